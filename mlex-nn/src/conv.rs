//! The short causal convolution in front of recurrent layers.

use mlex_core::Array;

use crate::{Error, Result, Weights};

/// A depthwise convolution along positions that sees the last `K` of them, the position's own
/// included.
#[derive(Clone, Debug)]
pub struct CausalConv {
    /// `[K, C]`.
    weight: Array,
    bias: Option<Array>,
    channels: i32,
    kernel: i32,
}

impl CausalConv {
    /// Takes `weight` `[C, K, 1]`, or `[C, 1, K]` as PyTorch has it, and `bias` `[C]` when it has
    /// one, from `weights`.
    ///
    /// # Errors
    /// When a tensor cannot be read.
    pub fn load(weights: &Weights, channels: i32, kernel: i32, bias: bool) -> Result<Self> {
        let torch = matches!(weights.shape("weight").as_deref(), Some([_, 1, _]));
        let shape = if torch {
            [channels, 1, kernel]
        } else {
            [channels, kernel, 1]
        };
        let weight = weights.get_float("weight", &shape)?;
        let weight = weight.reshape(&[channels, kernel])?.t()?.contiguous()?;
        if weights.is_complete() {
            weight.eval()?;
        }
        let bias = bias.then(|| weights.get_float("bias", &[channels]));
        Ok(Self {
            weight,
            bias: bias.transpose()?,
            channels,
            kernel,
        })
    }

    /// The weight, `[K, C]`.
    pub(crate) fn weight(&self) -> &Array {
        &self.weight
    }

    /// `x` `[B, L, C]` after `before` `[B, K - 1, C]` (zeros without it) to the same shape, and
    /// what the next call needs as `before`. Where `mask` `[B, L]` is false, `x` counts as zero.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward(
        &self,
        x: &Array,
        mask: Option<&Array>,
        before: Option<&Array>,
    ) -> Result<(Array, Array)> {
        let &[batch, length, _] = x.shape() else {
            let found = format!("{:?}", x.shape());
            return Err(Error::setting("input", "three dimensions", found));
        };
        let kept = self.kernel - 1;
        let before = match before {
            Some(before) => before.clone(),
            None => Array::zeros(&[batch, kept, self.channels], x.dtype())?,
        };
        let x = match mask {
            Some(mask) => &mask.expand_dims(-1)?.where_(x, &x.zeros_like()?)?,
            None => x,
        };
        let input = Array::concatenate([&before, x], 1)?;
        let tail = input.slice_axis(1, length, length + kept)?.contiguous()?;
        let weight = self.weight.t()?.expand_dims(-1)?;
        let y = input.conv1d(&weight, 1, 0, 1, self.channels)?;
        let y = match &self.bias {
            Some(bias) => y.add(bias)?,
            None => y,
        };
        Ok((y, tail))
    }
}
