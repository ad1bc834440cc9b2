//! The language model of Qwen3-VL, dense or with experts: Qwen3 whose rotary embedding has three
//! positions (time, height, width), and behind whose first layers further features of images and
//! videos are added (deepstack).
//!
//! Reference: mlx-vlm `models/qwen3_vl` and `models/qwen3_vl_moe`.

use mlex_nn::{AttentionConfig, Weights};
use serde::Deserialize;
use serde_json::Value;

use super::mixed::{LayerKind, Mixed, MixedConfig, MixerKind, MlpKind};
use super::qwen3_moe::MoeFields;
use super::{language, mrope};
use crate::config::{ModelConfig, RopeFields, check_layers, head_dim, shown};
use crate::registry::Entry;
use crate::{Error, Model, Result};

pub(crate) const ENTRY: Entry = Entry {
    model_types: &["qwen3_vl", "qwen3_vl_moe"],
    build,
};

/// The fields of config.json's `text_config`.
#[derive(Debug, Deserialize)]
struct Config {
    hidden_size: i32,
    num_hidden_layers: i32,
    intermediate_size: i32,
    num_attention_heads: i32,
    rms_norm_eps: f32,
    vocab_size: i32,
    num_key_value_heads: Option<i32>,
    head_dim: Option<i32>,
    #[serde(default)]
    attention_bias: bool,
    tie_word_embeddings: Option<bool>,
}

/// How many pairs turn with time, height and width where the config does not say.
const MROPE_SECTION: [i32; 3] = [24, 20, 20];

fn build(config: &ModelConfig, weights: &Weights) -> Result<Box<dyn Model>> {
    let mixed = language::settings(config, settings)?;
    let mixed = MixedConfig {
        model_type: config.model_type()?.to_owned(),
        deepstack: deepstack(config, mixed.layers.len())?,
        ..mixed
    };
    let (model, head) = language::places(weights);
    language::discard_vision(weights);
    for (index, layer) in mixed.layers.iter().enumerate() {
        if matches!(layer.mlp, MlpKind::Experts(_)) {
            turn_experts(&model.pp("layers").pp(index).pp("mlp.experts"));
        }
    }
    Ok(Box::new(Mixed::load(&mixed, &model, &head)?))
}

/// Behind how many layers features are added: as many as layers of the tower give some.
fn deepstack(config: &ModelConfig, layers: usize) -> Result<usize> {
    const FIELD: &str = "vision_config.deepstack_visual_indexes";
    let vision = config.json().get("vision_config");
    let indexes = match vision.and_then(|vision| vision.get("deepstack_visual_indexes")) {
        None | Some(Value::Null) => return Ok(0),
        Some(Value::Array(indexes)) => indexes.len(),
        Some(other) => return Err(Error::field(FIELD, "a list", shown(other))),
    };
    if indexes > layers {
        let expected = format!("at most {layers}, as the language model has layers");
        return Err(Error::field(FIELD, expected, indexes.to_string()));
    }
    Ok(indexes)
}

/// Published experts have their inputs before their outputs; others, such as those that
/// transformers writes, after them.
fn turn_experts(experts: &Weights) {
    let (gate_up, down) = (experts.shape("gate_up_proj"), experts.shape("down_proj"));
    let (Some(&[_, first, second]), Some(&[_, inner, hidden])) =
        (gate_up.as_deref(), down.as_deref())
    else {
        return;
    };
    if first != hidden || Some(second) != inner.checked_mul(2) {
        return;
    }
    let names = ["gate_up_proj", "down_proj"].map(|name| experts.path(name));
    experts.adapt(
        |path| names.iter().any(|name| name == path),
        |shape| match shape {
            &[count, a, b] => vec![count, b, a],
            other => other.to_vec(),
        },
        |weight| weight.transpose(&[0, 2, 1]),
    );
}

fn settings(config: &ModelConfig, outer_tied: Option<bool>) -> Result<MixedConfig> {
    let (mut experts, rope): (MoeFields, RopeFields) = (config.parse()?, config.parse()?);
    // As in transformers, which has no such field here, and mlx-vlm, where this is the default.
    experts.norm_topk_prob.get_or_insert(true);
    let turns: mrope::MropeFields = config.parse()?;
    let config: Config = config.parse()?;
    check_layers("num_hidden_layers", config.num_hidden_layers)?;
    let head_dim = match config.head_dim {
        Some(head_dim) => head_dim,
        None => head_dim(config.hidden_size, config.num_attention_heads)?,
    };
    let mlps = experts.some_layers(config.num_hidden_layers, config.intermediate_size, false)?;
    let layer = |mlp| LayerKind {
        mixer: MixerKind::Attention,
        mlp,
    };
    let section = turns.section().unwrap_or(MROPE_SECTION);
    let heads = config.num_attention_heads;
    Ok(MixedConfig {
        rope: rope.rope_required(head_dim)?,
        directions: Some(mrope::interleaved(head_dim / 2, section)),
        deepstack: 0,
        model_type: String::new(),
        vocab_size: config.vocab_size,
        rms_norm_eps: config.rms_norm_eps,
        attention: AttentionConfig {
            hidden_size: config.hidden_size,
            num_heads: heads,
            num_kv_heads: config.num_key_value_heads.unwrap_or(heads),
            head_dim,
            qkv_bias: config.attention_bias,
            o_bias: config.attention_bias,
            qk_norm_eps: Some(config.rms_norm_eps),
        },
        delta: None,
        layers: mlps.into_iter().map(layer).collect(),
        tied: config.tie_word_embeddings.or(outer_tied).unwrap_or(false),
        max_context: rope.max_position_embeddings(),
    })
}
