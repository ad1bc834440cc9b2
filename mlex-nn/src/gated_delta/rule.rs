//! The gated delta rule by MLX's operations, in chunks.
//!
//! Per head, with a state `S` `[D_v, D_k]`, a decay `g`, a step size `beta`:
//!
//! ```text
//! S_t = g_t S_(t-1) + u_t k_t^T      u_t = beta_t (v_t - g_t S_(t-1) k_t)      y_t = S_t q_t
//! ```
//!
//! ("Gated Delta Networks: Improving Mamba2 with Delta Rule".) Within a chunk, with `G_i` the
//! product of the decays up to `i`, the `u` are the solution of a triangular system ("Parallelizing
//! Linear Transformers with the Delta Rule over Sequence Length"):
//!
//! ```text
//! (I + L) U = beta (V - G K S_0^T)        L_ij = beta_i (G_i / G_j) (k_i . k_j)     for j < i
//! Y = G Q S_0^T + A U                     A_ij = (G_i / G_j) (q_i . k_j)            for j <= i
//! S_C = G_C S_0 + ((G_C / G_j) U)^T K
//! ```
//!
//! All decays there are quotients from a later position to an earlier one, thus at most 1. Their
//! logarithms are summed from `j` to `i`, not taken as differences of sums from the start, so
//! that small quotients near large ones lose no digits. `(I + L)^-1` is built from blocks of
//! doubled size, as stable as substitution; a product of powers of `L` would not be.

use mlex_core::{Array, Dtype};

use super::gpu;
use crate::{Error, Result};

/// Positions of a chunk.
const CHUNK: i32 = 64;

/// What the rule takes. `H_v` is a multiple of `H_k`: value heads share keys in order.
#[derive(Clone, Copy, Debug)]
pub struct DeltaInputs<'a> {
    /// `[B, L, H_k, D_k]`, with the scale applied.
    pub queries: &'a Array,
    /// `[B, L, H_k, D_k]`.
    pub keys: &'a Array,
    /// `[B, L, H_v, D_v]`.
    pub values: &'a Array,
    /// The logarithm of the decay, `[B, L, H_v]`; not positive.
    pub log_decay: &'a Array,
    /// The step size, `[B, L, H_v]`.
    pub beta: &'a Array,
}

/// Sizes of a call.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) batch: i32,
    pub(super) length: i32,
    pub(super) key_heads: i32,
    /// Value heads of each key head.
    pub(super) group: i32,
    pub(super) key_dim: i32,
    pub(super) value_dim: i32,
}

impl Sizes {
    fn of(inputs: &DeltaInputs<'_>) -> Result<Self> {
        let (&[batch, length, key_heads, key_dim], &[.., value_heads, value_dim]) =
            (inputs.keys.shape(), inputs.values.shape())
        else {
            let found = format!("{:?}", inputs.keys.shape());
            return Err(Error::setting("keys", "four dimensions", found));
        };
        if key_heads <= 0 || value_heads % key_heads != 0 {
            let expected = format!("a divisor of the {value_heads} value heads");
            return Err(Error::setting("key heads", expected, key_heads));
        }
        Ok(Self {
            batch,
            length,
            key_heads,
            group: value_heads / key_heads,
            key_dim,
            value_dim,
        })
    }

    /// `[B, H_k, R, D_v, D_k]`.
    fn state(self) -> [i32; 5] {
        [
            self.batch,
            self.key_heads,
            self.group,
            self.value_dim,
            self.key_dim,
        ]
    }
}

