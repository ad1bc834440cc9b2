//! Rotary embedding of tokens whose positions do not count up one by one, as those of images.

use mlex_core::Array;

use crate::{Error, Result};

/// The rotations of `L` tokens: for each a cosine and a sine per pair of entries of a head.
#[derive(Clone, Debug)]
pub struct Rotations {
    /// f32 `[L, pairs]`
    cos: Array,
    /// f32 `[L, pairs]`
    sin: Array,
    pairs: i32,
}

impl Rotations {
    /// Rotations by `angles` `[L, pairs]` in radians; what is rotated is multiplied by
    /// `magnitude`.
    ///
    /// # Errors
    /// When `angles` are not whole rows.
    pub fn new(angles: &[f32], pairs: usize, magnitude: f32) -> Result<Self> {
        if pairs == 0 || !angles.len().is_multiple_of(pairs) {
            let expected = format!("rows of {pairs} pairs");
            return Err(Error::setting("angles", expected, angles.len()));
        }
        let shape = [(angles.len() / pairs) as i32, pairs as i32];
        let table = |of: fn(f32) -> f32| {
            let values: Vec<f32> = angles.iter().map(|&x| of(x) * magnitude).collect();
            Array::from_slice(&values, &shape)
        };
        Ok(Self {
            cos: table(f32::cos)?,
            sin: table(f32::sin)?,
            pairs: pairs as i32,
        })
    }

    /// Rotates `x` `[B, H, L, D]`: entry `i` with entry `i + pairs`, those behind stay. It is
    /// computed in f32 and has the dtype of `x`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn apply(&self, x: &Array) -> Result<Array> {
        let (pairs, dim) = (self.pairs, x.dim(-1)?);
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
        Ok(Array::concatenate(&parts, -1)?)
    }
}
