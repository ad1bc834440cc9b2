//! The logarithm of a mel spectrogram, as Gemma 4's audio encoder takes it.
//!
//! Source: `Gemma4AudioFeatureExtractor` of transformers and mlx-vlm.

use std::f64::consts::PI;
use std::sync::Arc;

use realfft::{RealFftPlanner, RealToComplex};
use serde::Deserialize;
use serde_json::Value;

use crate::error::{Error, ErrorKind, Result};
use crate::sound::{Sound, check_rate};

/// The most samples that are listened to: 30 seconds at 16 kHz.
const MAX_SAMPLES: usize = 480_000;

/// Samples are filled up with silence to a multiple of this.
const MULTIPLE: usize = 128;

/// What `feature_extractor` in a checkpoint's `processor_config.json` says. Fields that are not
/// there have the default of the Python feature extractor.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default)]
pub struct MelConfig {
    /// How many mel bins there are.
    pub feature_size: usize,
    /// Samples per second.
    pub sampling_rate: u32,
    /// Milliseconds of a frame.
    pub frame_length_ms: f64,
    /// Milliseconds from one frame to the next.
    pub hop_length_ms: f64,
    /// Where the first mel bin begins, in Hz.
    pub min_frequency: f64,
    /// Where the last mel bin ends, in Hz.
    pub max_frequency: f64,
    /// How much of the sample before is taken off each one.
    pub preemphasis: f64,
    /// Whether the first sample of a frame is only scaled.
    pub preemphasis_htk_flavor: bool,
    /// Whether the transform is twice as long as it must be.
    pub fft_overdrive: bool,
    /// Noise that is added; only 0 is handled.
    pub dither: f64,
    /// What the samples are multiplied by.
    pub input_scale_factor: f64,
    /// What is added before the logarithm.
    pub mel_floor: f64,
    /// What is taken off each bin.
    pub per_bin_mean: Option<Vec<f64>>,
    /// What each bin is divided by.
    pub per_bin_stddev: Option<Vec<f64>>,
}

impl Default for MelConfig {
    fn default() -> Self {
        Self {
            feature_size: 128,
            sampling_rate: 16_000,
            frame_length_ms: 20.0,
            hop_length_ms: 10.0,
            min_frequency: 0.0,
            max_frequency: 8000.0,
            preemphasis: 0.0,
            preemphasis_htk_flavor: true,
            fft_overdrive: false,
            dither: 0.0,
            input_scale_factor: 1.0,
            mel_floor: 1e-3,
            per_bin_mean: None,
            per_bin_stddev: None,
        }
    }
}

impl MelConfig {
    /// The configuration in `feature_extractor` of `processor_config.json`.
    ///
    /// # Errors
    ///
    /// If a field is of the wrong type.
    pub fn from_json(value: &Value) -> Result<Self> {
        serde_path_to_error::deserialize(value).map_err(|error| {
            ErrorKind::Json {
                field: error.path().to_string(),
                cause: error.inner().to_string(),
            }
            .into()
        })
    }

    /// Samples of so many milliseconds.
    fn samples(&self, ms: f64) -> usize {
        (f64::from(self.sampling_rate) * ms / 1000.0).round_ties_even() as usize
    }

