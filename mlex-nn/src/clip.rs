//! Hard bounds.

use mlex_core::Array;

use crate::{Result, host};

/// `min(max(x, least), largest)`, of any shape, in the type of `x`, to which the bounds are rounded.
///
/// # Errors
/// When MLX refuses the dtype.
pub fn clip(x: &Array, [least, largest]: [f32; 2]) -> Result<Array> {
    if let Some(y) = host::clip(x, [least, largest])? {
        return Ok(y);
    }
    let bound = |bound: f32| Array::scalar(bound)?.as_type(x.dtype());
    Ok(x.clip(&bound(least)?, &bound(largest)?)?)
}
