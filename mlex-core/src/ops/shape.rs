//! Shapes: reshape, transpose, join, split, pad.

use std::ffi::CStr;

use crate::ffi::{VectorHandle, op, op_vec};
use crate::{Array, Error, ErrorKind, Result};

impl Array {
    /// The elements with another shape; one dimension may be -1, which takes what is left.
    ///
    /// # Errors
    /// When the number of elements differs.
    #[track_caller]
    pub fn reshape(&self, shape: &[i32]) -> Result<Array> {
        op!(mlx_reshape(self.raw(), shape.as_ptr(), shape.len()))
    }

    /// The dimensions in the order `axes`.
    ///
    /// # Errors
    /// When `axes` is not a permutation.
    #[track_caller]
    pub fn transpose(&self, axes: &[i32]) -> Result<Array> {
        op!(mlx_transpose_axes(self.raw(), axes.as_ptr(), axes.len()))
    }

    /// The dimensions in reverse order.
    ///
    /// # Errors
    /// When MLX refuses.
    #[track_caller]
    pub fn t(&self) -> Result<Array> {
        op!(mlx_transpose(self.raw()))
    }

    /// Two dimensions exchanged.
    ///
    /// # Errors
    /// When there is no such axis.
    #[track_caller]
    pub fn swap_axes(&self, first: i32, second: i32) -> Result<Array> {
        op!(mlx_swapaxes(self.raw(), first, second))
    }

    /// One dimension moved to another place.
    ///
    /// # Errors
    /// When there is no such axis.
    #[track_caller]
    pub fn move_axis(&self, source: i32, destination: i32) -> Result<Array> {
        op!(mlx_moveaxis(self.raw(), source, destination))
    }

    /// A dimension of size 1 put in at `axis`.
    ///
    /// # Errors
    /// When `axis` is out of range.
    #[track_caller]
    pub fn expand_dims(&self, axis: i32) -> Result<Array> {
        op!(mlx_expand_dims(self.raw(), axis))
    }

    /// A dimension of size 1 taken out.
    ///
    /// # Errors
    /// When there is no such axis or it is not of size 1.
    #[track_caller]
    pub fn squeeze(&self, axis: i32) -> Result<Array> {
        op!(mlx_squeeze_axis(self.raw(), axis))
    }

    /// The dimensions from `start` to `end` (included) as one.
    ///
    /// # Errors
    /// When there is no such axis.
    #[track_caller]
    pub fn flatten(&self, start: i32, end: i32) -> Result<Array> {
        op!(mlx_flatten(self.raw(), start, end))
    }

    /// One dimension as several, of which one may be -1.
    ///
    /// # Errors
    /// When the sizes do not multiply to the dimension.
    #[track_caller]
    pub fn unflatten(&self, axis: i32, shape: &[i32]) -> Result<Array> {
        // MLX divides by what is given to find the one that is left.
        if shape.contains(&-1) && shape.contains(&0) {
            return Err(Error::new(ErrorKind::Argument {
                argument: "shape",
                expected: "no 0 beside -1",
                found: format!("{shape:?}"),
            }));
        }
        op!(mlx_unflatten(self.raw(), axis, shape.as_ptr(), shape.len()))
    }

    /// The elements where `axis1` and `axis2` advance together, `axis2` by `offset` ahead: the
    /// other dimensions, then the diagonal.
    ///
    /// # Errors
    /// When there are fewer than two dimensions or no such axis.
    #[track_caller]
    pub fn diagonal(&self, offset: i32, axis1: i32, axis2: i32) -> Result<Array> {
        op!(mlx_diagonal(self.raw(), offset, axis1, axis2))
    }

    /// A matrix with the vector `self` on diagonal `k` and zeros elsewhere, or of a matrix its
    /// diagonal `k`.
    ///
    /// # Errors
    /// When there are neither one nor two dimensions.
    #[track_caller]
    pub fn diag(&self, k: i32) -> Result<Array> {
        op!(mlx_diag(self.raw(), k))
    }

    /// A view of the elements (in row-major order) that takes `strides` of them per step in
    /// each dimension of `shape`, from `offset` on.
    ///
    /// # Errors
    /// When it would leave the array, or the lists have not the same length.
    #[track_caller]
    pub fn as_strided(&self, shape: &[i32], strides: &[i64], offset: usize) -> Result<Array> {
        // MLX checks nothing here.
        if !within(shape, strides, offset, self.size()) {
            let size = self.size();
            return Err(Error::new(ErrorKind::Argument {
                argument: "as_strided",
                expected: "a shape, strides and an offset that stay within the array",
                found: format!("{shape:?}, {strides:?} and {offset} for {size} elements"),
            }));
        }
        op!(mlx_as_strided(
            self.raw(),
            shape.as_ptr(),
            shape.len(),
            strides.as_ptr(),
            strides.len(),
            offset,
        ))
    }

    /// Repeated along dimensions of size 1 and new leading ones, without a copy.
    ///
    /// # Errors
    /// When the shape does not broadcast to it.
    #[track_caller]
    pub fn broadcast_to(&self, shape: &[i32]) -> Result<Array> {
        super::check_shape(shape)?;
        op!(mlx_broadcast_to(self.raw(), shape.as_ptr(), shape.len()))
    }

