//! Arrays from nothing.

use super::scalar_like;
use crate::ffi::op;
use crate::{Array, Dtype, Result};

impl Array {
    /// All zero.
    ///
    /// # Errors
    /// When the shape is negative or too large.
    #[track_caller]
    pub fn zeros(shape: &[i32], dtype: Dtype) -> Result<Array> {
        super::check_shape(shape)?;
        op!(mlx_zeros(shape.as_ptr(), shape.len(), dtype.to_raw()))
    }

    /// All one.
    ///
    /// # Errors
    /// When the shape is negative or too large.
    #[track_caller]
    pub fn ones(shape: &[i32], dtype: Dtype) -> Result<Array> {
        super::check_shape(shape)?;
        op!(mlx_ones(shape.as_ptr(), shape.len(), dtype.to_raw()))
    }

    /// All `value`.
    ///
    /// # Errors
    /// When the shape is negative or too large.
    #[track_caller]
    pub fn full(shape: &[i32], value: f32, dtype: Dtype) -> Result<Array> {
        super::check_shape(shape)?;
        let value = scalar_like(f64::from(value), dtype)?;
        op!(mlx_full(
            shape.as_ptr(),
            shape.len(),
            value.raw(),
            dtype.to_raw()
        ))
    }

    /// `start`, `start + step`, .. before `stop`. Shape `[ceil((stop - start) / step)]`.
    ///
    /// # Errors
    /// When MLX refuses the range.
    #[track_caller]
    pub fn arange(start: f64, stop: f64, step: f64, dtype: Dtype) -> Result<Array> {
        op!(mlx_arange(start, stop, step, dtype.to_raw()))
    }

    /// `count` numbers from `start` to `stop`, both included.
    ///
    /// # Errors
    /// When the count is negative.
    #[track_caller]
    pub fn linspace(start: f64, stop: f64, count: i32, dtype: Dtype) -> Result<Array> {
        op!(mlx_linspace(start, stop, count, dtype.to_raw()))
    }

    /// `[rows, columns]` with ones on diagonal `k`.
    ///
    /// # Errors
    /// When a size is negative.
    #[track_caller]
    pub fn eye(rows: i32, columns: i32, k: i32, dtype: Dtype) -> Result<Array> {
        op!(mlx_eye(rows, columns, k, dtype.to_raw()))
    }

    /// `[rows, columns]` with ones on and below diagonal `k`.
    ///
    /// # Errors
    /// When a size is negative.
    #[track_caller]
    pub fn tri(rows: i32, columns: i32, k: i32, dtype: Dtype) -> Result<Array> {
        op!(mlx_tri(rows, columns, k, dtype.to_raw()))
    }

    /// Zeros of the same shape and dtype.
    ///
    /// # Errors
    /// When MLX refuses.
    #[track_caller]
    pub fn zeros_like(&self) -> Result<Array> {
        op!(mlx_zeros_like(self.raw()))
    }

    /// Ones of the same shape and dtype.
    ///
    /// # Errors
    /// When MLX refuses.
    #[track_caller]
    pub fn ones_like(&self) -> Result<Array> {
        op!(mlx_ones_like(self.raw()))
    }

    /// What is on and below diagonal `k` of the last two dimensions; zero above it.
    ///
    /// # Errors
    /// When there are fewer than two dimensions.
    #[track_caller]
    pub fn tril(&self, k: i32) -> Result<Array> {
        op!(mlx_tril(self.raw(), k))
    }

    /// What is on and above diagonal `k` of the last two dimensions; zero below it.
    ///
    /// # Errors
    /// When there are fewer than two dimensions.
    #[track_caller]
    pub fn triu(&self, k: i32) -> Result<Array> {
        op!(mlx_triu(self.raw(), k))
    }
}
