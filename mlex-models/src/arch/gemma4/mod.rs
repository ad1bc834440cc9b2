//! Gemma 4, the text side of every size: windowed and full attention layers with sizes of their
//! own, later layers on the keys and values of earlier ones, embeddings per layer, experts beside
//! the dense feed-forward part.
//!
//! Reference: mlx-lm `models/gemma4_text.py` and `models/gemma4.py`, whose defaults are taken;
//! mlx-vlm `models/gemma4_unified`. Tensors of the vision and audio parts are left unread.

mod attention;
mod config;
mod experts;
mod layer;

use mlex_core::Array;
use mlex_nn::{
    Cache, Embedding, KvCache, LayerCache, Linear, Offset, RmsNorm, Sequence, Value, Weights,
    softcap,
};

use self::attention::{KeysValues, Source};
use self::config::{PerLayerConfig, TextConfig};
use self::layer::{Layer, RecordedStream, Stream};
use super::language;
use super::stream::{Masks, Recording, StreamScales, check_cache, embed};
use crate::config::ModelConfig;
use crate::model::{Input, Model, ModelInfo};
use crate::registry::Entry;
use crate::{Error, Result};

pub(crate) const ENTRY: Entry = Entry {
    model_types: &[
        "gemma4",
        "gemma4_text",
        "gemma4_unified",
        "gemma4_unified_text",
    ],
    build,
};

fn build(config: &ModelConfig, weights: &Weights) -> Result<Box<dyn Model>> {
    let config = TextConfig::new(config)?;
    discard_unused(&config, weights);
    Ok(Box::new(Gemma4::load(config, weights)?))
}

/// Drops what checkpoints have beside the text model, and what a text model has and does not use.
fn discard_unused(config: &TextConfig, weights: &Weights) {
    const TOWERS: [&str; 6] = [
        "vision_tower",
        "multi_modal_projector",
        "audio_tower",
        "embed_audio",
        "embed_vision",
        "vision_embedder",
    ];
    const UNUSED: [&str; 5] = [
        "self_attn.rotary_emb",
        "input_max",
        "input_min",
        "output_max",
        "output_min",
    ];
    const KEYS: [&str; 4] = ["k_proj", "v_proj", "k_norm", "v_norm"];
    // A layer on the keys of another one may still have projections of its own.
    let shared_keys = |path: &str| {
        let (_, path) = path.split_once("layers.")?;
        let (index, path) = path.split_once(".self_attn.")?;
        let layer = config.layers.get(index.parse::<usize>().ok()?)?;
        let (name, _) = path.split_once('.')?;
        Some(layer.shared_with.is_some() && KEYS.contains(&name))
    };
    weights.discard(|path| {
        let inner = path.strip_prefix("model.").unwrap_or(path);
        TOWERS.iter().any(|tower| inner.starts_with(tower))
            || UNUSED.iter().any(|name| path.contains(name))
            || shared_keys(path).unwrap_or(false)
            || (config.tie_word_embeddings
                && path
                    .trim_start_matches("language_model.")
                    .starts_with("lm_head."))
    });
}

struct Gemma4 {
    info: ModelInfo,
    config: TextConfig,
    embed_tokens: Embedding,
    per_layer: Option<PerLayerEmbedding>,
    layers: Vec<Layer>,
    norm: RmsNorm,
    lm_head: Option<Linear>,
}

impl Gemma4 {
    fn load(config: TextConfig, weights: &Weights) -> Result<Self> {
        let (model, head) = language::places(weights);
        let (hidden_size, vocab_size) = (config.hidden_size, config.vocab_size);
        let embed_tokens = Embedding::load(&model.pp("embed_tokens"), vocab_size, hidden_size)?;
        let per_layer = config
            .per_layer
            .map(|sizes| PerLayerEmbedding::load(&model, &config, sizes))
            .transpose()?;
        let layers = config.layers.iter().enumerate();
        let layers = layers
            .map(|(index, layer)| Layer::load(&model.pp("layers").pp(index), &config, layer))
            .collect::<Result<Vec<_>>>()?;
        let norm = RmsNorm::load(&model.pp("norm"), hidden_size, config.rms_norm_eps)?;
        let lm_head = (!config.tie_word_embeddings)
            .then(|| Linear::load(&head, hidden_size, vocab_size, false))
            .transpose()?;
        let owners = config
            .layers
            .iter()
            .filter(|layer| layer.shared_with.is_none());
        let cache_per_token =
            owners.map(|layer| 2 * i64::from(layer.num_kv_heads) * i64::from(layer.head_dim));
        Ok(Self {
            info: ModelInfo {
                model_type: config.model_type.clone(),
                vocab_size,
                hidden_size,
                num_layers: layers.len() as i32,
                cache_per_token: cache_per_token.sum(),
                max_context: Some(config.max_context),
            },
            embed_tokens,
            per_layer,
            layers,
            norm,
            lm_head,
            config,
        })
    }

