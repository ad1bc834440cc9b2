//! Typed data into arrays and out of them.

use std::slice;

use mlex_sys::mlx_array;

use super::{ArrayHandle, lock};
use crate::dtype::Element;
use crate::{Array, Dtype, Error, ErrorKind, Result};

/// An array of `shape` with a copy of `data`, whose length has been checked against it.
pub(crate) fn array_from_slice<T: Element>(data: &[T], shape: &[i32]) -> Result<Array> {
    debug_assert_eq!(
        data.len(),
        shape.iter().map(|&dim| dim as usize).product::<usize>()
    );
    new_data(data.as_ptr().cast(), shape, T::DTYPE)
}

/// An array of `shape` and `dtype` with a copy of `bytes` (native byte order), whose
/// length has been checked against it.
pub(crate) fn array_from_bytes(bytes: &[u8], shape: &[i32], dtype: Dtype) -> Result<Array> {
    if dtype == Dtype::Bool && bytes.iter().any(|&byte| byte > 1) {
        return Err(Error::format("bool data", "bytes 0 and 1", "another byte"));
    }
    // MLX reads typed elements: bring odd addresses (a file's) to an aligned one first.
    if bytes.as_ptr().align_offset(dtype.size_in_bytes().min(8)) == 0 {
        return new_data(bytes.as_ptr().cast(), shape, dtype);
    }
    let mut aligned = vec![0u64; bytes.len().div_ceil(8)];
    // SAFETY: `aligned` has at least as many bytes as `bytes`; any byte is valid in a u64.
    let view = unsafe { slice::from_raw_parts_mut(aligned.as_mut_ptr().cast::<u8>(), bytes.len()) };
    view.copy_from_slice(bytes);
    new_data(aligned.as_ptr().cast(), shape, dtype)
}

fn new_data(data: *const std::ffi::c_void, shape: &[i32], dtype: Dtype) -> Result<Array> {
    let _guard = lock();
    // SAFETY: the callers checked that `data` holds the elements of `shape`; MLX copies them.
    let raw = unsafe {
        mlex_sys::mlx_array_new_data(data, shape.as_ptr(), shape.len() as i32, dtype.to_raw())
    };
    if raw.ctx.is_null() {
        return Err(super::failure("mlx_array_new_data"));
    }
    Ok(Array::from_handle(ArrayHandle::from_raw(raw)))
}

/// The elements of an evaluated array in row-major order.
pub(crate) fn slice_of<T: Element>(array: &Array) -> Result<&[T]> {
    if array.dtype() != T::DTYPE {
        return Err(Error::new(ErrorKind::Dtype {
            expected: T::DTYPE,
            found: array.dtype(),
        }));
    }
    let bytes = bytes_of(array)?;
    if bytes.is_empty() {
        // Their place is not MLX's, and may be aligned to nothing.
        return Ok(&[]);
    }
    // SAFETY: the bytes are those of elements of `T` (the dtype was compared), MLX aligns its
    // buffers to 8 bytes at least and offsets are whole elements, and every bit pattern is
    // valid: bools are 0 or 1 wherever an array can come from (see `array_from_bytes`, `view`).
    Ok(unsafe { slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size_of::<T>()) })
}

/// The bytes of an evaluated array in row-major order.
pub(crate) fn bytes_of(array: &Array) -> Result<&[u8]> {
    array.eval()?;
    let _guard = lock();
    let raw = array.raw();
    if array.size() == 0 {
        return Ok(&[]);
    }
    if !is_row_contiguous(raw)? {
        return Err(Error::new(ErrorKind::NotContiguous));
    }
    // SAFETY: the array is evaluated, so it has data. They live as long as the array does:
    // MLX reuses a buffer only when the last reference to it is given away, and `array`,
    // which the result borrows, is one. Nothing writes to a buffer that is referred to.
    unsafe {
        let data = mlex_sys::mlx_array_data_uint8(raw);
        Ok(slice::from_raw_parts(data, array.nbytes()))
    }
}

fn is_row_contiguous(raw: mlx_array) -> Result<bool> {
    let mut contiguous = false;
    super::call!(_mlx_array_is_row_contiguous(&raw mut contiguous, raw))?;
    Ok(contiguous)
}

/// The shape of an array, as MLX holds it.
pub(crate) fn shape_of(array: &Array) -> &[i32] {
    let raw = array.raw();
    // SAFETY: a valid handle. MLX never changes the shape of an existing array, and keeps
    // it as long as the array, which the result borrows. A scalar's pointer may be null.
    unsafe {
        let ndim = mlex_sys::mlx_array_ndim(raw);
        if ndim == 0 {
            return &[];
        }
        slice::from_raw_parts(mlex_sys::mlx_array_shape(raw), ndim)
    }
}

/// The dtype of an array.
pub(crate) fn dtype_of(array: &Array) -> Dtype {
    // SAFETY: a valid handle; MLX never changes the dtype of an existing array.
    Dtype::from_raw(unsafe { mlex_sys::mlx_array_dtype(array.raw()) })
}
