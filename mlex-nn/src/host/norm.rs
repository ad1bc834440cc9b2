//! Norms over the last dimension.

use std::sync::Arc;

use mlex_core::{Array, HostConstant, HostView, HostViewMut};

use super::constants::Constants;
use super::sequence::{Sequence, Step, Value};
use super::{by_dtype, columns, floats, keeps, kernel_error, size};
use crate::Result;

/// The parameters of a norm: weight, and bias where there is one.
#[derive(Clone, Copy)]
pub(crate) struct Parameters<'a> {
    pub(crate) weight: &'a Array,
    pub(crate) bias: Option<&'a Array>,
    pub(crate) constants: &'a Constants,
    pub(crate) eps: f32,
}

impl Parameters<'_> {
    /// None where the result would have another dtype than `x`, or the shapes do not fit, which
    /// MLX's operation says.
    pub(super) fn constants(
        &self,
        sequence: &Sequence,
        x: Value,
    ) -> mlex_core::Result<Option<Arc<[HostConstant]>>> {
        let arrays = std::iter::once(self.weight).chain(self.bias);
        let constants = self.constants.of(arrays)?;
        let (dtype, last) = (sequence.dtype(x), sequence.shape(x).last());
        let fits = |array: &HostConstant| {
            keeps(dtype, array.dtype()) && last.is_some() && array.shape().last() == last
        };
        Ok(constants.iter().all(fits).then_some(constants))
    }
}

/// See [`RmsNorm`](crate::RmsNorm).
pub(crate) fn rms_norm(x: &Array, parameters: Parameters<'_>) -> Result<Option<Array>> {
    norm(x, parameters, false)
}

/// See [`LayerNorm`](crate::LayerNorm).
pub(crate) fn layer_norm(x: &Array, parameters: Parameters<'_>) -> Result<Option<Array>> {
    norm(x, parameters, true)
}

fn norm(x: &Array, parameters: Parameters<'_>, centered: bool) -> Result<Option<Array>> {
    Sequence::single(x, |sequence, x| record(sequence, x, parameters, centered))
}

/// As [`rms_norm`].
pub(crate) fn record_rms_norm(
    sequence: &mut Sequence,
    x: Value,
    parameters: Parameters<'_>,
) -> Result<Option<Value>> {
    record(sequence, x, parameters, false)
}

/// As [`rms_norm`], of parts of the last dimension that are as long as the weight.
pub(crate) fn record_rms_norm_of_parts(
    sequence: &mut Sequence,
    x: Value,
    parameters: Parameters<'_>,
) -> Result<Option<Value>> {
    let part = parameters.weight.dim(0)?;
    let last = sequence.shape(x).last().copied().unwrap_or(0);
    if part <= 0 || last % part != 0 {
        return Ok(None);
    }
    let Some(constants) = parameters.constants(sequence, x)? else {
        return Ok(None);
    };
    let y = sequence.output_like(x);
    let step = NormStep {
        eps: parameters.eps,
        centered: false,
        size: Some(size(part)),
        constants,
    };
    sequence.step(step, &[x], &[y]);
    Ok(Some(y))
}

fn record(
    sequence: &mut Sequence,
    x: Value,
    parameters: Parameters<'_>,
    centered: bool,
) -> Result<Option<Value>> {
    let Some(constants) = parameters.constants(sequence, x)? else {
        return Ok(None);
    };
    let y = sequence.output_like(x);
    let step = NormStep {
        eps: parameters.eps,
        centered,
        size: None,
        constants,
    };
    sequence.step(step, &[x], &[y]);
    Ok(Some(y))
}

/// `x + residual`, and its RMS norm.
pub(crate) fn add_rms_norm(
    x: &Array,
    residual: &Array,
    parameters: Parameters<'_>,
) -> Result<Option<(Array, Array)>> {
    let Some((mut sequence, x)) = Sequence::start(x)? else {
        return Ok(None);
    };
    let residual = sequence.input(residual);
    let Some((sum, normed)) = record_add_rms_norm(&mut sequence, x, residual, 1.0, parameters)?
    else {
        return Ok(None);
    };
    let outputs = <[Array; 2]>::try_from(sequence.finish(&[sum, normed])?);
    Ok(outputs.ok().map(|[sum, normed]| (sum, normed)))
}

/// `x + scale * residual`, and its RMS norm.
pub(crate) fn record_add_rms_norm(
    sequence: &mut Sequence,
    x: Value,
    residual: Value,
    scale: f32,
    parameters: Parameters<'_>,
) -> Result<Option<(Value, Value)>> {
    let same = sequence.dtype(residual) == sequence.dtype(x);
    if !same || sequence.shape(residual) != sequence.shape(x) {
        return Ok(None);
    }
    let Some(constants) = parameters.constants(sequence, x)? else {
        return Ok(None);
    };
    let sum = sequence.output_like(x);
    let normed = sequence.output_like(x);
    let step = AddNormStep {
        eps: parameters.eps,
        scale,
        constants,
    };
    sequence.step(step, &[x, residual], &[sum, normed]);
    Ok(Some((sum, normed)))
}

struct AddNormStep {
    eps: f32,
    scale: f32,
    constants: Arc<[HostConstant]>,
}

impl Step for AddNormStep {
    fn name(&self) -> &'static str {
        "add_rms_norm"
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let [sum, normed] = outputs else {
            return Err(super::outputs_error(2, outputs));
        };
        let weight = floats(&self.constants[0].view())?;
        let size = columns(&inputs[0]);
        by_dtype!(inputs[0].dtype(), T => {
            let outputs = [sum.as_mut_slice::<T>()?, normed.as_mut_slice::<T>()?];
            let inputs = [inputs[0].as_slice::<T>()?, inputs[1].as_slice::<T>()?];
            mlex_kernels::add_rms_norm(outputs, inputs, self.scale, size, weight, self.eps)
        })
        .map_err(kernel_error(self.name()))
    }
}

struct NormStep {
    eps: f32,
    /// Layer norm: the mean is taken off first.
    centered: bool,
    /// Elements of a row; the last dimension without it.
    size: Option<usize>,
    constants: Arc<[HostConstant]>,
}

impl Step for NormStep {
    fn name(&self) -> &'static str {
        if self.centered {
            "layer_norm"
        } else {
            "rms_norm"
        }
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let x = inputs[0];
        let size = self.size.unwrap_or_else(|| columns(&x));
        let weight = Some(floats(&self.constants[0].view())?);
        let bias = self.constants.get(1).map(|bias| floats(&bias.view()));
        let bias = bias.transpose()?;
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
