//! MiniCPM: Llama with scaled embeddings, residuals and logits (maximal update
//! parametrization).
//!
//! Reference: mlx-lm `models/minicpm.py`.

use mlex_nn::{AttentionConfig, Weights};
use serde::Deserialize;

use super::decoder::{Decoder, DecoderConfig, Head, LayerKind, Scales};
use super::stream::StreamScales;
use crate::config::{ModelConfig, RopeFields, check_layers, check_positive, check_size, head_dim};
use crate::registry::Entry;
use crate::{Model, Result};

pub(crate) const ENTRY: Entry = Entry {
    model_types: &["minicpm"],
    build,
};

/// The fields of config.json.
#[derive(Debug, Deserialize)]
struct Config {
    model_type: String,
    hidden_size: i32,
    dim_model_base: i32,
    num_hidden_layers: i32,
    intermediate_size: i32,
    num_attention_heads: i32,
    rms_norm_eps: f32,
    vocab_size: i32,
    num_key_value_heads: i32,
    scale_depth: f32,
    scale_emb: f32,
    #[serde(default)]
    tie_word_embeddings: bool,
}

fn build(config: &ModelConfig, weights: &Weights) -> Result<Box<dyn Model>> {
    let (config, rope): (Config, RopeFields) = (config.parse()?, config.parse()?);
    check_layers("num_hidden_layers", config.num_hidden_layers)?;
    check_size("dim_model_base", config.dim_model_base)?;
    check_positive("scale_depth", config.scale_depth)?;
    check_positive("scale_emb", config.scale_emb)?;
    let head_dim = head_dim(config.hidden_size, config.num_attention_heads)?;
    let head_input = config.dim_model_base as f32 / config.hidden_size as f32;
    let depth = config.num_hidden_layers as f32;
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
            qkv_bias: false,
            o_bias: false,
            qk_norm_eps: None,
        },
        mlp_bias: false,
        // Some exports leave the head out although it is not tied.
        head: if config.tie_word_embeddings {
            Head::Tied
        } else {
            Head::OwnOrEmbedding
        },
        layers: vec![LayerKind::default(); config.num_hidden_layers as usize],
        max_context: rope.max_position_embeddings(),
        scales: Scales {
            stream: StreamScales {
                embedding: Some(config.scale_emb),
                residual: Some(config.scale_depth / depth.sqrt()),
            },
            head_input: Some(head_input),
        },
    };
    Ok(Box::new(Decoder::load(&decoder, weights)?))
}
