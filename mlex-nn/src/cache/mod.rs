//! What a model remembers of the tokens it has seen: one state per layer, in one value.

mod buffers;
mod checkpoint;
mod conv;
mod kv;
pub(crate) mod memory;
mod packed;
mod padding;
mod recurrent;
mod state;

use std::sync::Arc;

use mlex_core::{Array, AttentionMask, Dtype};

pub use checkpoint::Checkpoint;
pub use conv::ConvCache;
pub use kv::KvCache;
pub use packed::{KvPacking, KvQuantization};
pub use recurrent::{RecurrentCache, RecurrentState};
pub use state::{KvState, LayerState};

use crate::{Error, Result};

/// The position of the first new token.
#[derive(Clone, Debug)]
pub enum Offset {
    /// The same in every batch row.
    Same(i32),
    /// One per batch row.
    PerRow(Arc<[i32]>),
}

impl Offset {
    /// One position, or one per batch row.
    pub fn positions(&self) -> &[i32] {
        match self {
            Self::Same(position) => std::slice::from_ref(position),
            Self::PerRow(positions) => positions,
        }
    }
}

/// Which keys the new queries see.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Mask {
    /// All of them.
    None,
    /// Those up to the query's own position.
    Causal,
    /// bool, broadcasting to `[B, H, L, S]`: true where the query sees the key.
    Array(Array),
}

impl Mask {
    /// As an attention operation takes it.
    pub fn as_attention(&self) -> AttentionMask<'_> {
        match self {
            Self::None => AttentionMask::None,
            Self::Causal => AttentionMask::Causal,
            Self::Array(mask) => AttentionMask::Array(mask),
        }
    }
}

/// The state of one layer.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LayerCache {
    /// Keys and values of an attention layer.
    Attention(KvCache),
    /// The state of a recurrent layer.
    Recurrent(RecurrentCache),
    /// The last inputs of a short convolution.
    Conv(ConvCache),
}

/// Calls a method that all kinds of caches have.
macro_rules! each {
    ($cache:expr, $inner:ident => $call:expr) => {
        match $cache {
            LayerCache::Attention($inner) => $call,
            LayerCache::Recurrent($inner) => $call,
            LayerCache::Conv($inner) => $call,
        }
    };
}

impl LayerCache {
    /// The keys and values of an attention layer.
    ///
    /// # Errors
    /// When it is another kind of layer's.
    pub fn attention(&mut self) -> Result<&mut KvCache> {
        match self {
            Self::Attention(cache) => Ok(cache),
            other => Err(other.is_not("an attention layer's")),
        }
    }

    /// The state of a recurrent layer.
    ///
    /// # Errors
    /// When it is another kind of layer's.
    pub fn recurrent(&mut self) -> Result<&mut RecurrentCache> {
        match self {
            Self::Recurrent(cache) => Ok(cache),
            other => Err(other.is_not("a recurrent layer's")),
        }
    }

    /// The last inputs of a short convolution.
    ///
    /// # Errors
    /// When it is another kind of layer's.
    pub fn conv(&mut self) -> Result<&mut ConvCache> {
        match self {
            Self::Conv(cache) => Ok(cache),
            other => Err(other.is_not("a convolution's")),
        }
    }

    fn is_not(&self, expected: &str) -> Error {
        let found = match self {
            Self::Attention(_) => "an attention layer's",
            Self::Recurrent(_) => "a recurrent layer's",
            Self::Conv(_) => "a convolution's",
        };
        Error::setting("layer cache", expected, found)
    }

    /// How many tokens the layer has seen, padding included.
    pub fn len(&self) -> i32 {
        each!(self, cache => cache.len())
    }

    /// Whether it has seen none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the last `count` tokens can be forgotten.
    pub fn can_trim(&self, count: i32) -> bool {
        each!(self, cache => cache.can_trim(count))
    }

    /// Forgets the last `count` tokens.
    ///
    /// # Errors
    /// When it cannot ([`can_trim`](Self::can_trim)); then nothing is changed.
    pub fn trim(&mut self, count: i32) -> Result<()> {
        each!(self, cache => cache.trim(count))
    }

