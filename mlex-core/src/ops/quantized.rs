//! Quantized weights: MLX's packed layouts and the products with them.

use std::ffi::CStr;
use std::fmt;
use std::str::FromStr;

use mlex_sys::{mlx_optional_dtype_, mlx_optional_int, mlx_optional_int_};

use super::indices::batch_indices;
use super::unless_empty;
use crate::ffi::{op, op_vec, optional};
use crate::{Array, Dtype, Error, ErrorKind, Result};

/// How packed numbers stand for weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QuantizationMode {
    /// `scale * q + bias` per group: 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128.
    #[default]
    Affine,
    /// FP4 (e2m1) with a power-of-two scale (e8m0) per 32 (OCP microscaling).
    Mxfp4,
    /// FP8 (e4m3) with a power-of-two scale (e8m0) per 32 (OCP microscaling).
    Mxfp8,
    /// FP4 (e2m1) with an FP8 (e4m3) scale per 16.
    Nvfp4,
}

impl QuantizationMode {
    /// The name as MLX and config.json write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Affine => "affine",
            Self::Mxfp4 => "mxfp4",
            Self::Mxfp8 => "mxfp8",
            Self::Nvfp4 => "nvfp4",
        }
    }

    /// Bits per weight and group size, as MLX takes them where none are given.
    pub const fn defaults(self) -> (i32, i32) {
        match self {
            Self::Affine => (4, 64),
            Self::Mxfp4 => (4, 32),
            Self::Mxfp8 => (8, 32),
            Self::Nvfp4 => (4, 16),
        }
    }

    /// The bits per weight that MLX has for the mode.
    pub const fn widths(self) -> &'static [i32] {
        match self {
            Self::Affine => &[2, 3, 4, 5, 6, 8],
            Self::Mxfp4 | Self::Nvfp4 => &[4],
            Self::Mxfp8 => &[8],
        }
    }

    /// The group sizes that MLX has for the mode.
    pub const fn group_sizes(self) -> &'static [i32] {
        match self {
            Self::Affine => &[32, 64, 128],
            Self::Mxfp4 | Self::Mxfp8 => &[32],
            Self::Nvfp4 => &[16],
        }
    }

    /// Whether there is a bias per group beside the scale.
    pub const fn has_biases(self) -> bool {
        matches!(self, Self::Affine)
    }

    const fn c_name(self) -> &'static CStr {
        match self {
            Self::Affine => c"affine",
            Self::Mxfp4 => c"mxfp4",
            Self::Mxfp8 => c"mxfp8",
            Self::Nvfp4 => c"nvfp4",
        }
    }
}

impl fmt::Display for QuantizationMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for QuantizationMode {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        [Self::Affine, Self::Mxfp4, Self::Mxfp8, Self::Nvfp4]
            .into_iter()
            .find(|mode| mode.name() == text)
            .ok_or_else(|| {
                let expected = "affine, mxfp4, mxfp8 or nvfp4";
                Error::argument("quantization mode", expected, format!("{text:?}"))
            })
    }
}

/// The layout of a quantized weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quantized {
    /// Bits per weight.
    pub bits: i32,
    /// Weights per scale, along the last dimension.
    pub group_size: i32,
    /// What the numbers stand for.
    pub mode: QuantizationMode,
}

impl Quantized {
    /// Checks that MLX has the layout: it divides by these numbers before it looks at them.
    ///
    /// # Errors
    /// An [`Argument`](ErrorKind::Argument) error that names `bits` or `group_size`.
    pub fn check(self) -> Result<()> {
        let Self {
            bits,
            group_size,
            mode,
        } = self;
        if !mode.widths().contains(&bits) {
            let expected = match mode {
                QuantizationMode::Affine => "2, 3, 4, 5, 6 or 8 for affine",
                QuantizationMode::Mxfp4 => "4 for mxfp4",
                QuantizationMode::Mxfp8 => "8 for mxfp8",
                QuantizationMode::Nvfp4 => "4 for nvfp4",
            };
            return Err(Error::argument("bits", expected, bits));
        }
        if !mode.group_sizes().contains(&group_size) {
            let expected = match mode {
                QuantizationMode::Affine => "32, 64 or 128 for affine",
                QuantizationMode::Mxfp4 => "32 for mxfp4",
                QuantizationMode::Mxfp8 => "32 for mxfp8",
                QuantizationMode::Nvfp4 => "16 for nvfp4",
            };
            return Err(Error::argument("group_size", expected, group_size));
        }
        Ok(())
    }
}

impl fmt::Display for Quantized {
    /// `4-bit affine, group 64`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            bits,
            group_size,
            mode,
        } = self;
        write!(f, "{bits}-bit {mode}, group {group_size}")
    }
}

