//! Norms over the last dimension.

use mlex_core::{Array, HostOp, HostOutput, HostView, HostViewMut, host_op};

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

/// `x + residual`, and its RMS norm.
pub(crate) fn add_rms_norm(
    x: &Array,
    residual: &Array,
    weight: &Array,
    eps: f32,
) -> Result<Option<(Array, Array)>> {
    let same = x.dtype() == residual.dtype() && x.shape() == residual.shape();
    if !applies(x)? || !same || !keeps_dtype(x, weight) {
        return Ok(None);
    }
    let outputs = host_op(
        &std::sync::Arc::new(AddNormOp { eps }),
        &[x, residual, weight],
    )?;
    Ok(<[Array; 2]>::try_from(outputs)
        .ok()
        .map(|[sum, normed]| (sum, normed)))
}

struct AddNormOp {
    eps: f32,
}

impl HostOp for AddNormOp {
    fn name(&self) -> &'static str {
        "add_rms_norm"
    }

    fn outputs(&self, inputs: &[&Array]) -> mlex_core::Result<Vec<HostOutput>> {
        let output = HostOutput::new(inputs[0].shape(), inputs[0].dtype());
        Ok(vec![output.clone(), output])
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let [sum, normed] = outputs else {
            return Err(mlex_core::Error::format(
                "outputs",
                "2",
                outputs.len().to_string(),
            ));
        };
        let size = inputs[0].shape().last().copied().map_or(0, super::size);
        let weight = Some(floats(&inputs[2])?);
        by_dtype!(inputs[0].dtype(), T => {
            let sum = sum.as_mut_slice::<T>()?;
            let (x, residual) = (inputs[0].as_slice::<T>()?, inputs[1].as_slice::<T>()?);
            for ((sum, x), residual) in sum.iter_mut().zip(x).zip(residual) {
                *sum = *x + *residual;
            }
            mlex_kernels::rms_norm(normed.as_mut_slice::<T>()?, sum, size, weight, self.eps)
        })
        .map_err(kernel_error(self.name()))
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
