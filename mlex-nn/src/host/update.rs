//! What becomes of caches when a sequence that writes to them is finished.

use std::sync::Arc;

use mlex_core::Array;
use smallvec::SmallVec;

use super::node::{Place, Program};
use super::replay::Replay;
use super::sequence::{Sequence, Value};
use crate::Result;
use crate::cache::memory::{Marker, Plan, Target};
use crate::cache::{ConvCache, KvCache, LayerCache, Offset, RecurrentCache, RecurrentState};

/// What becomes of a cache when the sequence that writes to it is finished.
#[derive(Debug)]
pub struct CacheUpdate {
    change: Change,
    /// New positions.
    new: i32,
}

#[derive(Debug)]
enum Change {
    /// Keys and values in memory of our own; queries see the last `seen` positions.
    Keys { plan: Plan, seen: i32 },
    /// A recurrent state, and the last inputs of its convolution.
    State { state: Value, conv: Value },
    /// The last inputs of a short convolution, of which it needs `needed`.
    Rows { rows: Value, needed: i32 },
}

/// What a sequence gives for an update.
pub(super) enum Made {
    Keys(Marker),
    State(RecurrentState),
    Rows(Array),
}

impl CacheUpdate {
    /// Keys and values; queries see the last `seen` positions.
    pub(super) fn keys(plan: Plan, seen: i32, new: i32) -> Self {
        let change = Change::Keys { plan, seen };
        Self { change, new }
    }

    /// A recurrent state, and the last inputs of its convolution.
    pub(super) fn state(state: Value, conv: Value, new: i32) -> Self {
        let change = Change::State { state, conv };
        Self { change, new }
    }

    /// The last inputs of a short convolution, of which it needs `needed`.
    pub(super) fn rows(rows: Value, needed: i32, new: i32) -> Self {
        let change = Change::Rows { rows, needed };
        Self { change, new }
    }

    /// Where keys and values are, and how many of them the queries see.
    pub(super) fn seen(&self) -> Option<(&Target, i32)> {
        match &self.change {
            Change::Keys { plan, seen } => Some((&plan.target, *seen)),
            Change::State { .. } | Change::Rows { .. } => None,
        }
    }

    /// How many positions are new.
    pub(super) fn new_positions(&self) -> i32 {
        self.new
    }

    /// Where the keys and values of tokens from `offset` on are.
    pub(super) fn place(&self, offset: &Offset) -> Option<Place> {
        let (target, seen) = self.seen()?;
        Some(Place {
            offsets: SmallVec::from_slice(offset.positions()),
            target: target.clone(),
            seen: super::size(seen),
        })
    }

    /// The values that the sequence has to finish with.
    fn values(&self) -> impl Iterator<Item = Value> {
        let values = match self.change {
            Change::Keys { .. } => [None, None],
            Change::State { state, conv } => [Some(state), Some(conv)],
            Change::Rows { rows, .. } => [Some(rows), None],
        };
        values.into_iter().flatten()
    }

    pub(super) fn apply_to_keys(&self, cache: &mut KvCache, made: Made) {
        if let (Change::Keys { plan, .. }, Made::Keys(marker)) = (&self.change, made) {
            cache.commit(plan, self.new, marker);
        }
    }

    fn apply_to_state(&self, cache: &mut RecurrentCache, made: Made) {
        if let Made::State(state) = made {
            cache.update(state, self.new);
        }
    }

    fn apply_to_rows(&self, cache: &mut ConvCache, made: Made) -> Result<()> {
        match (&self.change, made) {
            (Change::Rows { needed, .. }, Made::Rows(rows)) => {
                cache.update(rows, *needed, self.new)
            }
            _ => Ok(()),
        }
    }

    fn apply(&self, cache: &mut LayerCache, made: Made) -> Result<()> {
        match self.change {
            Change::Keys { .. } => self.apply_to_keys(cache.attention()?, made),
            Change::State { .. } => self.apply_to_state(cache.recurrent()?, made),
            Change::Rows { .. } => self.apply_to_rows(cache.conv()?, made)?,
        }
        Ok(())
    }
}

impl Sequence {
    /// [`finish`](Self::finish) with one output; each update is applied to its cache, in order.
    ///
    /// # Errors
    /// As `finish`, or when a cache is of another kind than its update.
    pub fn finish_updating(
        self,
        output: Value,
        updates: &[CacheUpdate],
        caches: &mut [LayerCache],
    ) -> Result<Array> {
        let (output, made) = self.finish_with(output, updates)?;
        for ((update, made), cache) in updates.iter().zip(made).zip(caches) {
            update.apply(cache, made)?;
        }
        Ok(output)
    }

    /// The same, and how it is done again for other tokens, where it can be.
    ///
    /// # Errors
    /// As [`finish_updating`](Self::finish_updating).
    pub fn finish_replayable(
        self,
        output: Value,
        updates: &[CacheUpdate],
        caches: &mut [LayerCache],
    ) -> Result<(Array, Option<Replay>)> {
        let record = Replay::prepare(&self, updates);
        let (output, made, program) = self.finish_with_program(output, updates)?;
        for ((update, made), cache) in updates.iter().zip(made).zip(caches) {
            update.apply(cache, made)?;
        }
        Ok((output, record.map(|record| record.of(program))))
    }

    /// The same with the cache of one attention layer.
    pub(crate) fn finish_keys(
        self,
        output: Value,
        update: &CacheUpdate,
        cache: &mut KvCache,
    ) -> Result<Array> {
        let (output, made) = self.finish_with(output, std::slice::from_ref(update))?;
        for made in made {
            update.apply_to_keys(cache, made);
        }
        Ok(output)
    }

    /// The same with the cache of one recurrent layer.
    pub(crate) fn finish_state(
        self,
        output: Value,
        update: &CacheUpdate,
        cache: &mut RecurrentCache,
    ) -> Result<Array> {
        let (output, made) = self.finish_with(output, std::slice::from_ref(update))?;
        for made in made {
            update.apply_to_state(cache, made);
        }
        Ok(output)
    }

    /// The same with the cache of one short convolution.
    pub(crate) fn finish_rows(
        self,
        output: Value,
        update: &CacheUpdate,
        cache: &mut ConvCache,
    ) -> Result<Array> {
        let (output, made) = self.finish_with(output, std::slice::from_ref(update))?;
        for made in made {
            update.apply_to_rows(cache, made)?;
        }
        Ok(output)
    }

    /// The output, and what there is for each update.
    fn finish_with(self, output: Value, updates: &[CacheUpdate]) -> Result<(Array, Vec<Made>)> {
        let (output, made, _) = self.finish_with_program(output, updates)?;
        Ok((output, made))
    }

    fn finish_with_program(
        self,
        output: Value,
        updates: &[CacheUpdate],
    ) -> Result<(Array, Vec<Made>, Arc<Program>)> {
        let values = updates.iter().flat_map(CacheUpdate::values);
        let values: Vec<Value> = values.chain([output]).collect();
        let (mut arrays, program) = self.finish_program(&values)?;
        // One for each value.
        let output = arrays.pop().unwrap_or_else(|| unreachable!("no output"));
        let marker = Marker::new(&output);
        let mut arrays = arrays.into_iter();
        let made = updates.iter().filter_map(|update| match update.change {
            Change::Keys { .. } => Some(Made::Keys(marker.clone())),
            Change::State { .. } => {
                let (state, conv) = (arrays.next()?, arrays.next()?);
                Some(Made::State(RecurrentState { conv, state }))
            }
            Change::Rows { .. } => Some(Made::Rows(arrays.next()?)),
        });
        let made = made.collect();
        Ok((output, made, program))
    }
}
