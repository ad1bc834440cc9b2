//! The gated delta rule by a kernel on the GPU.

use mlex_core::{Array, Dtype, GpuLaunch};
use mlex_kernels::gpu::GATED_DELTA;

use super::rule::{DeltaInputs, Sizes};
use crate::{Result, gpu};

/// Rows of a state that one group of lanes has.
const ROWS: i32 = 4;

/// As [`gated_delta_rule`](super::gated_delta_rule), where the kernel applies.
pub(super) fn gated_delta_rule(
    inputs: &DeltaInputs<'_>,
    state: Option<&Array>,
    mask: Option<&Array>,
    sizes: Sizes,
) -> Result<Option<(Array, Array)>> {
    let Sizes {
        batch,
        length,
        key_heads,
        group,
        key_dim,
        value_dim,
    } = sizes;
    // A lane has at most eight entries of each row in its registers.
    let fits = key_dim % 32 == 0 && key_dim <= 256 && value_dim % ROWS == 0;
    if !fits || batch == 0 || length == 0 {
        return Ok(None);
    }
    let heads = key_heads * group;
    let states = [batch, heads, value_dim, key_dim];
    let state = match state {
        Some(state) => state.as_type(Dtype::Float32)?,
        None => Array::zeros(&states, Dtype::Float32)?,
    };
    let dtype = inputs.queries.dtype();
    let inputs: [Array; 8] = [
        inputs.queries.clone(),
        inputs.keys.as_type(dtype)?,
        inputs.values.as_type(dtype)?,
        inputs.log_decay.as_type(Dtype::Float32)?,
        inputs.beta.as_type(Dtype::Float32)?,
        state,
        Array::from_slice(&[length], &[1])?,
        match mask {
            Some(mask) => mask.clone(),
            None => Array::from_slice(&[true], &[1])?,
        },
    ];
    let launch = GpuLaunch {
        outputs: &[
            (&[batch, length, heads, value_dim], dtype),
            (&states, Dtype::Float32),
        ],
        grid: [32, value_dim / ROWS, batch * heads],
        group: [32, 4, 1],
        numbers: &[
            ("KEY_HEADS", key_heads),
            ("VALUE_HEADS", heads),
            ("KEY_DIM", key_dim),
            ("VALUE_DIM", value_dim),
            ("ROWS", ROWS),
        ],
        flags: &[("MASKED", mask.is_some())],
        types: &[("T", dtype)],
    };
    let outputs = gpu::call(&GATED_DELTA, &inputs.each_ref(), &launch)?;
    Ok(outputs
        .and_then(|outputs| <[Array; 2]>::try_from(outputs).ok())
        .map(|[y, state]| (y, state)))
}
