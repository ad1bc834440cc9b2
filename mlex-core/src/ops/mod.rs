//! Operations, as methods of [`Array`] that return a `Result`.
//!
//! Each puts one node (or a few) on the current stream's graph and computes nothing yet.
//! Shapes broadcast as numpy's do, dtypes promote as MLX's do; a negative axis counts from
//! the end. Errors carry the operation and the caller's location.

mod arithmetic;
mod conv;
mod create;
mod fast;
mod indexing;
mod indices;
mod linalg;
mod quantized;
pub mod random;
mod reduce;
mod shape;

use std::borrow::Cow;

use crate::dtype::Element;
use crate::{Array, Dtype, Error, ErrorKind, Result};

pub use fast::{AttentionMask, Rope};
pub use quantized::{QuantizationMode, Quantized, QuantizedWeight};

/// The second operand of a binary operation: an array, or a number that takes the dtype of
/// the first where that is a floating-point type (as Python's numbers do in MLX).
pub trait Operand<'a> {
    /// The operand as an array, to be combined with `other`.
    ///
    /// # Errors
    /// When MLX is out of memory.
    fn to_operand(self, other: &Array) -> Result<Cow<'a, Array>>
    where
        Array: 'a;
}

impl<'a> Operand<'a> for &'a Array {
    fn to_operand(self, _other: &Array) -> Result<Cow<'a, Array>> {
        Ok(Cow::Borrowed(self))
    }
}

/// Checks that a shape has no negative dimension and that its elements can be addressed:
/// MLX multiplies without looking.
fn check_shape(shape: &[i32]) -> Result<()> {
    // No element has more than 8 bytes.
    let bytes = shape.iter().try_fold(8isize, |bytes, &dim| {
        let dim = usize::try_from(dim).ok()?;
        bytes.checked_mul(isize::try_from(dim).ok()?)
    });
    if bytes.is_some() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Argument {
        argument: "shape",
        expected: "no negative dimension, and a size that memory can have",
        found: format!("{shape:?}"),
    }))
}

/// The result of an operation whose kernel on the CPU divides by sizes, or on a GPU is launched
/// for no rows: one without elements is made of nothing instead of being computed.
#[track_caller]
pub(crate) fn unless_empty(result: Result<Array>) -> Result<Array> {
    let array = result?;
    if array.size() == 0 {
        return Array::zeros(array.shape(), array.dtype());
    }
    Ok(array)
}

/// A scalar that becomes `dtype`; the conversion happens here, not in the graph.
fn scalar_like(value: f64, dtype: Dtype) -> Result<Array> {
    match dtype {
        Dtype::Float16 => Array::scalar(half::f16::from_f64(value)),
        Dtype::Bfloat16 => Array::scalar(half::bf16::from_f64(value)),
        Dtype::Float64 => Array::scalar(value),
        _ => Array::scalar(value as f32),
    }
}

impl<'a> Operand<'a> for f32 {
    fn to_operand(self, other: &Array) -> Result<Cow<'a, Array>> {
        scalar_like(f64::from(self), other.dtype()).map(Cow::Owned)
    }
}

impl<'a> Operand<'a> for i32 {
    fn to_operand(self, other: &Array) -> Result<Cow<'a, Array>> {
        let dtype = other.dtype();
        let array = match dtype {
            Dtype::Bool | Dtype::Int32 => Array::scalar(self),
            Dtype::Complex64 => Array::scalar(self as f32),
            dtype if dtype.is_float() => scalar_like(f64::from(self), dtype),
            // Other integers keep their own width, as with Python's numbers.
            dtype => integer_like(self, dtype),
        }?;
        Ok(Cow::Owned(array))
    }
}

/// An integer scalar of another integer dtype; wraps as MLX's conversion does.
fn integer_like(value: i32, dtype: Dtype) -> Result<Array> {
    fn scalar<T: Element>(value: T) -> Result<Array> {
        Array::scalar(value)
    }
    match dtype {
        Dtype::Uint8 => scalar(value as u8),
        Dtype::Uint16 => scalar(value as u16),
        Dtype::Uint32 => scalar(value as u32),
        Dtype::Uint64 => scalar(value as u64),
        Dtype::Int8 => scalar(value as i8),
        Dtype::Int16 => scalar(value as i16),
        Dtype::Int64 => scalar(i64::from(value)),
        _ => scalar(value),
    }
}
