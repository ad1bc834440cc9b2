//! The selective state space recurrence of Mamba 2.
//!
//! `S_t = exp(dt_t a) S_(t-1) + dt_t x_t b_t^T` and `y_t = S_t c_t + d x_t`, for each head. Many
//! positions are done in chunks, in which the recurrence is a masked product of two matrices
//! ("Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State
//! Space Duality"); only the states at the starts of chunks are computed one after another.

use mlex_core::{Array, Dtype};

use super::gpu;
use crate::{Error, Result};

/// Positions of a chunk.
const CHUNK: i32 = 64;

/// What the recurrence takes: `H` heads of `P`, and `G` groups of heads that share their `b` and
/// `c` of `N` entries.
#[derive(Clone, Copy, Debug)]
pub struct ScanInputs<'a> {
    /// `[B, L, H, P]`.
    pub x: &'a Array,
    /// The step sizes, f32 `[B, L, H]`; at 0 a position leaves no trace.
    pub dt: &'a Array,
    /// The rates of growth, f32 `[H]`; negative for decay.
    pub a: &'a Array,
    /// `[B, L, G, N]`.
    pub b: &'a Array,
    /// `[B, L, G, N]`.
    pub c: &'a Array,
    /// What of `x` goes to the output unchanged, `[H]`.
    pub d: &'a Array,
}

/// Sizes of a scan.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) batch: i32,
    pub(super) length: i32,
    pub(super) heads: i32,
    pub(super) dim: i32,
    pub(super) groups: i32,
    pub(super) state: i32,
}

/// The outputs `[B, L, H, P]` in the type of `x`, and the state after them, f32 `[B, H, P, N]`.
/// Without `state` it starts at zero.
///
/// # Errors
/// When the shapes do not fit.
pub fn mamba2_scan(inputs: &ScanInputs<'_>, state: Option<&Array>) -> Result<(Array, Array)> {
    let (&[batch, length, heads, dim], &[_, _, groups, state_size]) =
        (inputs.x.shape(), inputs.b.shape())
    else {
        let found = format!("{:?} and {:?}", inputs.x.shape(), inputs.b.shape());
        return Err(Error::setting("x and b", "four dimensions", found));
    };
    if groups == 0 || heads % groups != 0 {
        let expected = format!("a divisor of the {heads} heads");
        return Err(Error::setting("groups", expected, groups));
    }
    let sizes = Sizes {
        batch,
        length,
        heads,
        dim,
        groups,
        state: state_size,
    };
    if let Some(outputs) = gpu::mamba2_scan(inputs, state, sizes)? {
        return Ok(outputs);
    }
    let (y, state) = if length == 1 {
        step(inputs, state, sizes)?
    } else {
        chunks(inputs, state, sizes)?
    };
    let skipped = inputs.d.as_type(inputs.x.dtype())?.expand_dims(-1)?;
    let y = y.as_type(inputs.x.dtype())?;
    Ok((y.add(&inputs.x.multiply(&skipped)?)?, state))
}

/// One position.
fn step(inputs: &ScanInputs<'_>, state: Option<&Array>, sizes: Sizes) -> Result<(Array, Array)> {
    let Sizes {
        batch,
        heads,
        dim,
        groups,
        state: n,
        ..
    } = sizes;
    let in_groups = [batch, groups, heads / groups, dim, 1];
    let dt = inputs.dt.reshape(&[batch, groups, heads / groups, 1, 1])?;
    let rate = inputs.a.reshape(&[groups, heads / groups, 1, 1])?;
    let x = inputs.x.as_type(Dtype::Float32)?.reshape(&in_groups)?;
    let row = |array: &Array| {
        array
            .as_type(Dtype::Float32)?
            .reshape(&[batch, groups, 1, 1, n])
    };
    let mut new = x.multiply(&dt)?.multiply(&row(inputs.b)?)?;
    if let Some(state) = state {
        let before = state.reshape(&[batch, groups, heads / groups, dim, n])?;
        new = before.multiply(&dt.multiply(&rate)?.exp()?)?.add(&new)?;
    }
    let y = new.multiply(&row(inputs.c)?)?.sum(&[-1], false)?;
    Ok((
        y.reshape(&[batch, 1, heads, dim])?,
        new.reshape(&[batch, heads, dim, n])?,
    ))
}