impl From<QuantizationMode> for Quantized {
    /// The layout that MLX takes for a mode where no numbers are given.
    fn from(mode: QuantizationMode) -> Self {
        let (bits, group_size) = mode.defaults();
        Self {
            bits,
            group_size,
            mode,
        }
    }
}

/// The arrays of a quantized weight of logical shape `[.., N, K]`.
#[derive(Clone, Debug)]
pub struct QuantizedWeight {
    /// The packed numbers, uint32 `[.., N, K * bits / 32]`.
    pub weight: Array,
    /// `[.., N, K / group_size]`; uint8 for the floating-point modes.
    pub scales: Array,
    /// As the scales; in affine mode only.
    pub biases: Option<Array>,
    /// Their layout.
    pub layout: Quantized,
}

fn some(value: i32) -> mlx_optional_int {
    mlx_optional_int_ {
        value,
        has_value: true,
    }
}

impl QuantizedWeight {
    /// Quantizes a weight `[.., N, K]`.
    ///
    /// # Errors
    /// When MLX does not have the layout or K does not divide into groups.
    #[track_caller]
    pub fn quantize(weight: &Array, layout: Quantized) -> Result<Self> {
        layout.check()?;
        let mut outputs = op_vec!(mlx_quantize(
            weight.raw(),
            some(layout.group_size),
            some(layout.bits),
            layout.mode.c_name().as_ptr(),
            optional(None),
        ))?
        .into_iter()
        .map(|output| unless_empty(Ok(output)))
        .collect::<Result<Vec<_>>>()?
        .into_iter();
        let count = outputs.len() as u64;
        let (Some(weight), Some(scales)) = (outputs.next(), outputs.next()) else {
            return Err(Error::new(ErrorKind::Length {
                what: "outputs of quantize",
                expected: 2,
                found: count,
            }));
        };
        Ok(Self {
            weight,
            scales,
            biases: outputs.next(),
            layout,
        })
    }

    /// The weights as floating point `[.., N, K]`: of `dtype`, else of the scales' dtype
    /// (affine) or bfloat16.
    ///
    /// # Errors
    /// When the arrays do not fit the layout.
    #[track_caller]
    pub fn dequantize(&self, dtype: Option<Dtype>) -> Result<Array> {
        self.layout.check()?;
        let dtype = mlx_optional_dtype_ {
            value: dtype.unwrap_or(Dtype::Float32).to_raw(),
            has_value: dtype.is_some(),
        };
        unless_empty(op!(mlx_dequantize(
            self.weight.raw(),
            self.scales.raw(),
            optional(self.biases.as_ref()),
            some(self.layout.group_size),
            some(self.layout.bits),
            self.layout.mode.c_name().as_ptr(),
            optional(None),
            dtype,
        )))
    }

    /// `x` `[.., M, K]` times the transposed weight: `[.., M, N]`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    #[track_caller]
    pub fn matmul(&self, x: &Array) -> Result<Array> {
        self.matmul_oriented(x, true)
    }

    /// As [`matmul`](Self::matmul), or with the weight not transposed: `[.., M, N]` times
    /// `[N, K]` is `[.., M, K]`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    #[track_caller]
    pub fn matmul_oriented(&self, x: &Array, transpose: bool) -> Result<Array> {
        self.layout.check()?;
        unless_empty(op!(mlx_quantized_matmul(
            x.raw(),
            self.weight.raw(),
            self.scales.raw(),
            optional(self.biases.as_ref()),
            transpose,
            some(self.layout.group_size),
            some(self.layout.bits),
            self.layout.mode.c_name().as_ptr(),
        )))
    }

    /// Products of matrices of `x` and weights picked by index out of the batch dimensions,
    /// as a mixture of experts needs; an index beyond them picks the last. `sorted` says that
    /// `rhs_indices` ascend.
    ///
    /// # Errors
    /// When the shapes do not fit.
    #[track_caller]
    pub fn gather_matmul(
        &self,
        x: &Array,
        lhs_indices: Option<&Array>,
        rhs_indices: Option<&Array>,
        sorted: bool,
    ) -> Result<Array> {
        self.layout.check()?;
        let lhs_indices = lhs_indices.map(|i| batch_indices(i, x)).transpose()?;
        let rhs_indices = rhs_indices
            .map(|i| batch_indices(i, &self.weight))
            .transpose()?;
        unless_empty(op!(mlx_gather_qmm(
            x.raw(),
            self.weight.raw(),
            self.scales.raw(),
            optional(self.biases.as_ref()),
            optional(lhs_indices.as_ref()),
            optional(rhs_indices.as_ref()),
            true,
            some(self.layout.group_size),
            some(self.layout.bits),
            self.layout.mode.c_name().as_ptr(),
            sorted,
        )))
    }
}
