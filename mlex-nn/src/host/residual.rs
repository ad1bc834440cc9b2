//! A part of a layer added to the residual stream, in one step.

use std::sync::Arc;

use mlex_core::{Array, HostConstant, HostView, HostViewMut};
use mlex_kernels::Element;

use super::norm::Parameters;
use super::sequence::{Sequence, Step, Value};
use super::{by_dtype, columns, floats, keeps_dtype, kernel_error};
use crate::Result;

/// See [`add_normed`](crate::add_normed).
pub(crate) fn add_normed(
    x: &Array,
    part: &Array,
    norm: Parameters<'_>,
    scale: Option<&Array>,
    next: Option<Parameters<'_>>,
) -> Result<Option<(Array, Option<Array>)>> {
    let Some((mut sequence, x)) = Sequence::start(x)? else {
        return Ok(None);
    };
    let part = sequence.input(part);
    let Some((sum, normed)) = record_add_normed(&mut sequence, x, part, norm, scale, next)? else {
        return Ok(None);
    };
    let values: Vec<Value> = [sum].into_iter().chain(normed).collect();
    let mut outputs = sequence.finish(&values)?.into_iter();
    Ok(outputs.next().map(|sum| (sum, outputs.next())))
}

/// The same as a step of a sequence.
pub(crate) fn record_add_normed(
    sequence: &mut Sequence,
    x: Value,
    part: Value,
    norm: Parameters<'_>,
    scale: Option<&Array>,
    next: Option<Parameters<'_>>,
) -> Result<Option<(Value, Option<Value>)>> {
    let dtype = sequence.dtype(x);
    let fits = sequence.dtype(part) == dtype
        && sequence.shape(part) == sequence.shape(x)
        && scale.is_none_or(|scale| scale.shape() == [1] && keeps_dtype(dtype, scale));
    let Some(weight) = norm.constants(sequence, x)?.filter(|_| fits) else {
        return Ok(None);
    };
    let next = match next {
        Some(next) => match next.constants(sequence, x)? {
            Some(weight) => Some((weight, next.eps)),
            None => return Ok(None),
        },
        None => None,
    };
    let scale = match scale {
        Some(scale) => floats(&HostConstant::new(scale)?.view())?.get(0),
        None => 1.0,
    };
    let sum = sequence.output_like(x);
    let normed = next.is_some().then(|| sequence.output_like(x));
    let step = AddNormedStep {
        weight,
        eps: norm.eps,
        scale,
        next,
    };
    let outputs: Vec<Value> = [sum].into_iter().chain(normed).collect();
    sequence.step(step, &[x, part], &outputs);
    Ok(Some((sum, normed)))
}

struct AddNormedStep {
    weight: Arc<[HostConstant]>,
    eps: f32,
    scale: f32,
    /// Weight and epsilon of the next norm.
    next: Option<(Arc<[HostConstant]>, f32)>,
}

const NAME: &str = "add_normed";

impl AddNormedStep {
    fn compute<T: mlex_core::Element + Element>(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let size = columns(&inputs[0]);
        let norm = |out: &mut [T], x: &[T], weight: &[HostConstant], eps| {
            mlex_kernels::rms_norm(out, x, size, Some(floats(&weight[0].view())?), eps)
                .map_err(kernel_error(NAME))
        };
        let (sum, normed) = outputs.split_at_mut(1);
        let sum = sum[0].as_mut_slice::<T>()?;
        norm(sum, inputs[1].as_slice()?, &self.weight, self.eps)?;
        let x = inputs[0].as_slice::<T>()?;
        for (sum, x) in sum.iter_mut().zip(x) {
            // Rounded after each step, as separate operations would.
            let added = T::from_f32(x.to_f32() + sum.to_f32());
            *sum = T::from_f32(added.to_f32() * self.scale);
        }
        if let (Some((weight, eps)), [normed]) = (&self.next, normed) {
            norm(normed.as_mut_slice()?, sum, weight, *eps)?;
        }
        Ok(())
    }
}

impl Step for AddNormedStep {
    fn name(&self) -> &'static str {
        NAME
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        by_dtype!(inputs[0].dtype(), T => self.compute::<T>(inputs, outputs))
    }
}
