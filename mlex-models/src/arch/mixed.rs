//! The decoder of architectures whose layers differ: pre-norm blocks of attention, gated
//! attention or a gated delta net, each before a feed-forward layer, dense or of experts.

use mlex_core::Array;
use mlex_nn::{
    Activation, AttentionConfig, Cache, Embedding, GatedAttention, GatedDeltaConfig, GatedDeltaNet,
    GatedMlp, KvCache, LayerCache, Linear, Mask, MoeConfig, MoeMlp, RecurrentCache, RmsNorm, Rope,
    RopeConfig, SelfAttention, Weights,
};

use crate::config::{check, check_layers, check_positive, check_size};
use crate::model::{Input, Model, ModelInfo};
use crate::{Error, Result};

/// The settings of a [`Mixed`] decoder, as an architecture's config gives them.
pub(crate) struct MixedConfig {
    pub(crate) model_type: String,
    pub(crate) vocab_size: i32,
    pub(crate) rms_norm_eps: f32,
    pub(crate) attention: AttentionConfig,
    pub(crate) rope: RopeConfig,
    /// Of the layers that have one.
    pub(crate) delta: Option<GatedDeltaConfig>,
    pub(crate) layers: Vec<LayerKind>,
    /// The logits come from the embedding.
    pub(crate) tied: bool,
    pub(crate) max_context: Option<i32>,
}