    /// The number of layers with keys and values of their own; they come first.
    fn owners(&self) -> usize {
        let layers = self.config.layers.iter();
        layers
            .take_while(|layer| layer.shared_with.is_none())
            .count()
    }

    /// Factor of the embeddings of tokens; others are taken as they enter the first layer.
    fn embedding_scale(&self, input: Input<'_>) -> Option<f32> {
        match input {
            Input::Tokens(_) | Input::Mixed(_) => Some((self.config.hidden_size as f32).sqrt()),
            Input::Embeddings(_) => None,
        }
    }

    /// All layers in one node of the graph, where the kernels have everything that they need.
    fn forward_recorded(
        &self,
        input: Input<'_>,
        masks: &Masks,
        offset: &Offset,
        cache: &mut Cache,
    ) -> Result<Option<Array>> {
        let scales = StreamScales {
            embedding: self.embedding_scale(input),
            residual: None,
        };
        let Some(mut recording) = Recording::start(&self.embed_tokens, input, scales)? else {
            return Ok(None);
        };
        let embeddings = match (&self.per_layer, recording.ids) {
            (Some(table), Some(ids)) => {
                let x = recording.x;
                let Some(embeddings) = table.record(&mut recording.sequence, ids, x)? else {
                    return Ok(None);
                };
                Some((embeddings, table))
            }
            _ => None,
        };
        let norms = self.norms();
        let x = recording.x;
        let started = RecordedStream::new(&mut recording.sequence, x, norms[0])?;
        let Some(mut stream) = started else {
            return Ok(None);
        };
        for (index, (layer, kind)) in self.layers.iter().zip(&self.config.layers).enumerate() {
            let embedding = match embeddings {
                Some((all, table)) => {
                    let embedding = table.record_layer(&mut recording.sequence, all, index);
                    if embedding.is_none() {
                        return Ok(None);
                    }
                    embedding
                }
                None => None,
            };
            let (sequence, updates) = recording.parts();
            let source = match kind.shared_with {
                Some(owner) => Source::Shared(&updates[owner]),
                None => Source::Own(&*cache.layers_mut()[index].attention()?),
            };
            let (mask, next) = (masks.of(kind.window), norms[index + 1]);
            let recorded = layer.record(sequence, stream, embedding, mask, offset, source, next)?;
            let Some((behind, update)) = recorded else {
                return Ok(None);
            };
            stream = behind;
            if let Some(update) = update {
                recording.update(update);
            }
        }
        recording.finish(stream.normed, cache).map(Some)
    }

    /// The norm that each layer starts with, and the last one.
    fn norms(&self) -> Vec<&RmsNorm> {
        let norms = self.layers.iter().map(Layer::input_norm);
        norms.chain([&self.norm]).collect()
    }
}

impl Model for Gemma4 {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn new_cache(&self) -> Result<Cache> {
        let owners = &self.config.layers[..self.owners()];
        let caches = owners.iter().map(|layer| {
            Ok(LayerCache::Attention(match layer.window {
                Some(window) => KvCache::with_window(window)?,
                None => KvCache::default(),
            }))
        });
        Ok(Cache::new(caches.collect::<Result<Vec<_>>>()?))
    }

