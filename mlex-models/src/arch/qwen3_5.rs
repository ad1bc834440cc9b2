//! Qwen3.5 and 3.6: as Qwen3-Next, with the projections of the gated delta nets apart, dense or
//! with experts in every layer. The language model may be a part of one that sees.
//!
//! Its rotary embedding has three positions (time, height, width), which for text are one, so
//! that there it is the usual one over a part of each head.
//!
//! Reference: mlx-lm `models/qwen3_5.py` and `models/qwen3_5_moe.py`. Whether norms are stored as
//! `w` or `1 + w` is told by the convolutions alone, as in its versions after 0.31.3; before,
//! weights of an MTP head said so too.

use mlex_nn::{AttentionConfig, Weights};
use serde::Deserialize;

use super::mixed::{Mixed, MixedConfig, MlpKind};
use super::mtp::Mtp;
use super::qwen3_moe::MoeFields;
use super::qwen3_next::{
    DeltaFields, adapt, full_attention_interval, layers, mtp_weights, rotated,
};
use super::{language, mrope};
use crate::config::{ModelConfig, RopeFields, check_layers, head_dim};
use crate::model::MtpHead;
use crate::registry::Entry;
use crate::{Error, Model, Result};

pub(crate) const ENTRY: Entry = Entry {
    model_types: &["qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"],
    build,
};

/// The fields of config.json, or of its `text_config`.
#[derive(Debug, Deserialize)]
struct Config {
    hidden_size: i32,
    num_hidden_layers: i32,
    /// Of layers without experts.
    intermediate_size: Option<i32>,
    num_attention_heads: i32,
    rms_norm_eps: f32,
    vocab_size: i32,
    num_key_value_heads: i32,
    head_dim: Option<i32>,
    #[serde(default)]
    attention_bias: bool,
    tie_word_embeddings: Option<bool>,
    full_attention_interval: Option<i32>,
    #[serde(default)]
    rope_parameters: RotaryPart,
}

#[derive(Debug, Default, Deserialize)]
struct RotaryPart {
    partial_rotary_factor: Option<f32>,
    mrope_section: Option<[i32; 3]>,
}

/// How many pairs turn with time, height and width where the config does not say.
const MROPE_SECTION: [i32; 3] = [11, 11, 10];

/// The base of the rotary embedding where the config has none.
const ROPE_THETA: f32 = 100_000.0;
/// The part of a head that is rotated where the config does not say.
const ROTARY_PART: f32 = 0.25;

/// The head for further tokens.
pub(crate) fn build_mtp(config: &ModelConfig, weights: &Weights) -> Result<Box<dyn MtpHead>> {
    let weights = mtp_weights(weights)?;
    Ok(Box::new(Mtp::load(&mixed(config)?, &weights)?))
}

/// The settings of the language model.
fn mixed(config: &ModelConfig) -> Result<MixedConfig> {
    Ok(MixedConfig {
        model_type: config.model_type()?.to_owned(),
        ..language::settings(config, settings)?
    })
}

fn build(config: &ModelConfig, weights: &Weights) -> Result<Box<dyn Model>> {
    let mixed = mixed(config)?;
    let (model, head) = language::places(weights);
    language::discard_vision(weights);
    adapt(weights, &model);
    Ok(Box::new(Mixed::load(&mixed, &model, &head)?))
}

fn settings(config: &ModelConfig, outer_tied: Option<bool>) -> Result<MixedConfig> {
    let (experts, rope): (MoeFields, RopeFields) = (config.parse()?, config.parse()?);
    let delta: DeltaFields = config.parse()?;
    let config: Config = config.parse()?;
    check_layers("num_hidden_layers", config.num_hidden_layers)?;
    let mlp = if experts.num_experts > 0 {
        MlpKind::Experts(experts.experts(true, true)?)
    } else {
        let missing = || Error::missing("field intermediate_size");
        MlpKind::Dense(config.intermediate_size.ok_or_else(missing)?)
    };
    let head_dim = match config.head_dim {
        Some(head_dim) => head_dim,
        None => head_dim(config.hidden_size, config.num_attention_heads)?,
    };
    let part = config.rope_parameters.partial_rotary_factor;
    let dims = rotated(head_dim, part.unwrap_or(ROTARY_PART));
    let section = config
        .rope_parameters
        .mrope_section
        .unwrap_or(MROPE_SECTION);
    let interval = config.full_attention_interval;
    Ok(MixedConfig {
        rope: rope.rope(dims, ROPE_THETA)?,
        directions: Some(mrope::interleaved(dims / 2, section)),
        deepstack: 0,
        model_type: String::new(),
        vocab_size: config.vocab_size,
        rms_norm_eps: config.rms_norm_eps,
        attention: AttentionConfig {
            hidden_size: config.hidden_size,
            num_heads: config.num_attention_heads,
            num_kv_heads: config.num_key_value_heads,
            head_dim,
            qkv_bias: config.attention_bias,
            o_bias: config.attention_bias,
            qk_norm_eps: Some(config.rms_norm_eps),
        },
        delta: Some(delta.layer()),
        layers: layers(
            vec![mlp; config.num_hidden_layers as usize],
            interval.unwrap_or_else(full_attention_interval),
        )?,
        tied: config.tie_word_embeddings.or(outer_tied).unwrap_or(false),
        max_context: rope.max_position_embeddings(),
    })
}
