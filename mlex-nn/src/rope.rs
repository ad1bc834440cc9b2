//! Rotary position embedding with the scalings that checkpoints name.

use std::f32::consts::TAU;
use std::sync::Arc;

use mlex_core::{Array, Rope as Rotation};

use crate::cache::Offset;
use crate::host::RopeKernel;
use crate::{Error, Result, Rotations, host};

/// How positions beyond the trained context are brought into it.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// Not at all.
    #[default]
    None,
    /// Every position divided by a factor ("Extending Context Window of Large Language Models
    /// via Positional Interpolation").
    Linear {
        /// The factor.
        factor: f32,
    },
    /// Long wavelengths divided, short ones kept, smooth between (Llama 3.1).
    Llama3 {
        /// What long wavelengths are stretched by.
        factor: f32,
        /// Wavelengths above `original / low_freq_factor` are stretched.
        low_freq_factor: f32,
        /// Wavelengths below `original / high_freq_factor` are kept.
        high_freq_factor: f32,
        /// The context that the model was first trained with.
        original_max_position_embeddings: f32,
    },
    /// "YaRN: Efficient Context Window Extension of Large Language Models".
    Yarn {
        /// The stretch of the context.
        factor: f32,
        /// The context that the model was first trained with.
        original_max_position_embeddings: f32,
        /// Rotations within the context from which on a dimension is kept.
        beta_fast: f32,
        /// Rotations within the context up to which a dimension is interpolated.
        beta_slow: f32,
        /// The attention's temperature correction.
        mscale: f32,
        /// The part of it that the model applies elsewhere.
        mscale_all_dim: f32,
    },
    /// "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens": one factor per
    /// frequency. As in mlx-lm the long factors are used at any length.
    Long {
        /// `[dims / 2]` factors of the wavelengths.
        long_factor: Vec<f32>,
        /// The context that the model was extended to.
        max_position_embeddings: f32,
        /// The context that the model was first trained with.
        original_max_position_embeddings: f32,
    },
    /// The fast frequencies alone are used, at those of the whole head; the other pairs stay as
    /// they are (Gemma 4).
    Proportional {
        /// What the wavelengths are stretched by.
        factor: f32,
        /// The part of the pairs that is rotated, up to 1.
        partial_rotary_factor: f32,
    },
}

/// The settings of a [`Rope`].
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// How many entries of a head are rotated.
    pub dims: i32,
    /// The base of the frequencies (`rope_theta`).
    pub base: f32,
    /// Neighbouring entries form a pair; otherwise the two halves do.
    pub traditional: bool,
    /// How long contexts are reached.
    pub scaling: RopeScaling,
}

/// Rotary position embedding ("RoFormer"), frequencies computed once.
#[derive(Clone, Debug)]
pub struct Rope {
    dims: i32,
    base: f32,
    traditional: bool,
    /// What positions are multiplied by.
    scale: f32,
    /// Wavelengths over 2 pi, `[dims / 2]`, where the base alone does not give them.
    freqs: Option<Array>,
    /// What the rotated entries are multiplied by.
    magnitude: f32,
    /// The same for the kernels.
    kernel: RopeKernel,
    /// Radians per position, `[dims / 2]`, for kernels on a GPU.
    inverse: Array,
}