    /// Each element along `axis`, `count` times in a row.
    ///
    /// # Errors
    /// When there is no such axis or the count is negative.
    #[track_caller]
    pub fn repeat(&self, count: i32, axis: i32) -> Result<Array> {
        op!(mlx_repeat_axis(self.raw(), count, axis))
    }

    /// The whole, repeated `counts` times along each dimension.
    ///
    /// # Errors
    /// When a count is negative.
    #[track_caller]
    pub fn tile(&self, counts: &[i32]) -> Result<Array> {
        super::check_shape(counts)?;
        op!(mlx_tile(self.raw(), counts.as_ptr(), counts.len()))
    }

    /// Shifted along `axis`; what leaves at one end comes in at the other.
    ///
    /// # Errors
    /// When there is no such axis.
    #[track_caller]
    pub fn roll(&self, shift: i32, axis: i32) -> Result<Array> {
        op!(mlx_roll_axis(self.raw(), &raw const shift, 1, axis))
    }

    /// `value` put `(before, after)` along each of `axes`.
    ///
    /// # Errors
    /// When there is no such axis or a size is negative.
    #[track_caller]
    pub fn pad(&self, axes: &[i32], sizes: &[(i32, i32)], value: f32) -> Result<Array> {
        let value = super::scalar_like(f64::from(value), self.dtype())?;
        self.pad_by(axes, sizes, &value, c"constant")
    }

    /// As [`pad`](Self::pad), with the elements at the edges.
    ///
    /// # Errors
    /// When there is no such axis or a size is negative.
    #[track_caller]
    pub fn pad_edge(&self, axes: &[i32], sizes: &[(i32, i32)]) -> Result<Array> {
        let value = super::scalar_like(0.0, self.dtype())?;
        self.pad_by(axes, sizes, &value, c"edge")
    }

    #[track_caller]
    fn pad_by(
        &self,
        axes: &[i32],
        sizes: &[(i32, i32)],
        value: &Array,
        mode: &CStr,
    ) -> Result<Array> {
        // MLX writes to the dimension without a look, and adds up in 32 bits.
        for (&axis, &(low, high)) in axes.iter().zip(sizes) {
            let padded = [self.dim(axis)?, low, high].map(i64::from);
            if padded.iter().sum::<i64>() > i64::from(i32::MAX) {
                return Err(Error::new(ErrorKind::Argument {
                    argument: "sizes",
                    expected: "a dimension that an i32 can count",
                    found: format!("{low} and {high} beside {}", padded[0]),
                }));
            }
        }
        let (low, high): (Vec<i32>, Vec<i32>) = sizes.iter().copied().unzip();
        op!(mlx_pad(
            self.raw(),
            axes.as_ptr(),
            axes.len(),
            low.as_ptr(),
            low.len(),
            high.as_ptr(),
            high.len(),
            value.raw(),
            mode.as_ptr(),
        ))
    }

    /// `parts` equal pieces along `axis`.
    ///
    /// # Errors
    /// When the dimension does not divide.
    #[track_caller]
    pub fn split(&self, parts: i32, axis: i32) -> Result<Vec<Array>> {
        op_vec!(mlx_split(self.raw(), parts, axis))
    }

    /// Pieces along `axis` that end before each of `indices`, and the rest.
    ///
    /// # Errors
    /// When there is no such axis.
    #[track_caller]
    pub fn split_at(&self, indices: &[i32], axis: i32) -> Result<Vec<Array>> {
        op_vec!(mlx_split_sections(
            self.raw(),
            indices.as_ptr(),
            indices.len(),
            axis
        ))
    }

    /// Several arrays joined along `axis`.
    ///
    /// # Errors
    /// When the other dimensions differ, or there is no array.
    #[track_caller]
    pub fn concatenate<'a>(
        arrays: impl IntoIterator<Item = &'a Array>,
        axis: i32,
    ) -> Result<Array> {
        let vector = VectorHandle::from_arrays(arrays);
        op!(mlx_concatenate_axis(vector.raw(), axis))
    }

    /// Several arrays of one shape joined along a new dimension.
    ///
    /// # Errors
    /// When the shapes differ, or there is no array.
    #[track_caller]
    pub fn stack<'a>(arrays: impl IntoIterator<Item = &'a Array>, axis: i32) -> Result<Array> {
        let vector = VectorHandle::from_arrays(arrays);
        op!(mlx_stack_axis(vector.raw(), axis))
    }
}

/// Whether a strided view of `size` elements stays within them.
fn within(shape: &[i32], strides: &[i64], offset: usize, size: usize) -> bool {
    if shape.len() != strides.len() || shape.iter().any(|&dim| dim < 0) {
        return false;
    }
    let Ok(offset) = i128::try_from(offset) else {
        return false;
    };
    if shape.contains(&0) {
        return offset <= size as i128;
    }
    let (mut low, mut high) = (offset, offset);
    for (&dim, &stride) in shape.iter().zip(strides) {
        let span = i128::from(dim - 1) * i128::from(stride);
        low += span.min(0);
        high += span.max(0);
    }
    low >= 0 && high < size as i128
}
