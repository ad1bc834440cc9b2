//! The decoder that the Llama-shaped architectures share: pre-norm blocks of rotary
//! attention and a gated feed-forward layer, a final norm and a head.

use mlex_core::Array;
use mlex_nn::{
    Activation, AttentionConfig, Cache, CacheUpdate, Embedding, GatedMlp, KvCache, LayerCache,
    Linear, Mask, RmsNorm, Rope, RopeConfig, SelfAttention, Sequence, Value, Weights,
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

    /// [`forward`](Self::forward) in steps of `sequence`; none where one has no kernel.
    fn record(
        &self,
        sequence: &mut Sequence,
        (x, residual): (Value, Option<Value>),
        mask: &Mask,
        cache: &KvCache,
        residual_scale: Option<f32>,
    ) -> Result<Option<Recorded>> {
        let scale = residual_scale.unwrap_or(1.0);
        let first = record_norm(&self.input_layernorm, sequence, (x, residual), scale)?;
        let Some((x, normed)) = first else {
            return Ok(None);
        };
        let Some((r, update)) = self.self_attn.record(sequence, normed, mask, cache)? else {
            return Ok(None);
        };
        let second = record_norm(
            &self.post_attention_layernorm,
            sequence,
            (x, Some(r)),
            scale,
        )?;
        let Some((x, normed)) = second else {
            return Ok(None);
        };
        let residual = self.mlp.record(sequence, normed)?;
        Ok(residual.map(|residual| Recorded {
            x,
            residual,
            update,
        }))
    }
}

/// A layer in a sequence: its residual stream, and what becomes of its cache.
struct Recorded {
    x: Value,
    residual: Value,
    update: CacheUpdate,
}

/// `x` plus the scaled residual, and the norm of that.
fn record_norm(
    norm: &RmsNorm,
    sequence: &mut Sequence,
    (x, residual): (Value, Option<Value>),
    scale: f32,
) -> Result<Option<(Value, Value)>> {
    Ok(match residual {
        Some(residual) => norm.record_sum(sequence, x, residual, scale)?,
        None => norm.record(sequence, x)?.map(|normed| (x, normed)),
    })
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

/// One mask for all layers of a kind: they have seen the same tokens.
struct Masks(Vec<(Option<i32>, Mask)>);

impl Masks {
    fn of(&self, window: Option<i32>) -> &Mask {
        let known = self.0.iter().find(|(known, _)| *known == window);
        // Made for the windows of all layers.
        known.map_or(&Mask::Causal, |(_, mask)| mask)
    }
}

impl Decoder {
    fn masks(&self, length: i32, cache: &mut Cache) -> Result<Masks> {
        let mut masks: Vec<(Option<i32>, Mask)> = Vec::new();
        for (layer, state) in self.layers.iter().zip(cache.layers_mut()) {
            if !masks.iter().any(|(window, _)| *window == layer.window) {
                masks.push((layer.window, state.attention()?.mask(length)?));
            }
        }
        Ok(Masks(masks))
    }

    /// All layers in one node of the graph, where the kernels have everything that they need.
    fn forward_recorded(
        &self,
        input: Input<'_>,
        masks: &Masks,
        cache: &mut Cache,
    ) -> Result<Option<Array>> {
        let start = match (input, self.scales.embedding) {
            (Input::Tokens(tokens), None) => Sequence::start_with_ids(tokens)?,
            (Input::Tokens(tokens), Some(scale)) => {
                Sequence::start(&self.embed_tokens.forward(tokens)?.multiply(scale)?)?
            }
            (Input::Embeddings(h), None) => Sequence::start(h)?,
            (Input::Embeddings(h), Some(scale)) => Sequence::start(&h.multiply(scale)?)?,
        };
        let Some((mut sequence, mut value)) = start else {
            return Ok(None);
        };
        if let (Input::Tokens(_), None) = (input, self.scales.embedding) {
            match self.embed_tokens.record(&mut sequence, value)? {
                Some(embedded) => value = embedded,
                None => return Ok(None),
            }
        }
        let scale = self.scales.residual;
        let mut stream = (value, None);
        let mut updates = Vec::with_capacity(self.layers.len());
        for (layer, state) in self.layers.iter().zip(cache.layers_mut()) {
            let mask = masks.of(layer.window);
            let recorded = layer.record(&mut sequence, stream, mask, state.attention()?, scale)?;
            let Some(recorded) = recorded else {
                return Ok(None);
            };
            stream = (recorded.x, Some(recorded.residual));
            updates.push(recorded.update);
        }
        let last = record_norm(&self.norm, &mut sequence, stream, scale.unwrap_or(1.0))?;
        let Some((_, hidden)) = last else {
            return Ok(None);
        };
        let hidden = sequence.finish(&[hidden])?.pop();
        if let Some(hidden) = &hidden {
            let mut caches = Vec::with_capacity(updates.len());
            for state in cache.layers_mut() {
                caches.push(state.attention()?);
            }
            CacheUpdate::apply_all(updates.iter().zip(caches), hidden);
        }
        Ok(hidden)
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
        if cache.layers().len() != self.layers.len() {
            let expected = format!("{} layers", self.layers.len());
            return Err(Error::field(
                "cache",
                expected,
                cache.layers().len().to_string(),
            ));
        }
        let length = match input {
            Input::Tokens(tokens) => tokens.dim(1)?,
            Input::Embeddings(embeddings) => embeddings.dim(1)?,
        };
        let masks = self.masks(length, cache)?;
        if let Some(hidden) = self.forward_recorded(input, &masks, cache)? {
            return Ok(hidden);
        }
        let mut h = match input {
            Input::Tokens(tokens) => self.embed_tokens.forward(tokens)?,
            Input::Embeddings(embeddings) => embeddings.clone(),
        };
        if let Some(scale) = self.scales.embedding {
            h = h.multiply(scale)?;
        }
        let mut stream = Residual {
            x: h,
            residual: None,
        };
        for (layer, state) in self.layers.iter().zip(cache.layers_mut()) {
            let state = state.attention()?;
            let mask = masks.of(layer.window);
            stream = layer.forward(stream, mask, state, self.scales.residual)?;
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
