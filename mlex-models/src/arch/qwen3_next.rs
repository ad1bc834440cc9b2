//! Qwen3-Next: gated delta nets with a layer of gated attention in between, and experts.
//!
//! Reference: mlx-lm `models/qwen3_next.py`.

use mlex_nn::{AttentionConfig, GatedDeltaConfig, Weights};
use serde::Deserialize;

use super::mixed::{LayerKind, Mixed, MixedConfig, MixerKind, MlpKind};
use super::mtp::Mtp;
use super::qwen3_moe::MoeFields;
use crate::config::{ModelConfig, RopeFields, check};
use crate::model::MtpHead;
use crate::registry::Entry;
use crate::{Error, Model, Result};

pub(crate) const ENTRY: Entry = Entry {
    model_types: &["qwen3_next"],
    build,
};

/// The fields about the gated delta layers.
#[derive(Debug, Deserialize)]
pub(super) struct DeltaFields {
    hidden_size: i32,
    rms_norm_eps: f32,
    linear_num_value_heads: i32,
    linear_num_key_heads: i32,
    linear_key_head_dim: i32,
    linear_value_head_dim: i32,
    linear_conv_kernel_dim: i32,
}

impl DeltaFields {
    pub(super) fn layer(&self) -> GatedDeltaConfig {
        GatedDeltaConfig {
            hidden_size: self.hidden_size,
            num_key_heads: self.linear_num_key_heads,
            num_value_heads: self.linear_num_value_heads,
            key_head_dim: self.linear_key_head_dim,
            value_head_dim: self.linear_value_head_dim,
            conv_kernel: self.linear_conv_kernel_dim,
            norm_eps: self.rms_norm_eps,
        }
    }
}

/// The fields of config.json.
#[derive(Debug, Deserialize)]
struct Config {
    model_type: String,
    hidden_size: i32,
    num_hidden_layers: i32,
    intermediate_size: i32,
    num_attention_heads: i32,
    rms_norm_eps: f32,
    vocab_size: i32,
    num_key_value_heads: i32,
    head_dim: i32,
    partial_rotary_factor: f32,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default = "full_attention_interval")]
    full_attention_interval: i32,
}

/// Every so many layers one has attention.
pub(super) fn full_attention_interval() -> i32 {
    4
}

/// The layers: attention in every `interval`th, a gated delta net in the others.
pub(super) fn layers(mlps: Vec<MlpKind>, interval: i32) -> Result<Vec<LayerKind>> {
    check("full_attention_interval", interval, 1..=i32::MAX)?;
    let layer = |(index, mlp): (usize, MlpKind)| LayerKind {
        mixer: if (index as i64 + 1) % i64::from(interval) == 0 {
            MixerKind::GatedAttention
        } else {
            MixerKind::GatedDelta
        },
        mlp,
    };
    Ok(mlps.into_iter().enumerate().map(layer).collect())
}

/// The part of a head that is rotated.
pub(super) fn rotated(head_dim: i32, part: f32) -> i32 {
    (head_dim as f32 * part) as i32
}

/// Brings the weights of Hugging Face's checkpoints into the form of mlx-lm's, and drops those
/// that are of no use yet. Where convolutions are `[C, 1, K]`, norms over the stream and over
/// heads are stored as `w` and used as `1 + w`; the norm within a gated delta net is not.
pub(super) fn adapt(weights: &Weights, model: &Weights) {
    // Heads for speculative decoding.
    weights.discard(|path| path.contains("mtp."));
    if !is_published(weights) {
        return;
    }
    let last = model.path("norm.weight");
    let shifted = move |path: &str| {
        let names = [
            ".input_layernorm.weight",
            ".post_attention_layernorm.weight",
            ".q_norm.weight",
            ".k_norm.weight",
        ];
        path == last || names.iter().any(|name| path.ends_with(name))
    };
    weights.adapt(shifted, <[i32]>::to_vec, |weight| weight.add(1.0));
    let is_convolution = |path: &str| path.ends_with("conv1d.weight");
    let moved = |shape: &[i32]| match shape {
        &[channels, one, kernel] => vec![channels, kernel, one],
        other => other.to_vec(),
    };
    weights.adapt(is_convolution, moved, |weight| weight.move_axis(2, 1));
}

/// Whether they are Hugging Face's.
fn is_published(weights: &Weights) -> bool {
    weights.any(|path, shape| {
        path.ends_with("conv1d.weight") && shape.last().is_some_and(|&last| last != 1)
    })
}

/// The weights of the head for further tokens, in the form of the model's; all others are dropped.
///
/// # Errors
/// When there is none.
pub(super) fn mtp_weights(weights: &Weights) -> Result<Weights> {
    if !weights.any(|path, _| path == "mtp.fc.weight") {
        return Err(Error::missing("the tensors of an MTP head (mtp.fc.weight)"));
    }
    let published = is_published(weights);
    weights.discard(|path| !path.starts_with("mtp."));
    if published {
        weights.transform(|path| path.contains("norm"), |weight| weight.add(1.0));
    }
    Ok(weights.pp("mtp"))
}

/// The head for further tokens.
pub(crate) fn build_mtp(config: &ModelConfig, weights: &Weights) -> Result<Box<dyn MtpHead>> {
    let weights = mtp_weights(weights)?;
    Ok(Box::new(Mtp::load(&settings(config)?, &weights)?))
}

fn build(config: &ModelConfig, weights: &Weights) -> Result<Box<dyn Model>> {
    let mixed = settings(config)?;
    let model = weights.pp("model");
    adapt(weights, &model);
    let head = weights.pp("lm_head");
    Ok(Box::new(Mixed::load(&mixed, &model, &head)?))
}

fn settings(config: &ModelConfig) -> Result<MixedConfig> {
    let (experts, rope): (MoeFields, RopeFields) = (config.parse()?, config.parse()?);
    let delta: DeltaFields = config.parse()?;
    let config: Config = config.parse()?;
    let mlps = experts.some_layers(config.num_hidden_layers, config.intermediate_size, true)?;
    let dims = rotated(config.head_dim, config.partial_rotary_factor);
    Ok(MixedConfig {
        rope: rope.rope_required(dims)?,
        directions: None,
        deepstack: 0,
        model_type: config.model_type,
        vocab_size: config.vocab_size,
        rms_norm_eps: config.rms_norm_eps,
        attention: AttentionConfig {
            hidden_size: config.hidden_size,
            num_heads: config.num_attention_heads,
            num_kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            qkv_bias: config.attention_bias,
            o_bias: config.attention_bias,
            qk_norm_eps: Some(config.rms_norm_eps),
        },
        delta: Some(delta.layer()),
        layers: layers(mlps, config.full_attention_interval)?,
        tied: config.tie_word_embeddings,
        max_context: rope.max_position_embeddings(),
    })
}
