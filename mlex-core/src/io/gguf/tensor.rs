//! One tensor of a GGUF file, and what it becomes.

use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;

use half::f16;

use super::affine;
use super::blocks::{self, Dequantize};
use super::ggml_type::{BlockSize, GgmlType};
use super::header::GgufTensorInfo;
use super::mxfp4;
use crate::{Dtype, Error, ErrorKind, Result};

/// A tensor of a GGUF file.
#[derive(Clone, Copy, Debug)]
pub struct GgufTensor<'a> {
    pub(super) name: &'a str,
    pub(super) info: &'a GgufTensorInfo,
    pub(super) bytes: &'a [u8],
    pub(super) path: &'a Path,
}

/// A tensor in a form that MLX computes with.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Decoded<'a> {
    /// Elements of an ordinary dtype.
    Plain {
        /// The element type.
        dtype: Dtype,
        /// The shape, outermost dimension first.
        shape: Vec<usize>,
        /// The elements, row-major and little-endian; borrowed from the file where it has them
        /// so, and then not aligned.
        bytes: Cow<'a, [u8]>,
    },
    /// MLX's affine quantization, with the same values as the file's blocks.
    Affine(Affine),
    /// MLX's `mxfp4` quantization, with the same values as the file's blocks.
    Mxfp4(Mxfp4),
}

/// MLX's affine quantization: `w = scale * q + bias`, one scale and bias for each group of
/// elements of a row.
///
/// The f32 scales and biases are exact: `scale * q + bias` rounded to f32 is what ggml
/// dequantizes to, bit by bit.
#[derive(Clone, Debug, PartialEq)]
pub struct Affine {
    /// Bits per element: 4, 5 or 8.
    pub bits: u32,
    /// Elements per group: 32.
    pub group_size: usize,
    /// The shape of what is quantized, `[.., rows, columns]`.
    pub shape: Vec<usize>,
    /// The elements, packed, `[.., rows, columns * bits / 32]`.
    pub weight: Vec<u32>,
    /// The scales, `[.., rows, columns / group_size]`.
    pub scales: Vec<f32>,
    /// The biases, shaped as the scales.
    pub biases: Vec<f32>,
}

impl Affine {
    /// The shape of `weight`.
    pub fn weight_shape(&self) -> Vec<usize> {
        with_columns(&self.shape, |columns| columns / 32 * self.bits as usize)
    }

    /// The shape of `scales` and of `biases`.
    pub fn scales_shape(&self) -> Vec<usize> {
        with_columns(&self.shape, |columns| columns / self.group_size)
    }

    /// Whether every scale and bias is an IEEE half, so that nothing is lost in `float16`.
    pub fn fits_f16(&self) -> bool {
        let fits = |x: &f32| f16::from_f32(*x).to_f32().to_bits() == x.to_bits();
        self.scales.iter().chain(&self.biases).all(fits)
    }
}

/// MLX's `mxfp4` quantization: 4-bit floats, and for each 32 of a row a power of two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mxfp4 {
    /// The shape of what is quantized, `[.., rows, columns]`.
    pub shape: Vec<usize>,
    /// The elements, packed, `[.., rows, columns / 8]`.
    pub weight: Vec<u32>,
    /// The exponents plus 127, `[.., rows, columns / 32]`.
    pub scales: Vec<u8>,
}

impl Mxfp4 {
    /// The shape of `weight`.
    pub fn weight_shape(&self) -> Vec<usize> {
        with_columns(&self.shape, |columns| columns / 8)
    }

    /// The shape of `scales`.
    pub fn scales_shape(&self) -> Vec<usize> {
        with_columns(&self.shape, |columns| columns / 32)
    }
}

/// `shape` with another number of columns.
fn with_columns(shape: &[usize], columns: impl Fn(usize) -> usize) -> Vec<usize> {
    let mut shape = shape.to_vec();
    if let Some(last) = shape.last_mut() {
        *last = columns(*last);
    }
    shape
}

impl<'a> GgufTensor<'a> {
    /// The name.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// The element type.
    pub fn ggml_type(&self) -> GgmlType {
        self.info.ggml_type
    }