/// What a layer consists of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerKind {
    pub(crate) mixer: MixerKind,
    pub(crate) mlp: MlpKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MixerKind {
    Attention,
    GatedAttention,
    GatedDelta,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum MlpKind {
    /// With this width inside.
    Dense(i32),
    Experts(MoeConfig),
}

/// The most experts that a layer may have; what a hostile file may make us loop over.
const MAX_EXPERTS: i32 = 1 << 14;

impl MixedConfig {
    /// Checks the numbers that sizes and loops depend on.
    fn validate(&self) -> Result<()> {
        let attention = &self.attention;
        check_layers("num_hidden_layers", self.layers.len() as i32)?;
        check_size("vocab_size", self.vocab_size)?;
        check_size("hidden_size", attention.hidden_size)?;
        check_size("num_attention_heads", attention.num_heads)?;
        check(
            "num_key_value_heads",
            attention.num_kv_heads,
            1..=attention.num_heads,
        )?;
        check_size("head_dim", attention.head_dim)?;
        check_size(
            "num_attention_heads * head_dim",
            attention.num_heads.saturating_mul(attention.head_dim),
        )?;
        check_positive("rms_norm_eps", self.rms_norm_eps)?;
        if let Some(delta) = &self.delta {
            check_size(
                "linear_num_key_heads * linear_key_head_dim",
                delta.key_dim(),
            )?;
            check_size(
                "linear_num_value_heads * linear_value_head_dim",
                delta.value_dim(),
            )?;
        }
        for layer in &self.layers {
            match layer.mlp {
                MlpKind::Dense(width) => check_size("intermediate_size", width)?,
                MlpKind::Experts(experts) => {
                    check("num_experts", experts.num_experts, 1..=MAX_EXPERTS)?;
                    check_size("moe_intermediate_size", experts.intermediate_size)?;
                    if let Some(width) = experts.shared_intermediate_size {
                        check_size("shared_expert_intermediate_size", width)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// How many layers of a kind there are.
    fn count(&self, mixer: MixerKind) -> i64 {
        let layers = self.layers.iter();
        layers.filter(|layer| layer.mixer == mixer).count() as i64
    }
}

enum Mixer {
    Attention(Box<SelfAttention>),
    GatedAttention(Box<GatedAttention>),
    GatedDelta(Box<GatedDeltaNet>),
}

impl Mixer {
    fn load(weights: &Weights, config: &MixedConfig, kind: MixerKind, rope: &Rope) -> Result<Self> {
        let attention = weights.pp("self_attn");
        let (settings, rope) = (&config.attention, rope.clone());
        Ok(match kind {
            MixerKind::Attention => {
                Self::Attention(SelfAttention::load(&attention, settings, Some(rope))?.into())
            }
            MixerKind::GatedAttention => {
                let eps = config.rms_norm_eps;
                Self::GatedAttention(GatedAttention::load(&attention, settings, eps, rope)?.into())
            }
            MixerKind::GatedDelta => {
                let delta = config.delta.as_ref();
                let delta = delta.ok_or_else(|| Error::missing("field linear_num_key_heads"))?;
                Self::GatedDelta(GatedDeltaNet::load(&weights.pp("linear_attn"), delta)?.into())
            }
        })
    }

    fn new_cache(&self) -> LayerCache {
        match self {
            Self::Attention(_) | Self::GatedAttention(_) => {
                LayerCache::Attention(KvCache::default())
            }
            Self::GatedDelta(_) => LayerCache::Recurrent(RecurrentCache::default()),
        }
    }

    /// `mask` is what the attention layers share, made by the first of them.
    fn forward(&self, x: &Array, mask: &mut Option<Mask>, cache: &mut LayerCache) -> Result<Array> {
        let mut shared = |cache: &KvCache| -> Result<Mask> {
            let made = match mask.take() {
                Some(mask) => mask,
                None => cache.mask(x.dim(1)?)?,
            };
            Ok(mask.insert(made).clone())
        };
        Ok(match self {
            Self::Attention(layer) => {
                let cache = cache.attention()?;
                layer.forward(x, &shared(cache)?, cache)?
            }
            Self::GatedAttention(layer) => {
                let cache = cache.attention()?;
                layer.forward(x, &shared(cache)?, cache)?
            }
            Self::GatedDelta(layer) => layer.forward(x, cache.recurrent()?)?,
        })
    }
}

enum Mlp {
    Dense(Box<GatedMlp>),
    Experts(Box<MoeMlp>),
}

impl Mlp {
    fn load(weights: &Weights, hidden_size: i32, kind: MlpKind) -> Result<Self> {
        Ok(match kind {
            MlpKind::Dense(width) => {
                let silu = Activation::Silu;
                Self::Dense(GatedMlp::load(weights, hidden_size, width, false, silu)?.into())
            }
            MlpKind::Experts(config) => Self::Experts(MoeMlp::load(weights, &config)?.into()),
        })
    }

    fn forward(&self, x: &Array) -> Result<Array> {
        Ok(match self {
            Self::Dense(layer) => layer.forward(x)?,
            Self::Experts(layer) => layer.forward(x)?,
        })
    }
}

struct Block {
    mixer: Mixer,
    mlp: Mlp,
    input_layernorm: RmsNorm,
    post_attention_layernorm: RmsNorm,
}

/// A decoder of layers that differ.
pub(crate) struct Mixed {
    info: ModelInfo,
    embed_tokens: Embedding,
    layers: Vec<Block>,
    norm: RmsNorm,
    lm_head: Option<Linear>,
}

impl Mixed {
    /// Builds the model from the weights of its decoder and those of its head.
    pub(crate) fn load(config: &MixedConfig, model: &Weights, head: &Weights) -> Result<Self> {
        config.validate()?;
        let hidden_size = config.attention.hidden_size;
        let norm = |weights: &Weights| RmsNorm::load(weights, hidden_size, config.rms_norm_eps);
        let rope = Rope::new(&config.rope)?;
        let embed_tokens =
            Embedding::load(&model.pp("embed_tokens"), config.vocab_size, hidden_size)?;
        let layers = config.layers.iter().enumerate().map(|(index, kind)| {
            let weights = model.pp("layers").pp(index);
            Ok(Block {
                mixer: Mixer::load(&weights, config, kind.mixer, &rope)?,
                mlp: Mlp::load(&weights.pp("mlp"), hidden_size, kind.mlp)?,
                input_layernorm: norm(&weights.pp("input_layernorm"))?,
                post_attention_layernorm: norm(&weights.pp("post_attention_layernorm"))?,
            })
        });
        let layers = layers.collect::<Result<Vec<_>>>()?;
        let lm_head = if config.tied {
            let prefix = head.path("");
            head.discard(|path| path.starts_with(&prefix));
            None
        } else {
            Some(Linear::load(head, hidden_size, config.vocab_size, false)?)
        };
        let attention = &config.attention;
        let per_layer = 2 * i64::from(attention.num_kv_heads) * i64::from(attention.head_dim);
        let with_keys =
            config.count(MixerKind::Attention) + config.count(MixerKind::GatedAttention);
        Ok(Self {
            info: ModelInfo {
                model_type: config.model_type.clone(),
                vocab_size: config.vocab_size,
                hidden_size,
                num_layers: layers.len() as i32,
                cache_per_token: per_layer * with_keys,
                max_context: config.max_context,
            },
            embed_tokens,
            layers,
            norm: norm(&model.pp("norm"))?,
            lm_head,
        })
    }
}

impl Model for Mixed {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn new_cache(&self) -> Result<Cache> {
        let layers = self.layers.iter();
        Ok(Cache::new(layers.map(|layer| layer.mixer.new_cache())))
    }

    fn forward(&self, input: Input<'_>, cache: &mut Cache) -> Result<Array> {
        let mut h = match input {
            Input::Tokens(tokens) => self.embed_tokens.forward(tokens)?,
            Input::Embeddings(embeddings) => embeddings.clone(),
        };
        let states = cache.layers_mut();
        if states.len() != self.layers.len() {
            let expected = format!("{} layers", self.layers.len());
            return Err(Error::field("cache", expected, states.len().to_string()));
        }
        let mut mask = None;
        // What the layer before adds to the stream, not added yet so that the norm can.
        let mut residual: Option<Array> = None;
        let sum = |norm: &RmsNorm, h: Array, residual: Option<Array>| -> Result<_> {
            Ok(match residual {
                Some(residual) => norm.forward_sum(&h, &residual)?,
                None => {
                    let normed = norm.forward(&h)?;
                    (h, normed)
                }
            })
        };
        for (layer, state) in self.layers.iter().zip(states) {
            let (before, normed) = sum(&layer.input_layernorm, h, residual)?;
            let mixed = layer.mixer.forward(&normed, &mut mask, state)?;
            let (between, normed) = sum(&layer.post_attention_layernorm, before, Some(mixed))?;
            residual = Some(layer.mlp.forward(&normed)?);
            h = between;
        }
        Ok(sum(&self.norm, h, residual)?.1)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        Ok(match &self.lm_head {
            Some(lm_head) => lm_head.forward(hidden)?,
            None => self.embed_tokens.as_linear(hidden)?,
        })
    }
}
