//! A residual sum and its norm as one node.

use mlex_core::{Array, GpuLaunch};
use mlex_kernels::gpu::ADD_RMS_NORM;

use super::{bits_of, is_half};
use crate::host::Parameters;
use crate::{Result, gpu};

/// The widest rows, of which a thread keeps its part in registers, and the most rows.
const WIDEST: i32 = 16384;
const MOST_ROWS: usize = 65535;

/// `x + added` and the RMS norm of that, `[.., D]` both, where the kernel applies.
///
/// # Errors
/// When the shapes do not fit.
pub(crate) fn add_rms_norm(
    x: &Array,
    added: &Array,
    norm: Parameters<'_>,
) -> Result<Option<(Array, Array)>> {
    if !gpu::is_cuda()? {
        return Ok(None);
    }
    let (width, dtype) = (x.dim(-1)?, x.dtype());
    let rows = x.size() / width.max(1) as usize;
    let applies = is_half(dtype)
        && added.dtype() == dtype
        && added.shape() == x.shape()
        && norm.weight.dtype() == dtype
        && norm.weight.shape() == [width]
        && width <= WIDEST
        && rows <= MOST_ROWS;
    if !applies {
        return Ok(None);
    }
    let warps = match width {
        4096.. => 16,
        2048.. => 8,
        _ => 4,
    };
    let launch = GpuLaunch {
        outputs: &[(x.shape(), dtype), (x.shape(), dtype)],
        grid: [32 * warps, rows as i32, 1],
        group: [32 * warps, 1, 1],
        numbers: &[("DIM", width), ("WARPS", warps), ("EPS", bits_of(norm.eps))],
        flags: &[],
        types: &[("T", dtype), ("WEIGHT", norm.weight.dtype())],
    };
    let outputs = gpu::call_cuda(&ADD_RMS_NORM, &[x, added, norm.weight], &launch)?;
    let outputs = outputs.and_then(|outputs| <[Array; 2]>::try_from(outputs).ok());
    Ok(outputs.map(|[sum, normed]| (sum, normed)))
}