    fn validate(&self) -> Result<()> {
        let check = |valid: bool, field: &str, expected: &str, found: String| {
            if valid {
                return Ok(());
            }
            Err(Error::new(ErrorKind::Config {
                field: field.to_owned(),
                expected: expected.to_owned(),
                found,
            }))
        };
        check_rate(self.sampling_rate)?;
        let bins = self.feature_size;
        let text = bins.to_string();
        check(
            (1..=4096).contains(&bins),
            "feature_size",
            "1 to 4096",
            text,
        )?;
        for (field, ms) in [
            ("frame_length_ms", self.frame_length_ms),
            ("hop_length_ms", self.hop_length_ms),
        ] {
            let valid = ms > 0.0 && ms <= 1000.0 && self.samples(ms) > 0;
            check(
                valid,
                field,
                "a number above 0 and up to 1000",
                ms.to_string(),
            )?;
        }
        let (min, max) = (self.min_frequency, self.max_frequency);
        let text = format!("{min} to {max}");
        check(
            0.0 <= min && min < max && max.is_finite(),
            "max_frequency",
            "frequencies of 0 and above, the lower one first",
            text,
        )?;
        check(self.dither == 0.0, "dither", "0", self.dither.to_string())?;
        let floor = self.mel_floor;
        let valid = floor > 0.0 && floor.is_finite();
        check(valid, "mel_floor", "a number above 0", floor.to_string())?;
        for (field, number) in [
            ("preemphasis", self.preemphasis),
            ("input_scale_factor", self.input_scale_factor),
        ] {
            check(
                number.is_finite(),
                field,
                "a finite number",
                number.to_string(),
            )?;
        }
        for (field, list) in [
            ("per_bin_mean", &self.per_bin_mean),
            ("per_bin_stddev", &self.per_bin_stddev),
        ] {
            let found = list.as_ref().map_or(bins, Vec::len);
            check(
                found == bins,
                field,
                &format!("{bins} numbers"),
                found.to_string(),
            )?;
        }
        Ok(())
    }
}

/// What Gemma 4's audio encoder takes of a sound.
#[derive(Debug, Clone, PartialEq)]
pub struct MelFeatures {
    /// Values `[frames, bins]`. Frames from `valid` on are zero.
    pub values: Vec<f32>,
    /// How many mel bins there are.
    pub bins: usize,
    /// How many frames hold nothing but the sound; the others hold silence that was added.
    pub valid: usize,
    /// How many tokens of the language model it becomes.
    pub tokens: usize,
}

/// Computes [`MelFeatures`].
#[derive(Clone)]
pub struct MelExtractor {
    config: MelConfig,
    frame: usize,
    hop: usize,
    window: Vec<f32>,
    fft: Arc<dyn RealToComplex<f64>>,
    /// For each mel bin its first frequency and the weights from there on.
    filters: Vec<(usize, Vec<f64>)>,
}

