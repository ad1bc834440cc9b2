//! The linear layer, dense or quantized, and the weight that it shares with the embedding.

use mlex_core::{Array, Dtype, QuantizedWeight};

use crate::host::{Constants, Sequence, Value, Weight};
use crate::quant::packed_columns;
use crate::{Result, Weights, dispatch, host};

/// A matrix `[N, K]` as a checkpoint has it: dense or quantized.
#[derive(Clone, Debug)]
pub struct Matrix {
    pub(crate) stored: Stored,
    pub(crate) constants: Constants,
}

/// The arrays of a matrix.
#[derive(Clone, Debug)]
pub(crate) enum Stored {
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

impl From<Stored> for Matrix {
    fn from(stored: Stored) -> Self {
        Self {
            stored,
            constants: Constants::default(),
        }
    }
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
            return Ok(Stored::Dense { weight, transposed }.into());
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
        let dtype = if layout.mode.has_biases() {
            Some(scales.dtype())
        } else {
            weights.wanted_dtype()
        };
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
        Ok(Stored::Quantized { weight, dtype }.into())
    }

    /// `x` `[.., K]` times the transposed matrix: `[.., N]`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn matmul(&self, x: &Array) -> Result<Array> {
        dispatch::linear(x, self.weight(None))
    }

    /// The rows that `ids` name: `[*ids.shape, K]`.
    ///
    /// # Errors
    /// When `ids` are not integers.
    pub fn rows(&self, ids: &Array) -> Result<Array> {
        match &self.stored {
            Stored::Dense { weight, .. } => Ok(weight.take(ids, 0)?),
            Stored::Quantized { weight, dtype } => {
                // MLX unpacks in the type of the scales, which may be held in a narrower one.
                let taken = |array: &Array| {
                    let rows = array.take(ids, 0)?;
                    match dtype {
                        Some(dtype) if array.dtype().is_float() => rows.as_type(*dtype),
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

    pub(crate) fn weight<'a>(&'a self, bias: Option<(&'a Array, &'a Constants)>) -> Weight<'a> {
        Weight { matrix: self, bias }
    }

    /// N and K.
    pub(crate) fn rows_and_columns(&self) -> Result<(i32, i32)> {
        Ok(match &self.stored {
            Stored::Dense { weight, .. } => (weight.dim(0)?, weight.dim(1)?),
            Stored::Quantized { weight, .. } => {
                let words = i64::from(weight.weight.dim(1)?);
                // What was packed is an i32 again.
                let columns = words * 32 / i64::from(weight.layout.bits.max(1));
                (weight.weight.dim(0)?, columns as i32)
            }
        })
    }

    /// The arrays that it consists of.
    pub(crate) fn arrays(&self) -> impl Iterator<Item = &Array> {
        let (weight, scales, biases) = match &self.stored {
            Stored::Dense { weight, .. } => (weight, None, None),
            Stored::Quantized { weight, .. } => {
                (&weight.weight, Some(&weight.scales), weight.biases.as_ref())
            }
        };
        std::iter::once(weight).chain(scales).chain(biases)
    }
}

/// `y = x W^T + b`, the weight dense or quantized.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Matrix,
    bias: Option<Array>,
    bias_constants: Constants,
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
        Ok(Self {
            weight,
            bias,
            bias_constants: Constants::default(),
        })
    }

    /// A layer of a dense `weight` `[output, input]` and a `bias` `[output]`.
    ///
    /// # Errors
    /// When the weight is no matrix.
    pub fn of(weight: Array, bias: Option<Array>) -> Result<Self> {
        let transposed = weight.t()?;
        Ok(Self {
            weight: Stored::Dense { weight, transposed }.into(),
            bias,
            bias_constants: Constants::default(),
        })
    }

    /// `x` `[.., input]` to `[.., output]`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        dispatch::linear(x, self.weight())
    }

    /// The same as a step of `sequence`; none where there is no kernel for it.
    ///
    /// # Errors
    /// When the weights cannot be read.
    pub fn record(&self, sequence: &mut Sequence, x: Value) -> Result<Option<Value>> {
        let output = Self::record_all(sequence, x, [self])?;
        Ok(output.map(|[output]| output))
    }

    /// Several projections of `x` as one step, which takes less than one after another; as
    /// [`record`](Self::record).
    ///
    /// # Errors
    /// As [`record`](Self::record).
    pub fn record_all<const N: usize>(
        sequence: &mut Sequence,
        x: Value,
        projections: [&Self; N],
    ) -> Result<Option<[Value; N]>> {
        host::record_linear(sequence, x, projections.map(Self::weight))
    }

    /// The matrix and the bias.
    pub(crate) fn weight(&self) -> Weight<'_> {
        let bias = self.bias.as_ref();
        self.weight
            .weight(bias.map(|bias| (bias, &self.bias_constants)))
    }
}
