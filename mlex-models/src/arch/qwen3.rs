//! Qwen3: Qwen2 without biases, with queries and keys normalized per head.
//!
//! Reference: mlx-lm `models/qwen3.py`. It has no defaults for `rope_theta`, `head_dim`,
//! `max_position_embeddings` and `tie_word_embeddings`; neither have we.

use mlex_nn::{AttentionConfig, Weights};
use serde::Deserialize;

use super::decoder::{Decoder, DecoderConfig, Head, LayerKind, Scales};
use crate::config::{ModelConfig, RopeFields, check_layers};
use crate::registry::Entry;
use crate::{Model, Result};

pub(crate) const ENTRY: Entry = Entry {
    model_types: &["qwen3"],
    build,
};

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
    tie_word_embeddings: bool,
}

fn build(config: &ModelConfig, weights: &Weights) -> Result<Box<dyn Model>> {
    let (config, rope): (Config, RopeFields) = (config.parse()?, config.parse()?);
    check_layers("num_hidden_layers", config.num_hidden_layers)?;
    let decoder = DecoderConfig {
        rope: rope.rope_required(config.head_dim)?,
        model_type: config.model_type,
        vocab_size: config.vocab_size,
        intermediate_size: config.intermediate_size,
        rms_norm_eps: config.rms_norm_eps,
        attention: AttentionConfig {
            hidden_size: config.hidden_size,
            num_heads: config.num_attention_heads,
            num_kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            qkv_bias: false,
            o_bias: false,
            qk_norm_eps: Some(config.rms_norm_eps),
        },
        mlp_bias: false,
        head: Head::tied(config.tie_word_embeddings),
        layers: vec![LayerKind::default(); config.num_hidden_layers as usize],
        max_context: rope.max_position_embeddings(),
        scales: Scales::default(),
    };
    Ok(Box::new(Decoder::load(&decoder, weights)?))
}
