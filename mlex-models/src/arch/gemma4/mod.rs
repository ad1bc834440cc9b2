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
    Cache, Embedding, KvCache, LayerCache, Linear, Mask, Offset, RmsNorm, Weights, softcap,
};

use self::attention::{KeysValues, Source};
use self::config::{PerLayerConfig, TextConfig};
use self::layer::{Layer, Stream};
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
        // As mlx-lm writes a model with towers, as transformers does, and a text model.
        let language = weights.pp("language_model");
        let places = [
            (language.pp("model"), language.pp("lm_head")),
            (
                weights.pp("model").pp("language_model"),
                weights.pp("lm_head"),
            ),
        ];
        let (model, head) = places
            .into_iter()
            .find(|(model, _)| model.pp("embed_tokens").contains("weight"))
            .unwrap_or_else(|| (weights.pp("model"), weights.pp("lm_head")));
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
        if cache.layers().len() != owners {
            let found = cache.layers().len().to_string();
            return Err(Error::field("cache", format!("{owners} layers"), found));
        }
        let h = match input {
            Input::Tokens(tokens) => {
                let scale = (self.config.hidden_size as f32).sqrt();
                self.embed_tokens.forward(tokens)?.multiply(scale)?
            }
            Input::Embeddings(embeddings) => embeddings.clone(),
        };
        let embeddings = match (&self.per_layer, input) {
            (Some(table), Input::Tokens(tokens)) => Some(table.forward(tokens, &h)?),
            (Some(_), Input::Embeddings(_)) => {
                let found = "embeddings without token ids, for a model with embeddings per layer";
                return Err(Error::unsupported("input", found));
            }
            (None, _) => None,
        };
        let length = h.dim(1)?;
        let mut offset = Offset::Same(0);
        // One mask for all layers of a kind: they have seen the same tokens.
        let mut masks: [Option<Mask>; 2] = [None, None];
        for (layer, state) in self.config.layers.iter().zip(cache.layers_mut()) {
            let state = state.attention()?;
            offset = state.offset();
            let mask = &mut masks[usize::from(layer.window.is_some())];
            if mask.is_none() {
                *mask = Some(state.mask(length)?);
            }
        }
        let mut seen: Vec<KeysValues> = Vec::with_capacity(owners);
        let norms = self
            .layers
            .iter()
            .map(Layer::input_norm)
            .chain([&self.norm]);
        let norms: Vec<&RmsNorm> = norms.collect();
        let mut stream = Stream::new(h, norms[0])?;
        for (index, (layer, kind)) in self.layers.iter().zip(&self.config.layers).enumerate() {
            let embedding = match &embeddings {
                Some(all) => Some(all.at(2, index as i32)?),
                None => None,
            };
            let mask = masks[usize::from(kind.window.is_some())]
                .as_ref()
                .unwrap_or(&Mask::Causal);
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
}
