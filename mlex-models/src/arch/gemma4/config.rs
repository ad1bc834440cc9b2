//! The fields of Gemma4's config.json, and what they say of each layer.

use std::collections::BTreeMap;

use mlex_nn::{KvCache, RopeConfig, RopeScaling};
use serde::{Deserialize, Deserializer};

use crate::config::{ModelConfig, RopeSection, check, check_layers, check_positive, check_size};
use crate::{Error, Result};

const SLIDING: &str = "sliding_attention";
const FULL: &str = "full_attention";

/// The fields as a config gives them. What is `null` in `global_head_dim` or
/// `final_logit_softcapping` is switched off; elsewhere `null` is the default.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    model_type: Option<String>,
    hidden_size: Option<i32>,
    num_hidden_layers: Option<i32>,
    intermediate_size: Option<i32>,
    num_attention_heads: Option<i32>,
    num_key_value_heads: Option<i32>,
    num_global_key_value_heads: Option<i32>,
    head_dim: Option<i32>,
    #[serde(deserialize_with = "given")]
    global_head_dim: Option<Option<i32>>,
    hidden_activation: Option<String>,
    rms_norm_eps: Option<f32>,
    vocab_size: Option<i32>,
    vocab_size_per_layer_input: Option<i32>,
    #[serde(deserialize_with = "given")]
    hidden_size_per_layer_input: Option<Option<i32>>,
    num_kv_shared_layers: Option<i32>,
    rope_traditional: Option<bool>,
    rope_parameters: Option<BTreeMap<String, RopeSection>>,
    sliding_window: Option<i32>,
    sliding_window_pattern: Option<i32>,
    max_position_embeddings: Option<i32>,
    attention_k_eq_v: Option<bool>,
    use_bidirectional_attention: Option<String>,
    #[serde(deserialize_with = "given")]
    final_logit_softcapping: Option<Option<f32>>,
    use_double_wide_mlp: Option<bool>,
    enable_moe_block: Option<bool>,
    num_experts: Option<i32>,
    top_k_experts: Option<i32>,
    moe_intermediate_size: Option<i32>,
    layer_types: Option<Vec<String>>,
    tie_word_embeddings: Option<bool>,
}

/// A model with towers: the text part is a section.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Whole {
    text_config: Option<Fields>,
    vocab_size: Option<i32>,
}

/// A value that is there, `null` included.
fn given<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Option<T>, D::Error> {
    T::deserialize(from).map(Some)
}

/// What the sizes that a config leaves out are.
struct Defaults {
    hidden_size: i32,
    num_hidden_layers: i32,
    intermediate_size: i32,
    num_attention_heads: i32,
    num_key_value_heads: i32,
    num_global_key_value_heads: Option<i32>,
    hidden_size_per_layer_input: i32,
    num_kv_shared_layers: i32,
    sliding_window: i32,
    sliding_window_pattern: i32,
    attention_k_eq_v: bool,
    use_double_wide_mlp: bool,
}

/// mlx-lm `gemma4_text.py`.
const TEXT: Defaults = Defaults {
    hidden_size: 1536,
    num_hidden_layers: 35,
    intermediate_size: 6144,
    num_attention_heads: 8,
    num_key_value_heads: 1,
    num_global_key_value_heads: None,
    hidden_size_per_layer_input: 256,
    num_kv_shared_layers: 20,
    sliding_window: 512,
    sliding_window_pattern: 5,
    attention_k_eq_v: false,
    use_double_wide_mlp: true,
};

/// mlx-vlm `gemma4_unified/config.py`; mlx-lm has no defaults of its own for it.
const UNIFIED: Defaults = Defaults {
    hidden_size: 3840,
    num_hidden_layers: 48,
    intermediate_size: 15360,
    num_attention_heads: 16,
    num_key_value_heads: 8,
    num_global_key_value_heads: Some(1),
    hidden_size_per_layer_input: 0,
    num_kv_shared_layers: 0,
    sliding_window: 1024,
    sliding_window_pattern: 6,
    attention_k_eq_v: true,
    use_double_wide_mlp: false,
};

/// The settings of the text model, checked.
#[derive(Debug)]
pub(super) struct TextConfig {
    pub(super) model_type: String,
    pub(super) hidden_size: i32,
    pub(super) vocab_size: i32,
    pub(super) num_attention_heads: i32,
    pub(super) rms_norm_eps: f32,
    pub(super) max_context: i32,
    pub(super) final_logit_softcapping: Option<f32>,
    pub(super) tie_word_embeddings: bool,
    pub(super) per_layer: Option<PerLayerConfig>,
    pub(super) experts: Option<ExpertsConfig>,
    pub(super) layers: Vec<LayerConfig>,
}

/// The embeddings that each layer has of its own.
#[derive(Clone, Copy, Debug)]
pub(super) struct PerLayerConfig {
    pub(super) vocab_size: i32,
    pub(super) hidden_size: i32,
}