/// Runs the rule over all positions, from `state` `[B, H_v, D_v, D_k]` (zero without one):
/// `[B, L, H_v, D_v]` in the type of the queries, and the new state in f32. Where `mask`
/// `[B, L]` is false the state stays as it is and the output is 0.
///
/// # Errors
/// When the shapes do not fit.
pub fn gated_delta_rule(
    inputs: &DeltaInputs<'_>,
    state: Option<&Array>,
    mask: Option<&Array>,
) -> Result<(Array, Array)> {
    let sizes = Sizes::of(inputs)?;
    if let Some(outputs) = gpu::gated_delta_rule(inputs, state, mask, sizes)? {
        return Ok(outputs);
    }
    let [batch, key_heads, group, value_dim, key_dim] = sizes.state();
    let state = match state {
        Some(state) => state
            .as_type(Dtype::Float32)?
            .unflatten(1, &[key_heads, group])?,
        None => Array::zeros(&sizes.state(), Dtype::Float32)?,
    };
    let gates = match mask {
        // Without a step and a decay the state stays.
        Some(mask) => {
            let mask = mask.expand_dims(-1)?;
            let real = |x: &Array| mask.where_(x, &x.zeros_like()?);
            [real(inputs.log_decay)?, real(inputs.beta)?]
        }
        None => [inputs.log_decay.clone(), inputs.beta.clone()],
    };
    let (y, state) = if sizes.length == 1 {
        step(inputs, &gates, &state, sizes)?
    } else {
        chunks(inputs, &gates, state, sizes)?
    };
    // Both give [B, L, H_k, R, D_v].
    let y = y.reshape(&[batch, sizes.length, key_heads * group, value_dim])?;
    let y = match mask {
        Some(mask) => {
            let mask = mask.expand_dims(-1)?.expand_dims(-1)?;
            mask.where_(&y, &y.zeros_like()?)?
        }
        None => y,
    };
    let state = state.reshape(&[batch, key_heads * group, value_dim, key_dim])?;
    Ok((y.as_type(inputs.queries.dtype())?, state))
}

/// One position.
fn step(
    inputs: &DeltaInputs<'_>,
    [log_decay, beta]: &[Array; 2],
    state: &Array,
    sizes: Sizes,
) -> Result<(Array, Array)> {
    let [batch, heads, group, value_dim, key_dim] = sizes.state();
    let row = |x: &Array| -> Result<Array> {
        let x = x.as_type(Dtype::Float32)?;
        Ok(x.reshape(&[batch, heads, 1, 1, key_dim])?)
    };
    let gate = |x: &Array| -> Result<Array> {
        let x = x.as_type(Dtype::Float32)?;
        Ok(x.reshape(&[batch, heads, group, 1, 1])?)
    };
    let (q, k) = (row(inputs.queries)?, row(inputs.keys)?);
    let v = inputs.values.as_type(Dtype::Float32)?;
    let v = v.reshape(&[batch, heads, group, value_dim, 1])?;
    let decayed = state.multiply(&gate(&log_decay.exp()?)?)?;
    let known = decayed.multiply(&k)?.sum(&[-1], true)?;
    let u = v.subtract(&known)?.multiply(&gate(beta)?)?;
    let state = decayed.add(&u.multiply(&k)?)?;
    let y = state.multiply(&q)?.sum(&[-1], false)?;
    Ok((y.expand_dims(1)?, state))
}

