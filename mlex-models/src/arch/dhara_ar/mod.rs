//! Dhara: Llama-shaped, with Canon layers (short causal convolutions) at four places, queries and
//! keys normalized after they are rotated, and bounded logits. It fills blocks of mask tokens too.
//!
//! Reference: mlx-optiq `mlx_lm_patches/dhara_ar.py`, whose defaults are taken. Canon layers stand
//! before attention (A), on queries, keys and values (B), before the feed-forward part (C) and
//! inside of it (D).

mod config;
mod layers;

use mlex_core::Array;
use mlex_nn::{
    Cache, ConvCache, Embedding, KvCache, LayerCache, Linear, Mask, RmsNorm, Weights, softcap,
};

use self::config::Config;
use self::layers::Block;
use super::stream::{Recording, Stream, StreamScales, check_cache, check_plain, length};
use crate::config::ModelConfig;
use crate::model::{BlockModel, Input, Model, ModelInfo};
use crate::registry::Entry;
use crate::{Error, Result};

pub(crate) const ENTRY: Entry = Entry {
    model_types: &["dhara_ar"],
    build,
};

fn build(config: &ModelConfig, weights: &Weights) -> Result<Box<dyn Model>> {
    let config = Config::new(config)?;
    if config.tie_word_embeddings {
        weights.discard(|path| path.starts_with("lm_head."));
    }
    Ok(Box::new(Dhara::load(config, weights)?))
}

struct Dhara {
    info: ModelInfo,
    config: Config,
    embed_tokens: Embedding,
    layers: Vec<Block>,
    norm: RmsNorm,
    lm_head: Option<Linear>,
}

impl Dhara {
    fn load(config: Config, weights: &Weights) -> Result<Self> {
        let model = weights.pp("model");
        let (hidden_size, vocab_size) = (config.hidden_size, config.vocab_size);
        let embed_tokens = Embedding::load(&model.pp("embed_tokens"), vocab_size, hidden_size)?;
        let layers = (0..config.num_hidden_layers)
            .map(|index| Block::load(&model.pp("layers").pp(index), &config))
            .collect::<Result<Vec<_>>>()?;
        let lm_head = (!config.tie_word_embeddings)
            .then(|| Linear::load(&weights.pp("lm_head"), hidden_size, vocab_size, false));
        let per_layer = 2 * i64::from(config.num_key_value_heads) * i64::from(config.head_dim());
        Ok(Self {
            info: ModelInfo {
                model_type: config.model_type.clone(),
                vocab_size,
                hidden_size,
                num_layers: layers.len() as i32,
                cache_per_token: per_layer * layers.len() as i64,
                max_context: config.max_position_embeddings,
            },
            embed_tokens,
            layers,
            norm: RmsNorm::load(&model.pp("norm"), hidden_size, config.rms_norm_eps)?,
            lm_head: lm_head.transpose()?,
            config,
        })
    }

    /// The states of a layer: one for each Canon layer and that of attention, in the order in which
    /// the layer asks for them.
    fn layer_states(&self) -> Vec<LayerCache> {
        let places = [('A', 1), ('B', 3), ('K', 1), ('C', 1), ('D', 1)];
        let states = places.into_iter().flat_map(|(place, count)| {
            let state = match place {
                'K' => Some(LayerCache::Attention(KvCache::default())),
                _ if self.config.has_canon(place) => Some(LayerCache::Conv(ConvCache::default())),
                _ => None,
            };
            state.into_iter().flat_map(move |state| vec![state; count])
        });
        states.collect()
    }

    /// The keys and values of the first layer, which have seen what the others have.
    fn keys(cache: &Cache) -> Result<&KvCache> {
        let mut layers = cache.layers().iter();
        let keys = layers.find_map(|layer| match layer {
            LayerCache::Attention(cache) => Some(cache),
            _ => None,
        });
        keys.ok_or_else(|| Error::missing("the cache of an attention layer"))
    }

    fn run(&self, input: Input<'_>, mask: &Mask, cache: &mut Cache) -> Result<Array> {
        check_cache(cache, self.layers.len() * self.layer_states().len())?;
        if let Some(hidden) = self.run_recorded(input, mask, cache)? {
            return Ok(hidden);
        }
        let mut stream = Stream::start(&self.embed_tokens, input, StreamScales::default())?;
        let mut states = cache.layers_mut().iter_mut();
        for layer in &self.layers {
            layer.forward(&mut stream, mask, &mut states)?;
        }
        stream.norm(&self.norm)
    }

    /// All layers in one node of the graph, where the kernels have everything that they need.
    fn run_recorded(
        &self,
        input: Input<'_>,
        mask: &Mask,
        cache: &mut Cache,
    ) -> Result<Option<Array>> {
        let recording = Recording::start(&self.embed_tokens, input, StreamScales::default())?;
        let Some(mut recording) = recording else {
            return Ok(None);
        };
        let mut states = cache.layers_mut().iter_mut();
        for layer in &self.layers {
            if layer.record(&mut recording, mask, &mut states)?.is_none() {
                return Ok(None);
            }
        }
        match recording.norm(&self.norm)? {
            Some(hidden) => recording.finish(hidden, cache).map(Some),
            None => Ok(None),
        }
    }
}

impl Model for Dhara {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn new_cache(&self) -> Result<Cache> {
        let layer = self.layer_states();
        let layers = self.layers.iter().flat_map(|_| layer.clone());
        Ok(Cache::new(layers))
    }

    fn forward(&self, input: Input<'_>, cache: &mut Cache) -> Result<Array> {
        check_plain(input)?;
        let mask = Self::keys(cache)?.mask(length(input)?)?;
        self.run(input, &mask, cache)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        let logits = match &self.lm_head {
            Some(lm_head) => lm_head.forward(hidden)?,
            None => self.embed_tokens.as_linear(hidden)?,
        };
        Ok(match self.config.cap() {
            Some(cap) => softcap(&logits, cap)?,
            None => logits,
        })
    }

    fn repetition_penalty(&self) -> Option<f32> {
        Some(self.config.repetition_penalty())
    }

    fn blocks(&self) -> Option<&dyn BlockModel> {
        // One that is not in the vocabulary cannot be filled in.
        let known = i64::from(self.config.mask_token_id) < i64::from(self.info.vocab_size);
        known.then_some(self as &dyn BlockModel)
    }
}

impl BlockModel for Dhara {
    fn mask_token(&self) -> u32 {
        self.config.mask_token_id
    }

    fn forward_blocks(&self, tokens: &Array, block: i32, cache: &mut Cache) -> Result<Array> {
        let mask = Self::keys(cache)?.block_mask(tokens.dim(1)?, block)?;
        self.run(Input::Tokens(tokens), &mask, cache)
    }
}
