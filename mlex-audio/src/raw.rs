//! Samples as they are, as Gemma 4's variants without an encoder take them.
//!
//! Source: `Gemma4UnifiedAudioFeatureExtractor` of transformers and mlx-vlm.

use crate::error::{ErrorKind, Result};
use crate::sound::{Sound, check_rate};

/// What a model without an audio encoder takes of a sound.
#[derive(Debug, Clone, PartialEq)]
pub struct RawFeatures {
    /// Samples `[tokens, samples_per_token]`; the last token is filled up with silence.
    pub values: Vec<f32>,
    /// How many samples one token has.
    pub samples_per_token: usize,
    /// How many tokens of the language model it becomes.
    pub tokens: usize,
}

/// Computes [`RawFeatures`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawExtractor {
    sampling_rate: u32,
    samples_per_token: usize,
}

impl Default for RawExtractor {
    fn default() -> Self {
        Self {
            sampling_rate: 16_000,
            samples_per_token: 640,
        }
    }
}

impl RawExtractor {
    /// An extractor of `sampling_rate` and `audio_samples_per_token` of a checkpoint's
    /// `feature_extractor`.
    ///
    /// # Errors
    ///
    /// If the rate is not handled, or a token has no or more than 2^20 samples.
    pub fn new(sampling_rate: u32, samples_per_token: usize) -> Result<Self> {
        check_rate(sampling_rate)?;
        if !(1..=1 << 20).contains(&samples_per_token) {
            return Err(ErrorKind::Config {
                field: "audio_samples_per_token".to_owned(),
                expected: "1 to 1048576".to_owned(),
                found: samples_per_token.to_string(),
            }
            .into());
        }
        Ok(Self {
            sampling_rate,
            samples_per_token,
        })
    }

    /// The samples per second that it takes.
    pub fn sampling_rate(&self) -> u32 {
        self.sampling_rate
    }

    /// The features of a sound.
    ///
    /// # Errors
    ///
    /// If the sound has another rate, or no samples.
    pub fn features(&self, sound: &Sound) -> Result<RawFeatures> {
        let samples = sound.samples_at(self.sampling_rate)?;
        if samples.is_empty() {
            return Err(ErrorKind::TooShort { least: 1, found: 0 }.into());
        }
        let samples_per_token = self.samples_per_token;
        let tokens = samples.len().div_ceil(samples_per_token);
        let mut values = samples.to_vec();
        values.resize(tokens * samples_per_token, 0.0);
        Ok(RawFeatures {
            values,
            samples_per_token,
            tokens,
        })
    }
}
