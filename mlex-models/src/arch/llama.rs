//! Llama and what is shaped like it: Mistral, SmolLM, Yi, and others under the same name.
//!
//! Reference: mlx-lm `models/llama.py`, whose defaults are taken.

use mlex_nn::{AttentionConfig, Weights};
use serde::Deserialize;

use super::decoder::{Decoder, DecoderConfig, Head, LayerKind, Scales};
use crate::config::{ModelConfig, RopeFields, check_layers, check_size, head_dim};
use crate::registry::Entry;
use crate::{Error, Model, Result};

pub(crate) const ENTRY: Entry = Entry {
    model_types: &["llama", "mistral", "iquestcoder"],
    build,
};

/// The fields of config.json.
#[derive(Debug, Deserialize)]
pub(super) struct Config {
    model_type: String,
    hidden_size: i32,
    pub(super) num_hidden_layers: i32,
    intermediate_size: i32,
    num_attention_heads: i32,
    rms_norm_eps: f32,
    vocab_size: i32,
    head_dim: Option<i32>,
    num_key_value_heads: Option<i32>,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default = "tied")]
    tie_word_embeddings: bool,
    layer_types: Option<Vec<String>>,
    sliding_window: Option<i32>,
}

/// mlx-lm's default, which differs from transformers'.
fn tied() -> bool {
    true
}

impl Config {
    /// The settings of the decoder.
    pub(super) fn decoder(&self, rope: &RopeFields) -> Result<DecoderConfig> {
        check_layers("num_hidden_layers", self.num_hidden_layers)?;
        let head_dim = match self.head_dim {
            Some(head_dim) => head_dim,
            None => head_dim(self.hidden_size, self.num_attention_heads)?,
        };
        check_size("head_dim", head_dim)?;
        Ok(DecoderConfig {
            model_type: self.model_type.clone(),
            vocab_size: self.vocab_size,
            intermediate_size: self.intermediate_size,
            rms_norm_eps: self.rms_norm_eps,
            attention: AttentionConfig {
                hidden_size: self.hidden_size,
                num_heads: self.num_attention_heads,
                num_kv_heads: self.num_key_value_heads.unwrap_or(self.num_attention_heads),
                head_dim,
                qkv_bias: self.attention_bias,
                o_bias: self.attention_bias,
                qk_norm_eps: None,
            },
            rope: rope.rope(head_dim, 10_000.0)?,
            mlp_bias: self.mlp_bias,
            head: Head::tied(self.tie_word_embeddings),
            layers: self.layers()?,
            max_context: rope.max_position_embeddings(),
            scales: Scales::default(),
        })
    }

    /// Windowed layers where `layer_types` says so; a window alone changes nothing.
    fn layers(&self) -> Result<Vec<LayerKind>> {
        let count = self.num_hidden_layers as usize;
        let Some(types) = &self.layer_types else {
            return Ok(vec![LayerKind::default(); count]);
        };
        if types.len() != count {
            let expected = format!("{count} entries");
            return Err(Error::field(
                "layer_types",
                expected,
                types.len().to_string(),
            ));
        }
        let kind = |name: &String| match name.as_str() {
            "full_attention" => Ok(LayerKind::default()),
            "sliding_attention" => {
                let window = self
                    .sliding_window
                    .ok_or_else(|| Error::missing("field sliding_window"))?;
                Ok(LayerKind {
                    window: Some(window),
                    no_rope: false,
                })
            }
            other => Err(Error::unsupported("layer_types", format!("{other:?}"))),
        };
        types.iter().map(kind).collect()
    }
}

fn build(config: &ModelConfig, weights: &Weights) -> Result<Box<dyn Model>> {
    let (config, rope): (Config, RopeFields) = (config.parse()?, config.parse()?);
    Ok(Box::new(Decoder::load(&config.decoder(&rope)?, weights)?))
}
