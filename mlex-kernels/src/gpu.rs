//! Sources of GPU kernels, as MLX's custom-kernel calls take them: the body of a function whose
//! parameters are the named inputs and outputs.
//!
//! Metal and CUDA share the body. What differs stands in two preludes: where a thread finds its
//! place, and how 32 lanes add up. A body uses
//!
//! * `lane`, 0 to 31, and `row` and `plane`, its place along the second and third dimension of
//!   the grid (the first is the lanes);
//! * `lane_sum(x)`, the sum of a float over the 32 lanes, in all of them;
//! * its parameters as pointers by index, so that the address space does not show.

/// A GPU kernel.
#[derive(Debug, Clone, Copy)]
pub struct GpuSource {
    /// Its name.
    pub name: &'static str,
    /// The names of the inputs, in order.
    pub inputs: &'static [&'static str],
    /// The names of the outputs, in order.
    pub outputs: &'static [&'static str],
    body: &'static str,
}

/// The text of a kernel for one kind of GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuText {
    /// What stands before the function.
    pub header: &'static str,
    /// What stands in it.
    pub source: String,
}

impl GpuSource {
    /// The text for Metal. Thread positions are named in it, by which MLX finds out what to
    /// pass.
    pub fn metal(&self) -> GpuText {
        GpuText {
            header: "inline float lane_sum(float x) { return metal::simd_sum(x); }\n",
            source: format!(
                "  const uint lane = thread_index_in_simdgroup;
  const uint row = thread_position_in_grid.y;
  const uint plane = thread_position_in_grid.z;
{}",
                self.body
            ),
        }
    }

    /// The text for CUDA.
    pub fn cuda(&self) -> GpuText {
        GpuText {
            header: "__device__ inline float lane_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, offset);
  }
  return x;
}
",
            source: format!(
                "  const unsigned int lane = threadIdx.x;
  const unsigned int row = blockIdx.y * blockDim.y + threadIdx.y;
  const unsigned int plane = blockIdx.z * blockDim.z + threadIdx.z;
{}",
                self.body
            ),
        }
    }
}

/// The gated delta rule over all positions.
///
/// | Input | |
/// |---|---|
/// | `queries`, `keys` | `[B, L, H_k, D_k]` |
/// | `values` | `[B, L, H_v, D_v]` |
/// | `log_decay`, `beta` | `[B, L, H_v]`, f32 |
/// | `state` | `[B, H_v, D_v, D_k]`, f32 |
/// | `length` | `[1]`, int32: `L` |
/// | `mask` | `[B, L]`, bool, if `MASKED`, else anything |
///
/// Outputs are `y` `[B, L, H_v, D_v]` of type `T` and `state_after`. Constants are `MASKED`,
/// `KEY_HEADS`, `VALUE_HEADS`, `KEY_DIM` (a multiple of 32), `VALUE_DIM` and `ROWS` (which
/// divides it). The grid is `[32, VALUE_DIM / ROWS, B * VALUE_HEADS]`.
pub const GATED_DELTA: GpuSource = GpuSource {
    name: "mlex_gated_delta",
    inputs: &[
        "queries",
        "keys",
        "values",
        "log_decay",
        "beta",
        "state",
        "length",
        "mask",
    ],
    outputs: &["y", "state_after"],
    body: include_str!("../gpu/gated_delta.inc"),
};

