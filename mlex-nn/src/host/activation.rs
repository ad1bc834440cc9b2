//! Activations, and what they gate.

use mlex_core::Array;
use mlex_kernels::Activation as Kernel;

use super::sequence::Sequence;
use crate::{Activation, Result};

/// `activation(x)`.
pub(crate) fn activate(activation: Activation, x: &Array) -> Result<Option<Array>> {
    Sequence::single(x, |sequence, x| Ok(sequence.activate(activation, x)))
}

/// `activation(gate) * up`.
pub(crate) fn gated(activation: Activation, gate: &Array, up: &Array) -> Result<Option<Array>> {
    Sequence::single(gate, |sequence, gate| {
        let up = sequence.input(up);
        Ok(sequence.gate(activation, gate, up))
    })
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
