//! Element-wise operations: arithmetic, comparison, logic, functions of one variable.

use super::Operand;
use crate::ffi::{op, op_vec};
use crate::{Array, Dtype, Error, ErrorKind, Result};

macro_rules! unary {
    ($($(#[$doc:meta])* $name:ident => $function:ident;)*) => {
        impl Array {
            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// When MLX refuses the dtype.
                #[track_caller]
                pub fn $name(&self) -> Result<Array> {
                    op!($function(self.raw()))
                }
            )*
        }
    };
}

macro_rules! binary {
    ($($(#[$doc:meta])* $name:ident => $function:ident;)*) => {
        impl Array {
            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// When the shapes do not broadcast or MLX refuses the dtypes.
                #[track_caller]
                pub fn $name<'a>(&self, other: impl Operand<'a>) -> Result<Array> {
                    let other = other.to_operand(self)?;
                    op!($function(self.raw(), other.raw()))
                }
            )*
        }
    };
}

unary! {
    /// The absolute value.
    abs => mlx_abs;
    /// The arc cosine.
    arccos => mlx_arccos;
    /// The inverse hyperbolic cosine.
    arccosh => mlx_arccosh;
    /// The arc sine.
    arcsin => mlx_arcsin;
    /// The inverse hyperbolic sine.
    arcsinh => mlx_arcsinh;
    /// The arc tangent.
    arctan => mlx_arctan;
    /// The inverse hyperbolic tangent.
    arctanh => mlx_arctanh;
    /// The bits of integers, inverted.
    bitwise_invert => mlx_bitwise_invert;
    /// Rounded up.
    ceil => mlx_ceil;
    /// The cosine.
    cos => mlx_cos;
    /// The hyperbolic cosine.
    cosh => mlx_cosh;
    /// e to the power of each element.
    exp => mlx_exp;
    /// `exp(x) - 1`, exact for small x.
    expm1 => mlx_expm1;
    /// Rounded down.
    floor => mlx_floor;
    /// Whether it is neither infinite nor NaN.
    is_finite => mlx_isfinite;
    /// Whether it is infinite.
    is_inf => mlx_isinf;
    /// Whether it is NaN.
    is_nan => mlx_isnan;
    /// Whether it is negative infinity.
    is_neg_inf => mlx_isneginf;
    /// Whether it is positive infinity.
    is_pos_inf => mlx_isposinf;
    /// The natural logarithm.
    log => mlx_log;
    /// The logarithm to base 10.
    log10 => mlx_log10;
    /// `log(1 + x)`, exact for small x.
    log1p => mlx_log1p;
    /// The logarithm to base 2.
    log2 => mlx_log2;
    /// Logical not.
    logical_not => mlx_logical_not;
    /// The negative.
    negative => mlx_negative;
    /// `1 / x`.
    reciprocal => mlx_reciprocal;
    /// `1 / sqrt(x)`.
    rsqrt => mlx_rsqrt;
    /// `1 / (1 + exp(-x))`.
    sigmoid => mlx_sigmoid;
    /// -1, 0 or 1.
    sign => mlx_sign;
    /// The sine.
    sin => mlx_sin;
    /// The hyperbolic sine.
    sinh => mlx_sinh;
    /// The square root.
    sqrt => mlx_sqrt;
    /// The square.
    square => mlx_square;
    /// The tangent.
    tan => mlx_tan;
    /// The hyperbolic tangent.
    tanh => mlx_tanh;
    /// A copy with a buffer of its own.
    copy => mlx_copy;
}

binary! {
    /// `self + other`.
    add => mlx_add;
    /// The angle of the point (other, self).
    arctan2 => mlx_arctan2;
    /// The bits that both have.
    bitwise_and => mlx_bitwise_and;
    /// The bits that either has.
    bitwise_or => mlx_bitwise_or;
    /// The bits that one of them has.
    bitwise_xor => mlx_bitwise_xor;
    /// `self / other`, as floating point.
    divide => mlx_divide;
    /// `self == other`, as bool.
    equal => mlx_equal;
    /// `floor(self / other)`; of integers the quotient towards zero with MLX before 0.32.3. An
    /// integer divided by 0 ends the process on a CPU, as in MLX.
    floor_divide => mlx_floor_divide;
    /// `self > other`, as bool.
    greater => mlx_greater;
    /// `self >= other`, as bool.
    greater_equal => mlx_greater_equal;
    /// Bits shifted up.
    left_shift => mlx_left_shift;
    /// `self < other`, as bool.
    less => mlx_less;
    /// `self <= other`, as bool.
    less_equal => mlx_less_equal;
    /// `log(exp(self) + exp(other))` without overflow.
    logaddexp => mlx_logaddexp;
    /// Whether both are non-zero.
    logical_and => mlx_logical_and;
    /// Whether either is non-zero.
    logical_or => mlx_logical_or;
    /// The larger of the two.
    maximum => mlx_maximum;
    /// The smaller of the two.
    minimum => mlx_minimum;
    /// `self * other`.
    multiply => mlx_multiply;
    /// `self != other`, as bool.
    not_equal => mlx_not_equal;
    /// `self` to the power of `other`.
    power => mlx_power;
    /// What is left of `self / other`, with the sign of `other`. An integer divided by 0 ends
    /// the process on a CPU, as in MLX.
    remainder => mlx_remainder;
    /// Bits shifted down.
    right_shift => mlx_right_shift;
    /// `self - other`.
    subtract => mlx_subtract;
}

impl Array {
    /// Quotient (towards zero) and remainder. An integer divided by 0 ends the process on a
    /// CPU, as in MLX.
    ///
    /// # Errors
    /// When the shapes do not broadcast.
    #[track_caller]
    pub fn divmod<'a>(&self, other: impl Operand<'a>) -> Result<(Array, Array)> {
        let other = other.to_operand(self)?;
        let outputs = op_vec!(mlx_divmod(self.raw(), other.raw()))?;
        match <[Array; 2]>::try_from(outputs) {
            Ok([quotient, remainder]) => Ok((quotient, remainder)),
            Err(outputs) => Err(Error::new(ErrorKind::Length {
                what: "outputs of divmod",
                expected: 2,
                found: outputs.len() as u64,
            })),
        }
    }

    /// The error function.
    ///
    /// # Errors
    /// When the elements are complex.
    #[track_caller]
    pub fn erf(&self) -> Result<Array> {
        self.check_real()?;
        op!(mlx_erf(self.raw()))
    }

    /// The inverse of the error function.
    ///
    /// # Errors
    /// When the elements are complex.
    #[track_caller]
    pub fn erfinv(&self) -> Result<Array> {
        self.check_real()?;
        op!(mlx_erfinv(self.raw()))
    }

    /// MLX notices complex elements on a worker thread, where an error ends the process.
    fn check_real(&self) -> Result<()> {
        if self.dtype() != Dtype::Complex64 {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Dtype {
            expected: Dtype::Float32,
            found: self.dtype(),
        }))
    }

    /// Rounded to `decimals` places, halves to even.
    ///
    /// # Errors
    /// When MLX refuses the dtype.
    #[track_caller]
    pub fn round(&self, decimals: i32) -> Result<Array> {
        op!(mlx_round(self.raw(), decimals))
    }

    /// Each element brought into `[low, high]`.
    ///
    /// # Errors
    /// When MLX refuses the dtype.
    #[track_caller]
    pub fn clip<'a>(&self, low: impl Operand<'a>, high: impl Operand<'a>) -> Result<Array> {
        let (low, high) = (low.to_operand(self)?, high.to_operand(self)?);
        op!(mlx_clip(self.raw(), low.raw(), high.raw()))
    }

    /// The elements as another dtype.
    ///
    /// # Errors
    /// When MLX refuses.
    #[track_caller]
    pub fn as_type(&self, dtype: Dtype) -> Result<Array> {
        op!(mlx_astype(self.raw(), dtype.to_raw()))
    }

    /// The same bytes as another dtype; the last dimension changes with the element size.
    ///
    /// # Errors
    /// When the bytes do not divide, or the dtype is `bool`, which not every byte is.
    #[track_caller]
    pub fn view(&self, dtype: Dtype) -> Result<Array> {
        if dtype == Dtype::Bool && self.dtype() != Dtype::Bool {
            return Err(Error::new(ErrorKind::Argument {
                argument: "dtype of a view",
                expected: "any but bool, which not every byte is",
                found: dtype.to_string(),
            }));
        }
        op!(mlx_view(self.raw(), dtype.to_raw()))
    }

    /// `x` where `self` is true, `y` elsewhere.
    ///
    /// # Errors
    /// When the shapes do not broadcast.
    #[track_caller]
    pub fn where_<'a>(&self, x: impl Operand<'a>, y: &Array) -> Result<Array> {
        let x = x.to_operand(y)?;
        op!(mlx_where(self.raw(), x.raw(), y.raw()))
    }

    /// Whether all elements are within `atol + rtol * |other|` of each other.
    ///
    /// # Errors
    /// When the shapes do not broadcast.
    #[track_caller]
    pub fn all_close(&self, other: &Array, rtol: f64, atol: f64) -> Result<bool> {
        op!(mlx_allclose(self.raw(), other.raw(), rtol, atol, false))?.item()
    }

    /// NaN and the infinities replaced by numbers; by default the infinities become the
    /// largest finite ones.
    ///
    /// # Errors
    /// When MLX refuses the dtype.
    #[track_caller]
    pub fn nan_to_num(&self, nan: f32, posinf: Option<f32>, neginf: Option<f32>) -> Result<Array> {
        op!(mlx_nan_to_num(
            self.raw(),
            nan,
            optional_float(posinf),
            optional_float(neginf)
        ))
    }

    /// Floating-point values as FP8 (e4m3), one byte each.
    ///
    /// # Errors
    /// When the dtype is not a floating-point one.
    #[track_caller]
    pub fn to_fp8(&self) -> Result<Array> {
        op!(mlx_to_fp8(self.raw()))
    }

    /// FP8 (e4m3) bytes as floating-point values.
    ///
    /// # Errors
    /// When `self` is not uint8 or `dtype` not a floating-point one.
    #[track_caller]
    pub fn from_fp8(&self, dtype: Dtype) -> Result<Array> {
        op!(mlx_from_fp8(self.raw(), dtype.to_raw()))
    }
}

pub(super) fn optional_float(value: Option<f32>) -> mlex_sys::mlx_optional_float {
    mlex_sys::mlx_optional_float_ {
        value: value.unwrap_or_default(),
        has_value: value.is_some(),
    }
}
