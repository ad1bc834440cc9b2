//! Reductions, cumulative operations, softmax, sorting.

use super::unless_empty;
use crate::ffi::op;
use crate::{Array, Result};

macro_rules! reduce {
    ($($(#[$doc:meta])* $name:ident => $function:ident;)*) => {
        impl Array {
            $(
                $(#[$doc])*
                ///
                /// Over `axes`, which `keep_dims` keeps with size 1.
                ///
                /// # Errors
                /// When there is no such axis.
                #[track_caller]
                pub fn $name(&self, axes: &[i32], keep_dims: bool) -> Result<Array> {
                    op!($function(self.raw(), axes.as_ptr(), axes.len(), keep_dims))
                }
            )*
        }
    };
}

macro_rules! cumulative {
    ($($(#[$doc:meta])* $name:ident => $function:ident;)*) => {
        impl Array {
            $(
                $(#[$doc])*
                ///
                /// From the end when `reverse`; without the element itself unless `inclusive`.
                ///
                /// # Errors
                /// When there is no such axis.
                #[track_caller]
                pub fn $name(&self, axis: i32, reverse: bool, inclusive: bool) -> Result<Array> {
                    // MLX divides by the stride, which is 0 for some dimensions of size 1:
                    // there the first (last) of two elements is the result.
                    if self.dim(axis)? == 1 {
                        let twice = Array::concatenate([self, self], axis)?;
                        let start = i32::from(reverse);
                        return twice
                            .$name(axis, reverse, inclusive)?
                            .slice_axis(axis, start, start + 1);
                    }
                    unless_empty(op!($function(self.raw(), axis, reverse, inclusive)))
                }
            )*
        }
    };
}

reduce! {
    /// Whether all elements are non-zero.
    all => mlx_all_axes;
    /// Whether any element is non-zero.
    any => mlx_any_axes;
    /// The sum.
    sum => mlx_sum_axes;
    /// The product.
    prod => mlx_prod_axes;
    /// The mean.
    mean => mlx_mean_axes;
    /// The largest element.
    max => mlx_max_axes;
    /// The smallest element.
    min => mlx_min_axes;
    /// `log(sum(exp(x)))` without overflow.
    logsumexp => mlx_logsumexp_axes;
}

cumulative! {
    /// The sum of the elements so far along `axis`.
    cumsum => mlx_cumsum;
    /// The product of the elements so far along `axis`.
    cumprod => mlx_cumprod;
    /// The maximum of the elements so far along `axis`.
    cummax => mlx_cummax;
    /// The minimum of the elements so far along `axis`.
    cummin => mlx_cummin;
    /// `log(sum(exp(x)))` of the elements so far along `axis`, without overflow.
    logcumsumexp => mlx_logcumsumexp;
}

impl Array {
    /// The sum of all elements, a scalar.
    ///
    /// # Errors
    /// When MLX refuses the dtype.
    #[track_caller]
    pub fn sum_all(&self) -> Result<Array> {
        op!(mlx_sum(self.raw(), false))
    }

    /// The largest of all elements, a scalar.
    ///
    /// # Errors
    /// When the array is empty.
    #[track_caller]
    pub fn max_all(&self) -> Result<Array> {
        op!(mlx_max(self.raw(), false))
    }

    /// The smallest of all elements, a scalar.
    ///
    /// # Errors
    /// When the array is empty.
    #[track_caller]
    pub fn min_all(&self) -> Result<Array> {
        op!(mlx_min(self.raw(), false))
    }

    /// The variance over `axes`, with `ddof` taken off the count.
    ///
    /// # Errors
    /// When there is no such axis.
    #[track_caller]
    pub fn var(&self, axes: &[i32], keep_dims: bool, ddof: i32) -> Result<Array> {
        op!(mlx_var_axes(
            self.raw(),
            axes.as_ptr(),
            axes.len(),
            keep_dims,
            ddof
        ))
    }

    /// The standard deviation over `axes`, with `ddof` taken off the count.
    ///
    /// # Errors
    /// When there is no such axis.
    #[track_caller]
    pub fn std(&self, axes: &[i32], keep_dims: bool, ddof: i32) -> Result<Array> {
        op!(mlx_std_axes(
            self.raw(),
            axes.as_ptr(),
            axes.len(),
            keep_dims,
            ddof
        ))
    }

    /// `exp(x) / sum(exp(x))` over `axes`; `precise` computes it in f32.
    ///
    /// # Errors
    /// When there is no such axis.
    #[track_caller]
    pub fn softmax(&self, axes: &[i32], precise: bool) -> Result<Array> {
        op!(mlx_softmax_axes(
            self.raw(),
            axes.as_ptr(),
            axes.len(),
            precise
        ))
    }

    /// The `k` largest elements along `axis`, in no certain order.
    ///
    /// # Errors
    /// When there is no such axis or fewer than `k` elements.
    #[track_caller]
    pub fn topk(&self, k: i32, axis: i32) -> Result<Array> {
        op!(mlx_topk_axis(self.raw(), k, axis))
    }

    /// The index (uint32) of the largest element along `axis`; the first of several.
    ///
    /// # Errors
    /// When there is no such axis.
    #[track_caller]
    pub fn argmax(&self, axis: i32, keep_dims: bool) -> Result<Array> {
        op!(mlx_argmax_axis(self.raw(), axis, keep_dims))
    }

    /// The index (uint32) of the smallest element along `axis`; the first of several.
    ///
    /// # Errors
    /// When there is no such axis.
    #[track_caller]
    pub fn argmin(&self, axis: i32, keep_dims: bool) -> Result<Array> {
        op!(mlx_argmin_axis(self.raw(), axis, keep_dims))
    }

    /// The elements in ascending order along `axis`.
    ///
    /// # Errors
    /// When there is no such axis.
    #[track_caller]
    pub fn sort(&self, axis: i32) -> Result<Array> {
        unless_empty(op!(mlx_sort_axis(self.raw(), axis)))
    }

    /// The indices (uint32) that sort along `axis`, ascending.
    ///
    /// # Errors
    /// When there is no such axis.
    #[track_caller]
    pub fn argsort(&self, axis: i32) -> Result<Array> {
        unless_empty(op!(mlx_argsort_axis(self.raw(), axis)))
    }

    /// The elements along `axis` with element `kth` where sorting would put it: no larger one before it, no smaller one after it.
    ///
    /// # Errors
    /// When there is no such axis or element.
    #[track_caller]
    pub fn partition(&self, kth: i32, axis: i32) -> Result<Array> {
        op!(mlx_partition_axis(self.raw(), kth, axis))
    }

    /// The indices (uint32) that [`partition`](Self::partition) along `axis`.
    ///
    /// # Errors
    /// When there is no such axis or element.
    #[track_caller]
    pub fn argpartition(&self, kth: i32, axis: i32) -> Result<Array> {
        op!(mlx_argpartition_axis(self.raw(), kth, axis))
    }
}