    /// The bytes that the state takes.
    pub fn nbytes(&self) -> usize {
        match self {
            Self::Attention(cache) => cache.nbytes(),
            Self::Recurrent(cache) => cache.arrays().map(Array::nbytes).sum(),
            Self::Conv(cache) => cache.arrays().map(Array::nbytes).sum(),
        }
    }

    /// The bytes that the state takes after `tokens` tokens, judged by the first ones, which it has
    /// seen: zero without.
    pub fn estimate(&self, tokens: u64) -> u64 {
        match self {
            Self::Attention(cache) => cache.estimate(tokens),
            Self::Recurrent(_) | Self::Conv(_) => self.nbytes() as u64,
        }
    }

    /// The arrays that hold the state.
    pub fn arrays(&self) -> Box<dyn Iterator<Item = &Array> + '_> {
        match self {
            Self::Attention(cache) => Box::new(cache.arrays()),
            Self::Recurrent(cache) => Box::new(cache.arrays()),
            Self::Conv(cache) => Box::new(cache.arrays()),
        }
    }
}

/// The states of all layers. A clone is a snapshot: it shares the arrays and costs no copy
/// until one of the two goes on.
#[derive(Clone, Debug, Default)]
pub struct Cache {
    layers: Vec<LayerCache>,
    quantization: Option<KvQuantization>,
}

impl Cache {
    /// One state per layer, in order.
    pub fn new(layers: impl IntoIterator<Item = LayerCache>) -> Self {
        Self {
            layers: layers.into_iter().collect(),
            quantization: None,
        }
    }

    /// Empty keys and values for `layers` attention layers.
    pub fn attention(layers: usize) -> Self {
        Self::new((0..layers).map(|_| LayerCache::Attention(KvCache::default())))
    }

    /// The states, to be updated layer by layer.
    pub fn layers_mut(&mut self) -> &mut [LayerCache] {
        &mut self.layers
    }

    /// The states.
    pub fn layers(&self) -> &[LayerCache] {
        &self.layers
    }

    /// How many tokens the model has seen, padding included.
    pub fn len(&self) -> i32 {
        self.layers.first().map_or(0, LayerCache::len)
    }

    /// Whether it has seen none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Announces that row `b` of the batch starts with `padding[b]` tokens of padding.
    ///
    /// # Errors
    /// When tokens have been seen already.
    pub fn set_left_padding(&mut self, padding: &[i32]) -> Result<()> {
        for layer in &mut self.layers {
            each!(layer, cache => cache.set_left_padding(padding))?;
        }
        Ok(())
    }

    /// The position of the next token, in the first row of a batch.
    pub fn position(&self) -> i32 {
        let attention = self.layers.iter().find_map(|layer| match layer {
            LayerCache::Attention(cache) => cache.offset().positions().first().copied(),
            _ => None,
        });
        attention.unwrap_or_else(|| self.len())
    }

    /// Sets the position of the next token, after tokens whose positions did not count up.
    pub fn set_position(&mut self, position: i32) {
        for layer in &mut self.layers {
            if let LayerCache::Attention(cache) = layer {
                cache.set_position(position);
            }
        }
    }

    /// Announces `additional` tokens. On a CPU, layers that keep all of them make room with the
    /// first ones, which saves copies of keys and values when more come.
    pub fn reserve(&mut self, additional: usize) {
        let additional = i32::try_from(additional).unwrap_or(i32::MAX);
        for layer in &mut self.layers {
            if let LayerCache::Attention(cache) = layer {
                cache.reserve(additional);
            }
        }
    }

    /// Has short convolutions keep so many inputs more, from the next step on, that the last
    /// `tokens` can be forgotten. Other layers do what they can anyway.
    pub fn set_spare(&mut self, tokens: i32) {
        for layer in &mut self.layers {
            if let LayerCache::Conv(cache) = layer {
                cache.set_spare(tokens);
            }
        }
    }

    /// Whether the last `count` tokens can be forgotten. Recurrent layers cannot forget some of
    /// what they have seen: keep a clone of the cache to go back to.
    pub fn can_trim(&self, count: i32) -> bool {
        let mut layers = self.layers.iter();
        layers.all(|layer| layer.can_trim(count))
    }

