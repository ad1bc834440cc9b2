//! Activations, and what they gate.

use crate::error::check_len;
use crate::simd::Level;
use crate::simd::elementwise::{Activate, Gate, Gated};
use crate::threads::parallel_chunks;
use crate::{Element, Result};

/// The function of the gate; `Φ` is the normal distribution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x sigmoid(x)`: SwiGLU.
    Silu,
    /// `x Φ(x)` in the approximation by tanh: GeGLU of Gemma.
    GeluTanh,
    /// `x Φ(x)`
    Gelu,
    /// `sigmoid(x)`: a gate that opens from 0 to 1.
    Sigmoid,
}

impl Activation {
    pub(crate) fn gate(self) -> Gate {
        match self {
            Self::Silu => Gate::Silu,
            Self::GeluTanh => Gate::GeluTanh,
            Self::Gelu => Gate::Gelu,
            Self::Sigmoid => Gate::Sigmoid,
        }
    }
}

/// Elements that one task takes.
const TASK: usize = 8192;

/// `out = activation(gate) * up`, computed in f32 and rounded once. The relative error in f32
/// is below 1e-6.
///
/// # Errors
/// When the slices differ in length.
pub fn gated<T: Element>(
    out: &mut [T],
    gate: &[T],
    up: &[T],
    activation: Activation,
) -> Result<()> {
    check_len("gated: gate", out.len(), gate.len())?;
    check_len("gated: up", out.len(), up.len())?;
    let function = activation.gate();
    let level = Level::current();
    parallel_chunks(out, TASK, |first, out| {
        let range = first..first + out.len();
        level.dispatch(Gated {
            gate: &gate[range.clone()],
            up: &up[range],
            out,
            function,
        });
    });
    Ok(())
}

/// `out = activation(x)`, as [`gated`] computes it.
///
/// # Errors
/// When the slices differ in length.
pub fn activate<T: Element>(out: &mut [T], x: &[T], activation: Activation) -> Result<()> {
    check_len("activate: x", out.len(), x.len())?;
    let function = activation.gate();
    let level = Level::current();
    parallel_chunks(out, TASK, |first, out| {
        let x = &x[first..first + out.len()];
        level.dispatch(Activate { x, out, function });
    });
    Ok(())
}
