//! The decoder that the Llama-shaped architectures share: pre-norm blocks of rotary
//! attention and a gated feed-forward layer, a final norm and a head.

use mlex_core::Array;
use mlex_nn::{
    Activation, AttentionConfig, Cache, Embedding, GatedMlp, KvCache, LayerCache, Linear, Mask,
    RmsNorm, Rope, RopeConfig, SelfAttention, Weights,
};

use crate::config::{check, check_positive, check_size};
use crate::model::{Input, Model, ModelInfo};
use crate::{Error, Result};

/// The settings of a [`Decoder`], as an architecture's config gives them.
pub(crate) struct DecoderConfig {
    pub(crate) model_type: String,
    pub(crate) vocab_size: i32,
    pub(crate) intermediate_size: i32,
    pub(crate) rms_norm_eps: f32,
    pub(crate) attention: AttentionConfig,
    pub(crate) rope: RopeConfig,
    pub(crate) mlp_bias: bool,
    pub(crate) head: Head,
    pub(crate) layers: Vec<LayerKind>,
    pub(crate) max_context: Option<i32>,
    pub(crate) scales: Scales,
}

/// Where the logits come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Head {
    /// The embedding, whatever else the checkpoint has.
    Tied,
    /// `lm_head`.
    Own,
    /// `lm_head`, or the embedding in its place when the checkpoint leaves it out.
    OwnOrEmbedding,
}

impl Head {
    pub(crate) fn tied(tied: bool) -> Self {
        if tied { Self::Tied } else { Self::Own }
    }
}

/// What differs between the layers of a model.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LayerKind {
    /// How many positions back a query sees; all without it.
    pub(crate) window: Option<i32>,
    /// Positions are not encoded.
    pub(crate) no_rope: bool,
}

/// Constants that some architectures multiply by.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Scales {
    pub(crate) embedding: Option<f32>,
    pub(crate) residual: Option<f32>,
    /// The hidden states before the head, unless it is tied.
    pub(crate) head_input: Option<f32>,
}

impl DecoderConfig {
    /// Checks the numbers that sizes and loops depend on.
    fn validate(&self) -> Result<()> {
        let attention = &self.attention;
        check_size("vocab_size", self.vocab_size)?;
        check_size("hidden_size", attention.hidden_size)?;
        check_size("intermediate_size", self.intermediate_size)?;
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
        for window in self.layers.iter().filter_map(|layer| layer.window) {
            // As the caches will be made.
            KvCache::with_window(window)?;
        }
        Ok(())
    }
}

struct Block {
    self_attn: SelfAttention,
    mlp: GatedMlp,
    input_layernorm: RmsNorm,
    post_attention_layernorm: RmsNorm,
    window: Option<i32>,
}

impl Block {
    fn load(
        weights: &Weights,
        config: &DecoderConfig,
        kind: LayerKind,
        rope: &Rope,
    ) -> Result<Self> {
        let hidden_size = config.attention.hidden_size;
        let norm = |name| RmsNorm::load(&weights.pp(name), hidden_size, config.rms_norm_eps);
        let rope = (!kind.no_rope).then(|| rope.clone());
        Ok(Self {
            self_attn: SelfAttention::load(&weights.pp("self_attn"), &config.attention, rope)?,
            mlp: GatedMlp::load(
                &weights.pp("mlp"),
                hidden_size,
                config.intermediate_size,
                config.mlp_bias,
                Activation::Silu,
            )?,
            input_layernorm: norm("input_layernorm")?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            window: kind.window,
        })
    }

    /// The stream is `x + residual`; what the layer adds to it last is not added yet, so that
    /// the next norm can.
    fn forward(
        &self,
        stream: Residual,
        mask: &Mask,
        cache: &mut KvCache,
        residual_scale: Option<f32>,
    ) -> Result<Residual> {
        let scaled = |r: Array| match residual_scale {
            Some(scale) => r.multiply(scale),
            None => Ok(r),
        };
        let (x, normed) = stream.normed(&self.input_layernorm)?;
        let r = scaled(self.self_attn.forward(&normed, mask, cache)?)?;
        let (h, normed) = self.post_attention_layernorm.forward_sum(&x, &r)?;
        let residual = Some(scaled(self.mlp.forward(&normed)?)?);
        Ok(Residual { x: h, residual })
    }
}

/// The residual stream between two layers: `x`, and what is still to be added to it.
struct Residual {
    x: Array,
    residual: Option<Array>,
}

