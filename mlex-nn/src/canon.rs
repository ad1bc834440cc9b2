//! Canon layers: short causal convolutions that mix neighbouring positions ("Physics of Language
//! Models: Part 4.1, Architecture Design and the Magic of Canon Layers").

use mlex_core::Array;

use crate::activation::silu;
use crate::cache::ConvCache;
use crate::conv::CausalConv;
use crate::host::{self, CacheUpdate, Constants, Sequence, ShortConv, Value};
use crate::{Error, Result, Weights};

/// The settings of a [`Canon`] layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CanonConfig {
    /// How many positions the convolution sees, its own included.
    pub kernel: i32,
    /// Whether the convolution has a bias.
    pub bias: bool,
    /// Whether its output goes through [`silu`].
    pub activation: bool,
    /// Whether its output is added to the input.
    pub residual: bool,
}

/// A depthwise convolution over the last positions, added to its input.
#[derive(Clone, Debug)]
pub struct Canon {
    conv: CausalConv,
    constants: Constants,
    config: CanonConfig,
}

impl Canon {
    /// Takes `conv` over `channels` channels from `weights`.
    ///
    /// # Errors
    /// When a tensor cannot be read or the kernel is out of range.
    pub fn load(weights: &Weights, channels: i32, config: CanonConfig) -> Result<Self> {
        if !(2..=64).contains(&config.kernel) {
            let expected = "a number from 2 to 64";
            return Err(Error::setting("canon_kernel", expected, config.kernel));
        }
        Ok(Self {
            conv: CausalConv::load(&weights.pp("conv"), channels, config.kernel, config.bias)?,
            constants: Constants::default(),
            config,
        })
    }

    /// `x` `[B, L, C]` to the same shape; `cache` goes on by `L` positions. What stands at
    /// padding is of no meaning.
    ///
    /// # Errors
    /// When the shapes do not fit; then the cache is as it was.
    pub fn forward(&self, x: &Array, cache: &mut ConvCache) -> Result<Array> {
        if let Some((mut sequence, value)) = Sequence::start(x)?
            && let Some((y, update)) = self.record(&mut sequence, value, cache)?
        {
            return sequence.finish_rows(y, &update, cache);
        }
        let length = x.dim(1)?;
        let mask = cache.mask(length)?;
        let needed = self.config.kernel - 1;
        let (mut y, rows) =
            self.conv
                .forward_keeping(x, mask.as_ref(), cache.rows(), cache.keep(needed))?;
        if self.config.activation {
            y = silu(&y)?;
        }
        if self.config.residual {
            y = x.add(&y)?;
        }
        cache.update(rows, needed, length)?;
        Ok(y)
    }

    /// The same as a step of `sequence`; none where there is no kernel for it. The cache changes
    /// when the [`CacheUpdate`] is applied, after the sequence is finished.
    ///
    /// # Errors
    /// When the weights cannot be read or the cache is another layer's.
    pub fn record(
        &self,
        sequence: &mut Sequence,
        x: Value,
        cache: &ConvCache,
    ) -> Result<Option<(Value, CacheUpdate)>> {
        let layer = ShortConv {
            conv: &self.conv,
            constants: &self.constants,
            activate: self.config.activation,
            residual: self.config.residual,
        };
        host::record_conv(sequence, x, &layer, cache)
    }
}
