//! Norms over the last dimension.

use mlex_core::{Array, HostOp, HostOutput, HostView, HostViewMut};

use super::{applies, by_dtype, floats, keeps_dtype, kernel_error, single};
use crate::Result;

/// See [`RmsNorm`](crate::RmsNorm).
pub(crate) fn rms_norm(x: &Array, weight: &Array, eps: f32) -> Result<Option<Array>> {
    let op = NormOp {
        eps,
        centered: false,
    };
    norm(op, x, &[weight])
}

/// See [`LayerNorm`](crate::LayerNorm).
pub(crate) fn layer_norm(
    x: &Array,
    weight: &Array,
    bias: Option<&Array>,
    eps: f32,
) -> Result<Option<Array>> {
    let op = NormOp {
        eps,
        centered: true,
    };
    match bias {
        Some(bias) => norm(op, x, &[weight, bias]),
        None => norm(op, x, &[weight]),
    }
}

fn norm(op: NormOp, x: &Array, parameters: &[&Array]) -> Result<Option<Array>> {
    if !applies(x)? || !parameters.iter().all(|array| keeps_dtype(x, array)) {
        return Ok(None);
    }
    let inputs: Vec<&Array> = [x].into_iter().chain(parameters.iter().copied()).collect();
    Ok(Some(single(op, &inputs)?))
}

struct NormOp {
    eps: f32,
    /// Layer norm: the mean is taken off first.
    centered: bool,
}

impl HostOp for NormOp {
    fn name(&self) -> &'static str {
        if self.centered {
            "layer_norm"
        } else {
            "rms_norm"
        }
    }

    fn outputs(&self, inputs: &[&Array]) -> mlex_core::Result<Vec<HostOutput>> {
        Ok(vec![HostOutput::new(inputs[0].shape(), inputs[0].dtype())])
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let x = inputs[0];
        let size = x.shape().last().copied().map_or(0, super::size);
        let weight = Some(floats(&inputs[1])?);
        let bias = inputs.get(2).map(floats).transpose()?;
        by_dtype!(x.dtype(), T => {
            let (out, x) = (outputs[0].as_mut_slice::<T>()?, x.as_slice::<T>()?);
            if self.centered {
                mlex_kernels::layer_norm(out, x, size, weight, bias, self.eps)
            } else {
                mlex_kernels::rms_norm(out, x, size, weight, self.eps)
            }
        })
        .map_err(kernel_error(self.name()))
    }
}
