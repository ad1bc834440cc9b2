//! The residual stream of layers whose parts are normalized before and after.

use mlex_core::Array;

use crate::{Result, RmsNorm, Sequence, Value, host};

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

/// [`add_normed`] as a step of `sequence`; none where there is no kernel for it.
///
/// # Errors
/// When the weights cannot be read.
pub fn record_add_normed(
    sequence: &mut Sequence,
    x: Value,
    part: Value,
    norm: &RmsNorm,
    scale: Option<&Array>,
    next: Option<&RmsNorm>,
) -> Result<Option<(Value, Option<Value>)>> {
    let next = next.map(RmsNorm::parameters);
    host::record_add_normed(sequence, x, part, norm.parameters(), scale, next)
}
