//! Sound files as the features that audio towers take.
//!
//! A file becomes a [`Sound`], mono samples at a rate, and a sound at 16 kHz what a model takes:
//! [`MelExtractor`] for Gemma 4's audio encoder, [`RawExtractor`] for its variants without one.
//! The values are those of the Python feature extractors.
//!
//! It knows nothing of MLX and can be used alone.
//!
//! ```
//! use mlex_audio::{MelConfig, MelExtractor, Sound};
//!
//! # fn main() -> mlex_audio::Result<()> {
//! let extractor = MelExtractor::new(MelConfig::default())?;
//! let second = Sound::new(8000, vec![0.0; 8000])?.resampled(extractor.sampling_rate())?;
//! let features = extractor.features(&second)?;
//! assert_eq!(features.bins, 128);
//! assert_eq!((features.valid, features.tokens), (99, 25));
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod decode;
mod error;
mod limits;
mod mel;
mod raw;
mod resample;
mod sound;

pub use error::{Error, ErrorKind, Result};
pub use limits::Limits;
pub use mel::{MelConfig, MelExtractor, MelFeatures};
pub use raw::{RawExtractor, RawFeatures};
pub use sound::Sound;
