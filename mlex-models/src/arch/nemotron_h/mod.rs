//! NemotronH: layers of one part each, which is a Mamba 2 mixer, attention without positions, a
//! feed-forward part or a mixture of experts, in any order.
//!
//! Reference: mlx-lm `models/nemotron_h.py`.

mod config;
mod experts;

use mlex_core::Array;
use mlex_nn::{
    AttentionConfig, Cache, CacheUpdate, Embedding, KvCache, LayerCache, Linear, Mamba2,
    RecurrentCache, RmsNorm, SelfAttention, Sequence, Value, Weights,
};

use self::config::{Config, Kind};
use self::experts::{Mlp, Moe};
use super::stream::{Masks, Recording, Stream, StreamScales, check_cache, check_plain};
use crate::config::ModelConfig;
use crate::model::{Input, Model, ModelInfo};
use crate::registry::Entry;
use crate::{Error, Result};

pub(crate) const ENTRY: Entry = Entry {
    model_types: &["nemotron_h"],
    build,
};

fn build(config: &ModelConfig, weights: &Weights) -> Result<Box<dyn Model>> {
    let config = Config::new(config)?;
    // The heads of multi-token prediction.
    weights.discard(|path| path.starts_with("mtp."));
    Ok(Box::new(NemotronH::load(&config, weights)?))
}

#[allow(clippy::large_enum_variant, reason = "a model has some dozens")]
enum Mixer {
    Mamba(Mamba2),
    Attention(SelfAttention),
    Mlp(Mlp),
    Experts(Moe),
}

impl Mixer {
    fn load(weights: &Weights, config: &Config, kind: Kind) -> Result<Self> {
        Ok(match kind {
            Kind::Mamba => Self::Mamba(Mamba2::load(weights, &config.mamba())?),
            Kind::Attention => {
                let attention = AttentionConfig {
                    hidden_size: config.hidden_size,
                    num_heads: config.num_attention_heads,
                    num_kv_heads: config.num_key_value_heads,
                    head_dim: config.head_dim()?,
                    qkv_bias: config.attention_bias,
                    o_bias: config.attention_bias,
                    qk_norm_eps: None,
                };
                Self::Attention(SelfAttention::load(weights, &attention, None)?)
            }
            Kind::Mlp => Self::Mlp(Mlp::load(weights, config, config.intermediate_size)?),
            Kind::Experts => Self::Experts(Moe::load(weights, config, config.experts()?)?),
        })
    }

    /// An empty state, for a layer that has one.
    fn new_cache(&self) -> Option<LayerCache> {
        match self {
            Self::Mamba(_) => Some(LayerCache::Recurrent(RecurrentCache::default())),
            Self::Attention(_) => Some(LayerCache::Attention(KvCache::default())),
            Self::Mlp(_) | Self::Experts(_) => None,
        }
    }

    /// `states` are those of this layer and the ones after it.
    fn forward(&self, x: &Array, masks: &Masks, states: &mut States<'_>) -> Result<Array> {
        Ok(match self {
            Self::Mamba(layer) => layer.forward(x, next(states)?.recurrent()?)?,
            Self::Attention(layer) => {
                layer.forward(x, masks.of(None), next(states)?.attention()?)?
            }
            Self::Mlp(layer) => layer.forward(x)?,
            Self::Experts(layer) => layer.forward(x)?,
        })
    }

    /// [`forward`](Self::forward) in steps; none where one has no kernel.
    fn record(
        &self,
        sequence: &mut Sequence,
        x: Value,
        masks: &Masks,
        states: &mut States<'_>,
    ) -> Result<Option<(Value, Option<CacheUpdate>)>> {
        let recorded = match self {
            Self::Mamba(layer) => layer.record(sequence, x, next(states)?.recurrent()?)?,
            Self::Attention(layer) => {
                layer.record(sequence, x, masks.of(None), next(states)?.attention()?)?
            }
            Self::Mlp(layer) => return Ok(layer.record(sequence, x)?.map(|y| (y, None))),
            Self::Experts(layer) => return Ok(layer.record(sequence, x)?.map(|y| (y, None))),
        };
        Ok(recorded.map(|(y, update)| (y, Some(update))))
    }
}

/// The states of the layers that have one, in order.
type States<'a> = std::slice::IterMut<'a, LayerCache>;

