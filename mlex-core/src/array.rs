//! The array: a reference to a node of MLX's graph, evaluated or not.

use std::fmt;

use crate::dtype::Element;
use crate::ffi::{self, ArrayHandle, StringHandle, VectorHandle, call, op};
use crate::{Dtype, Error, ErrorKind, Result};

/// An n-dimensional array of MLX.
///
/// A clone is one more reference to the same data. Operations build a lazy graph; [`eval`],
/// and the accessors of the data, compute it.
///
/// An array may be sent to another thread: every call into MLX is made under one lock. It is
/// not `Sync`; clone it for a second thread.
///
/// Until it is computed, an array belongs to the streams, and so to the thread, that its graph
/// was built on: [`eval`] or [`async_eval`] it before it is sent. From MLX 0.32 on, computing
/// it on another thread is an error ("There is no Stream(cpu, 1) in current thread").
pub struct Array {
    handle: ArrayHandle,
}

impl Array {
    pub(crate) fn from_handle(handle: ArrayHandle) -> Self {
        Self { handle }
    }

    pub(crate) fn raw(&self) -> mlex_sys::mlx_array {
        self.handle.raw()
    }

    /// An array of `shape` with a copy of `data` in row-major order.
    ///
    /// # Errors
    /// When the number of elements is not the one of the shape.
    pub fn from_slice<T: Element>(data: &[T], shape: &[i32]) -> Result<Self> {
        check_length(shape, data.len(), "elements", 1)?;
        ffi::array_from_slice(data, shape)
    }

    /// An array of `shape` and `dtype` with a copy of `bytes`: elements in row-major order,
    /// little-endian as files have them (and every machine that MLX runs on).
    ///
    /// # Errors
    /// When the number of bytes is not the one of the shape and dtype.
    pub fn from_bytes(bytes: &[u8], shape: &[i32], dtype: Dtype) -> Result<Self> {
        check_length(shape, bytes.len(), "bytes", dtype.size_in_bytes())?;
        ffi::array_from_bytes(bytes, shape, dtype)
    }

    /// A scalar.
    ///
    /// # Errors
    /// When MLX is out of memory.
    pub fn scalar<T: Element>(value: T) -> Result<Self> {
        Self::from_slice(&[value], &[])
    }

    /// The shape, outermost dimension first.
    pub fn shape(&self) -> &[i32] {
        ffi::shape_of(self)
    }

    /// The number of dimensions.
    pub fn ndim(&self) -> usize {
        self.shape().len()
    }

    /// The size of dimension `axis`; a negative one counts from the end.
    ///
    /// # Errors
    /// When there is no such dimension.
    pub fn dim(&self, axis: i32) -> Result<i32> {
        let shape = self.shape();
        let index = if axis < 0 {
            axis + shape.len() as i32
        } else {
            axis
        };
        usize::try_from(index)
            .ok()
            .and_then(|index| shape.get(index))
            .copied()
            .ok_or_else(|| {
                Error::new(ErrorKind::Argument {
                    argument: "axis",
                    expected: "one of the array's dimensions",
                    found: format!("{axis} for shape {shape:?}"),
                })
            })
    }

    /// The number of elements.
    pub fn size(&self) -> usize {
        self.shape().iter().map(|&dim| dim as usize).product()
    }

    /// The bytes of the elements, without gaps.
    pub fn nbytes(&self) -> usize {
        self.size() * self.dtype().size_in_bytes()
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        ffi::dtype_of(self)
    }

    /// Computes it, and waits for it.
    ///
    /// # Errors
    /// What the operations that lead to it met.
    #[track_caller]
    pub fn eval(&self) -> Result<()> {
        call!(mlx_array_eval(self.raw()))?;
        ffi::check_failures()
    }

    /// The elements in row-major order, computed now.
    ///
    /// # Errors
    /// When `T` is not the element type, when the elements do not lie in row-major order
    /// without gaps (see [`contiguous`](Self::contiguous)), or when the evaluation fails.
    #[track_caller]
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        ffi::slice_of(self)
    }

    /// The bytes of the elements in row-major order, computed now.
    ///
    /// # Errors
    /// As [`as_slice`](Self::as_slice).
    #[track_caller]
    pub fn as_bytes(&self) -> Result<&[u8]> {
        ffi::bytes_of(self)
    }

    /// A copy of the elements in row-major order, however they lie.
    ///
    /// # Errors
    /// When `T` is not the element type or the evaluation fails.
    #[track_caller]
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        Ok(self.contiguous()?.as_slice()?.to_vec())
    }

    /// The only element of an array with one.
    ///
    /// # Errors
    /// When there are more or fewer, or as [`as_slice`](Self::as_slice).
    #[track_caller]
    pub fn item<T: Element>(&self) -> Result<T> {
        match self.as_slice()? {
            [value] => Ok(*value),
            values => Err(Error::new(ErrorKind::Length {
                what: "elements of the array",
                expected: 1,
                found: values.len() as u64,
            })),
        }
    }

    /// The same elements in row-major order without gaps.
    ///
    /// # Errors
    /// When MLX refuses.
    #[track_caller]
    pub fn contiguous(&self) -> Result<Self> {
        op!(mlx_contiguous(self.raw(), false))
    }
}

impl Clone for Array {
    fn clone(&self) -> Self {
        Self {
            handle: self.handle.clone(),
        }
    }
}

impl fmt::Debug for Array {
    /// Shape and dtype; the elements may not be computed yet.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Array({:?}, {})", self.shape(), self.dtype())
    }
}

impl fmt::Display for Array {
    /// The elements, abbreviated, as MLX prints them; evaluates the array.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = StringHandle::empty();
        call!(mlx_array_tostring(text.as_mut_ptr(), self.raw())).map_err(|_| fmt::Error)?;
        f.write_str(&text.to_string_lossy())
    }
}

/// Checks that `found` things are what `shape` asks for with `unit` each.
fn check_length(shape: &[i32], found: usize, what: &'static str, unit: usize) -> Result<()> {
    let expected = shape.iter().try_fold(unit, |count, &dim| {
        usize::try_from(dim)
            .ok()
            .and_then(|dim| count.checked_mul(dim))
    });
    match expected {
        Some(expected) if expected == found => Ok(()),
        Some(expected) => Err(Error::new(ErrorKind::Length {
            what,
            expected: expected as u64,
            found: found as u64,
        })),
        None => Err(Error::new(ErrorKind::Argument {
            argument: "shape",
            expected: "dimensions whose product can be counted",
            found: format!("{shape:?}"),
        })),
    }
}

/// Computes several arrays together, and waits for them.
///
/// # Errors
/// What the operations that lead to them met.
#[track_caller]
pub fn eval<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Result<()> {
    let vector = VectorHandle::from_arrays(arrays);
    call!(mlx_eval(vector.raw()))?;
    ffi::check_failures()
}

/// Starts computing several arrays and returns at once.
///
/// # Errors
/// What could be seen before the computation started.
#[track_caller]
pub fn async_eval<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Result<()> {
    let vector = VectorHandle::from_arrays(arrays);
    call!(mlx_async_eval(vector.raw()))
}
