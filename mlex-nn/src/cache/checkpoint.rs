//! The way back to where a cache was.

use super::{Cache, LayerCache};
use crate::{Error, Result};

/// Brings a cache back to before some tokens. It keeps the states of the layers that cannot
/// forget them again; those are shared with the cache until it goes on.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// None where the layer can forget.
    layers: Vec<Option<LayerCache>>,
    len: i32,
}

impl Checkpoint {
    /// Whether every layer can forget: then any part of the tokens can be
    /// [trimmed](Cache::trim), and nothing is kept here.
    pub fn is_trim(&self) -> bool {
        self.layers.iter().all(Option::is_none)
    }

    /// How many tokens the cache had seen.
    pub fn len(&self) -> i32 {
        self.len
    }

    /// Whether it had seen none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Cache {
    /// A way back to now after up to `new` more tokens.
    pub fn checkpoint(&self, new: i32) -> Checkpoint {
        let kept = |layer: &LayerCache| match layer {
            LayerCache::Attention(cache) if cache.can_take_back(new) => None,
            other => Some(other.clone()),
        };
        Checkpoint {
            layers: self.layers().iter().map(kept).collect(),
            len: self.len(),
        }
    }

    /// Forgets all tokens since `checkpoint`.
    ///
    /// # Errors
    /// When it is none of this cache's, or a layer cannot forget so many tokens; then nothing is
    /// changed.
    pub fn rewind(&mut self, checkpoint: Checkpoint) -> Result<()> {
        let count = self.len() - checkpoint.len;
        let mut pairs = self.layers().iter().zip(&checkpoint.layers);
        let fits = self.layers().len() == checkpoint.layers.len()
            && count >= 0
            && pairs.all(|(layer, kept)| kept.is_some() || layer.can_trim(count));
        if !fits {
            return Err(Error::setting(
                "tokens to take back",
                "those since a checkpoint of the same cache",
                count,
            ));
        }
        for (layer, kept) in self.layers_mut().iter_mut().zip(checkpoint.layers) {
            match kept {
                Some(kept) => *layer = kept,
                None => layer.trim(count)?,
            }
        }
        Ok(())
    }
}
