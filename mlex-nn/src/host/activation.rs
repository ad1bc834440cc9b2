//! Gated activations.

use mlex_core::{Array, HostOp, HostOutput, HostView, HostViewMut};
use mlex_kernels::Activation as Kernel;

use super::{applies, by_dtype, kernel_error, single};
use crate::{Activation, Result};

/// `activation(gate) * up`.
pub(crate) fn gated(activation: Activation, gate: &Array, up: &Array) -> Result<Option<Array>> {
    let same = gate.dtype() == up.dtype() && gate.shape() == up.shape();
    if !applies(gate)? || !same {
        return Ok(None);
    }
    Ok(Some(single(GatedOp(kernel(activation)), &[gate, up])?))
}

/// The kernels' name of an activation.
pub(super) fn kernel(activation: Activation) -> Kernel {
    match activation {
        Activation::Silu => Kernel::Silu,
        Activation::Gelu => Kernel::Gelu,
        Activation::GeluTanh => Kernel::GeluTanh,
    }
}

struct GatedOp(Kernel);

impl HostOp for GatedOp {
    fn name(&self) -> &'static str {
        "gated"
    }

    fn outputs(&self, inputs: &[&Array]) -> mlex_core::Result<Vec<HostOutput>> {
        Ok(vec![HostOutput::new(inputs[0].shape(), inputs[0].dtype())])
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
        .map_err(kernel_error("gated"))
    }
}
