//! The decoder of architectures whose layers differ: pre-norm blocks of attention, gated
//! attention or a gated delta net, each before a feed-forward layer, dense or of experts.

use mlex_core::Array;
use mlex_nn::{
    Activation, AttentionConfig, Cache, CacheUpdate, Embedding, GatedAttention, GatedDeltaConfig,
    GatedDeltaNet, GatedMlp, KvCache, LayerCache, Linear, MoeConfig, MoeMlp, RecurrentCache,
    RmsNorm, Rope, RopeConfig, Rotations, SelfAttention, Sequence, Value, Weights,
};

use super::stream::{Masks, Recording, Stream, StreamScales, check_cache, check_plain};
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
    /// By which direction each pair of a head is rotated, where tokens may have several
    /// positions: time, height and width.
    pub(crate) directions: Option<Vec<usize>>,
    /// Behind how many layers, from the first on, further features of media are added.
    pub(crate) deepstack: usize,
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
    pub(super) fn validate(&self) -> Result<()> {
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

    /// Makes the mask of an attention layer.
    fn add_mask(&self, masks: &mut Masks, cache: &mut LayerCache) -> Result<()> {
        match self {
            Self::Attention(_) | Self::GatedAttention(_) => masks.add(None, cache.attention()?),
            Self::GatedDelta(_) => Ok(()),
        }
    }

    fn forward(
        &self,
        x: &Array,
        masks: &Masks,
        rotations: Option<&Rotations>,
        cache: &mut LayerCache,
    ) -> Result<Array> {
        let mask = masks.of(None);
        Ok(match (self, rotations) {
            (Self::Attention(layer), Some(rotations)) => {
                layer.forward_rotated(x, mask, rotations, cache.attention()?)?
            }
            (Self::Attention(layer), None) => layer.forward(x, mask, cache.attention()?)?,
            (Self::GatedAttention(layer), Some(rotations)) => {
                layer.forward_rotated(x, mask, rotations, cache.attention()?)?
            }
            (Self::GatedAttention(layer), None) => layer.forward(x, mask, cache.attention()?)?,
            (Self::GatedDelta(layer), _) => layer.forward(x, cache.recurrent()?)?,
        })
    }

    /// [`forward`](Self::forward) in steps; none where one has no kernel.
    fn record(
        &self,
        sequence: &mut Sequence,
        x: Value,
        masks: &Masks,
        cache: &mut LayerCache,
    ) -> Result<Option<(Value, CacheUpdate)>> {
        let mask = masks.of(None);
        Ok(match self {
            Self::Attention(layer) => layer.record(sequence, x, mask, cache.attention()?)?,
            Self::GatedAttention(layer) => layer.record(sequence, x, mask, cache.attention()?)?,
            Self::GatedDelta(layer) => layer.record(sequence, x, cache.recurrent()?)?,
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

    /// [`forward`](Self::forward) in steps; none where one has no kernel.
    fn record(&self, sequence: &mut Sequence, x: Value) -> Result<Option<Value>> {
        Ok(match self {
            Self::Dense(layer) => layer.record(sequence, x)?,
            Self::Experts(layer) => layer.record(sequence, x)?,
        })
    }
}

pub(super) struct Block {
    mixer: Mixer,
    mlp: Mlp,
    input_layernorm: RmsNorm,
    post_attention_layernorm: RmsNorm,
}

impl Block {
    pub(super) fn load(
        weights: &Weights,
        config: &MixedConfig,
        kind: LayerKind,
        rope: &Rope,
    ) -> Result<Self> {
        let hidden_size = config.attention.hidden_size;
        let norm = |name: &str| RmsNorm::load(&weights.pp(name), hidden_size, config.rms_norm_eps);
        Ok(Self {
            mixer: Mixer::load(weights, config, kind.mixer, rope)?,
            mlp: Mlp::load(&weights.pp("mlp"), hidden_size, kind.mlp)?,
            input_layernorm: norm("input_layernorm")?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
        })
    }

    pub(super) fn forward(
        &self,
        stream: &mut Stream,
        masks: &Masks,
        rotations: Option<&Rotations>,
        cache: &mut LayerCache,
    ) -> Result<()> {
        let normed = stream.norm(&self.input_layernorm)?;
        stream.add(self.mixer.forward(&normed, masks, rotations, cache)?)?;
        let normed = stream.norm(&self.post_attention_layernorm)?;
        stream.add(self.mlp.forward(&normed)?)
    }

    /// [`forward`](Self::forward) in steps; none where one has no kernel.
    fn record(
        &self,
        recording: &mut Recording,
        masks: &Masks,
        cache: &mut LayerCache,
    ) -> Result<Option<()>> {
        let Some(normed) = recording.norm(&self.input_layernorm)? else {
            return Ok(None);
        };
        let sequence = &mut recording.sequence;
        let Some((mixed, update)) = self.mixer.record(sequence, normed, masks, cache)? else {
            return Ok(None);
        };
        recording.update(update);
        recording.add(mixed);
        let Some(normed) = recording.norm(&self.post_attention_layernorm)? else {
            return Ok(None);
        };
        let fed = self.mlp.record(&mut recording.sequence, normed)?;
        Ok(fed.map(|fed| recording.add(fed)))
    }
}

/// A decoder of layers that differ.
pub(crate) struct Mixed {
    info: ModelInfo,
    embed_tokens: Embedding,
    layers: Vec<Block>,
    norm: RmsNorm,
    lm_head: Option<Linear>,
    rope: Rope,
    directions: Option<Vec<usize>>,
    deepstack: usize,
}

impl Mixed {
    /// Builds the model from the weights of its decoder and those of its head.
    pub(crate) fn load(config: &MixedConfig, model: &Weights, head: &Weights) -> Result<Self> {
        config.validate()?;
        let hidden_size = config.attention.hidden_size;
        let rope = Rope::new(&config.rope)?;
        let embed_tokens =
            Embedding::load(&model.pp("embed_tokens"), config.vocab_size, hidden_size)?;
        let layers = config.layers.iter().enumerate();
        let layers = layers
            .map(|(index, &kind)| Block::load(&model.pp("layers").pp(index), config, kind, &rope));
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
            norm: RmsNorm::load(&model.pp("norm"), hidden_size, config.rms_norm_eps)?,
            lm_head,
            rope,
            directions: config.directions.clone(),
            deepstack: config.deepstack,
        })
    }

    /// The rotations of tokens with positions in several directions.
    fn rotations(&self, input: Input<'_>) -> Result<Option<Rotations>> {
        let positions = match input {
            Input::Mixed(mixed) => mixed.positions(),
            _ => None,
        };
        match (positions, &self.directions) {
            (Some(positions), Some(directions)) => {
                Ok(Some(self.rope.rotations(&positions.each, directions)?))
            }
            _ => check_plain(input).map(|()| None),
        }
    }

    /// All layers in one node of the graph, where the kernels have everything that they need.
    fn forward_recorded(
        &self,
        input: Input<'_>,
        masks: &Masks,
        cache: &mut Cache,
    ) -> Result<Option<Array>> {
        let recording = Recording::start(&self.embed_tokens, input, StreamScales::default())?;
        let Some(mut recording) = recording else {
            return Ok(None);
        };
        for (layer, state) in self.layers.iter().zip(cache.layers_mut()) {
            if layer.record(&mut recording, masks, state)?.is_none() {
                return Ok(None);
            }
        }
        match recording.norm(&self.norm)? {
            Some(hidden) => recording.finish(hidden, cache).map(Some),
            None => Ok(None),
        }
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
        check_cache(cache, self.layers.len())?;
        let rotations = self.rotations(input)?;
        let mut masks = Masks::new(input)?;
        for (layer, state) in self.layers.iter().zip(cache.layers_mut()) {
            layer.mixer.add_mask(&mut masks, state)?;
        }
        if let Some(hidden) = self.forward_recorded(input, &masks, cache)? {
            return Ok(hidden);
        }
        let (mut stream, deep) = Stream::start_deep(&self.embed_tokens, input, self.deepstack)?;
        let mut deep = deep.into_iter();
        for (layer, state) in self.layers.iter().zip(cache.layers_mut()) {
            layer.forward(&mut stream, &masks, rotations.as_ref(), state)?;
            if let Some(features) = deep.next() {
                stream.add(features)?;
            }
        }
        let hidden = stream.norm(&self.norm)?;
        if let Input::Mixed(mixed) = input
            && let Some(positions) = mixed.positions()
        {
            cache.set_position(positions.next);
        }
        Ok(hidden)
    }

    fn embed(&self, tokens: &Array) -> Result<Array> {
        Ok(self.embed_tokens.forward(tokens)?)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        Ok(match &self.lm_head {
            Some(lm_head) => lm_head.forward(hidden)?,
            None => self.embed_tokens.as_linear(hidden)?,
        })
    }
}