    /// The shape, outermost dimension first.
    pub fn shape(&self) -> &'a [usize] {
        &self.info.shape
    }

    /// The bytes as they are in the file, borrowed from it.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Elements per row: the innermost dimension, 1 for a scalar.
    pub fn columns(&self) -> usize {
        self.info.shape.last().copied().unwrap_or(1)
    }

    /// How many rows there are: the product of the other dimensions.
    pub fn rows(&self) -> usize {
        match self.info.shape.split_last() {
            // With no columns there are no bytes that bound the other dimensions.
            Some((0, _)) => 0,
            Some((_, outer)) => outer.iter().product(),
            None => 1,
        }
    }

    /// The tensor in a form that MLX computes with, without loss.
    ///
    /// | stored | decoded |
    /// |---|---|
    /// | F32, F16, BF16, F64, I8 to I64 | the same bytes |
    /// | Q4_0, Q4_1, Q4_K | affine, 4 bits, group 32 |
    /// | Q5_0, Q5_1, Q5_K | affine, 5 bits, group 32 |
    /// | Q8_0 | affine, 8 bits, group 32 |
    /// | MXFP4 | mxfp4 |
    /// | Q2_K, Q3_K, Q6_K, Q8_K, IQ4_NL, IQ4_XS | f32 |
    ///
    /// The last ones have no equal in MLX, and as f32 they need several times their size; a caller
    /// who has no such memory takes them by [`dequantize_rows`](Self::dequantize_rows).
    ///
    /// # Errors
    /// Fails with [`ErrorKind::Format`] for every other type.
    pub fn decode(&self) -> Result<Decoded<'a>> {
        let plain = |dtype| {
            let bytes = Cow::Borrowed(self.bytes);
            Ok(Decoded::Plain {
                dtype,
                shape: self.info.shape.clone(),
                bytes,
            })
        };
        match self.info.ggml_type {
            GgmlType::F32 => return plain(Dtype::Float32),
            GgmlType::F16 => return plain(Dtype::Float16),
            GgmlType::BF16 => return plain(Dtype::Bfloat16),
            GgmlType::F64 => return plain(Dtype::Float64),
            GgmlType::I8 => return plain(Dtype::Int8),
            GgmlType::I16 => return plain(Dtype::Int16),
            GgmlType::I32 => return plain(Dtype::Int32),
            GgmlType::I64 => return plain(Dtype::Int64),
            GgmlType::MXFP4 => {
                let (weight, scales) = mxfp4::repack(self.bytes);
                return Ok(Decoded::Mxfp4(Mxfp4 {
                    shape: self.info.shape.clone(),
                    weight,
                    scales,
                }));
            }
            _ => {}
        }
        if let Some((bits, repacked)) = affine::repack(self.info.ggml_type, self.bytes) {
            let affine::Repacked {
                weight,
                scales,
                biases,
            } = repacked;
            let shape = self.info.shape.clone();
            return Ok(Decoded::Affine(Affine {
                bits,
                group_size: 32,
                shape,
                weight,
                scales,
                biases,
            }));
        }
        let (block, dequantize) = self.dequantizer()?;
        let mut bytes = vec![0; self.bytes.len() / block.bytes * block.elements * 4];
        let mut values = [0.0; blocks::MAX_ELEMENTS];
        let values = &mut values[..block.elements];
        let stored = self.bytes.chunks_exact(block.bytes);
        for (stored, out) in stored.zip(bytes.chunks_exact_mut(block.elements * 4)) {
            dequantize(stored, values);
            for (out, value) in out.as_chunks_mut().0.iter_mut().zip(&*values) {
                *out = value.to_le_bytes();
            }
        }
        let shape = self.info.shape.clone();
        Ok(Decoded::Plain {
            dtype: Dtype::Float32,
            shape,
            bytes: Cow::Owned(bytes),
        })
    }

    /// The rows of that range as f32, written over `out`, which has room for exactly them.
    ///
    /// Takes every type that [`decode`](Self::decode) takes but integers and F64, and gives the
    /// values that ggml gives.
    ///
    /// # Errors
    /// Fails with [`ErrorKind::Format`] for other types, with [`ErrorKind::Argument`] for
    /// rows that the tensor does not have, and with [`ErrorKind::Length`] where `out` is not of
    /// their size.
    pub fn dequantize_rows(&self, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let (block, dequantize) = self.dequantizer()?;
        if rows.start > rows.end || rows.end > self.rows() {
            let error = Error::new(ErrorKind::Argument {
                argument: "rows",
                expected: "a range of the tensor's rows",
                found: format!("{rows:?} of {}", self.rows()),
            });
            return Err(error.with_tensor(self.name).with_path(self.path));
        }
        // The rows are within the tensor, whose bytes are in memory, so the products fit.
        let expected = rows.len() * self.columns();
        if out.len() != expected {
            let error = Error::new(ErrorKind::Length {
                what: "elements of the output",
                expected: expected as u64,
                found: out.len() as u64,
            });
            return Err(error.with_tensor(self.name).with_path(self.path));
        }
        let row_bytes = self.columns() / block.elements * block.bytes;
        let stored = &self.bytes[rows.start * row_bytes..rows.end * row_bytes];
        let stored = stored.chunks_exact(block.bytes);
        for (stored, out) in stored.zip(out.chunks_exact_mut(block.elements)) {
            dequantize(stored, out);
        }
        Ok(())
    }

    fn dequantizer(&self) -> Result<(BlockSize, Dequantize)> {
        let ggml_type = self.info.ggml_type;
        ggml_type
            .block()
            .zip(blocks::dequantizer(ggml_type))
            .ok_or_else(|| {
                let error = Error::format("type", "a type that can be read", ggml_type.to_string());
                error.with_tensor(self.name).with_path(self.path)
            })
    }
}
