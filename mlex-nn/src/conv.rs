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

    /// The bias, `[C]`.
    pub(crate) fn bias(&self) -> Option<&Array> {
        self.bias.as_ref()
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
        self.forward_keeping(x, mask, before, self.kernel - 1)
    }

    /// The same where `before` may have more rows, and the last `keep` of all come back: no more
    /// than there are.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub(crate) fn forward_keeping(
        &self,
        x: &Array,
        mask: Option<&Array>,
        before: Option<&Array>,
        keep: i32,
    ) -> Result<(Array, Array)> {
        let &[batch, length, _] = x.shape() else {
            let found = format!("{:?}", x.shape());
            return Err(Error::setting("input", "three dimensions", found));
        };
        let needed = self.kernel - 1;
        let before = match before {
            Some(before) => {
                let found = before.shape();
                let fits = found.len() == 3
                    && [found[0], found[2]] == [batch, self.channels]
                    && found[1] >= needed;
                if !fits {
                    let expected =
                        format!("shape [{batch}, {needed}, {}] or more rows", self.channels);
                    let found = format!("{found:?}");
                    return Err(Error::setting("cache of a convolution", expected, found));
                }
                before.clone()
            }
            None => Array::zeros(&[batch, needed, self.channels], x.dtype())?,
        };
        let x = match mask {
            Some(mask) => &mask.expand_dims(-1)?.where_(x, &x.zeros_like()?)?,
            None => x,
        };
        let rows = Array::concatenate([&before, x], 1)?;
        let end = rows.dim(1)?;
        let first = (end - keep).max(0);
        let tail = rows.slice_axis(1, first, end)?.contiguous()?;
        let input = rows.slice_axis(1, end - length - needed, end)?;
        let weight = self.weight.t()?.expand_dims(-1)?;
        let y = input.conv1d(&weight, 1, 0, 1, self.channels)?;
        let y = match &self.bias {
            Some(bias) => y.add(bias)?,
            None => y,
        };
        Ok((y, tail))
    }
}
