//! Qwen3 with a mixture of experts in place of some or all feed-forward layers.
//!
//! Reference: mlx-lm `models/qwen3_moe.py`. It has no defaults; ours for `mlp_only_layers`,
//! `decoder_sparse_step` and `norm_topk_prob` are those of transformers.

use mlex_nn::{Activation, AttentionConfig, MoeConfig, Weights};
use serde::Deserialize;

use super::mixed::{LayerKind, Mixed, MixedConfig, MixerKind, MlpKind};
use crate::config::{ModelConfig, RopeFields, check_layers};
use crate::registry::Entry;
use crate::{Error, Model, Result};

pub(crate) const ENTRY: Entry = Entry {
    model_types: &["qwen3_moe"],
    build,
};

/// The fields about experts, which other Qwen models have too.
#[derive(Debug, Deserialize)]
pub(super) struct MoeFields {
    hidden_size: i32,
    #[serde(default)]
    pub(super) num_experts: i32,
    num_experts_per_tok: Option<i32>,
    moe_intermediate_size: Option<i32>,
    pub(super) norm_topk_prob: Option<bool>,
    shared_expert_intermediate_size: Option<i32>,
    decoder_sparse_step: Option<i32>,
    #[serde(default)]
    mlp_only_layers: Vec<i32>,
}

impl MoeFields {
    /// The experts of a layer. Whether the weights of a token's experts add up to 1 is `normalize`
    /// where the config does not say.
    pub(super) fn experts(&self, normalize: bool, shared: bool) -> Result<MoeConfig> {
        let need = |field: &str, value: Option<i32>| {
            value.ok_or_else(|| Error::missing(format!("field {field}")))
        };
        let shared = shared.then(|| {
            need(
                "shared_expert_intermediate_size",
                self.shared_expert_intermediate_size,
            )
        });
        Ok(MoeConfig {
            hidden_size: self.hidden_size,
            intermediate_size: need("moe_intermediate_size", self.moe_intermediate_size)?,
            num_experts: self.num_experts,
            experts_per_token: need("num_experts_per_tok", self.num_experts_per_tok)?,
            normalize: self.norm_topk_prob.unwrap_or(normalize),
            shared_intermediate_size: shared.transpose()?,
            gate: Some(Activation::Silu),
        })
    }

    /// The feed-forward layer of each of `count` layers: experts in every
    /// `decoder_sparse_step`th that `mlp_only_layers` does not name.
    pub(super) fn some_layers(
        &self,
        count: i32,
        intermediate_size: i32,
        shared: bool,
    ) -> Result<Vec<MlpKind>> {
        check_layers("num_hidden_layers", count)?;
        let step = self.decoder_sparse_step.unwrap_or(1);
        if step <= 0 {
            let expected = "a positive number";
            return Err(Error::field(
                "decoder_sparse_step",
                expected,
                step.to_string(),
            ));
        }
        let kind = |layer: i32| {
            let sparse = self.num_experts > 0
                && (layer + 1) % step == 0
                && !self.mlp_only_layers.contains(&layer);
            Ok(if sparse {
                MlpKind::Experts(self.experts(false, shared)?)
            } else {
                MlpKind::Dense(intermediate_size)
            })
        };
        (0..count).map(kind).collect()
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
    tie_word_embeddings: bool,
}

fn build(config: &ModelConfig, weights: &Weights) -> Result<Box<dyn Model>> {
    let (experts, rope): (MoeFields, RopeFields) = (config.parse()?, config.parse()?);
    let config: Config = config.parse()?;
    let mlps = experts.some_layers(config.num_hidden_layers, config.intermediate_size, false)?;
    let layer = |mlp| LayerKind {
        mixer: MixerKind::Attention,
        mlp,
    };
    let mixed = MixedConfig {
        rope: rope.rope_required(config.head_dim)?,
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
            qkv_bias: false,
            o_bias: false,
            qk_norm_eps: Some(config.rms_norm_eps),
        },
        delta: None,
        layers: mlps.into_iter().map(layer).collect(),
        tied: config.tie_word_embeddings,
        max_context: rope.max_position_embeddings(),
    };
    let model = Mixed::load(&mixed, &weights.pp("model"), &weights.pp("lm_head"))?;
    Ok(Box::new(model))
}
