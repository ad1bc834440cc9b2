//! The decoder that the Llama-shaped architectures share: pre-norm blocks of rotary
//! attention and a gated feed-forward layer, a final norm and a head.

use mlex_core::Array;
use mlex_nn::{
    Activation, AttentionConfig, Cache, Embedding, GatedMlp, KvCache, LayerCache, Linear, Mask,
    RmsNorm, Rope, RopeConfig, SelfAttention, Weights,
};

use super::stream::{
    DecodeSteps, Masks, Recording, Stream, StreamScales, check_cache, check_plain,
};
use crate::Result;
use crate::config::{check, check_positive, check_size};
use crate::model::{Input, Model, ModelInfo};

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
    pub(crate) stream: StreamScales,
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

    fn forward(&self, stream: &mut Stream, mask: &Mask, cache: &mut KvCache) -> Result<()> {
        let normed = stream.norm(&self.input_layernorm)?;
        stream.add(self.self_attn.forward(&normed, mask, cache)?)?;
        let normed = stream.norm(&self.post_attention_layernorm)?;
        stream.add(self.mlp.forward(&normed)?)
    }

    /// [`forward`](Self::forward) in steps; none where one has no kernel.
    fn record(
        &self,
        recording: &mut Recording,
        mask: &Mask,
        cache: &KvCache,
    ) -> Result<Option<()>> {
        let Some(normed) = recording.norm(&self.input_layernorm)? else {
            return Ok(None);
        };
        let sequence = &mut recording.sequence;
        let Some((attended, update)) = self.self_attn.record(sequence, normed, mask, cache)? else {
            return Ok(None);
        };
        recording.update(update);
        recording.add(attended);
        let Some(normed) = recording.norm(&self.post_attention_layernorm)? else {
            return Ok(None);
        };
        let fed = self.mlp.record(&mut recording.sequence, normed)?;
        Ok(fed.map(|fed| recording.add(fed)))
    }
}

/// A Llama-shaped model.
pub(crate) struct Decoder {
    info: ModelInfo,
    embed_tokens: Embedding,
    layers: Vec<Block>,
    norm: RmsNorm,
    lm_head: Option<Linear>,
    scales: StreamScales,
    /// Factor of the hidden states before the head.
    head_input: Option<f32>,
    decode_steps: DecodeSteps,
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
            scales: config.scales.stream,
            head_input,
            decode_steps: DecodeSteps::default(),
        })
    }
}

impl Decoder {
    /// All layers in one node of the graph, where the kernels have everything that they need.
    fn forward_recorded(
        &self,
        input: Input<'_>,
        masks: &Masks,
        cache: &mut Cache,
    ) -> Result<Option<Array>> {
        let recording = Recording::start(&self.embed_tokens, input, self.scales)?;
        let Some(mut recording) = recording else {
            return Ok(None);
        };
        for (layer, state) in self.layers.iter().zip(cache.layers_mut()) {
            let mask = masks.of(layer.window);
            if layer
                .record(&mut recording, mask, state.attention()?)?
                .is_none()
            {
                return Ok(None);
            }
        }
        match recording.norm(&self.norm)? {
            Some(hidden) if DecodeSteps::apply(masks) => {
                let kept = &self.decode_steps;
                recording.finish_decode(hidden, cache, kept).map(Some)
            }
            Some(hidden) => recording.finish(hidden, cache).map(Some),
            None => Ok(None),
        }
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
        check_cache(cache, self.layers.len())?;
        check_plain(input)?;
        let mut masks = Masks::new(input)?;
        for (layer, state) in self.layers.iter().zip(cache.layers_mut()) {
            masks.add(layer.window, state.attention()?)?;
        }
        if DecodeSteps::apply(&masks)
            && let Some(hidden) = self.decode_steps.run(input, cache)?
        {
            return Ok(hidden);
        }
        if let Some(hidden) = self.forward_recorded(input, &masks, cache)? {
            return Ok(hidden);
        }
        let mut stream = Stream::start(&self.embed_tokens, input, self.scales)?;
        for (layer, state) in self.layers.iter().zip(cache.layers_mut()) {
            layer.forward(&mut stream, masks.of(layer.window), state.attention()?)?;
        }
        stream.norm(&self.norm)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        let scaled = match self.head_input {
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
