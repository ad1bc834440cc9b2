//! Normalization of rows.

use crate::error::{check, check_len};
use crate::simd::elementwise::{Add, Norm};
use crate::simd::{Level, scratch};
use crate::threads::{Rows, parallel_chunks, parallel_for};
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

/// `sum = x + residual_scale * residual`, and the [`rms_norm`] of each row of it: the step
/// between two layers of a residual stream. The scale, products and sums are rounded to the
/// element type, as those of MLX are.
///
/// # Errors
/// When the slices differ in length, or as [`rms_norm`].
pub fn add_rms_norm<T: Element>(
    [sum, normed]: [&mut [T]; 2],
    [x, residual]: [&[T]; 2],
    residual_scale: f32,
    size: usize,
    weight: Floats<'_>,
    eps: f32,
) -> Result<()> {
    check_len("add_rms_norm: residual", x.len(), residual.len())?;
    check_len("add_rms_norm: sum", x.len(), sum.len())?;
    check_len("add_rms_norm: normed", x.len(), normed.len())?;
    check_rows(x.len(), size)?;
    check_len("norm: weight or bias", size, weight.len())?;
    if x.is_empty() {
        return Ok(());
    }
    let level = Level::current();
    let factor = T::from_f32(residual_scale).to_f32();
    let rows = TASK.div_ceil(size);
    let (count, sums, normeds) = (
        x.len() / size,
        Rows::new(sum, size),
        Rows::new(normed, size),
    );
    scratch::with(0, |[memory, ..]| {
        let weight = weight.widened_in(memory);
        parallel_for(count.div_ceil(rows), |task| {
            for row in task * rows..((task + 1) * rows).min(count) {
                let range = row * size..(row + 1) * size;
                let (sum, normed) = (sums.take(row), normeds.take(row));
                level.dispatch(Add {
                    x: &x[range.clone()],
                    residual: &residual[range],
                    factor,
                    gain: 1.0,
                    sum,
                });
                level.dispatch(Norm {
                    x: sum,
                    out: normed,
                    size,
                    weight,
                    bias: &[],
                    eps,
                    centered: false,
                });
            }
        });
    });
    Ok(())
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
    check_rows(x.len(), size)?;
    for floats in [&weight, &bias].into_iter().flatten() {
        check_len("norm: weight or bias", size, floats.len())?;
    }
    if x.is_empty() {
        return Ok(());
    }
    let level = Level::current();
    scratch::with(0, |[first, second, ..]| {
        let weight = weight.map_or(&[][..], |weight| weight.widened_in(first));
        let bias = bias.map_or(&[][..], |bias| bias.widened_in(second));
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
    });
    Ok(())
}

fn check_rows(length: usize, size: usize) -> Result<()> {
    let whole = if size == 0 {
        length == 0
    } else {
        length.is_multiple_of(size)
    };
    check(whole, "norm: x", "whole rows", length)
}