/// What stands between the projections of a gated delta net and its rule: a causal convolution with
/// SiLU, norms of queries and keys, decays and step sizes.
///
/// | Input | |
/// |---|---|
/// | `qkv` | `[B, L, C]`, type `T`: queries, keys and values, head by head |
/// | `a`, `b` | `[B, L, H_v]` |
/// | `before` | `[B, KERNEL - 1, C]`, type `T` |
/// | `weight` | `[KERNEL, C]` |
/// | `a_log`, `dt_bias` | `[H_v]` |
/// | `length` | `[1]`, int32: `L` |
/// | `mask` | `[B, L]`, bool, if `MASKED`, else anything |
///
/// Outputs are `queries`, `keys` `[B, L, H_k, D_k]` and `values` `[B, L, H_v, D_v]` of type `T`,
/// `log_decay` and `beta` `[B, L, H_v]` in f32, and `tail`, what the next call takes as `before`.
/// Constants are `MASKED`, `KEY_HEADS`, `VALUE_HEADS`, `KEY_DIM`, `VALUE_DIM` and `KERNEL`. The grid is
/// `[32, 2 * KEY_HEADS + VALUE_HEADS, B * L]`.
pub const GATED_DELTA_INPUTS: GpuSource = GpuSource {
    name: "mlex_gated_delta_inputs",
    inputs: &[
        "qkv", "a", "b", "before", "weight", "a_log", "dt_bias", "length", "mask",
    ],
    outputs: &["queries", "keys", "values", "log_decay", "beta", "tail"],
    body: include_str!("../gpu/gated_delta_inputs.inc"),
};

/// The RMS norm of each head, times a weight and SiLU of a gate.
///
/// | Input | |
/// |---|---|
/// | `y`, `z` | `[.., HEADS, DIM]` |
/// | `weight` | `[DIM]` |
/// | `eps` | `[1]`, f32 |
///
/// The output is `gated`, as `y` in type `T`. The grid is `[32, HEADS, ..]`.
pub const GATED_NORM: GpuSource = GpuSource {
    name: "mlex_gated_norm",
    inputs: &["y", "z", "weight", "eps"],
    outputs: &["gated"],
    body: include_str!("../gpu/gated_norm.inc"),
};

/// The recurrence of Mamba 2 over all positions: `S = exp(rate dt) S + dt x b^T`, `y = S c + d x`.
///
/// | Input | |
/// |---|---|
/// | `x` | `[B, L, H, P]` |
/// | `dt` | `[B, L, H]`, f32; at 0 a position leaves no trace |
/// | `rate` | `[H]`, f32 |
/// | `b`, `c` | `[B, L, G, N]` |
/// | `d` | `[H]`, f32 |
/// | `state` | `[B, H, P, N]`, f32 |
/// | `length` | `[1]`, int32: `L` |
///
/// Outputs are `y` `[B, L, H, P]` of type `T` and `state_after`. Constants are `HEADS`, `GROUPS`,
/// `HEAD_DIM`, `STATE` (a multiple of 32) and `ROWS` (which divides `HEAD_DIM`). The grid is
/// `[32, HEAD_DIM / ROWS, B * HEADS]`.
pub const MAMBA2: GpuSource = GpuSource {
    name: "mlex_mamba2",
    inputs: &["x", "dt", "rate", "b", "c", "d", "state", "length"],
    outputs: &["y", "state_after"],
    body: include_str!("../gpu/mamba2.inc"),
};

/// A GPU kernel for CUDA alone: what it does has no counterpart in Metal, or MLX's own kernel does
/// it well there.
#[derive(Debug, Clone, Copy)]
pub struct CudaSource {
    /// Its name.
    pub name: &'static str,
    /// The names of the inputs, in order.
    pub inputs: &'static [&'static str],
    /// The names of the outputs, in order.
    pub outputs: &'static [&'static str],
    /// What stands before the function.
    pub header: &'static str,
    /// What stands in it.
    pub source: &'static str,
}

/// At most 8 rows times a transposed weight of 4 bits, by tensor cores: sums are f32, the weights
/// are not rounded. It reads the weight once, however many the rows.
///
/// | Input | |
/// |---|---|
/// | `x` | `[.., K]`, float16 or bfloat16 |
/// | `w` | `[N, K / 8]`, uint32, the first number in the lowest bits |
/// | `scales`, `biases` | `[N, K / GROUP]`, of types `SCALES` and `BIASES` |
///
/// The output is `y` `[.., N]` of type `T`, that of `x`. Constants are `GROUP` (32, 64 or 128, which
/// divides K), `WARPS` (at least 4) and `HALF` (`x` is float16). The grid is
/// `[32, WARPS, ceil(N / 16)]` in groups of `[32, WARPS, 1]`. It takes an sm_80 or later.
pub const QUANTIZED_ROWS: CudaSource = CudaSource {
    name: "mlex_quantized_rows",
    inputs: &["x", "w", "scales", "biases"],
    outputs: &["y"],
    header: include_str!("../gpu/quantized_rows.h"),
    source: include_str!("../gpu/quantized_rows.inc"),
};

