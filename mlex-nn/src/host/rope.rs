//! Rotary embedding.

use std::sync::Arc;

use mlex_core::{Array, HostView, HostViewMut};
use mlex_kernels::{Frequencies, Heads, RopeOptions};

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
        let shape = x.shape();
        let options = RopeOptions {
            dims: size(self.kernel.dims),
            traditional: self.kernel.traditional,
            frequencies: Frequencies::Inverse(&self.kernel.inverse),
            scale: self.kernel.scale,
            offsets: &self.offsets,
        };
        let sizes = [
            size(shape[0]),
            size(shape[1]),
            size(shape[2]),
            size(shape[3]),
        ];
        by_dtype!(x.dtype(), T => {
            let (data, strides) = heads::<T>(&x)?;
            let heads = Heads { data: &data, strides };
            mlex_kernels::rope(outputs[0].as_mut_slice::<T>()?, heads, sizes, options)
        })
        .map_err(kernel_error("rope"))
    }
}