impl std::fmt::Debug for MelExtractor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MelExtractor")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl MelExtractor {
    /// The extractor of a configuration.
    ///
    /// # Errors
    ///
    /// If a field of it is out of bounds.
    pub fn new(config: MelConfig) -> Result<Self> {
        config.validate()?;
        let frame = config.samples(config.frame_length_ms);
        let mut length = frame.next_power_of_two();
        if config.fft_overdrive {
            length *= 2;
        }
        // A periodic Hann window.
        let hann = |n: usize| 0.5 - 0.5 * (2.0 * PI * n as f64 / frame as f64).cos();
        Ok(Self {
            frame,
            hop: config.samples(config.hop_length_ms),
            window: (0..frame).map(|n| hann(n) as f32).collect(),
            fft: RealFftPlanner::new().plan_fft_forward(length),
            filters: filters(&config, length),
            config,
        })
    }

    /// The samples per second that it takes.
    pub fn sampling_rate(&self) -> u32 {
        self.config.sampling_rate
    }

    /// The features of a sound, of its first 480000 samples.
    ///
    /// # Errors
    ///
    /// If the sound has another rate, or is shorter than half a frame.
    pub fn features(&self, sound: &Sound) -> Result<MelFeatures> {
        let samples = sound.samples_at(self.config.sampling_rate)?;
        let samples = &samples[..samples.len().min(MAX_SAMPLES)];
        // Half a frame of silence before, so that the first frame is centred at the beginning,
        // and one sample more than a frame for each.
        let before = self.frame / 2;
        let frames = |length: usize| {
            let length = (length + before).checked_sub(self.frame + 1);
            length.map_or(0, |length| length / self.hop + 1)
        };
        let valid = frames(samples.len());
        if valid == 0 {
            return Err(ErrorKind::TooShort {
                least: self.frame + 1 - before,
                found: samples.len(),
            }
            .into());
        }
        let scale = self.config.input_scale_factor as f32;
        let mut padded = vec![0.0_f32; before];
        padded.extend(samples.iter().map(|sample| sample * scale));
        let bins = self.config.feature_size;
        let mut values = vec![0.0; frames(samples.len().next_multiple_of(MULTIPLE)) * bins];
        let mut input = self.fft.make_input_vec();
        let mut spectrum = self.fft.make_output_vec();
        let mut scratch = self.fft.make_scratch_vec();
        let mut magnitudes = vec![0.0; spectrum.len()];
        for (n, out) in values.chunks_exact_mut(bins).take(valid).enumerate() {
            let start = n * self.hop;
            self.window(&padded[start..=start + self.frame], &mut input);
            // The buffers are the transform's own, so it cannot fail.
            let _ = self
                .fft
                .process_with_scratch(&mut input, &mut spectrum, &mut scratch);
            for (magnitude, value) in magnitudes.iter_mut().zip(&spectrum) {
                *magnitude = value.norm();
            }
            self.bins(&magnitudes, out);
        }
        Ok(MelFeatures {
            values,
            bins,
            valid,
            // The encoder halves the frames twice, and keeps those that start at a valid one.
            tokens: valid.div_ceil(4),
        })
    }

    /// One frame, with emphasis and window, followed by zeros; it has a sample more at its end.
    fn window(&self, frame: &[f32], input: &mut [f64]) {
        input.fill(0.0);
        let emphasis = self.config.preemphasis as f32;
        for (n, (out, window)) in input.iter_mut().zip(&self.window).enumerate() {
            let sample = match (emphasis > 0.0, self.config.preemphasis_htk_flavor) {
                (false, _) => frame[n],
                (true, true) if n == 0 => frame[0] * (1.0 - emphasis),
                (true, true) => frame[n] - emphasis * frame[n - 1],
                (true, false) => frame[n + 1] - emphasis * frame[n],
            };
            *out = f64::from(sample * window);
        }
    }

    fn bins(&self, magnitudes: &[f64], out: &mut [f32]) {
        let config = &self.config;
        for (bin, (out, (start, weights))) in out.iter_mut().zip(&self.filters).enumerate() {
            let pairs = magnitudes[*start..].iter().zip(weights);
            let sum: f64 = pairs.map(|(magnitude, weight)| magnitude * weight).sum();
            let mut value = (sum + config.mel_floor).ln();
            if let Some(mean) = &config.per_bin_mean {
                value -= mean[bin];
            }
            if let Some(deviation) = &config.per_bin_stddev {
                value /= deviation[bin];
            }
            *out = value as f32;
        }
    }
}

/// Triangles whose corners are evenly spaced on the mel scale of HTK, over the frequencies of a
/// transform of this length.
fn filters(config: &MelConfig, length: usize) -> Vec<(usize, Vec<f64>)> {
    let mel = |hertz: f64| 2595.0 * (1.0 + hertz / 700.0).log10();
    let hertz = |mel: f64| 700.0 * (10_f64.powf(mel / 2595.0) - 1.0);
    let (low, high) = (mel(config.min_frequency), mel(config.max_frequency));
    let step = (high - low) / (config.feature_size + 1) as f64;
    let corner = |n: usize| hertz(low + step * n as f64);
    let frequencies = length / 2 + 1;
    let spacing = f64::from(config.sampling_rate / 2) / (frequencies - 1) as f64;
    let triangle = |bin: usize| {
        let [left, top, right] = [corner(bin), corner(bin + 1), corner(bin + 2)];
        let weight = |n: usize| {
            let frequency = n as f64 * spacing;
            let rising = (frequency - left) / (top - left);
            let falling = (right - frequency) / (right - top);
            rising.min(falling).max(0.0)
        };
        let start = (0..frequencies).find(|&n| weight(n) > 0.0);
        let start = start.unwrap_or(frequencies);
        let rest = (start..frequencies).map(weight);
        (start, rest.take_while(|&weight| weight > 0.0).collect())
    };
    (0..config.feature_size).map(triangle).collect()
}
