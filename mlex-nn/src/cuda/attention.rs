//! What stands between the projections of an attention layer and its cache, as one node; and which
//! of MLX's kernels attends in a decode step.

use mlex_core::{Array, GpuLaunch};
use mlex_kernels::gpu::NORM_ROPE;

use super::{bits_of, is_half};
use crate::host::Parameters;
use crate::{Result, Rope, gpu};

/// The most positions of a call: CUDA's limit of a grid in the third dimension.
const MOST_POSITIONS: i64 = 65535;
/// Heads that a block has.
const HEADS_OF_BLOCK: i32 = 4;

/// Up to how many positions MLX's own kernel attends for one query in place of cuDNN's, whose graph the
/// host changes in some 30 us for each layer: that is worth more than a faster kernel.
const OWN_KERNEL: i32 = 3072;

/// For how many positions a cache has room that needs room for `positions`, which are whole steps. MLX
/// takes cuDNN for one query where the room is a multiple of 256, as that of mlx-lm's caches is.
///
/// # Errors
/// When MLX cannot tell whether there is a GPU.
pub(crate) fn capacity(positions: i32) -> Result<i32> {
    let more = if positions <= OWN_KERNEL && gpu::is_cuda()? {
        8
    } else {
        0
    };
    Ok(positions + more)
}

/// Queries `[B, L, H * D]` and keys `[B, L, H_kv * D]`, normalized per head where there are norms,
/// rotated from position `offset` on: `[B, H, L, D]` and `[B, H_kv, L, D]`. None where the kernel does
/// not apply.
///
/// # Errors
/// When the shapes do not fit.
pub(crate) fn normed_and_rotated(
    [queries, keys]: [&Array; 2],
    [heads, kv_heads]: [i32; 2],
    norms: Option<[Parameters<'_>; 2]>,
    rope: &Rope,
    offset: i32,
) -> Result<Option<[Array; 2]>> {
    if !gpu::is_cuda()? {
        return Ok(None);
    }
    let &[batch, length, width] = queries.shape() else {
        return Ok(None);
    };
    let dtype = queries.dtype();
    let dim = width / heads.max(1);
    let Some((inverse, scale, rotated)) = rope.halves() else {
        return Ok(None);
    };
    let plain =
        |norm: &Parameters<'_>| norm.weight.dtype() == dtype && norm.weight.shape() == [dim];
    let applies = is_half(dtype)
        && keys.dtype() == dtype
        && keys.shape() == [batch, length, kv_heads * dim]
        && norms.iter().flatten().all(plain)
        && dim % 32 == 0
        && dim <= 256
        && rotated % 64 == 0
        && rotated <= dim
        && i64::from(batch) * i64::from(length) <= MOST_POSITIONS;
    if !applies {
        return Ok(None);
    }
    let [query_weight, key_weight] = match &norms {
        Some(norms) => norms.each_ref().map(|norm| norm.weight),
        None => [inverse; 2],
    };
    let [query_eps, key_eps] = match &norms {
        Some(norms) => norms.each_ref().map(|norm| norm.eps),
        None => [0.0; 2],
    };
    let launch = GpuLaunch {
        outputs: &[
            (&[batch, heads, length, dim], dtype),
            (&[batch, kv_heads, length, dim], dtype),
        ],
        grid: [32, heads + kv_heads, batch * length],
        group: [32, HEADS_OF_BLOCK, 1],
        numbers: &[
            ("HEADS", heads),
            ("KV_HEADS", kv_heads),
            ("DIM", dim),
            ("ROTATED", rotated),
            ("QUERY_EPS", bits_of(query_eps)),
            ("KEY_EPS", bits_of(key_eps)),
            ("SCALE", bits_of(scale)),
        ],
        flags: &[("NORMED", norms.is_some())],
        types: &[
            ("T", dtype),
            ("QUERY_WEIGHT", query_weight.dtype()),
            ("KEY_WEIGHT", key_weight.dtype()),
        ],
    };
    let offset = Array::from_slice(&[offset], &[1])?;
    let inputs = [queries, keys, query_weight, key_weight, inverse, &offset];
    let outputs = gpu::call_cuda(&NORM_ROPE, &inputs, &launch)?;
    Ok(outputs.and_then(|outputs| outputs.try_into().ok()))
}