/// The experts beside a layer's dense feed-forward part.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertsConfig {
    pub(super) count: i32,
    /// How many of them a token goes through.
    pub(super) active: i32,
    pub(super) intermediate_size: i32,
}

/// What differs between the layers.
#[derive(Clone, Debug)]
pub(super) struct LayerConfig {
    /// How many positions back a query sees; all without it.
    pub(super) window: Option<i32>,
    pub(super) head_dim: i32,
    pub(super) num_kv_heads: i32,
    /// The keys, as they are projected, are the values too.
    pub(super) keys_are_values: bool,
    /// The layer whose keys and values are used in place of own ones.
    pub(super) shared_with: Option<usize>,
    pub(super) intermediate_size: i32,
    pub(super) rope: RopeConfig,
}

impl TextConfig {
    /// The text part of a config.
    pub(super) fn new(config: &ModelConfig) -> Result<Self> {
        let model_type = config.model_type()?;
        let unified = model_type.starts_with("gemma4_unified");
        let fields = if model_type.ends_with("_text") {
            config.parse_with_nulls()?
        } else {
            let whole: Whole = config.parse_with_nulls()?;
            let fields = whole.text_config.unwrap_or_default();
            Fields {
                vocab_size: whole.vocab_size.or(fields.vocab_size),
                ..fields
            }
        };
        let defaults = if unified { &UNIFIED } else { &TEXT };
        fields.resolve(model_type, defaults)
    }
}

impl Fields {
    fn resolve(&self, model_type: &str, defaults: &Defaults) -> Result<TextConfig> {
        self.refuse_unknown()?;
        let size = |name: &str, value: Option<i32>, default: i32| {
            let value = value.unwrap_or(default);
            check_size(name, value).map(|()| value)
        };
        let hidden_size = size("hidden_size", self.hidden_size, defaults.hidden_size)?;
        let num_attention_heads = size(
            "num_attention_heads",
            self.num_attention_heads,
            defaults.num_attention_heads,
        )?;
        let rms_norm_eps = self.rms_norm_eps.unwrap_or(1e-6);
        check_positive("rms_norm_eps", rms_norm_eps)?;
        let final_logit_softcapping = self.final_logit_softcapping.unwrap_or(Some(30.0));
        if let Some(cap) = final_logit_softcapping {
            check_positive("final_logit_softcapping", cap)?;
        }
        let layers = self.layers(num_attention_heads, defaults)?;
        let per_layer_size = self
            .hidden_size_per_layer_input
            .unwrap_or(Some(defaults.hidden_size_per_layer_input))
            .filter(|&size| size != 0);
        let per_layer = match per_layer_size {
            Some(hidden_size) => {
                check_size("hidden_size_per_layer_input", hidden_size)?;
                check_size(
                    "num_hidden_layers * hidden_size_per_layer_input",
                    hidden_size.saturating_mul(layers.len() as i32),
                )?;
                Some(PerLayerConfig {
                    vocab_size: size(
                        "vocab_size_per_layer_input",
                        self.vocab_size_per_layer_input,
                        262_144,
                    )?,
                    hidden_size,
                })
            }
            None => None,
        };
        let experts = if self.enable_moe_block.unwrap_or(false) {
            Some(self.experts()?)
        } else {
            None
        };
        Ok(TextConfig {
            model_type: model_type.to_owned(),
            hidden_size,
            vocab_size: size("vocab_size", self.vocab_size, 262_144)?,
            num_attention_heads,
            rms_norm_eps,
            max_context: self.max_position_embeddings.unwrap_or(131_072),
            final_logit_softcapping,
            tie_word_embeddings: self.tie_word_embeddings.unwrap_or(true),
            per_layer,
            experts,
            layers,
        })
    }

    /// What other configs of this family may say and nothing here computes.
    fn refuse_unknown(&self) -> Result<()> {
        match self.hidden_activation.as_deref() {
            None | Some("gelu_pytorch_tanh") => {}
            Some(other) => {
                let found = format!("{other:?}");
                return Err(Error::unsupported("hidden_activation", found));
            }
        }
        match self.use_bidirectional_attention.as_deref() {
            // Images alone see ahead.
            None | Some("vision") => Ok(()),
            Some(other) => Err(Error::unsupported(
                "use_bidirectional_attention",
                format!("{other:?}"),
            )),
        }
    }

    fn experts(&self) -> Result<ExpertsConfig> {
        let need = |name: &str, value: Option<i32>| {
            let value = value.ok_or_else(|| Error::missing(format!("field {name}")))?;
            check_size(name, value).map(|()| value)
        };
        let count = need("num_experts", self.num_experts)?;
        let active = need("top_k_experts", self.top_k_experts)?;
        check("top_k_experts", active, 1..=count)?;
        Ok(ExpertsConfig {
            count,
            active,
            intermediate_size: need("moe_intermediate_size", self.moe_intermediate_size)?,
        })
    }

