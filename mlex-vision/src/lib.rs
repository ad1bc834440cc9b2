//! Images and video frames as the patches that vision towers take.
//!
//! A file becomes a [`Picture`] (8-bit RGB, upright), a picture the patches of a model family:
//! [`QwenVision`] for Qwen2.5-VL to Qwen3.5, [`GemmaVision`] for Gemma 4. A [`Video`] gives frames
//! one at a time, so that a long one is never in memory as a whole. The values are those of the
//! families' Python processors; resampling gives Pillow's bytes.
//!
//! It knows nothing of MLX and can be used alone.
//!
//! ```
//! use mlex_vision::{Picture, ProcessorFiles, QwenVision};
//!
//! # fn main() -> mlex_vision::Result<()> {
//! let qwen = QwenVision::new(&ProcessorFiles::default())?;
//! let picture = Picture::new(64, 32, vec![127; 64 * 32 * 3])?;
//! let input = qwen.image(&picture)?;
//! assert_eq!(input.grid, [1, 4, 6]);
//! assert_eq!(input.patches.len(), 4 * 6 * input.patch_len);
//! assert_eq!(input.tokens, 6);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod animation;
mod config;
mod decode;
mod error;
mod ffmpeg;
mod gemma;
mod jpeg;
mod limits;
mod normalize;
mod picture;
mod qwen;
mod resample;
mod sampling;
mod video;

pub use config::ProcessorFiles;
pub use error::{Error, ErrorKind, Result};
pub use ffmpeg::VideoPrograms;
pub use gemma::{GemmaInput, GemmaVideo, GemmaVision};
pub use limits::Limits;
pub use picture::Picture;
pub use qwen::{QwenInput, QwenVideo, QwenVision};
pub use resample::{Filter, resize};
pub use sampling::FrameSampling;
pub use video::{Video, VideoInfo};