impl Rope {
    /// The embedding of `config`.
    ///
    /// # Errors
    /// When a setting is out of range.
    pub fn new(config: &RopeConfig) -> Result<Self> {
        let RopeConfig {
            dims,
            base,
            traditional,
            scaling,
        } = config;
        let (dims, base, traditional) = (*dims, *base, *traditional);
        if dims <= 0 || dims % 2 != 0 {
            return Err(Error::setting("rope dims", "a positive even number", dims));
        }
        positive("rope_theta", base)?;
        let inverse: Arc<[f32]> = wavelengths(dims, base).map(f32::recip).collect();
        let mut rope = Self {
            inverse: Array::from_slice(&inverse, &[dims / 2])?,
            dims,
            base,
            traditional,
            scale: 1.0,
            freqs: None,
            magnitude: 1.0,
            kernel: RopeKernel {
                dims,
                traditional,
                inverse,
                scale: 1.0,
            },
        };
        match scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => {
                rope.scale = 1.0 / positive("factor", *factor)?;
                rope.kernel.scale = rope.scale;
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: original,
            } => {
                let low = original / positive("low_freq_factor", *low_freq_factor)?;
                let high = original / positive("high_freq_factor", *high_freq_factor)?;
                let factor = positive("factor", *factor)?;
                rope.set_freqs(wavelengths(dims, base).map(|freq| {
                    let wavelength = TAU * freq;
                    if wavelength > low {
                        freq * factor
                    } else if wavelength > high && wavelength < low {
                        let smooth = (original / wavelength - low_freq_factor)
                            / (high_freq_factor - low_freq_factor);
                        freq / ((1.0 - smooth) / factor + smooth)
                    } else {
                        freq
                    }
                }))?;
            }
            RopeScaling::Yarn {
                factor,
                original_max_position_embeddings: original,
                beta_fast,
                beta_slow,
                mscale,
                mscale_all_dim,
            } => {
                let factor = positive("factor", *factor)?;
                let original = positive("original_max_position_embeddings", *original)?;
                // The dimension that turns so many times within the original context.
                let dimension = |rotations: f32| {
                    dims as f32 * (original / (rotations * TAU)).ln() / (2.0 * base.ln())
                };
                let low = dimension(positive("beta_fast", *beta_fast)?)
                    .floor()
                    .max(0.0);
                let high = dimension(positive("beta_slow", *beta_slow)?)
                    .ceil()
                    .min(dims as f32 - 1.0);
                let high = if low == high { high + 0.001 } else { high };
                rope.set_freqs(wavelengths(dims, base).enumerate().map(|(index, extra)| {
                    let keep = 1.0 - ((index as f32 - low) / (high - low)).clamp(0.0, 1.0);
                    let inter = factor * extra;
                    inter * extra / (inter * keep + extra * (1.0 - keep))
                }))?;
                let magnitude = |mscale: f32| {
                    if factor <= 1.0 {
                        1.0
                    } else {
                        0.1 * mscale * factor.ln() + 1.0
                    }
                };
                rope.magnitude = magnitude(*mscale) / magnitude(*mscale_all_dim);
            }
            RopeScaling::Long {
                long_factor,
                max_position_embeddings,
                original_max_position_embeddings,
            } => {
                if long_factor.len() != dims as usize / 2 {
                    let expected = format!("{} numbers", dims / 2);
                    return Err(Error::setting("long_factor", expected, long_factor.len()));
                }
                let original = positive(
                    "original_max_position_embeddings",
                    *original_max_position_embeddings,
                )?;
                rope.set_freqs(
                    wavelengths(dims, base)
                        .zip(long_factor)
                        .map(|(freq, factor)| factor * freq),
                )?;
                let factor = max_position_embeddings / original;
                if factor > 1.0 {
                    rope.magnitude = (1.0 + factor.ln() / original.ln()).sqrt();
                }
            }
            RopeScaling::Proportional {
                factor,
                partial_rotary_factor: part,
            } => {
                let factor = positive("factor", *factor)?;
                if !(0.0..=1.0).contains(part) {
                    let expected = "a number from 0 to 1";
                    return Err(Error::setting("partial_rotary_factor", expected, part));
                }
                let rotated = (dims as f32 * part) as usize;
                rope.set_freqs(wavelengths(dims, base).enumerate().map(|(pair, freq)| {
                    // At an infinite wavelength nothing turns.
                    if 2 * pair < rotated {
                        factor * freq
                    } else {
                        f32::INFINITY
                    }
                }))?;
            }
        }
        Ok(rope)
    }

    /// The embedding of `config` at frequencies of its own, in radians per position: one for each
    /// pair of entries. The base and the scaling are not used.
    ///
    /// # Errors
    /// When a setting is out of range, or there is not a frequency for each pair.
    pub fn with_frequencies(config: &RopeConfig, frequencies: &[f32]) -> Result<Self> {
        let mut rope = Self::new(&RopeConfig {
            scaling: RopeScaling::None,
            ..config.clone()
        })?;
        if frequencies.len() != rope.kernel.inverse.len() {
            let expected = format!("{} numbers", rope.kernel.inverse.len());
            return Err(Error::setting("inv_freq", expected, frequencies.len()));
        }
        if let Some(wrong) = frequencies.iter().find(|frequency| !frequency.is_finite()) {
            return Err(Error::setting("inv_freq", "finite numbers", wrong));
        }
        rope.set_freqs(frequencies.iter().map(|frequency| frequency.recip()))?;
        Ok(rope)
    }

    fn set_freqs(&mut self, freqs: impl Iterator<Item = f32>) -> Result<()> {
        let freqs: Vec<f32> = freqs.collect();
        // An infinite wavelength is no rotation.
        self.kernel.inverse = freqs.iter().map(|freq| freq.recip()).collect();
        self.inverse = Array::from_slice(&self.kernel.inverse, &[freqs.len() as i32])?;
        self.freqs = Some(Array::from_slice(&freqs, &[freqs.len() as i32])?);
        Ok(())
    }

    /// Rotates `x` `[B, H, L, D]`, positions from `offset` on.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward(&self, x: &Array, offset: &Offset) -> Result<Array> {
        let rotation = Rotation {
            dims: self.dims,
            traditional: self.traditional,
            base: self.base,
            scale: self.scale,
            freqs: self.freqs.as_ref(),
        };
        let scaled = self.scaled(x)?;
        let x = scaled.as_ref().unwrap_or(x);
        if let Some(y) = host::rope(x, &self.kernel, offset.positions())? {
            return Ok(y);
        }
        Ok(match offset {
            Offset::Same(position) => x.rope(rotation, *position)?,
            Offset::PerRow(rows) => {
                let rows = Array::from_slice(rows, &[rows.len() as i32])?;
                x.rope_at(rotation, &rows)?
            }
        })
    }

    /// The rotations of `L` tokens that have several positions, one for each direction of an
    /// image or a video: `positions` are `L` each, and pair `i` of a head turns with those of
    /// direction `directions[i]`.
    ///
    /// # Errors
    /// When the lengths do not fit, or neighbouring entries form the pairs.
    pub fn rotations(&self, positions: &[Vec<i32>], directions: &[usize]) -> Result<Rotations> {
        let pairs = self.kernel.inverse.len();
        if self.traditional {
            return Err(Error::setting("rope", "pairs of two halves", "neighbours"));
        }
        let (count, length) = (positions.len(), positions.first().map_or(0, Vec::len));
        if directions.len() != pairs || directions.iter().any(|&which| which >= count) {
            let expected = format!("one of {count} directions for each of {pairs} pairs");
            let found = format!("{directions:?}");
            return Err(Error::setting("rope directions", expected, found));
        }
        if let Some(other) = positions.iter().find(|other| other.len() != length) {
            let expected = format!("{length} in each direction");
            return Err(Error::setting("positions", expected, other.len()));
        }
        let mut angles = Vec::with_capacity(length * pairs);
        let pairs_of = || directions.iter().zip(self.kernel.inverse.iter());
        for token in 0..length {
            let angle = |(&which, inverse)| {
                let positions: &Vec<i32> = &positions[which];
                positions[token] as f32 * self.kernel.scale * inverse
            };
            angles.extend(pairs_of().map(angle));
        }
        Rotations::new(&angles, pairs, self.magnitude)
    }

    /// What the kernels need, where the rotation is all there is to it.
    pub(crate) fn kernel(&self) -> Option<&RopeKernel> {
        (self.magnitude == 1.0).then_some(&self.kernel)
    }

    /// Radians per position `[dims / 2]`, what positions are multiplied by, and how many entries are
    /// rotated, where the two halves of them form the pairs and the rotation is all there is to it.
    pub(crate) fn halves(&self) -> Option<(&Array, f32, i32)> {
        let halves = !self.traditional && self.magnitude == 1.0;
        halves.then_some((&self.inverse, self.scale, self.dims))
    }

    /// `x` with the rotated entries multiplied by the magnitude, where it is not 1.
    fn scaled(&self, x: &Array) -> Result<Option<Array>> {
        if self.magnitude == 1.0 {
            return Ok(None);
        }
        let head_dim = x.dim(-1)?;
        if head_dim == self.dims {
            return Ok(Some(x.multiply(self.magnitude)?));
        }
        let factors: Vec<f32> = (0..head_dim)
            .map(|index| {
                if index < self.dims {
                    self.magnitude
                } else {
                    1.0
                }
            })
            .collect();
        let factors = Array::from_slice(&factors, &[head_dim])?.as_type(x.dtype())?;
        Ok(Some(x.multiply(&factors)?))
    }
}

/// `base^(2i / dims)` for each pair of entries.
fn wavelengths(dims: i32, base: f32) -> impl Iterator<Item = f32> {
    (0..dims / 2).map(move |pair| base.powf(2.0 * pair as f32 / dims as f32))
}

fn positive(name: &'static str, value: f32) -> Result<f32> {
    if value.is_finite() && value > 0.0 {
        Ok(value)
    } else {
        Err(Error::setting(name, "a positive number", value))
    }
}
