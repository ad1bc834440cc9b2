//! Activations, and what they gate.

use mlex_core::Array;
use mlex_kernels::Activation as Kernel;

use super::sequence::Sequence;
use crate::{Activation, Result};

/// `activation(x)`.
pub(crate) fn activate(activation: Activation, x: &Array) -> Result<Option<Array>> {
    let Some((mut sequence, value)) = Sequence::start(x)? else {
        return Ok(None);
    };
    match sequence.activate(activation, value) {
        Some(y) => Ok(sequence.finish(&[y])?.pop()),
        None => Ok(None),
    }
}

/// `activation(gate) * up`.
pub(crate) fn gated(activation: Activation, gate: &Array, up: &Array) -> Result<Option<Array>> {
    let Some((mut sequence, value)) = Sequence::start(gate)? else {
        return Ok(None);
    };
    let up = sequence.input(up);
    match sequence.gate(activation, value, up) {
        Some(y) => Ok(sequence.finish(&[y])?.pop()),
        None => Ok(None),
    }
}

/// The kernels' name of an activation.
pub(super) fn kernel(activation: Activation) -> Kernel {
    match activation {
        Activation::Silu => Kernel::Silu,
        Activation::Gelu => Kernel::Gelu,
        Activation::GeluTanh => Kernel::GeluTanh,
        Activation::Sigmoid => Kernel::Sigmoid,
    }
}