fn next<'a>(states: &mut States<'a>) -> Result<&'a mut LayerCache> {
    let state = states.next();
    state.ok_or_else(|| Error::missing("a layer's cache"))
}

struct Block {
    norm: RmsNorm,
    mixer: Mixer,
}

struct NemotronH {
    info: ModelInfo,
    embeddings: Embedding,
    layers: Vec<Block>,
    /// How many layers have a state.
    states: usize,
    norm_f: RmsNorm,
    lm_head: Linear,
}

impl NemotronH {
    fn load(config: &Config, weights: &Weights) -> Result<Self> {
        let backbone = weights.pp("backbone");
        let (hidden_size, vocab_size) = (config.hidden_size, config.vocab_size);
        let norm = |weights: &Weights| {
            let norm = RmsNorm::load(weights, hidden_size, config.layer_norm_epsilon);
            norm.map_err(Error::from)
        };
        let kinds = config.kinds()?;
        let layers = kinds.iter().enumerate().map(|(index, &kind)| {
            let weights = backbone.pp("layers").pp(index);
            Ok(Block {
                norm: norm(&weights.pp("norm"))?,
                mixer: Mixer::load(&weights.pp("mixer"), config, kind)?,
            })
        });
        let layers = layers.collect::<Result<Vec<_>>>()?;
        let with_keys = kinds
            .iter()
            .filter(|&&kind| kind == Kind::Attention)
            .count();
        let per_layer = 2 * i64::from(config.num_key_value_heads) * i64::from(config.head_dim()?);
        Ok(Self {
            info: ModelInfo {
                model_type: config.model_type.clone(),
                vocab_size,
                hidden_size,
                num_layers: layers.len() as i32,
                cache_per_token: per_layer * with_keys as i64,
                max_context: Some(config.max_position_embeddings),
            },
            embeddings: Embedding::load(&backbone.pp("embeddings"), vocab_size, hidden_size)?,
            states: layers
                .iter()
                .filter_map(|layer| layer.mixer.new_cache())
                .count(),
            layers,
            norm_f: norm(&backbone.pp("norm_f"))?,
            lm_head: Linear::load(&weights.pp("lm_head"), hidden_size, vocab_size, false)?,
        })
    }
}

impl NemotronH {
    /// All layers in one node of the graph, where the kernels have everything that they need.
    fn forward_recorded(
        &self,
        input: Input<'_>,
        masks: &Masks,
        cache: &mut Cache,
    ) -> Result<Option<Array>> {
        let recording = Recording::start(&self.embeddings, input, StreamScales::default())?;
        let Some(mut recording) = recording else {
            return Ok(None);
        };
        let mut states = cache.layers_mut().iter_mut();
        for layer in &self.layers {
            let Some(normed) = recording.norm(&layer.norm)? else {
                return Ok(None);
            };
            let sequence = &mut recording.sequence;
            let recorded = layer.mixer.record(sequence, normed, masks, &mut states)?;
            let Some((output, update)) = recorded else {
                return Ok(None);
            };
            if let Some(update) = update {
                recording.update(update);
            }
            recording.add(output);
        }
        match recording.norm(&self.norm_f)? {
            Some(hidden) => recording.finish(hidden, cache).map(Some),
            None => Ok(None),
        }
    }
}

impl Model for NemotronH {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn new_cache(&self) -> Result<Cache> {
        let layers = self.layers.iter();
        Ok(Cache::new(
            layers.filter_map(|layer| layer.mixer.new_cache()),
        ))
    }

    fn forward(&self, input: Input<'_>, cache: &mut Cache) -> Result<Array> {
        check_cache(cache, self.states)?;
        check_plain(input)?;
        let mut masks = Masks::new(input)?;
        for state in cache.layers_mut() {
            if let LayerCache::Attention(state) = state {
                masks.add(None, state)?;
            }
        }
        if let Some(hidden) = self.forward_recorded(input, &masks, cache)? {
            return Ok(hidden);
        }
        let mut stream = Stream::start(&self.embeddings, input, StreamScales::default())?;
        let mut states = cache.layers_mut().iter_mut();
        for layer in &self.layers {
            let normed = stream.norm(&layer.norm)?;
            stream.add(layer.mixer.forward(&normed, &masks, &mut states)?)?;
        }
        stream.norm(&self.norm_f)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        Ok(self.lm_head.forward(hidden)?)
    }
}