    /// Embeddings are taken as they enter the first layer, those of tokens scaled already.
    fn forward(&self, input: Input<'_>, cache: &mut Cache) -> Result<Array> {
        let owners = self.owners();
        check_cache(cache, owners)?;
        if let (Some(_), Input::Embeddings(_)) = (&self.per_layer, input) {
            let found = "embeddings without token ids, for a model with embeddings per layer";
            return Err(Error::unsupported("input", found));
        }
        let mut offset = Offset::Same(0);
        if let Input::Mixed(mixed) = input
            && mixed.positions().is_some()
        {
            let found = "tokens with positions in several directions";
            return Err(Error::unsupported("input", found));
        }
        let mut masks = Masks::new(input)?;
        for (layer, state) in self.config.layers.iter().zip(cache.layers_mut()) {
            let state = state.attention()?;
            offset = state.offset();
            masks.add(layer.window, state)?;
        }
        if let Some(hidden) = self.forward_recorded(input, &masks, &offset, cache)? {
            return Ok(hidden);
        }
        let h = embed(&self.embed_tokens, input, self.embedding_scale(input))?;
        let embeddings = match (&self.per_layer, input) {
            (Some(table), Input::Tokens(tokens)) => Some(table.forward(tokens, &h)?),
            // Features have the table's row of token 0, as in the reference.
            (Some(table), Input::Mixed(mixed)) => Some(table.forward(&mixed.text_tokens()?, &h)?),
            _ => None,
        };
        let mut seen: Vec<KeysValues> = Vec::with_capacity(owners);
        let norms = self.norms();
        let mut stream = Stream::new(h, norms[0])?;
        for (index, (layer, kind)) in self.layers.iter().zip(&self.config.layers).enumerate() {
            let embedding = match &embeddings {
                Some(all) => Some(all.at(2, index as i32)?),
                None => None,
            };
            let mask = masks.of(kind.window);
            let source = match kind.shared_with {
                Some(owner) => Source::Shared(&seen[owner]),
                None => Source::Own(cache.layers_mut()[index].attention()?),
            };
            let next = norms[index + 1];
            let (behind, keys_values) =
                layer.forward(&stream, embedding.as_ref(), mask, &offset, source, next)?;
            stream = behind;
            if kind.shared_with.is_none() {
                seen.push(keys_values);
            }
        }
        Ok(stream.normed)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        let logits = match &self.lm_head {
            Some(lm_head) => lm_head.forward(hidden)?,
            None => self.embed_tokens.as_linear(hidden)?,
        };
        Ok(match self.config.final_logit_softcapping {
            Some(cap) => softcap(&logits, cap)?,
            None => logits,
        })
    }
}

/// Every layer's own embedding of a token: a table, plus a projection of the main embedding.
struct PerLayerEmbedding {
    embed_tokens_per_layer: Embedding,
    per_layer_model_projection: Linear,
    per_layer_projection_norm: RmsNorm,
    sizes: PerLayerConfig,
    num_layers: i32,
    projection_scale: f32,
}

impl PerLayerEmbedding {
    fn load(weights: &Weights, config: &TextConfig, sizes: PerLayerConfig) -> Result<Self> {
        let num_layers = config.layers.len() as i32;
        let width = num_layers * sizes.hidden_size;
        Ok(Self {
            embed_tokens_per_layer: Embedding::load(
                &weights.pp("embed_tokens_per_layer"),
                sizes.vocab_size,
                width,
            )?,
            per_layer_model_projection: Linear::load(
                &weights.pp("per_layer_model_projection"),
                config.hidden_size,
                width,
                false,
            )?,
            per_layer_projection_norm: RmsNorm::load(
                &weights.pp("per_layer_projection_norm"),
                sizes.hidden_size,
                config.rms_norm_eps,
            )?,
            sizes,
            num_layers,
            projection_scale: (config.hidden_size as f32).powf(-0.5),
        })
    }

    /// `[B, L, layers, D]` of tokens `[B, L]` whose scaled embeddings are `h`.
    fn forward(&self, tokens: &Array, h: &Array) -> Result<Array> {
        let split = [self.num_layers, self.sizes.hidden_size];
        let table = self
            .embed_tokens_per_layer
            .forward(tokens)?
            .multiply((self.sizes.hidden_size as f32).sqrt())?
            .unflatten(-1, &split)?;
        let projected = self
            .per_layer_model_projection
            .forward(h)?
            .multiply(self.projection_scale)?
            .unflatten(-1, &split)?;
        let projected = self.per_layer_projection_norm.forward(&projected)?;
        Ok(projected
            .add(&table)?
            .multiply(std::f32::consts::FRAC_1_SQRT_2)?)
    }

    /// [`forward`](Self::forward) in steps, `[B, L, layers * D]`; none where one has no kernel.
    fn record(&self, sequence: &mut Sequence, ids: Value, h: Value) -> Result<Option<Value>> {
        let table = self.embed_tokens_per_layer.record(sequence, ids)?;
        let scale = (self.sizes.hidden_size as f32).sqrt();
        let table = table.and_then(|table| sequence.scale(table, scale));
        let projected = self.per_layer_model_projection.record(sequence, h)?;
        let scale = self.projection_scale;
        let projected = projected.and_then(|projected| sequence.scale(projected, scale));
        let (Some(table), Some(projected)) = (table, projected) else {
            return Ok(None);
        };
        let norm = &self.per_layer_projection_norm;
        let projected = norm.record_parts(sequence, projected)?;
        let half = std::f32::consts::FRAC_1_SQRT_2;
        Ok(projected.and_then(|projected| sequence.add(projected, table, half)))
    }

    /// A layer's part of [`record`](Self::record): `[B, L, D]`.
    fn record_layer(&self, sequence: &mut Sequence, all: Value, layer: usize) -> Option<Value> {
        let (width, layers) = (self.sizes.hidden_size, self.num_layers);
        sequence.columns(all, layers * width, layer as i32 * width, width)
    }
}
