//! Qwen2 and Qwen2.5: Llama with a bias on the query, key and value projections.
//!
//! Reference: mlx-lm `models/qwen2.py`, whose defaults are taken.

use mlex_nn::{AttentionConfig, Weights};
use serde::Deserialize;

use super::decoder::{Decoder, DecoderConfig, Head, LayerKind, Scales};
use crate::config::{ModelConfig, RopeFields, check_layers, head_dim};
use crate::registry::Entry;
use crate::{Model, Result};

pub(crate) const ENTRY: Entry = Entry {
    model_types: &["qwen2"],
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
    #[serde(default = "tied")]
    tie_word_embeddings: bool,
}

fn tied() -> bool {
    true
}

fn build(config: &ModelConfig, weights: &Weights) -> Result<Box<dyn Model>> {
    let (config, rope): (Config, RopeFields) = (config.parse()?, config.parse()?);
    check_layers("num_hidden_layers", config.num_hidden_layers)?;
    let head_dim = head_dim(config.hidden_size, config.num_attention_heads)?;
    let decoder = DecoderConfig {
        rope: rope.rope(head_dim, 1e6)?,
        model_type: config.model_type,
        vocab_size: config.vocab_size,
        intermediate_size: config.intermediate_size,
        rms_norm_eps: config.rms_norm_eps,
        attention: AttentionConfig {
            hidden_size: config.hidden_size,
            num_heads: config.num_attention_heads,
            num_kv_heads: config.num_key_value_heads,
            head_dim,
            qkv_bias: true,
            o_bias: false,
            qk_norm_eps: None,
        },
        mlp_bias: false,
        head: Head::tied(config.tie_word_embeddings),
        layers: vec![LayerKind::default(); config.num_hidden_layers as usize],
        max_context: rope.max_position_embeddings(),
        scales: Scales::default(),
    };
    Ok(Box::new(Decoder::load(&decoder, weights)?))
}
