//! Slices, gathers and scatters.
//!
//! An index out of bounds is brought to the nearest one within: see [`super::indices`].

use super::indices::axis_indices;
use crate::ffi::{VectorHandle, op};
use crate::{Array, Dtype, Error, ErrorKind, Result};

impl Array {
    /// The elements from `start` to `stop` (not included) of each dimension, by `strides`
    /// where they are given. Negative positions count from the end, a negative stride goes
    /// backwards.
    ///
    /// # Errors
    /// When a list has not one entry per dimension or a stride is 0.
    #[track_caller]
    pub fn slice(&self, start: &[i32], stop: &[i32], strides: Option<&[i32]>) -> Result<Array> {
        let strides = self.strides(strides, start.len())?;
        op!(mlx_slice(
            self.raw(),
            start.as_ptr(),
            start.len(),
            stop.as_ptr(),
            stop.len(),
            strides.as_ptr(),
            strides.len(),
        ))
    }

    /// The elements from `start` to `stop` (not included) of one dimension.
    ///
    /// # Errors
    /// When there is no such axis.
    #[track_caller]
    pub fn slice_axis(&self, axis: i32, start: i32, stop: i32) -> Result<Array> {
        let (starts, stops) = self.bounds(axis, start, stop)?;
        self.slice(&starts, &stops, None)
    }

    /// `self` with the part from `start` to `stop` replaced by `update`, which broadcasts to
    /// it. Done in place when nothing else refers to `self`.
    ///
    /// # Errors
    /// When a list has not one entry per dimension or the update does not fit.
    #[track_caller]
    pub fn slice_update(&self, update: &Array, start: &[i32], stop: &[i32]) -> Result<Array> {
        self.slice_update_strided(update, start, stop, None)
    }

    /// As [`slice_update`](Self::slice_update), for the part that [`slice`](Self::slice) takes
    /// with these strides.
    ///
    /// # Errors
    /// When a list has not one entry per dimension, a stride is 0 or the update does not fit.
    #[track_caller]
    pub fn slice_update_strided(
        &self,
        update: &Array,
        start: &[i32],
        stop: &[i32],
        strides: Option<&[i32]>,
    ) -> Result<Array> {
        let strides = self.strides(strides, start.len())?;
        op!(mlx_slice_update(
            self.raw(),
            update.raw(),
            start.as_ptr(),
            start.len(),
            stop.as_ptr(),
            stop.len(),
            strides.as_ptr(),
            strides.len(),
        ))
    }

    /// The strides of a slice, by default 1 in each of `count` dimensions. MLX divides by them
    /// and adds them to positions, so one that steps over the whole dimension is cut to that.
    fn strides(&self, strides: Option<&[i32]>, count: usize) -> Result<Vec<i32>> {
        let Some(strides) = strides else {
            return Ok(vec![1; count]);
        };
        if strides.contains(&0) {
            return Err(Error::new(ErrorKind::Argument {
                argument: "strides",
                expected: "no 0",
                found: format!("{strides:?}"),
            }));
        }
        let dims = self.shape().iter().map(|&dim| dim.max(1));
        let dims = dims.chain(std::iter::repeat(1));
        let cut = |(&stride, dim): (&i32, i32)| stride.clamp(-dim, dim);
        Ok(strides.iter().zip(dims).map(cut).collect())
    }

    /// As [`slice_update`](Self::slice_update), over one dimension.
    ///
    /// # Errors
    /// When there is no such axis or the update does not fit.
    #[track_caller]
    pub fn slice_update_axis(
        &self,
        update: &Array,
        axis: i32,
        start: i32,
        stop: i32,
    ) -> Result<Array> {
        let (starts, stops) = self.bounds(axis, start, stop)?;
        self.slice_update(update, &starts, &stops)
    }

    /// Bounds that take everything but `start..stop` of `axis`.
    fn bounds(&self, axis: i32, start: i32, stop: i32) -> Result<(Vec<i32>, Vec<i32>)> {
        self.dim(axis)?;
        let mut stops = self.shape().to_vec();
        let mut starts = vec![0; stops.len()];
        let index = if axis < 0 {
            axis + stops.len() as i32
        } else {
            axis
        } as usize;
        starts[index] = start;
        stops[index] = stop;
        Ok((starts, stops))
    }

