//! Random numbers from counter-based keys: the same key gives the same numbers.

use crate::ffi::ArrayHandle;
use crate::ffi::{call, op};
use crate::{Array, Dtype, Result};

/// The key of a seed.
///
/// # Errors
/// When MLX is out of memory.
pub fn key(seed: u64) -> Result<Array> {
    let mut out = ArrayHandle::empty();
    call!(mlx_random_key(out.as_mut_ptr(), seed))?;
    Ok(Array::from_handle(out))
}

/// `count` independent keys of one: `[count, 2]`.
///
/// # Errors
/// When `key` is not a key.
#[track_caller]
pub fn split(key: &Array, count: i32) -> Result<Array> {
    super::check_shape(&[count])?;
    op!(mlx_random_split_num(key.raw(), count))
}

/// Uniform in `[low, high)`.
///
/// # Errors
/// When `dtype` is not a floating-point one.
#[track_caller]
pub fn uniform(low: f32, high: f32, shape: &[i32], dtype: Dtype, key: &Array) -> Result<Array> {
    super::check_shape(shape)?;
    let (low, high) = (Array::scalar(low)?, Array::scalar(high)?);
    op!(mlx_random_uniform(
        low.raw(),
        high.raw(),
        shape.as_ptr(),
        shape.len(),
        dtype.to_raw(),
        key.raw(),
    ))
}

/// Normal with the given mean and standard deviation.
///
/// # Errors
/// When `dtype` is not a floating-point one.
#[track_caller]
pub fn normal(mean: f32, std: f32, shape: &[i32], dtype: Dtype, key: &Array) -> Result<Array> {
    super::check_shape(shape)?;
    op!(mlx_random_normal(
        shape.as_ptr(),
        shape.len(),
        dtype.to_raw(),
        mean,
        std,
        key.raw()
    ))
}

/// Standard normal, drawn again where it is outside of `[low, high]`.
///
/// # Errors
/// When `dtype` is not a floating-point one.
#[track_caller]
pub fn truncated_normal(
    low: f32,
    high: f32,
    shape: &[i32],
    dtype: Dtype,
    key: &Array,
) -> Result<Array> {
    super::check_shape(shape)?;
    let (low, high) = (Array::scalar(low)?, Array::scalar(high)?);
    op!(mlx_random_truncated_normal(
        low.raw(),
        high.raw(),
        shape.as_ptr(),
        shape.len(),
        dtype.to_raw(),
        key.raw(),
    ))
}

/// The numbers below `count` (uint32 `[count]`) in random order.
///
/// # Errors
/// When the count is negative.
#[track_caller]
pub fn permutation(count: i32, key: &Array) -> Result<Array> {
    super::check_shape(&[count])?;
    op!(mlx_random_permutation_arange(count, key.raw()))
}

/// Integers in `[low, high)`. MLX before 0.32.1 rounds a draw towards zero, not down: with a
/// negative `low`, 0 comes twice as often as the others, and `low` almost never.
///
/// # Errors
/// When `dtype` is not an integer one.
#[track_caller]
pub fn integers(low: i32, high: i32, shape: &[i32], dtype: Dtype, key: &Array) -> Result<Array> {
    super::check_shape(shape)?;
    let (low, high) = (Array::scalar(low)?, Array::scalar(high)?);
    op!(mlx_random_randint(
        low.raw(),
        high.raw(),
        shape.as_ptr(),
        shape.len(),
        dtype.to_raw(),
        key.raw(),
    ))
}

/// True with the given probability.
///
/// # Errors
/// When MLX refuses the shape.
#[track_caller]
pub fn bernoulli(probability: f32, shape: &[i32], key: &Array) -> Result<Array> {
    super::check_shape(shape)?;
    let probability = Array::scalar(probability)?;
    op!(mlx_random_bernoulli(
        probability.raw(),
        shape.as_ptr(),
        shape.len(),
        key.raw()
    ))
}

/// Standard Gumbel noise.
///
/// # Errors
/// When `dtype` is not a floating-point one.
#[track_caller]
pub fn gumbel(shape: &[i32], dtype: Dtype, key: &Array) -> Result<Array> {
    super::check_shape(shape)?;
    op!(mlx_random_gumbel(
        shape.as_ptr(),
        shape.len(),
        dtype.to_raw(),
        key.raw()
    ))
}

/// One index (uint32) per row, drawn by the softmax of `logits` along `axis`.
///
/// # Errors
/// When there is no such axis.
#[track_caller]
pub fn categorical(logits: &Array, axis: i32, key: &Array) -> Result<Array> {
    op!(mlx_random_categorical(logits.raw(), axis, key.raw()))
}

/// As [`categorical`], `count` indices per row: `axis` goes away, a last dimension of `count`
/// is added.
///
/// # Errors
/// When there is no such axis.
#[track_caller]
pub fn categorical_samples(logits: &Array, axis: i32, count: i32, key: &Array) -> Result<Array> {
    super::check_shape(&[count])?;
    op!(mlx_random_categorical_num_samples(
        logits.raw(),
        axis,
        count,
        key.raw()
    ))
}
