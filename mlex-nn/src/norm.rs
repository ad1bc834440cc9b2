//! Normalization layers.

use mlex_core::Array;

use crate::host::{Constants, Parameters, Sequence, Value};
use crate::{Result, Weights, cuda, host};

/// `x / sqrt(mean(x^2) + eps) * weight` ("Root Mean Square Layer Normalization").
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Array,
    eps: f32,
    constants: Constants,
}

impl RmsNorm {
    /// Takes `weight` `[dim]` from `weights`.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn load(weights: &Weights, dim: i32, eps: f32) -> Result<Self> {
        Ok(Self::new(weights.get_float("weight", &[dim])?, eps))
    }

    /// A norm with this weight `[dim]`.
    pub fn new(weight: Array, eps: f32) -> Self {
        Self {
            weight,
            eps,
            constants: Constants::default(),
        }
    }

    /// `[.., dim]` to the same shape; f32 inside.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        match host::rms_norm(x, self.parameters())? {
            Some(y) => Ok(y),
            None => Ok(x.rms_norm(Some(&self.weight), self.eps)?),
        }
    }

    /// `x + residual`, and its norm: the step between two layers of a residual stream.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward_sum(&self, x: &Array, residual: &Array) -> Result<(Array, Array)> {
        if let Some(outputs) = host::add_rms_norm(x, residual, self.parameters())? {
            return Ok(outputs);
        }
        if let Some(outputs) = cuda::add_rms_norm(x, residual, self.parameters())? {
            return Ok(outputs);
        }
        let sum = x.add(residual)?;
        let normed = self.forward(&sum)?;
        Ok((sum, normed))
    }

    /// [`forward`](Self::forward) as a step of `sequence`; none where there is no kernel for it.
    ///
    /// # Errors
    /// When the weight cannot be read.
    pub fn record(&self, sequence: &mut Sequence, x: Value) -> Result<Option<Value>> {
        host::record_rms_norm(sequence, x, self.parameters())
    }

    /// As [`record`](Self::record), each part of `dim` elements of `x` `[.., parts * dim]` by
    /// itself.
    ///
    /// # Errors
    /// When the weight cannot be read.
    pub fn record_parts(&self, sequence: &mut Sequence, x: Value) -> Result<Option<Value>> {
        host::record_rms_norm_of_parts(sequence, x, self.parameters())
    }

    /// `x + scale * residual` and its norm as a step of `sequence`; none where there is no kernel
    /// for it.
    ///
    /// # Errors
    /// When the weight cannot be read.
    pub fn record_sum(
        &self,
        sequence: &mut Sequence,
        x: Value,
        residual: Value,
        scale: f32,
    ) -> Result<Option<(Value, Value)>> {
        host::record_add_rms_norm(sequence, x, residual, scale, self.parameters())
    }

    pub(crate) fn parameters(&self) -> Parameters<'_> {
        Parameters {
            weight: &self.weight,
            bias: None,
            constants: &self.constants,
            eps: self.eps,
        }
    }
}

/// `(x - mean) / sqrt(var + eps) * weight + bias` ("Layer Normalization").
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: Array,
    bias: Option<Array>,
    eps: f32,
    constants: Constants,
}

impl LayerNorm {
    /// Takes `weight` `[dim]`, and `bias` `[dim]` where the checkpoint has one.
    ///
    /// # Errors
    /// When a tensor cannot be read.
    pub fn load(weights: &Weights, dim: i32, eps: f32) -> Result<Self> {
        Ok(Self {
            weight: weights.get_float("weight", &[dim])?,
            bias: if weights.contains("bias") {
                Some(weights.get_float("bias", &[dim])?)
            } else {
                None
            },
            eps,
            constants: Constants::default(),
        })
    }

    /// `[.., dim]` to the same shape; f32 inside.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        let bias = self.bias.as_ref();
        let parameters = Parameters {
            weight: &self.weight,
            bias,
            constants: &self.constants,
            eps: self.eps,
        };
        match host::layer_norm(x, parameters)? {
            Some(y) => Ok(y),
            None => Ok(x.layer_norm(Some(&self.weight), bias, self.eps)?),
        }
    }
}