    /// Whether each layer has a window.
    fn sliding(&self, defaults: &Defaults) -> Result<Vec<bool>> {
        let count = self.num_hidden_layers.unwrap_or(defaults.num_hidden_layers);
        check_layers("num_hidden_layers", count)?;
        let Some(types) = &self.layer_types else {
            let pattern = self
                .sliding_window_pattern
                .unwrap_or(defaults.sliding_window_pattern);
            check_layers("sliding_window_pattern", pattern)?;
            return Ok((1..=count).map(|layer| layer % pattern != 0).collect());
        };
        if types.len() != count as usize {
            let expected = format!("{count} entries");
            let found = types.len().to_string();
            return Err(Error::field("layer_types", expected, found));
        }
        let sliding = types.iter().map(|name| match name.as_str() {
            SLIDING => Ok(true),
            FULL => Ok(false),
            other => Err(Error::unsupported("layer_types", format!("{other:?}"))),
        });
        sliding.collect()
    }

    fn layers(&self, num_heads: i32, defaults: &Defaults) -> Result<Vec<LayerConfig>> {
        let sliding = self.sliding(defaults)?;
        let count = sliding.len() as i32;
        let shared = self
            .num_kv_shared_layers
            .unwrap_or(defaults.num_kv_shared_layers);
        check("num_kv_shared_layers", shared, 0..=count - 1)?;
        let first_shared = (count - shared) as usize;
        let mut layers = Vec::with_capacity(sliding.len());
        for (index, &is_sliding) in sliding.iter().enumerate() {
            let mut layer = self.layer(is_sliding, num_heads, defaults)?;
            if index >= first_shared {
                // The last one of the same kind.
                let owner = (0..first_shared).rfind(|&owner| sliding[owner] == is_sliding);
                layer.shared_with = Some(owner.ok_or_else(|| {
                    let expected = format!("less: layer {index} has none to share with");
                    Error::field("num_kv_shared_layers", expected, shared.to_string())
                })?);
                if self
                    .use_double_wide_mlp
                    .unwrap_or(defaults.use_double_wide_mlp)
                {
                    layer.intermediate_size *= 2;
                }
            }
            layers.push(layer);
        }
        Ok(layers)
    }

    /// A layer of either kind with keys and values of its own.
    fn layer(&self, sliding: bool, num_heads: i32, defaults: &Defaults) -> Result<LayerConfig> {
        let global = self.global_head_dim.unwrap_or(Some(512));
        let head_dim = match global.filter(|&dim| !sliding && dim != 0) {
            Some(dim) => dim,
            None => self.head_dim.unwrap_or(256),
        };
        let name = if sliding {
            "head_dim"
        } else {
            "global_head_dim"
        };
        check_size(name, head_dim)?;
        check_size(
            &format!("num_attention_heads * {name}"),
            num_heads.saturating_mul(head_dim),
        )?;
        let keys_are_values =
            !sliding && self.attention_k_eq_v.unwrap_or(defaults.attention_k_eq_v);
        let fewer = self
            .num_global_key_value_heads
            .or(defaults.num_global_key_value_heads)
            .filter(|_| keys_are_values);
        let num_kv_heads = fewer
            .or(self.num_key_value_heads)
            .unwrap_or(defaults.num_key_value_heads);
        check("num_key_value_heads", num_kv_heads, 1..=num_heads)?;
        if num_heads % num_kv_heads != 0 {
            let expected = format!("a divisor of the {num_heads} query heads");
            let found = num_kv_heads.to_string();
            return Err(Error::field("num_key_value_heads", expected, found));
        }
        let window = self.sliding_window.unwrap_or(defaults.sliding_window);
        if sliding {
            // As the cache will be made.
            KvCache::with_window(window)?;
        }
        let intermediate_size = self.intermediate_size.unwrap_or(defaults.intermediate_size);
        check_size("intermediate_size", intermediate_size.saturating_mul(2))?;
        Ok(LayerConfig {
            window: sliding.then_some(window),
            head_dim,
            num_kv_heads,
            keys_are_values,
            shared_with: None,
            intermediate_size,
            rope: self.rope(sliding, head_dim)?,
        })
    }

    fn rope(&self, sliding: bool, dims: i32) -> Result<RopeConfig> {
        let section = match &self.rope_parameters {
            Some(sections) => sections.get(if sliding { SLIDING } else { FULL }),
            None => None,
        };
        let (base, scaling) = match (section, &self.rope_parameters) {
            (Some(section), _) => (
                section.rope_theta.unwrap_or(10_000.0),
                section.scaling(self.max_position_embeddings.or(Some(131_072)))?,
            ),
            (None, None) if !sliding => (
                1_000_000.0,
                RopeScaling::Proportional {
                    factor: 1.0,
                    partial_rotary_factor: 0.25,
                },
            ),
            _ => (10_000.0, RopeScaling::None),
        };
        Ok(RopeConfig {
            dims,
            base,
            traditional: self.rope_traditional.unwrap_or(false),
            scaling,
        })
    }
}
