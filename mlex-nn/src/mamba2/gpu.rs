//! The recurrence of Mamba 2 by a kernel on the GPU.

use mlex_core::{Array, Dtype, GpuLaunch};
use mlex_kernels::gpu::MAMBA2;

use super::scan::{ScanInputs, Sizes};
use crate::{Result, gpu};

/// Rows of a state that one group of lanes has.
const ROWS: i32 = 4;

/// As [`mamba2_scan`](super::mamba2_scan), where the kernel applies.
pub(super) fn mamba2_scan(
    inputs: &ScanInputs<'_>,
    state: Option<&Array>,
    sizes: Sizes,
) -> Result<Option<(Array, Array)>> {
    let Sizes {
        batch,
        length,
        heads,
        dim,
        groups,
        state: n,
    } = sizes;
    // A lane has at most eight entries of each row in its registers.
    let fits = n % 32 == 0 && n <= 256 && dim % ROWS == 0;
    if !fits || batch == 0 || length == 0 {
        return Ok(None);
    }
    let states = [batch, heads, dim, n];
    let state = match state {
        Some(state) => state.as_type(Dtype::Float32)?,
        None => Array::zeros(&states, Dtype::Float32)?,
    };
    let dtype = inputs.x.dtype();
    let inputs: [Array; 8] = [
        inputs.x.clone(),
        inputs.dt.as_type(Dtype::Float32)?,
        inputs.a.as_type(Dtype::Float32)?,
        inputs.b.as_type(dtype)?,
        inputs.c.as_type(dtype)?,
        inputs.d.as_type(Dtype::Float32)?,
        state,
        Array::from_slice(&[length], &[1])?,
    ];
    let launch = GpuLaunch {
        outputs: &[
            (&[batch, length, heads, dim], dtype),
            (&states, Dtype::Float32),
        ],
        grid: [32, dim / ROWS, batch * heads],
        group: [32, 4, 1],
        numbers: &[
            ("HEADS", heads),
            ("GROUPS", groups),
            ("HEAD_DIM", dim),
            ("STATE", n),
            ("ROWS", ROWS),
        ],
        flags: &[],
        types: &[("T", dtype)],
    };
    let outputs = gpu::call(&MAMBA2, &inputs.each_ref(), &launch)?;
    Ok(outputs
        .and_then(|outputs| <[Array; 2]>::try_from(outputs).ok())
        .map(|[y, state]| (y, state)))
}
