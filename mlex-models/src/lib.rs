//! Language models on [`mlex_core`] and [`mlex_nn`]: architectures, loading, text, generation.
//!
//! [`generate::Session`] loads a model and generates from any thread. Below it:
//! [`ModelFiles`] opens a directory or a GGUF file, [`load`] makes a [`Model`] of it, and
//! [`generate::TokenStream`] runs it on the calling thread.
#![forbid(unsafe_code)]

mod arch;
pub mod compute;
mod config;
mod convert;
mod error;
mod files;
mod fingerprint;
mod fp8;
pub mod generate;
mod gguf;
mod load;
pub mod media;
mod model;
mod quantization;
mod registry;
pub mod text;
pub mod towers;

pub use config::ModelConfig;
pub use convert::{ConvertOptions, Converted, LayoutSettings, Quantize, Recipe, convert};
pub use error::{Error, ErrorKind, Result, ResultExt};
pub use files::{ModelFiles, Tensors, total_bytes};
pub use load::{LoadProgress, LoadedModel, Outline, load, load_mtp, outline};
pub use model::{BlockModel, Input, MixedInput, Model, ModelInfo, MtpHead, Positions};
pub use registry::{build, model_types};
