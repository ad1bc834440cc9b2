//! The gated delta rule, and what stands before and after it, by kernels on the GPU.

use mlex_core::{Array, Dtype, GpuLaunch};
use mlex_kernels::gpu::{GATED_DELTA, GATED_DELTA_INPUTS, GATED_NORM};

use super::rule::{DeltaInputs, Sizes, gated_delta_rule as rule};
use super::{GatedDeltaConfig, GatedDeltaNet, Projected};
use crate::cache::{RecurrentCache, RecurrentState};
use crate::{Result, gpu};

/// Rows of a state that one group of lanes has.
const ROWS: i32 = 4;
/// The most positions of a call: CUDA's limit of a grid in the third dimension.
const MOST_POSITIONS: i64 = 65535;

/// The input of a kernel that reads a mask only where it is told of one.
fn mask_or_any(mask: Option<&Array>) -> Result<Array> {
    match mask {
        Some(mask) => Ok(mask.clone()),
        None => Ok(Array::from_slice(&[true], &[1])?),
    }
}

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
        mask_or_any(mask)?,
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

/// As [`GatedDeltaNet::recur`], by three kernels where they apply: a decode step is bound by how
/// many nodes its graph has.
pub(super) fn recur(
    layer: &GatedDeltaNet,
    projected: &Projected,
    cache: &RecurrentCache,
) -> Result<Option<(Array, RecurrentState)>> {
    let &GatedDeltaConfig {
        num_key_heads: key_heads,
        num_value_heads: heads,
        key_head_dim: key_dim,
        value_head_dim: value_dim,
        conv_kernel: kernel,
        ..
    } = &layer.config;
    let Projected { qkv, z, b, a } = projected;
    let &[batch, length, channels] = qkv.shape() else {
        return Ok(None);
    };
    // As `before` may come from another place, it is for the convolution to refuse it.
    let tails = [batch, kernel - 1, channels];
    let before = cache.state().map(|state| &state.conv);
    let fits = key_dim <= 512
        && value_dim <= 512
        && i64::from(batch) * i64::from(length) <= MOST_POSITIONS
        && qkv.size() > 0
        && before.is_none_or(|before| before.shape() == tails)
        && channels == layer.config.conv_dim();
    if !fits || gpu::language()?.is_none() {
        return Ok(None);
    }
    let dtype = qkv.dtype();
    let mask = cache.mask(length)?;
    let inputs: [Array; 9] = [
        qkv.clone(),
        a.clone(),
        b.clone(),
        match before {
            Some(before) => before.as_type(dtype)?,
            None => Array::zeros(&tails, dtype)?,
        },
        layer.conv.weight().clone(),
        layer.a_log.clone(),
        layer.dt_bias.clone(),
        Array::from_slice(&[length], &[1])?,
        mask_or_any(mask.as_ref())?,
    ];
    let (keys, gates) = ([batch, length, key_heads, key_dim], [batch, length, heads]);
    let launch = GpuLaunch {
        outputs: &[
            (&keys, dtype),
            (&keys, dtype),
            (&[batch, length, heads, value_dim], dtype),
            (&gates, Dtype::Float32),
            (&gates, Dtype::Float32),
            (&tails, dtype),
        ],
        grid: [32, 2 * key_heads + heads, batch * length],
        group: [32, 4, 1],
        numbers: &[
            ("KEY_HEADS", key_heads),
            ("VALUE_HEADS", heads),
            ("KEY_DIM", key_dim),
            ("VALUE_DIM", value_dim),
            ("KERNEL", kernel),
        ],
        flags: &[("MASKED", mask.is_some())],
        // MLX knows a compiled kernel by its constants, so they name the types of all inputs.
        types: &[
            ("T", dtype),
            ("A", a.dtype()),
            ("B", b.dtype()),
            ("WEIGHT", layer.conv.weight().dtype()),
            ("A_LOG", layer.a_log.dtype()),
            ("DT_BIAS", layer.dt_bias.dtype()),
        ],
    };
    let outputs = gpu::call(&GATED_DELTA_INPUTS, &inputs.each_ref(), &launch)?;
    let Some(Ok([queries, keys, values, log_decay, beta, conv])) =
        outputs.map(<[Array; 6]>::try_from)
    else {
        return Ok(None);
    };
    let inputs = DeltaInputs {
        queries: &queries,
        keys: &keys,
        values: &values,
        log_decay: &log_decay,
        beta: &beta,
    };
    let state = cache.state().map(|state| &state.state);
    let (y, state) = rule(&inputs, state, mask.as_ref())?;
    let launch = GpuLaunch {
        outputs: &[(&[batch, length, heads * value_dim], dtype)],
        grid: [32, heads, batch * length],
        group: [32, 4, 1],
        numbers: &[("HEADS", heads), ("DIM", value_dim)],
        flags: &[],
        types: &[
            ("T", dtype),
            ("Z", z.dtype()),
            ("WEIGHT", layer.norm.dtype()),
        ],
    };
    let eps = Array::from_slice(&[layer.config.norm_eps], &[1])?;
    let inputs = [&y, z, &layer.norm, &eps];
    let gated = gpu::call(&GATED_NORM, &inputs, &launch)?;
    let y = gated.and_then(|mut outputs| outputs.pop());
    Ok(y.map(|y| (y, RecurrentState { conv, state })))
}
