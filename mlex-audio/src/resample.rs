//! Another sampling rate, with what the new one cannot hold filtered away.

use rubato::audioadapter_buffers::owned::InterleavedOwned;
use rubato::{Fft, FixedSync, Resampler};

use crate::error::{Error, ErrorKind, Result};
use crate::sound::{Sound, check_rate};

/// How many samples are worked on at once, about.
const CHUNK: usize = 1024;

impl Sound {
    /// The sound at another rate.
    ///
    /// # Errors
    ///
    /// If the rate is not within 1000 to 768000 Hz.
    pub fn resampled(self, rate: u32) -> Result<Self> {
        check_rate(rate)?;
        if self.rate() == rate || self.samples().is_empty() {
            return Self::new(rate, self.samples().to_vec());
        }
        let from = self.rate();
        let failed = |cause: String| {
            Error::new(ErrorKind::Resample {
                from,
                to: rate,
                cause,
            })
        };
        let mut resampler =
            Fft::<f32>::new(from as usize, rate as usize, CHUNK, 1, FixedSync::Both)
                .map_err(|error| failed(error.to_string()))?;
        let length = self.samples().len();
        let input = InterleavedOwned::new_from(self.samples().to_vec(), 1, length)
            .map_err(|error| failed(error.to_string()))?;
        let output = resampler
            .process_all(&input, length, None)
            .map_err(|error| failed(error.to_string()))?;
        Self::new(rate, output.take_data())
    }
}
