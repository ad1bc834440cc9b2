//! Neural network layers over [`mlex_core`], and the caches that decoding needs.
//!
//! A layer takes its tensors from [`Weights`] by their names in the checkpoint, dense or
//! quantized alike, and computes with `forward(&self, ..)`. State lives in [`cache`].
#![forbid(unsafe_code)]

pub mod activation;
mod adapt;
pub mod attention;
pub mod cache;
mod canon;
mod chain;
mod clip;
mod conv;
mod cuda;
pub mod dispatch;
mod embedding;
mod error;
mod gated_attention;
pub mod gated_delta;
mod gpu;
mod host;
mod linear;
pub mod mamba2;
mod moe;
mod norm;
pub mod quant;
mod residual;
mod rope;
mod rotations;
mod softcap;
mod weights;

pub use activation::{Activation, GatedMlp};
pub use attention::{AttentionConfig, SelfAttention};
pub use cache::{
    Cache, Checkpoint, ConvCache, KvCache, KvPacking, KvQuantization, KvState, LayerCache,
    LayerState, Mask, Offset, RecurrentCache, RecurrentState,
};
pub use canon::{Canon, CanonConfig};
pub use clip::clip;
pub use conv::CausalConv;
pub use embedding::Embedding;
pub use error::{Error, ErrorKind, Misshapen, Mistyped, Result, WeightErrors};
pub use gated_attention::GatedAttention;
pub use gated_delta::{GatedDeltaConfig, GatedDeltaNet};
pub use host::{Attend, CacheUpdate, Replay, Sequence, Value};
pub use linear::{Linear, Matrix};
pub use mamba2::{Mamba2, Mamba2Config};
pub use moe::{ExpertGroups, Experts, MoeConfig, MoeMlp};
pub use norm::{LayerNorm, RmsNorm};
pub use quant::QuantizationConfig;
pub use residual::{add_normed, record_add_normed};
pub use rope::{Rope, RopeConfig, RopeScaling};
pub use rotations::Rotations;
pub use softcap::softcap;
pub use weights::{LazyTensor, OnLoad, Taken, Weights};
