//! One step of a residual stream as one node.

use mlex_core::{Array, HostOp, HostOutput, HostView, HostViewMut, host_op};
use mlex_kernels::Element;

use super::norm::Parameters;
use super::{applies, by_dtype, floats, keeps_dtype, kernel_error, size};
use crate::Result;

/// See [`add_normed`](crate::add_normed).
pub(crate) fn add_normed(
    x: &Array,
    part: &Array,
    Parameters { weight, eps, .. }: Parameters<'_>,
    scale: Option<&Array>,
    next: Option<Parameters<'_>>,
) -> Result<Option<(Array, Option<Array>)>> {
    let same = x.dtype() == part.dtype() && x.shape() == part.shape();
    let one = scale.is_none_or(|scale| scale.shape() == [1]);
    let mut weights = [Some(weight), scale, next.map(|next| next.weight)]
        .into_iter()
        .flatten();
    if !applies(x)? || !same || !one || !weights.all(|weight| keeps_dtype(x.dtype(), weight)) {
        return Ok(None);
    }
    let op = AddNormedOp {
        eps,
        scaled: scale.is_some(),
        next_eps: next.map(|next| next.eps),
    };
    let next = next.map(|next| next.weight);
    let inputs: Vec<&Array> = [x, part, weight]
        .into_iter()
        .chain(scale)
        .chain(next)
        .collect();
    let mut outputs = host_op(&std::sync::Arc::new(op), &inputs)?.into_iter();
    Ok(outputs.next().map(|sum| (sum, outputs.next())))
}

struct AddNormedOp {
    eps: f32,
    /// The input after the first norm's weight is a scale.
    scaled: bool,
    /// The last input is the weight of the next norm.
    next_eps: Option<f32>,
}

const NAME: &str = "add_normed";

impl AddNormedOp {
    fn compute<T: mlex_core::Element + Element>(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let size = inputs[0].shape().last().copied().map_or(0, size);
        let norm = |out: &mut [T], x: &[T], weight: &HostView<'_>, eps| {
            mlex_kernels::rms_norm(out, x, size, Some(floats(weight)?), eps)
                .map_err(kernel_error(NAME))
        };
        let (sum, normed) = outputs.split_at_mut(1);
        let sum = sum[0].as_mut_slice::<T>()?;
        norm(sum, inputs[1].as_slice()?, &inputs[2], self.eps)?;
        let scale = match inputs.get(3).filter(|_| self.scaled) {
            Some(scale) => floats(scale)?.get(0),
            None => 1.0,
        };
        let x = inputs[0].as_slice::<T>()?;
        for (sum, x) in sum.iter_mut().zip(x) {
            // Rounded after each step, as separate operations would.
            let added = T::from_f32(x.to_f32() + sum.to_f32());
            *sum = T::from_f32(added.to_f32() * scale);
        }
        if let (Some(eps), [normed]) = (self.next_eps, normed) {
            let weight = &inputs[3 + usize::from(self.scaled)];
            norm(normed.as_mut_slice()?, sum, weight, eps)?;
        }
        Ok(())
    }
}

impl HostOp for AddNormedOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[&Array]) -> mlex_core::Result<Vec<HostOutput>> {
        let output = HostOutput::new(inputs[0].shape(), inputs[0].dtype());
        let count = 1 + usize::from(self.next_eps.is_some());
        Ok(vec![output; count])
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        by_dtype!(inputs[0].dtype(), T => self.compute::<T>(inputs, outputs))
    }
}