    /// The entries at `indices` along `axis`: `[.., *indices.shape, ..]`. Negative indices
    /// count from the end; those out of bounds take the nearest entry.
    ///
    /// # Errors
    /// When there is no such axis or the indices are not integers.
    #[track_caller]
    pub fn take(&self, indices: &Array, axis: i32) -> Result<Array> {
        let indices = axis_indices(indices, self.dim(axis)?, 1)?;
        op!(mlx_take_axis(self.raw(), indices.raw(), axis))
    }

    /// The elements at `indices` of the flattened array, in the shape of the indices.
    ///
    /// # Errors
    /// When the indices are not integers.
    #[track_caller]
    pub fn take_flat(&self, indices: &Array) -> Result<Array> {
        self.reshape(&[-1])?.take(indices, 0)
    }

    /// For each place of `indices`, the element of `self` at that index along `axis`.
    ///
    /// # Errors
    /// When the other dimensions do not broadcast or the indices are not integers.
    #[track_caller]
    pub fn take_along_axis(&self, indices: &Array, axis: i32) -> Result<Array> {
        let indices = axis_indices(indices, self.dim(axis)?, 1)?;
        op!(mlx_take_along_axis(self.raw(), indices.raw(), axis))
    }

    /// `self` with `values` put at `indices` along `axis`.
    ///
    /// # Errors
    /// When the other dimensions do not broadcast.
    #[track_caller]
    pub fn put_along_axis(&self, indices: &Array, values: &Array, axis: i32) -> Result<Array> {
        let indices = axis_indices(indices, self.dim(axis)?, 1)?;
        op!(mlx_put_along_axis(
            self.raw(),
            indices.raw(),
            values.raw(),
            axis
        ))
    }

    /// `self` with `values` added at `indices` along `axis`; what is named twice is added twice.
    ///
    /// # Errors
    /// When the other dimensions do not broadcast.
    #[track_caller]
    pub fn scatter_add_axis(&self, indices: &Array, values: &Array, axis: i32) -> Result<Array> {
        let indices = axis_indices(indices, self.dim(axis)?, 1)?;
        op!(mlx_scatter_add_axis(
            self.raw(),
            indices.raw(),
            values.raw(),
            axis
        ))
    }