/// Any number of positions, in chunks. Shapes below are `[B, C, G, R, ..]` for `C` chunks and `R`
/// heads of a group.
fn chunks(inputs: &ScanInputs<'_>, state: Option<&Array>, sizes: Sizes) -> Result<(Array, Array)> {
    let Sizes {
        batch,
        length,
        heads,
        dim,
        groups,
        state: n,
    } = sizes;
    let chunk = CHUNK.min(length.max(1));
    let count = (length + chunk - 1) / chunk;
    // Positions beyond the last have a step of 0.
    let chunked = |array: &Array, shape: &[i32], order: &[i32]| -> Result<Array> {
        let array = array.as_type(Dtype::Float32)?;
        let array = array.pad(&[1], &[(0, count * chunk - length)], 0.0)?;
        let shape = [&[batch, count, chunk], shape].concat();
        Ok(array.reshape(&shape)?.transpose(order)?)
    };
    let per_group = heads / groups;
    let dt = chunked(inputs.dt, &[groups, per_group], &[0, 1, 3, 4, 2])?;
    let x = chunked(inputs.x, &[groups, per_group, dim], &[0, 1, 3, 4, 2, 5])?;
    let b = chunked(inputs.b, &[groups, 1, n], &[0, 1, 3, 4, 2, 5])?;
    let c = chunked(inputs.c, &[groups, 1, n], &[0, 1, 3, 4, 2, 5])?;

    let growth = dt.multiply(&inputs.a.reshape(&[groups, per_group, 1])?)?;
    // From position j to position i of a chunk, [.., i, j].
    let square = [batch, count, groups, per_group, chunk, chunk];
    let decay = growth
        .expand_dims(-1)?
        .broadcast_to(&square)?
        .tril(-1)?
        .cumsum(-2, false, true)?
        .exp()?;
    let x = x.multiply(&dt.expand_dims(-1)?)?;
    let scores = c.matmul(&b.swap_axes(-1, -2)?)?;
    let mut y = scores.multiply(&decay)?.tril(0)?.matmul(&x)?;

    // What each chunk adds to the state, and what of a state before it is left.
    let to_end = decay.slice_axis(-2, chunk - 1, chunk)?.swap_axes(-1, -2)?;
    let added = x.multiply(&to_end)?.swap_axes(-1, -2)?.matmul(&b)?;
    let from_start = growth.cumsum(-1, false, true)?.exp()?;
    let left = from_start
        .slice_axis(-1, chunk - 1, chunk)?
        .expand_dims(-1)?;
    let mut state = match state {
        Some(state) => state.reshape(&[batch, groups, per_group, dim, n])?,
        None => Array::zeros(&[batch, groups, per_group, dim, n], Dtype::Float32)?,
    };
    let mut starts = Vec::with_capacity(count.unsigned_abs() as usize);
    for index in 0..count {
        starts.push(state.clone());
        state = state
            .multiply(&left.at(1, index)?)?
            .add(&added.at(1, index)?)?;
    }
    if !starts.is_empty() {
        let starts = Array::stack(&starts, 1)?.swap_axes(-1, -2)?;
        let before = c.matmul(&starts)?.multiply(&from_start.expand_dims(-1)?)?;
        y = y.add(&before)?;
    }
    let y = y
        .transpose(&[0, 1, 4, 2, 3, 5])?
        .reshape(&[batch, count * chunk, heads, dim])?
        .slice_axis(1, 0, length)?;
    Ok((y, state.reshape(&[batch, heads, dim, n])?))
}
