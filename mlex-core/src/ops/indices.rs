//! Arrays of indices, brought into bounds.
//!
//! MLX's kernels read and write wherever an index points to, outside of the array too. A safe
//! operation must not, and the values are known only when the graph runs; so they are clamped
//! in the graph, which is one node for unsigned indices and two for signed ones.

use crate::{Array, Dtype, Error, ErrorKind, Result};

/// `indices` along a dimension of size `dim`, where each picks `window` neighbours. Negative
/// ones count from the end; those out of bounds become the nearest one that is not.
#[track_caller]
pub(super) fn axis_indices(indices: &Array, dim: i32, window: i32) -> Result<Array> {
    let limits = limits(indices.dtype())?;
    if indices.size() == 0 || window <= 0 {
        return Ok(indices.clone());
    }
    let last = dim.saturating_sub(window);
    if last < 0 {
        return Err(Error::new(ErrorKind::Argument {
            argument: "indices",
            expected: "none for a dimension that has no room for them",
            found: format!("{} for size {dim}", indices.size()),
        }));
    }
    if limits.0 == 0 || window == 1 {
        return clamp(indices, limits, -i64::from(dim), i64::from(last));
    }
    // Of a window the start must be in bounds, counted from the front.
    let wide = if i64::from(dim) > limits.1 {
        indices.as_type(Dtype::Int32)?
    } else {
        indices.clone()
    };
    let from_end = wide.add(dim)?;
    let start = wide.less(0)?.where_(&from_end, &wide)?;
    clamp(&start, self::limits(start.dtype())?, 0, i64::from(last))
}

/// `indices` of the matrices in the batch dimensions of `array`, which have no negative ones.
#[track_caller]
pub(super) fn batch_indices(indices: &Array, array: &Array) -> Result<Array> {
    let limits = limits(indices.dtype())?;
    if indices.size() == 0 {
        return Ok(indices.clone());
    }
    let shape = array.shape();
    let batch = &shape[..shape.len().saturating_sub(2)];
    let matrices: i64 = batch.iter().map(|&dim| i64::from(dim)).product();
    if matrices == 0 {
        return Err(Error::new(ErrorKind::Argument {
            argument: "indices",
            expected: "none for an empty batch",
            found: format!("{} for shape {shape:?}", indices.size()),
        }));
    }
    clamp(indices, limits, 0, matrices - 1)
}

/// The values of an integer dtype.
fn limits(dtype: Dtype) -> Result<(i64, i64)> {
    Ok(match dtype {
        Dtype::Uint8 => (0, u8::MAX.into()),
        Dtype::Uint16 => (0, u16::MAX.into()),
        Dtype::Uint32 => (0, u32::MAX.into()),
        Dtype::Uint64 => (0, i64::MAX),
        Dtype::Int8 => (i8::MIN.into(), i8::MAX.into()),
        Dtype::Int16 => (i16::MIN.into(), i16::MAX.into()),
        Dtype::Int32 => (i32::MIN.into(), i32::MAX.into()),
        Dtype::Int64 => (i64::MIN, i64::MAX),
        dtype => {
            return Err(Error::new(ErrorKind::Argument {
                argument: "indices",
                expected: "integers",
                found: dtype.to_string(),
            }));
        }
    })
}

/// `indices` within `[low, high]`; nothing is done for a bound that the dtype cannot pass.
#[track_caller]
fn clamp(indices: &Array, limits: (i64, i64), low: i64, high: i64) -> Result<Array> {
    // A bound beyond an i32 is beyond every dimension too.
    let bound = |value: i64| value.clamp(i32::MIN.into(), i32::MAX.into()) as i32;
    let mut indices = indices.clone();
    if high < limits.1 {
        indices = indices.minimum(bound(high))?;
    }
    if low > limits.0 {
        indices = indices.maximum(bound(low))?;
    }
    Ok(indices)
}