/// As [`QUANTIZED_ROWS`], `silu(gate(x)) * up(x)` with two weights of one shape: the products are not
/// rounded before.
pub const QUANTIZED_ROWS_GATED: CudaSource = CudaSource {
    name: "mlex_quantized_rows_gated",
    inputs: &[
        "x",
        "gate",
        "gate_scales",
        "gate_biases",
        "up",
        "up_scales",
        "up_biases",
    ],
    outputs: &["y"],
    header: include_str!("../gpu/quantized_rows.h"),
    source: include_str!("../gpu/quantized_rows_gated.inc"),
};

/// As [`QUANTIZED_ROWS`], with three weights of the same number of columns, whose products are
/// `queries`, `keys` and `values`. The grid's third dimension has the blocks of 16 rows of each, one
/// after the other.
pub const QUANTIZED_ROWS_THREE: CudaSource = CudaSource {
    name: "mlex_quantized_rows_three",
    inputs: &[
        "x", "q", "q_scales", "q_biases", "k", "k_scales", "k_biases", "v", "v_scales", "v_biases",
    ],
    outputs: &["queries", "keys", "values"],
    header: include_str!("../gpu/quantized_rows.h"),
    source: include_str!("../gpu/quantized_rows_three.inc"),
};

/// How a warp adds up.
const LANE_SUM: &str = "__device__ inline float lane_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, offset);
  }
  return x;
}
";

/// What stands between the projections of an attention layer and its cache: the RMS norm of each
/// head, where `NORMED`, and the rotation by position.
///
/// | Input | |
/// |---|---|
/// | `queries`, `keys` | `[B, L, H * DIM]`, `[B, L, H_kv * DIM]`, type `T` |
/// | `query_weight`, `key_weight` | `[DIM]`, of types `QUERY_WEIGHT` and `KEY_WEIGHT`, if `NORMED`, else anything |
/// | `inverse` | `[ROTATED / 2]`, f32: radians per position |
/// | `offset` | `[1]`, int32: the first position |
///
/// Outputs are `queries_out` `[B, H, L, DIM]` and `keys_out` `[B, H_kv, L, DIM]`. Constants are
/// `NORMED`, `HEADS`, `KV_HEADS`, `DIM` (a multiple of 32), `ROTATED` (a multiple of 64, at most `DIM`;
/// the two halves of it form the pairs), and the bits of the floats `QUERY_EPS`, `KEY_EPS` and
/// `SCALE`, which positions are multiplied by. The grid is `[32, H + H_kv, B * L]`.
pub const NORM_ROPE: CudaSource = CudaSource {
    name: "mlex_norm_rope",
    inputs: &[
        "queries",
        "keys",
        "query_weight",
        "key_weight",
        "inverse",
        "offset",
    ],
    outputs: &["queries_out", "keys_out"],
    header: LANE_SUM,
    source: include_str!("../gpu/norm_rope.inc"),
};

/// `x + added`, and the RMS norm of that.
///
/// | Input | |
/// |---|---|
/// | `x`, `added` | `[.., DIM]`, type `T` |
/// | `weight` | `[DIM]`, of type `WEIGHT` |
///
/// Outputs are `sum` and `normed`, as `x`. Constants are `DIM`, `WARPS` and the bits of the float `EPS`.
/// The grid is `[32 * WARPS, rows, 1]` in groups of `[32 * WARPS, 1, 1]`.
pub const ADD_RMS_NORM: CudaSource = CudaSource {
    name: "mlex_add_rms_norm",
    inputs: &["x", "added", "weight"],
    outputs: &["sum", "normed"],
    header: LANE_SUM,
    source: include_str!("../gpu/add_rms_norm.inc"),
};