impl Residual {
    /// The sum, and its norm.
    fn normed(self, norm: &RmsNorm) -> Result<(Array, Array)> {
        match self.residual {
            Some(residual) => Ok(norm.forward_sum(&self.x, &residual)?),
            None => {
                let normed = norm.forward(&self.x)?;
                Ok((self.x, normed))
            }
        }
    }
}

/// A Llama-shaped model.
pub(crate) struct Decoder {
    info: ModelInfo,
    embed_tokens: Embedding,
    layers: Vec<Block>,
    norm: RmsNorm,
    lm_head: Option<Linear>,
    scales: Scales,
}

impl Decoder {
    /// Builds the model from `model.*` and `lm_head` of `weights`.
    pub(crate) fn load(config: &DecoderConfig, weights: &Weights) -> Result<Self> {
        config.validate()?;
        // Precomputed frequencies that old checkpoints carry.
        weights.discard(|path| path.contains("self_attn.rotary_emb.inv_freq"));
        if config.head == Head::Tied {
            weights.discard(|path| path.starts_with("lm_head."));
        }
        let attention = &config.attention;
        let (hidden_size, vocab_size) = (attention.hidden_size, config.vocab_size);
        let model = weights.pp("model");
        let rope = Rope::new(&config.rope)?;
        let embed_tokens = Embedding::load(&model.pp("embed_tokens"), vocab_size, hidden_size)?;
        let layers =
            config.layers.iter().enumerate().map(|(index, kind)| {
                Block::load(&model.pp("layers").pp(index), config, *kind, &rope)
            });
        let layers = layers.collect::<Result<Vec<_>>>()?;
        let norm = RmsNorm::load(&model.pp("norm"), hidden_size, config.rms_norm_eps)?;
        let own = weights.pp("lm_head");
        let has_own = match config.head {
            Head::Tied => false,
            Head::Own => true,
            Head::OwnOrEmbedding => own.contains("weight"),
        };
        let lm_head = has_own
            .then(|| Linear::load(&own, hidden_size, vocab_size, false))
            .transpose()?;
        let head_input = config
            .scales
            .head_input
            .filter(|_| config.head != Head::Tied);
        let per_layer = 2 * i64::from(attention.num_kv_heads) * i64::from(attention.head_dim);
        Ok(Self {
            info: ModelInfo {
                model_type: config.model_type.clone(),
                vocab_size,
                hidden_size,
                num_layers: layers.len() as i32,
                cache_per_token: per_layer * layers.len() as i64,
                max_context: config.max_context,
            },
            embed_tokens,
            layers,
            norm,
            lm_head,
            scales: Scales {
                head_input,
                ..config.scales
            },
        })
    }
}

impl Model for Decoder {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn new_cache(&self) -> Result<Cache> {
        let layers = self.layers.iter().map(|layer| {
            Ok(LayerCache::Attention(match layer.window {
                Some(window) => KvCache::with_window(window)?,
                None => KvCache::default(),
            }))
        });
        Ok(Cache::new(layers.collect::<Result<Vec<_>>>()?))
    }

    fn forward(&self, input: Input<'_>, cache: &mut Cache) -> Result<Array> {
        let mut h = match input {
            Input::Tokens(tokens) => self.embed_tokens.forward(tokens)?,
            Input::Embeddings(embeddings) => embeddings.clone(),
        };
        if let Some(scale) = self.scales.embedding {
            h = h.multiply(scale)?;
        }
        if cache.layers().len() != self.layers.len() {
            let expected = format!("{} layers", self.layers.len());
            return Err(Error::field(
                "cache",
                expected,
                cache.layers().len().to_string(),
            ));
        }
        let length = h.dim(1)?;
        let mut stream = Residual {
            x: h,
            residual: None,
        };
        // One mask for all layers of a kind: they have seen the same tokens.
        let mut masks: Vec<(Option<i32>, Mask)> = Vec::new();
        for (layer, state) in self.layers.iter().zip(cache.layers_mut()) {
            let state = state.attention();
            let known = masks.iter().position(|(window, _)| *window == layer.window);
            let index = match known {
                Some(index) => index,
                None => {
                    masks.push((layer.window, state.mask(length)?));
                    masks.len() - 1
                }
            };
            stream = layer.forward(stream, &masks[index].1, state, self.scales.residual)?;
        }
        Ok(stream.normed(&self.norm)?.1)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        let scaled = match self.scales.head_input {
            Some(scale) => Some(hidden.multiply(scale)?),
            None => None,
        };
        let hidden = scaled.as_ref().unwrap_or(hidden);
        Ok(match &self.lm_head {
            Some(lm_head) => lm_head.forward(hidden)?,
            None => self.embed_tokens.as_linear(hidden)?,
        })
    }
}
