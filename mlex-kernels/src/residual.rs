//! Sums of a residual stream, and what is done to a stream as a whole.

use crate::error::{check, check_len, product};
use crate::simd::Level;
use crate::simd::elementwise::{Add, Clip, Scale};
use crate::threads::parallel_chunks;
use crate::{Element, Result};

/// Elements that one task takes at least.
const TASK: usize = 8192;

/// `out = factor * x`, the factor rounded to the element type as MLX does it.
///
/// # Errors
/// When the slices differ in length.
pub fn scale<T: Element>(out: &mut [T], x: &[T], factor: f32) -> Result<()> {
    check_len("scale: x", out.len(), x.len())?;
    let factor = T::from_f32(factor).to_f32();
    let level = Level::current();
    parallel_chunks(out, TASK, |first, out| {
        let x = &x[first..first + out.len()];
        level.dispatch(Scale { x, factor, out });
    });
    Ok(())
}

/// `out = min(max(x, least), largest)`, the bounds rounded to the element type as MLX does it; what
/// is not a number stays so.
///
/// # Errors
/// When the slices differ in length.
pub fn clip<T: Element>(out: &mut [T], x: &[T], [least, largest]: [f32; 2]) -> Result<()> {
    check_len("clip: x", out.len(), x.len())?;
    let bounds = [least, largest].map(|bound| T::from_f32(bound).to_f32());
    let level = Level::current();
    parallel_chunks(out, TASK, |first, out| {
        let x = &x[first..first + out.len()];
        level.dispatch(Clip { x, bounds, out });
    });
    Ok(())
}

/// `out = factor * (x + y)`; the sum and the factor are rounded to the element type.
///
/// # Errors
/// When the slices differ in length.
pub fn add<T: Element>(out: &mut [T], x: &[T], y: &[T], factor: f32) -> Result<()> {
    check_len("add: x", out.len(), x.len())?;
    check_len("add: y", out.len(), y.len())?;
    let factor = T::from_f32(factor).to_f32();
    let level = Level::current();
    parallel_chunks(out, TASK, |first, out| {
        let range = first..first + out.len();
        level.dispatch(Add {
            x: &x[range.clone()],
            residual: &y[range],
            factor: 1.0,
            gain: factor,
            sum: out,
        });
    });
    Ok(())
}

/// `out = max(x, 0)^2`, rounded to the element type once.
///
/// # Errors
/// When the slices differ in length.
pub fn relu2<T: Element>(out: &mut [T], x: &[T]) -> Result<()> {
    check_len("relu2: x", out.len(), x.len())?;
    parallel_chunks(out, TASK, |first, out| {
        for (out, x) in out.iter_mut().zip(&x[first..]) {
            let positive = x.to_f32().max(0.0);
            *out = T::from_f32(positive * positive);
        }
    });
    Ok(())
}

/// `out = x + sigmoid(gate) * y` for rows of `size` elements with one gate each. The gate's
/// sigmoid and the product are rounded to the element type.
///
/// # Errors
/// When the slices differ in length, or there is not a gate for each row.
pub fn add_gated<T: Element>(
    out: &mut [T],
    x: &[T],
    y: &[T],
    gates: &[T],
    size: usize,
) -> Result<()> {
    const WHAT: &str = "add_gated: gates";
    check_len("add_gated: x", out.len(), x.len())?;
    check_len("add_gated: y", out.len(), y.len())?;
    check_len(WHAT, product(WHAT, &[gates.len(), size])?, out.len())?;
    if out.is_empty() {
        return Ok(());
    }
    let level = Level::current();
    parallel_chunks(out, TASK.div_ceil(size) * size, |first, out| {
        for (row, out) in out.chunks_exact_mut(size).enumerate() {
            let start = first + row * size;
            let gate = 1.0 / (1.0 + (-gates[start / size].to_f32()).exp());
            level.dispatch(Add {
                x: &x[start..start + size],
                residual: &y[start..start + size],
                factor: T::from_f32(gate).to_f32(),
                gain: 1.0,
                sum: out,
            });
        }
    });
    Ok(())
}

/// Columns `first..` of each row of `period` elements of `x`: rows of `width` elements.
///
/// # Errors
/// When the columns are not in a row, `x` is not whole rows, or `out` not one for each.
pub fn take_columns<T: Element>(
    out: &mut [T],
    x: &[T],
    period: usize,
    first: usize,
    width: usize,
) -> Result<()> {
    const WHAT: &str = "take_columns";
    let end = first.checked_add(width);
    let inside = width > 0 && end.is_some_and(|end| end <= period);
    check(inside, "take_columns: columns", "columns of a row", width)?;
    let rows = x.len() / period;
    check_len("take_columns: x", product(WHAT, &[rows, period])?, x.len())?;
    check_len(
        "take_columns: out",
        product(WHAT, &[rows, width])?,
        out.len(),
    )?;
    for (out, row) in out.chunks_exact_mut(width).zip(x.chunks_exact(period)) {
        out.copy_from_slice(&row[first..first + width]);
    }
    Ok(())
}
