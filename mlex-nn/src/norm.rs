//! Normalization layers.

use mlex_core::Array;

use crate::{Result, Weights, host};

/// `x / sqrt(mean(x^2) + eps) * weight` ("Root Mean Square Layer Normalization").
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Array,
    eps: f32,
}

impl RmsNorm {
    /// Takes `weight` `[dim]` from `weights`.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn load(weights: &Weights, dim: i32, eps: f32) -> Result<Self> {
        Ok(Self {
            weight: weights.get_float("weight", &[dim])?,
            eps,
        })
    }

    /// `[.., dim]` to the same shape; f32 inside.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        match host::rms_norm(x, &self.weight, self.eps)? {
            Some(y) => Ok(y),
            None => Ok(x.rms_norm(Some(&self.weight), self.eps)?),
        }
    }

    /// `x + residual`, and its norm: the step between two layers of a residual stream.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward_sum(&self, x: &Array, residual: &Array) -> Result<(Array, Array)> {
        if let Some(outputs) = host::add_rms_norm(x, residual, &self.weight, self.eps)? {
            return Ok(outputs);
        }
        let sum = x.add(residual)?;
        let normed = self.forward(&sum)?;
        Ok((sum, normed))
    }

    /// The weight and the epsilon.
    pub(crate) fn parameters(&self) -> (&Array, f32) {
        (&self.weight, self.eps)
    }
}

/// `(x - mean) / sqrt(var + eps) * weight + bias` ("Layer Normalization").
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: Array,
    bias: Option<Array>,
    eps: f32,
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
        })
    }

    /// `[.., dim]` to the same shape; f32 inside.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        let bias = self.bias.as_ref();
        match host::layer_norm(x, &self.weight, bias, self.eps)? {
            Some(y) => Ok(y),
            None => Ok(x.layer_norm(Some(&self.weight), bias, self.eps)?),
        }
    }
}
