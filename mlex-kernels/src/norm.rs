//! Normalization of rows.

use crate::error::{check, check_len};
use crate::simd::Level;
use crate::simd::elementwise::Norm;
use crate::threads::parallel_chunks;
use crate::{Element, Floats, Result};

/// `out = x / sqrt(mean(x^2) + eps) * weight` for each row of `size` elements.
///
/// Sums are in f32. As in MLX, the normalized value is rounded to the element type before the
/// weight is applied.
///
/// # Errors
/// When `x` is not whole rows, `out` is not as long, or a weight is not there for each element
/// of a row.
pub fn rms_norm<T: Element>(
    out: &mut [T],
    x: &[T],
    size: usize,
    weight: Option<Floats<'_>>,
    eps: f32,
) -> Result<()> {
    norm(out, x, size, [weight, None], eps, false)
}

/// `out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias` for each row of `size` elements.
///
/// As [`rms_norm`].
///
/// # Errors
/// As [`rms_norm`].
pub fn layer_norm<T: Element>(
    out: &mut [T],
    x: &[T],
    size: usize,
    weight: Option<Floats<'_>>,
    bias: Option<Floats<'_>>,
    eps: f32,
) -> Result<()> {
    norm(out, x, size, [weight, bias], eps, true)
}

/// Elements that one task takes at least.
const TASK: usize = 8192;

fn norm<T: Element>(
    out: &mut [T],
    x: &[T],
    size: usize,
    [weight, bias]: [Option<Floats<'_>>; 2],
    eps: f32,
    centered: bool,
) -> Result<()> {
    check_len("norm: out", x.len(), out.len())?;
    let whole = if size == 0 {
        x.is_empty()
    } else {
        x.len().is_multiple_of(size)
    };
    check(whole, "norm: x", "whole rows", x.len())?;
    for floats in [&weight, &bias].into_iter().flatten() {
        check_len("norm: weight or bias", size, floats.len())?;
    }
    if x.is_empty() {
        return Ok(());
    }
    let level = Level::current();
    let (weight, bias) = (weight.map(|w| w.widened()), bias.map(|b| b.widened()));
    let (weight, bias) = (
        weight.as_deref().unwrap_or(&[]),
        bias.as_deref().unwrap_or(&[]),
    );
    parallel_chunks(out, TASK.div_ceil(size) * size, |first, out| {
        let x = &x[first..first + out.len()];
        level.dispatch(Norm {
            x,
            out,
            size,
            weight,
            bias,
            eps,
            centered,
        });
    });
    Ok(())
}
