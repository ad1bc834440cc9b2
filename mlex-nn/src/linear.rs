//! The linear layer, dense or quantized, and the weight that it shares with the embedding.

use mlex_core::{Array, Dtype, QuantizedWeight};

use crate::quant::packed_columns;
use crate::{Result, Weights, dispatch, host};

/// A matrix `[N, K]` as a checkpoint has it: dense or quantized.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Matrix {
    /// As floating point.
    Dense {
        /// `[N, K]`.
        weight: Array,
        /// `[K, N]`, a transposed view of it.
        transposed: Array,
    },
    /// Packed.
    Quantized {
        /// The packed numbers, their scales and biases.
        weight: QuantizedWeight,
        /// What the weights are when they are unpacked; MLX's choice without it.
        dtype: Option<Dtype>,
    },
}

impl Matrix {
    /// Takes `weight` `[rows, columns]`, or its packed form, from `weights`.
    ///
    /// # Errors
    /// When it cannot be read or its layout is not one that MLX has.
    pub fn load(weights: &Weights, rows: i32, columns: i32) -> Result<Self> {
        let Some(layout) = weights.quantized()? else {
            let weight = weights.get_float("weight", &[rows, columns])?;
            let transposed = weight.t()?;
            return Ok(Self::Dense { weight, transposed });
        };
        let (words, groups) =
            packed_columns(layout, columns).map_err(|error| error.with_layer(weights.prefix()))?;
        let biases = if layout.mode.has_biases() {
            Some(weights.get_float("biases", &[rows, groups])?)
        } else {
            None
        };
        let scales = if layout.mode.has_biases() {
            weights.get_float("scales", &[rows, groups])?
        } else {
            // Exponents, or 8-bit floats.
            weights.get_dtype("scales", &[rows, groups], Dtype::Uint8)?
        };
        let dtype = layout.mode.has_biases().then(|| scales.dtype());
        let mut weight = QuantizedWeight {
            weight: weights.get_dtype("weight", &[rows, words], Dtype::Uint32)?,
            scales,
            biases,
            layout,
        };
        // What is missing is a placeholder, not to be looked into.
        if weights.is_complete() {
            weight = host::narrowed(weight)?;
        }
        Ok(Self::Quantized { weight, dtype })
    }

    /// `x` `[.., K]` times the transposed matrix: `[.., N]`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn matmul(&self, x: &Array) -> Result<Array> {
        dispatch::linear(x, self, None)
    }

    /// The rows that `ids` name: `[*ids.shape, K]`.
    ///
    /// # Errors
    /// When `ids` are not integers.
    pub fn rows(&self, ids: &Array) -> Result<Array> {
        match self {
            Self::Dense { weight, .. } => Ok(weight.take(ids, 0)?),
            Self::Quantized { weight, dtype } => {
                // MLX unpacks in the type of the scales, which may be held in a narrower one.
                let taken = |array: &Array| {
                    let rows = array.take(ids, 0)?;
                    match dtype {
                        Some(dtype) if rows.dtype() != *dtype => rows.as_type(*dtype),
                        _ => Ok(rows),
                    }
                };
                let rows = QuantizedWeight {
                    weight: weight.weight.take(ids, 0)?,
                    scales: taken(&weight.scales)?,
                    biases: weight.biases.as_ref().map(taken).transpose()?,
                    layout: weight.layout,
                };
                Ok(rows.dequantize(*dtype)?)
            }
        }
    }
}

/// `y = x W^T + b`, the weight dense or quantized.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Matrix,
    bias: Option<Array>,
}

impl Linear {
    /// Takes `weight` `[output, input]`, and `bias` `[output]` when it has one, from `weights`.
    ///
    /// # Errors
    /// When a tensor cannot be read.
    pub fn load(weights: &Weights, input: i32, output: i32, bias: bool) -> Result<Self> {
        let weight = Matrix::load(weights, output, input)?;
        let bias = if bias {
            Some(weights.get_float("bias", &[output])?)
        } else {
            None
        };
        Ok(Self { weight, bias })
    }

    /// `x` `[.., input]` to `[.., output]`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        dispatch::linear(x, &self.weight, self.bias.as_ref())
    }

    /// The matrix and the bias.
    pub(crate) fn parts(&self) -> (&Matrix, Option<&Array>) {
        (&self.weight, self.bias.as_ref())
    }
}
