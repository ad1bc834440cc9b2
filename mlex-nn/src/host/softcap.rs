//! Soft bounds.

use mlex_core::{Array, HostOp, HostOutput, HostView, HostViewMut, host_op};

use super::{applies, by_dtype, kernel_error};
use crate::Result;

/// See [`softcap`](crate::softcap).
pub(crate) fn softcap(x: &Array, cap: f32) -> Result<Option<Array>> {
    if !applies(x)? {
        return Ok(None);
    }
    Ok(host_op(&std::sync::Arc::new(SoftcapOp(cap)), &[x])?.pop())
}

struct SoftcapOp(f32);

impl HostOp for SoftcapOp {
    fn name(&self) -> &'static str {
        "softcap"
    }

    fn outputs(&self, inputs: &[&Array]) -> mlex_core::Result<Vec<HostOutput>> {
        Ok(vec![HostOutput::new(inputs[0].shape(), inputs[0].dtype())])
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        by_dtype!(inputs[0].dtype(), T => mlex_kernels::softcap::<T>(
            outputs[0].as_mut_slice()?, inputs[0].as_slice()?, self.0,
        ))
        .map_err(kernel_error("softcap"))
    }
}
