//! Gated activations.

use mlex_core::{Array, HostView, HostViewMut};
use mlex_kernels::Activation as Kernel;

use super::sequence::{Sequence, Step};
use super::{by_dtype, kernel_error};
use crate::{Activation, Result};

/// `activation(gate) * up`.
pub(crate) fn gated(activation: Activation, gate: &Array, up: &Array) -> Result<Option<Array>> {
    let same = gate.dtype() == up.dtype() && gate.shape() == up.shape();
    let Some((mut sequence, value)) = Sequence::start(gate)?.filter(|_| same) else {
        return Ok(None);
    };
    let up = sequence.input(up);
    let y = sequence.output(gate.shape(), gate.dtype());
    sequence.step(GatedStep(kernel(activation)), &[value, up], &[y]);
    Ok(sequence.finish(&[y])?.pop())
}

/// The kernels' name of an activation.
pub(super) fn kernel(activation: Activation) -> Kernel {
    match activation {
        Activation::Silu => Kernel::Silu,
        Activation::Gelu => Kernel::Gelu,
        Activation::GeluTanh => Kernel::GeluTanh,
    }
}

struct GatedStep(Kernel);

impl Step for GatedStep {
    fn name(&self) -> &'static str {
        "gated"
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let (gate, up) = (inputs[0], inputs[1]);
        by_dtype!(gate.dtype(), T => mlex_kernels::gated::<T>(
            outputs[0].as_mut_slice()?, gate.as_slice()?, up.as_slice()?, self.0,
        ))
        .map_err(kernel_error(self.name()))
    }
}
