//! Rotary embedding.

use std::sync::Arc;

use mlex_core::{Array, HostView, HostViewMut};
use mlex_kernels::{Frequencies, Heads, RopeOptions, Turns};

use super::sequence::{Sequence, Step};
use super::{applies, by_dtype, heads, kernel_error, size};
use crate::Result;

/// The settings of a rotation.
#[derive(Clone, Debug)]
pub(crate) struct RopeKernel {
    pub(crate) dims: i32,
    pub(crate) traditional: bool,
    /// What a position is multiplied by for each pair, `[dims / 2]`.
    pub(crate) inverse: Arc<[f32]>,
    pub(crate) scale: f32,
}

/// Rotates `x` `[B, H, L, D]`, positions from `offsets` on: one, or one per batch row.
pub(crate) fn rope(x: &Array, kernel: &RopeKernel, offsets: &[i32]) -> Result<Option<Array>> {
    if !applies(x)? || x.ndim() != 4 {
        return Ok(None);
    }
    let mut sequence = Sequence::default();
    // Heads are usually a transposed view of a projection.
    let value = sequence.input_with(x, false);
    let y = sequence.output(x.shape(), x.dtype());
    let step = RopeStep {
        kernel: kernel.clone(),
        offsets: offsets.to_vec(),
    };
    sequence.step(step, &[value], &[y]);
    Ok(sequence.finish(&[y])?.pop())
}

/// Rotates each of `parts` parts of the heads of `x` `[B, H, L, D]` by the angles whose cosines
/// and sines are f32 `[L, parts, pairs]`.
pub(crate) fn rotate(x: &Array, [cos, sin]: [&Array; 2]) -> Result<Option<Array>> {
    let &[length, parts, pairs] = cos.shape() else {
        return Ok(None);
    };
    let shape = x.shape();
    let fits = shape.len() == 4 && shape[2] == length && parts > 0 && shape[3] % parts == 0;
    if !applies(x)? || !fits || 2 * pairs > shape[3] / parts {
        return Ok(None);
    }
    let mut sequence = Sequence::default();
    let value = sequence.input_with(x, false);
    let tables = [sequence.input(cos), sequence.input(sin)];
    let y = sequence.output(x.shape(), x.dtype());
    sequence.step(RotateStep, &[value, tables[0], tables[1]], &[y]);
    Ok(sequence.finish(&[y])?.pop())
}

struct RotateStep;

impl Step for RotateStep {
    fn name(&self) -> &'static str {
        "rotate"
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let [x, cos, sin] = [inputs[0], inputs[1], inputs[2]];
        let turns = Turns {
            cos: cos.as_slice()?,
            sin: sin.as_slice()?,
            parts: size(cos.shape()[1]),
            pairs: size(cos.shape()[2]),
        };
        by_dtype!(x.dtype(), T => {
            let (data, strides) = heads::<T>(&x)?;
            let heads = Heads { data: &data, strides };
            mlex_kernels::rotate(outputs[0].as_mut_slice::<T>()?, heads, sizes(&x), turns)
        })
        .map_err(kernel_error("rotate"))
    }
}

/// The four sizes of an input.
fn sizes(x: &HostView<'_>) -> [usize; 4] {
    let shape = x.shape();
    [0, 1, 2, 3].map(|axis| size(shape[axis]))
}

struct RopeStep {
    kernel: RopeKernel,
    offsets: Vec<i32>,
}

impl Step for RopeStep {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let x = inputs[0];
        let options = RopeOptions {
            dims: size(self.kernel.dims),
            traditional: self.kernel.traditional,
            frequencies: Frequencies::Inverse(&self.kernel.inverse),
            scale: self.kernel.scale,
            offsets: &self.offsets,
        };
        by_dtype!(x.dtype(), T => {
            let (data, strides) = heads::<T>(&x)?;
            let heads = Heads { data: &data, strides };
            mlex_kernels::rope(outputs[0].as_mut_slice::<T>()?, heads, sizes(&x), options)
        })
        .map_err(kernel_error("rope"))
    }
}
