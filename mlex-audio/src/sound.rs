//! What every sound file becomes first.

use crate::error::{Error, ErrorKind, Result};

/// The sampling rates that are handled.
const RATES: std::ops::RangeInclusive<u32> = 1000..=768_000;

/// Samples of one channel, of -1 to 1, at a rate.
#[derive(Debug, Clone, PartialEq)]
pub struct Sound {
    rate: u32,
    samples: Vec<f32>,
}

impl Sound {
    /// A sound of so many samples per second.
    ///
    /// # Errors
    ///
    /// If the rate is not within 1000 to 768000 Hz, or a sample is not finite.
    pub fn new(rate: u32, samples: Vec<f32>) -> Result<Self> {
        check_rate(rate)?;
        if let Some(index) = samples.iter().position(|sample| !sample.is_finite()) {
            let found = samples[index];
            return Err(ErrorKind::Sample { index, found }.into());
        }
        Ok(Self { rate, samples })
    }

    /// Samples per second.
    pub fn rate(&self) -> u32 {
        self.rate
    }

    /// The samples.
    pub fn samples(&self) -> &[f32] {
        &self.samples
    }

    /// The samples, which must be at `rate`.
    pub(crate) fn samples_at(&self, rate: u32) -> Result<&[f32]> {
        if self.rate == rate {
            return Ok(&self.samples);
        }
        let expected = rate.to_string();
        let found = self.rate;
        Err(ErrorKind::Rate { expected, found }.into())
    }
}

/// Refuses rates that are not handled.
pub(crate) fn check_rate(rate: u32) -> Result<(), Error> {
    if RATES.contains(&rate) {
        return Ok(());
    }
    let expected = format!("{} to {}", RATES.start(), RATES.end());
    let found = rate;
    Err(ErrorKind::Rate { expected, found }.into())
}
