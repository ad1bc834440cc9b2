//! A recorded sequence, for other tokens.

use std::sync::Arc;

use mlex_core::{Array, Dtype};

use super::node::{Place, Program};
use super::on_cpu;
use super::sequence::{Sequence, Shape};
use super::update::{CacheUpdate, Made};
use crate::Result;
use crate::cache::memory::Marker;
use crate::cache::{KvPacking, LayerCache};

/// What a [`Sequence`] has recorded, to be done again for other tokens and other places in the
/// caches: a decode step is the same for each token but for those. Recording it takes a tenth of
/// a millisecond or more, for each token, which this saves.
pub struct Replay {
    program: Arc<Program>,
    record: Record,
}

impl std::fmt::Debug for Replay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replay")
            .field("steps", &self.program.steps.len())
            .finish_non_exhaustive()
    }
}

/// What has to be the same in each run.
pub(super) struct Record {
    shape: Shape,
    dtype: Dtype,
    layers: Vec<Layer>,
}

/// New keys and values of a layer.
struct Layer {
    /// `[B, H_kv, L, D]`
    heads: [i32; 4],
    dtype: Dtype,
    packing: Option<KvPacking>,
}

impl Record {
    pub(super) fn of(self, program: Arc<Program>) -> Replay {
        let record = self;
        Replay { program, record }
    }
}

impl Replay {
    /// None where more differs between two runs than tokens and places of keys and values.
    pub(super) fn prepare(sequence: &Sequence, updates: &[CacheUpdate]) -> Option<Record> {
        let (shape, dtype) = sequence.only_input()?;
        if sequence.places() != updates.len() {
            return None;
        }
        let layers = updates.iter().map(|update| {
            let (target, _) = update.seen()?;
            let memory = &target.memory;
            let (dim, dtype) = memory.vectors();
            let [batch, heads, ..] = memory.shape;
            Some(Layer {
                heads: [batch, heads, update.new_positions(), dim],
                dtype,
                packing: memory.packing,
            })
        });
        Some(Record {
            shape: Shape::from_slice(shape),
            dtype,
            layers: layers.collect::<Option<_>>()?,
        })
    }

    /// The output for `x` (the token ids, or what the sequence was [started](Sequence::start)
    /// with), and the caches after it. None where it is not as what was recorded: another
    /// shape, other caches, another device. The caller answers for masks: there must be none, or
    /// a causal one.
    ///
    /// # Errors
    /// When there is no current stream.
    pub fn run(&self, x: &Array, caches: &mut [LayerCache]) -> Result<Option<Array>> {
        let Record {
            shape,
            dtype,
            layers,
        } = &self.record;
        let same = x.shape() == &shape[..] && x.dtype() == *dtype && caches.len() == layers.len();
        if !same || !on_cpu()? {
            return Ok(None);
        }
        let mut updates = Vec::with_capacity(layers.len());
        let mut places: Vec<Place> = Vec::with_capacity(layers.len());
        let mut markers: Vec<Marker> = Vec::new();
        for (layer, cache) in layers.iter().zip(&mut *caches) {
            let LayerCache::Attention(cache) = cache else {
                return Ok(None);
            };
            let Some((plan, keep)) = cache.plan(layer.heads, layer.dtype)? else {
                return Ok(None);
            };
            if plan.target.memory.packing != layer.packing {
                return Ok(None);
            }
            if let Some(marker) = cache.marker()
                && !markers.iter().any(|known| known.is(marker))
            {
                markers.push(marker.clone());
            }
            let new = layer.heads[2];
            let update = CacheUpdate::keys(plan, keep + new, new);
            places.extend(update.place(&cache.offset()));
            updates.push(update);
        }
        let inputs: Vec<&Array> = [x]
            .into_iter()
            .chain(markers.iter().map(|marker| &marker.array))
            .collect();
        let mut contiguous = vec![false; inputs.len()];
        contiguous[0] = true;
        let output = self.program.node(&inputs, contiguous, places)?.pop();
        let Some(output) = output else {
            return Ok(None);
        };
        let marker = Marker::new(&output);
        for (update, cache) in updates.iter().zip(caches) {
            if let LayerCache::Attention(cache) = cache {
                update.apply_to_keys(cache, Made::Keys(marker.clone()));
            }
        }
        Ok(Some(output))
    }
}