    /// Forgets the last `count` tokens.
    ///
    /// # Errors
    /// When a layer cannot ([`can_trim`](Self::can_trim)); then nothing is changed.
    pub fn trim(&mut self, count: i32) -> Result<()> {
        if !self.can_trim(count) {
            return Err(Error::setting(
                "tokens to trim",
                "what every layer still holds",
                count,
            ));
        }
        for layer in &mut self.layers {
            layer.trim(count)?;
        }
        Ok(())
    }

    /// The arrays that hold the state, to be evaluated.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.layers.iter().flat_map(LayerCache::arrays)
    }

    /// The bytes that the states take.
    pub fn nbytes(&self) -> usize {
        self.layers.iter().map(LayerCache::nbytes).sum()
    }

    /// The bytes that the states take after `tokens` tokens, judged by the first ones, which they
    /// have seen: zero without.
    pub fn estimate(&self, tokens: u64) -> u64 {
        let layers = self.layers.iter();
        layers.fold(0, |sum, layer| sum.saturating_add(layer.estimate(tokens)))
    }

    /// The type of keys and values, once a layer has some.
    pub fn dtype(&self) -> Option<Dtype> {
        self.layers.iter().find_map(|layer| match layer {
            LayerCache::Attention(cache) => cache.dtype(),
            _ => None,
        })
    }

    /// Lets the queries of layers that see all positions see the first `sinks` and the last ones,
    /// `size` together (mlx-lm's `RotatingKVCache`).
    ///
    /// # Errors
    /// When tokens have been seen, keys and values are to be packed, or `size` is not more than
    /// `sinks`.
    pub fn limit(&mut self, size: i32, sinks: i32) -> Result<()> {
        if self.quantization.is_some() {
            let expected = "keys and values that are not packed";
            return Err(Error::setting("max_kv_size", expected, size));
        }
        for layer in &mut self.layers {
            if let LayerCache::Attention(cache) = layer
                && cache.keeps_all()
            {
                cache.limit(size, sinks)?;
            }
        }
        Ok(())
    }

    /// Has [`settle`](Self::settle) pack keys and values. Layers with a window do not.
    ///
    /// # Errors
    /// When there is no such form, or the cache is [limited](Self::limit).
    pub fn set_quantization(&mut self, quantization: KvQuantization) -> Result<()> {
        quantization.check()?;
        let mut layers = self.layers.iter();
        let limited = |layer: &LayerCache| matches!(layer, LayerCache::Attention(cache) if cache.is_limited());
        if layers.any(limited) {
            let found = quantization.bits;
            return Err(Error::setting("kv_bits", "no max_kv_size", found));
        }
        self.quantization = Some(quantization);
        Ok(())
    }

    /// Packs what is due, after a step of the model.
    ///
    /// # Errors
    /// When keys and values do not have the form, or MLX fails.
    pub fn settle(&mut self) -> Result<()> {
        let Some(quantization) = self.quantization else {
            return Ok(());
        };
        let KvQuantization {
            bits,
            group_size,
            start,
        } = quantization;
        for layer in &mut self.layers {
            if let LayerCache::Attention(cache) = layer
                && cache.len() >= start
            {
                cache.pack(bits, group_size)?;
            }
        }
        Ok(())
    }

    /// The memory that the states take: the bytes of each part, and a number that is the same for
    /// the same memory, where several caches can share it.
    pub fn storage(&self) -> impl Iterator<Item = (Option<usize>, usize)> {
        self.layers.iter().map(|layer| match layer {
            LayerCache::Attention(cache) => (cache.memory_id(), cache.nbytes()),
            LayerCache::Recurrent(_) | LayerCache::Conv(_) => (None, layer.nbytes()),
        })
    }

    /// Whether all layers hold every token that they have seen and will see, so that any number
    /// of the last ones can be [trimmed](Self::trim).
    pub fn keeps_all(&self) -> bool {
        let mut layers = self.layers.iter();
        layers.all(|layer| matches!(layer, LayerCache::Attention(cache) if cache.keeps_all()))
    }

    /// Whether the next step can be queued while the last one is still computed, without a copy
    /// of the states.
    pub fn can_queue(&self) -> bool {
        let mut layers = self.layers.iter();
        layers.all(|layer| matches!(layer, LayerCache::Attention(cache) if cache.can_queue()))
    }
}
