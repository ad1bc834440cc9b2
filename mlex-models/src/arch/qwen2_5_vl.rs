//! The language model of Qwen2.5-VL: Qwen2 whose rotary embedding has three positions (time, height,
//! width).
//!
//! Reference: mlx-vlm `models/qwen2_5_vl`, whose defaults are taken.

use mlex_nn::{AttentionConfig, Weights};
use serde::Deserialize;

use super::mixed::{LayerKind, Mixed, MixedConfig, MixerKind, MlpKind};
use super::{language, mrope};
use crate::config::{ModelConfig, RopeFields, check_layers, head_dim};
use crate::registry::Entry;
use crate::{Model, Result};

pub(crate) const ENTRY: Entry = Entry {
    model_types: &["qwen2_5_vl"],
    build,
};

/// The fields of config.json, or of its `text_config`.
#[derive(Debug, Deserialize)]
struct Config {
    hidden_size: i32,
    num_hidden_layers: i32,
    intermediate_size: i32,
    num_attention_heads: i32,
    rms_norm_eps: f32,
    vocab_size: i32,
    num_key_value_heads: Option<i32>,
    tie_word_embeddings: Option<bool>,
}

/// How many pairs turn with time, height and width where the config does not say.
const MROPE_SECTION: [i32; 3] = [24, 20, 20];

fn build(config: &ModelConfig, weights: &Weights) -> Result<Box<dyn Model>> {
    let mixed = MixedConfig {
        model_type: config.model_type()?.to_owned(),
        ..language::settings(config, settings)?
    };
    let (model, head) = language::places(weights);
    language::discard_vision(weights);
    Ok(Box::new(Mixed::load(&mixed, &model, &head)?))
}

fn settings(config: &ModelConfig, outer_tied: Option<bool>) -> Result<MixedConfig> {
    let (turns, rope): (mrope::MropeFields, RopeFields) = (config.parse()?, config.parse()?);
    let config: Config = config.parse()?;
    check_layers("num_hidden_layers", config.num_hidden_layers)?;
    let heads = config.num_attention_heads;
    let head_dim = head_dim(config.hidden_size, heads)?;
    let section = turns.section().unwrap_or(MROPE_SECTION);
    let layer = LayerKind {
        mixer: MixerKind::Attention,
        mlp: MlpKind::Dense(config.intermediate_size),
    };
    Ok(MixedConfig {
        rope: rope.rope(head_dim, 1e6)?,
        directions: Some(mrope::sectioned(head_dim / 2, section)?),
        deepstack: 0,
        model_type: String::new(),
        vocab_size: config.vocab_size,
        rms_norm_eps: config.rms_norm_eps,
        attention: AttentionConfig {
            hidden_size: config.hidden_size,
            num_heads: heads,
            num_kv_heads: config.num_key_value_heads.unwrap_or(heads),
            head_dim,
            qkv_bias: true,
            o_bias: false,
            qk_norm_eps: None,
        },
        delta: None,
        layers: vec![layer; config.num_hidden_layers as usize],
        tied: config.tie_word_embeddings.or(outer_tied).unwrap_or(true),
        max_context: rope.max_position_embeddings(),
    })
}
