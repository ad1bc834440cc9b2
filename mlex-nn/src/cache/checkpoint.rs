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

#[cfg(test)]
mod tests {
    use mlex_core::Array;

    use super::*;
    use crate::{ConvCache, KvCache, RecurrentCache, RecurrentState};

    fn array(value: f32, length: i32) -> Result<Array> {
        let values = vec![value; length as usize];
        Ok(Array::from_slice(&values, &[1, 1, length, 1])?)
    }

    /// Gives every layer `length` tokens of this value.
    fn update(cache: &mut Cache, value: f32, length: i32) -> Result<()> {
        for layer in cache.layers_mut() {
            match layer {
                LayerCache::Attention(cache) => {
                    cache.update(&array(value, length)?, &array(value, length)?)?;
                }
                LayerCache::Recurrent(cache) => {
                    let (conv, state) = (array(value, 1)?, array(value, 1)?);
                    cache.update(RecurrentState { conv, state }, length);
                }
                LayerCache::Conv(cache) => cache.update(array(value, 1)?, 1, length)?,
            }
        }
        Ok(())
    }

    #[test]
    fn a_cache_goes_back() -> Result<()> {
        let mut cache = Cache::new([
            LayerCache::Attention(KvCache::default()),
            LayerCache::Attention(KvCache::with_window(4)?),
            LayerCache::Recurrent(RecurrentCache::default()),
            LayerCache::Conv(ConvCache::default()),
        ]);
        update(&mut cache, 1.0, 3)?;
        let checkpoint = cache.checkpoint(2);
        assert!(!checkpoint.is_trim());
        assert_eq!((checkpoint.len(), checkpoint.is_empty()), (3, false));
        update(&mut cache, 2.0, 2)?;
        assert_eq!(cache.len(), 5);
        cache.rewind(checkpoint.clone())?;
        for layer in cache.layers_mut() {
            assert_eq!(layer.len(), 3);
            match layer {
                LayerCache::Attention(cache) => {
                    let (keys, _) = cache.update(&array(3.0, 1)?, &array(3.0, 1)?)?;
                    assert_eq!(keys.to_vec::<f32>()?, [1.0, 1.0, 1.0, 3.0]);
                }
                LayerCache::Recurrent(cache) => {
                    let state = cache.state().map(|state| state.state.to_vec::<f32>());
                    assert_eq!(state.transpose()?, Some(vec![1.0]));
                }
                LayerCache::Conv(cache) => {
                    let rows = cache.rows().map(|rows| rows.to_vec::<f32>());
                    assert_eq!(rows.transpose()?, Some(vec![1.0]));
                }
            }
        }
        // Layers that can forget keep nothing, and only as many tokens as they have seen.
        let mut trims = Cache::attention(2);
        assert!(trims.checkpoint(7).is_trim() && trims.checkpoint(7).is_empty());
        update(&mut trims, 1.0, 2)?;
        assert!(trims.rewind(checkpoint).is_err());
        assert_eq!(trims.len(), 2);
        Ok(())
    }
}
