//! Another sampling rate, with what the new one cannot hold filtered away.

use rubato::audioadapter_buffers::owned::InterleavedOwned;
use rubato::{Fft, FixedSync, Resampler, WindowFunction};

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
        let mut resampler = Fft::<f32>::new_custom(
            from as usize,
            rate as usize,
            block(from, rate),
            1,
            1,
            WindowFunction::BlackmanHarris2,
            FixedSync::Both,
        )
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

/// How many samples are transformed at once: an even number of the shortest stretch that is
/// whole at both rates. The filter is centred on half of it, and would be off by half a sample.
fn block(from: u32, to: u32) -> usize {
    let (mut a, mut b) = (from, to);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    let stretch = 2 * (from / a) as usize;
    stretch * CHUNK.div_ceil(stretch)
}
