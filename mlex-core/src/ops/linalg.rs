//! Products.

use super::indices::batch_indices;
use super::unless_empty;
use crate::ffi::{VectorHandle, op, optional};
use crate::{Array, Device, Dtype, Result, Stream};

impl Array {
    /// The matrix product over the last two dimensions: `[.., M, K] x [.., K, N]`.
    ///
    /// # Errors
    /// When the shapes do not fit or a dtype is not floating-point.
    #[track_caller]
    pub fn matmul(&self, other: &Array) -> Result<Array> {
        unless_empty(op!(mlx_matmul(self.raw(), other.raw())))
    }

    /// `alpha * (a @ b) + beta * self`.
    ///
    /// # Errors
    /// As [`matmul`](Self::matmul), and when `self` does not broadcast to the product.
    #[track_caller]
    pub fn addmm(&self, a: &Array, b: &Array, alpha: f32, beta: f32) -> Result<Array> {
        unless_empty(op!(mlx_addmm(self.raw(), a.raw(), b.raw(), alpha, beta)))
    }

    /// Products of matrices picked by index out of the batch dimensions of each side (an
    /// index beyond them picks the last).
    /// `sorted` says that the right indices ascend.
    ///
    /// # Errors
    /// When the shapes do not fit.
    #[track_caller]
    pub fn gather_mm(
        &self,
        other: &Array,
        lhs_indices: Option<&Array>,
        rhs_indices: Option<&Array>,
        sorted: bool,
    ) -> Result<Array> {
        let lhs_indices = lhs_indices.map(|x| batch_indices(x, self)).transpose()?;
        let rhs_indices = rhs_indices.map(|x| batch_indices(x, other)).transpose()?;
        let product = |left: &Array, right: &Array| {
            op!(mlx_gather_mm(
                left.raw(),
                right.raw(),
                optional(lhs_indices.as_ref()),
                optional(rhs_indices.as_ref()),
                sorted,
            ))
        };
        let on_cpu = Stream::current()?.device() == Device::Cpu;
        // On CUDA the product with sorted indices goes from row to row by the stride of the rows'
        // own dimension, of one element: a reshape gives that the stride of the shape, where
        // `expand_dims` leaves 1.
        let left = if sorted && !on_cpu && self.size() > 0 {
            self.reshape(&[-1])?.reshape(self.shape())?
        } else {
            self.clone()
        };
        let direct = unless_empty(product(&left, other))?;
        // On the CPU MLX has this for f32 alone, and says so when it computes.
        if direct.dtype() == Dtype::Float32 || !on_cpu {
            return Ok(direct);
        }
        let [left, right] = [self, other].map(|side| side.as_type(Dtype::Float32));
        unless_empty(product(&left?, &right?))?.as_type(direct.dtype())
    }

    /// The product of every element of one vector with every element of the other.
    ///
    /// # Errors
    /// When MLX refuses the dtypes.
    #[track_caller]
    pub fn outer(&self, other: &Array) -> Result<Array> {
        op!(mlx_outer(self.raw(), other.raw()))
    }

    /// The sum of products over the last dimensions: `[.., K]` and `[*other, K]` give
    /// `[.., *other]`.
    ///
    /// # Errors
    /// When the last dimensions differ.
    #[track_caller]
    pub fn inner(&self, other: &Array) -> Result<Array> {
        unless_empty(op!(mlx_inner(self.raw(), other.raw())))
    }

    /// The sum of products over `axes` of `self` paired with `other_axes` of `other`: the
    /// remaining dimensions of `self`, then those of `other`.
    ///
    /// # Errors
    /// When the paired dimensions differ or there is no such axis.
    #[track_caller]
    pub fn tensordot(&self, other: &Array, axes: &[i32], other_axes: &[i32]) -> Result<Array> {
        unless_empty(op!(mlx_tensordot(
            self.raw(),
            other.raw(),
            axes.as_ptr(),
            axes.len(),
            other_axes.as_ptr(),
            other_axes.len(),
        )))
    }

    /// A product in Einstein's notation, such as `"bhld,bhsd->bhls"`.
    ///
    /// # Errors
    /// When the equation is malformed or does not fit the operands.
    #[track_caller]
    pub fn einsum<'a>(
        equation: &str,
        operands: impl IntoIterator<Item = &'a Array>,
    ) -> Result<Array> {
        let equation = crate::ffi::c_string(equation);
        let vector = VectorHandle::from_arrays(operands);
        unless_empty(op!(mlx_einsum(equation.as_ptr(), vector.raw())))
    }
}
