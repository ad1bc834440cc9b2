//! Rotary embedding of tokens whose positions do not count up one by one, as those of images.

use mlex_core::Array;

use crate::{Error, Result, host};

/// The rotations of `L` tokens: for each a cosine and a sine per pair of entries of a head, or of
/// each of its parts.
#[derive(Clone, Debug)]
pub struct Rotations {
    /// f32 `[L, parts, pairs]`
    cos: Array,
    /// f32 `[L, parts, pairs]`
    sin: Array,
    parts: i32,
    pairs: i32,
}

impl Rotations {
    /// Rotations by `angles` `[L, pairs]` in radians; what is rotated is multiplied by
    /// `magnitude`.
    ///
    /// # Errors
    /// When `angles` are not whole rows.
    pub fn new(angles: &[f32], pairs: usize, magnitude: f32) -> Result<Self> {
        Self::of_parts(angles, 1, pairs, magnitude)
    }

    /// Rotations of heads that consist of `parts` parts of one length, each by angles of its own:
    /// `angles` are `[L, parts, pairs]`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_parts(angles: &[f32], parts: usize, pairs: usize, magnitude: f32) -> Result<Self> {
        let row = parts.saturating_mul(pairs);
        if row == 0 || !angles.len().is_multiple_of(row) {
            let expected = format!("rows of {row} pairs");
            return Err(Error::setting("angles", expected, angles.len()));
        }
        let shape = [(angles.len() / row) as i32, parts as i32, pairs as i32];
        let table = |of: fn(f32) -> f32| {
            let values: Vec<f32> = angles.iter().map(|&x| of(x) * magnitude).collect();
            Array::from_slice(&values, &shape)
        };
        Ok(Self {
            cos: table(f32::cos)?,
            sin: table(f32::sin)?,
            parts: parts as i32,
            pairs: pairs as i32,
        })
    }

    /// Rotates `x` `[B, H, L, D]`: entry `i` of a part with entry `i + pairs`, those behind stay.
    /// It is computed in f32 and has the dtype of `x`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn apply(&self, x: &Array) -> Result<Array> {
        if let Some(y) = host::rotate(x, [&self.cos, &self.sin])? {
            return Ok(y);
        }
        let pairs = self.pairs;
        // [B, H, L, parts, D / parts]
        let x = x.unflatten(-1, &[self.parts, -1])?;
        let dim = x.dim(-1)?;
        let first = x.slice_axis(-1, 0, pairs)?;
        let second = x.slice_axis(-1, pairs, 2 * pairs)?;
        let (cos, sin) = (&self.cos, &self.sin);
        let rotated = [
            first.multiply(cos)?.subtract(&second.multiply(sin)?)?,
            second.multiply(cos)?.add(&first.multiply(sin)?)?,
        ];
        let mut parts = Vec::with_capacity(3);
        for part in rotated {
            parts.push(part.as_type(x.dtype())?);
        }
        if dim > 2 * pairs {
            parts.push(x.slice_axis(-1, 2 * pairs, dim)?);
        }
        Ok(Array::concatenate(&parts, -1)?.flatten(-2, -1)?)
    }
}
