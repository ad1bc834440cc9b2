//! The residual stream of layers whose parts are normalized before and after.

use mlex_core::Array;

use crate::{Result, RmsNorm, host};

/// Adds a part of a layer to the stream `x`: `(x + norm(part)) * scale`, and the `next` norm of
/// that, which the following part takes. `x` and `part` are `[.., D]` of one type; `scale` is
/// one number, `[1]`.
///
/// # Errors
/// When the shapes do not fit.
pub fn add_normed(
    x: &Array,
    part: &Array,
    norm: &RmsNorm,
    scale: Option<&Array>,
    next: Option<&RmsNorm>,
) -> Result<(Array, Option<Array>)> {
    let next_parameters = next.map(RmsNorm::parameters);
    if let Some(done) = host::add_normed(x, part, norm.parameters(), scale, next_parameters)? {
        return Ok(done);
    }
    let mut sum = x.add(&norm.forward(part)?)?;
    if let Some(scale) = scale {
        sum = sum.multiply(scale)?;
    }
    let normed = next.map(|next| next.forward(&sum)).transpose()?;
    Ok((sum, normed))
}