/// Many positions.
fn chunks(
    inputs: &DeltaInputs<'_>,
    [log_decay, beta]: &[Array; 2],
    mut state: Array,
    sizes: Sizes,
) -> Result<(Array, Array)> {
    let Sizes { batch, length, .. } = sizes;
    let [_, heads, group, value_dim, key_dim] = sizes.state();
    let chunk = u32::try_from(length)
        .map_or(CHUNK, |length| length.next_power_of_two() as i32)
        .clamp(1, CHUNK);
    let count = length.div_euclid(chunk) + i32::from(length % chunk != 0);
    // Positions that fill up the last chunk have no step and no decay: they change nothing.
    let missing = count * chunk - length;
    let cut = |x: &Array, shape: &[i32], axes: &[i32]| -> Result<Array> {
        let x = x.as_type(Dtype::Float32)?;
        let x = if missing > 0 {
            x.pad(&[1], &[(0, missing)], 0.0)?
        } else {
            x
        };
        let shape = [&[batch, count, chunk], shape].concat();
        Ok(x.reshape(&shape)?.transpose(axes)?)
    };
    // [B, H, 1, N, C, D_k], [B, H, R, N, C, D_v] and [B, H, R, N, C].
    let head = |x: &Array| cut(x, &[heads, 1, key_dim], &[0, 3, 4, 1, 2, 5]);
    let (q, k) = (head(inputs.queries)?, head(inputs.keys)?);
    let v = cut(
        inputs.values,
        &[heads, group, value_dim],
        &[0, 3, 4, 1, 2, 5],
    )?;
    let gate = |x: &Array| cut(x, &[heads, group], &[0, 3, 4, 1, 2]);
    let (log_decay, beta) = (gate(log_decay)?, gate(beta)?.expand_dims(-1)?);

    let from_start = log_decay.cumsum(-1, false, true)?.exp()?.expand_dims(-1)?;
    let lower = Array::tri(chunk, chunk, 0, Dtype::Float32)?;
    let strictly_lower = Array::tri(chunk, chunk, -1, Dtype::Float32)?;
    // G_i / G_j; the sums over rows start below the diagonal.
    let full = [batch, heads, group, count, chunk, chunk];
    let each = log_decay.expand_dims(-1)?.broadcast_to(&full)?;
    let zero = Array::scalar(0.0f32)?;
    let below = strictly_lower.as_type(Dtype::Bool)?;
    let quotients = below.where_(&each, &zero)?.cumsum(-2, false, true)?.exp()?;
    let to_end = quotients
        .slice_axis(-2, chunk - 1, chunk)?
        .swap_axes(-1, -2)?;
    let quotients = quotients.multiply(&lower)?;

    let transposed = k.swap_axes(-1, -2)?;
    let system = k.matmul(&transposed)?.multiply(&quotients)?;
    let system = system.multiply(&beta)?.multiply(&strictly_lower)?;
    let inverse = unit_lower_inverse(&system, chunk)?;
    let attention = q.matmul(&transposed)?.multiply(&quotients)?;
    // U = `new` - `seen` S^T
    let new = inverse.matmul(&v.multiply(&beta)?)?;
    let seen = inverse.matmul(&k.multiply(&beta.multiply(&from_start)?)?)?;
    let q = q.multiply(&from_start)?;
    let k = k.multiply(&to_end)?;
    let decay = from_start.slice_axis(-2, chunk - 1, chunk)?;

    let mut outputs = Vec::new();
    for index in 0..count {
        let at = |x: &Array| x.at(3, index);
        let before = state.swap_axes(-1, -2)?;
        let u = at(&new)?.subtract(&at(&seen)?.matmul(&before)?)?;
        let y = at(&q)?.matmul(&before)?.add(&at(&attention)?.matmul(&u)?)?;
        outputs.push(y);
        let grown = u.swap_axes(-1, -2)?.matmul(&at(&k)?)?;
        state = state.multiply(&at(&decay)?)?.add(&grown)?;
    }
    // [B, H, R, N * C, D_v] to [B, L, H, R, D_v].
    let y = Array::concatenate(&outputs, 3)?.slice_axis(3, 0, length)?;
    Ok((y.transpose(&[0, 3, 1, 2, 4])?, state))
}

/// `(I + L)^-1` of strictly lower triangular matrices `[.., size, size]`; `size` is a power
/// of two. The inverse of the diagonal blocks of a size gives that of blocks of twice the size:
/// `[[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]`.
fn unit_lower_inverse(lower: &Array, size: i32) -> Result<Array> {
    let mut inverse = Array::eye(size, size, 0, Dtype::Float32)?;
    let mut block = 1;
    while block < size {
        let corners = lower.multiply(&corners(size, block)?)?;
        let change = if block == 1 {
            corners
        } else {
            inverse.matmul(&corners)?.matmul(&inverse)?
        };
        inverse = inverse.subtract(&change)?;
        block *= 2;
    }
    Ok(inverse)
}

/// 1 in the lower left quarter of each diagonal block of `2 * block`, 0 elsewhere.
fn corners(size: i32, block: i32) -> Result<Array> {
    let entries = (0..size).flat_map(|row| {
        (0..size).map(move |column| {
            let (row, column) = (row / block, column / block);
            if row % 2 == 1 && column == row - 1 {
                1.0f32
            } else {
                0.0
            }
        })
    });
    let entries: Vec<f32> = entries.collect();
    Ok(Array::from_slice(&entries, &[size, size])?)
}
