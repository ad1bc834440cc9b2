//! Rotary embedding.

use std::sync::Arc;

use mlex_core::{Array, HostOp, HostOutput, HostView, HostViewMut};
use mlex_kernels::{Frequencies, Heads, RopeOptions};

use super::{applies, by_dtype, heads, kernel_error, single, size};
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
    let op = RopeOp {
        kernel: kernel.clone(),
        offsets: offsets.to_vec(),
    };
    Ok(Some(single(op, &[x])?))
}

struct RopeOp {
    kernel: RopeKernel,
    offsets: Vec<i32>,
}

impl HostOp for RopeOp {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn outputs(&self, inputs: &[&Array]) -> mlex_core::Result<Vec<HostOutput>> {
        Ok(vec![HostOutput::new(inputs[0].shape(), inputs[0].dtype())])
    }

    fn contiguous(&self, _index: usize) -> bool {
        // Heads are usually a transposed view of a projection.
        false
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