    /// Slices of `slice_sizes` whose place along each of `axes` is in `indices` (one array
    /// per axis, which broadcast): shape `[*indices.shape, *slice_sizes]`.
    ///
    /// # Errors
    /// When the lists do not fit the dimensions.
    #[track_caller]
    pub fn gather<'a>(
        &self,
        indices: impl IntoIterator<Item = &'a Array>,
        axes: &[i32],
        slice_sizes: &[i32],
    ) -> Result<Array> {
        let windows = axes.iter().map(|&axis| at(slice_sizes, axis));
        let indices = self.bounded(indices, axes, windows)?;
        op!(mlx_gather(
            self.raw(),
            indices.raw(),
            axes.as_ptr(),
            axes.len(),
            slice_sizes.as_ptr(),
            slice_sizes.len(),
        ))
    }

    /// Each of `indices` in bounds of its axis, where it picks as many neighbours as
    /// `windows` says. Axes that are none are left to MLX's own check.
    #[track_caller]
    fn bounded<'a>(
        &self,
        indices: impl IntoIterator<Item = &'a Array>,
        axes: &[i32],
        windows: impl Iterator<Item = i32>,
    ) -> Result<VectorHandle> {
        let windows = axes.iter().zip(windows).map(Some);
        let mut windows = windows.chain(std::iter::repeat(None));
        let mut bounded = Vec::new();
        for indices in indices {
            bounded.push(match windows.next().flatten() {
                Some((&axis, window)) if axis >= 0 => {
                    axis_indices(indices, at(self.shape(), axis), window)?
                }
                _ => indices.clone(),
            });
        }
        Ok(VectorHandle::from_arrays(&bounded))
    }

    /// `self` with the places where `mask` is true replaced by the rows of `source` in order.
    /// The mask (bool) has the first dimensions of `self`, a row has the others. Where there
    /// are too few rows the last one stands in.
    ///
    /// # Errors
    /// When the shapes do not fit, the mask is not bool, or there is no row at all.
    #[track_caller]
    pub fn masked_scatter(&self, mask: &Array, source: &Array) -> Result<Array> {
        // MLX's own operation counts the rows on a worker thread, where an error is the end of
        // the process.
        if mask.dtype() != Dtype::Bool {
            return Err(Error::new(ErrorKind::Dtype {
                expected: Dtype::Bool,
                found: mask.dtype(),
            }));
        }
        let row = self.shape().strip_prefix(mask.shape());
        let Some(row) = row.filter(|&row| source.shape().get(1..) == Some(row)) else {
            let (to, from) = (self.shape(), source.shape());
            return Err(Error::new(ErrorKind::Argument {
                argument: "masked_scatter",
                expected: "a mask of the first dimensions and rows of the others",
                found: format!("mask {:?} and rows {from:?} for {to:?}", mask.shape()),
            }));
        };
        let order = mask.reshape(&[-1])?.as_type(Dtype::Int32)?;
        let order = order.cumsum(0, false, true)?.subtract(1)?.maximum(0)?;
        let rows = source.as_type(self.dtype())?.take(&order, 0)?;
        let ones = vec![1; row.len()];
        let mask = mask.reshape(&[mask.shape(), &ones].concat())?;
        mask.where_(&rows.reshape(self.shape())?, self)
    }

    /// The entry at `index` along `axis`, which goes away.
    ///
    /// # Errors
    /// When there is no such axis or entry.
    #[track_caller]
    pub fn at(&self, axis: i32, index: i32) -> Result<Array> {
        let dim = self.dim(axis)?;
        let place = if index < 0 { index + dim } else { index };
        if !(0..dim).contains(&place) {
            return Err(Error::new(ErrorKind::Argument {
                argument: "index",
                expected: "one within the dimension",
                found: format!("{index} of {dim}"),
            }));
        }
        self.slice_axis(axis, place, place + 1)?.squeeze(axis)
    }
}

/// The entry of a list of sizes, 0 where there is none.
fn at(sizes: &[i32], axis: i32) -> i32 {
    let size = usize::try_from(axis).ok().and_then(|axis| sizes.get(axis));
    size.copied().unwrap_or(0)
}

macro_rules! scatter {
    ($($(#[$doc:meta])* $name:ident => $function:ident;)*) => {
        impl Array {
            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// When the shapes do not fit or the indices are not integers.
                #[track_caller]
                pub fn $name<'a>(
                    &self,
                    indices: impl IntoIterator<Item = &'a Array>,
                    updates: &Array,
                    axes: &[i32],
                ) -> Result<Array> {
                    // The updates' last dimensions are the sizes of what is written.
                    let before = updates.ndim().saturating_sub(self.ndim());
                    let sizes = &updates.shape()[before..];
                    let windows = axes.iter().map(|&axis| at(sizes, axis));
                    let indices = self.bounded(indices, axes, windows)?;
                    op!($function(
                        self.raw(),
                        indices.raw(),
                        updates.raw(),
                        axes.as_ptr(),
                        axes.len()
                    ))
                }
            )*
        }
    };
}

scatter! {
    /// `self` with `updates` (`[*indices.shape, *slice]`) put at the places along `axes`
    /// that `indices` name; of several updates of one place any one wins.
    scatter => mlx_scatter;
    /// As [`scatter`](Self::scatter), adding to what is there.
    scatter_add => mlx_scatter_add;
    /// As [`scatter`](Self::scatter), multiplying what is there.
    scatter_prod => mlx_scatter_prod;
    /// As [`scatter`](Self::scatter), where the update is larger.
    scatter_max => mlx_scatter_max;
    /// As [`scatter`](Self::scatter), where the update is smaller.
    scatter_min => mlx_scatter_min;
}
