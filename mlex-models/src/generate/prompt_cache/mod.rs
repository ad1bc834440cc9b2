//! States of prompts that were computed before, so that a prompt that begins alike starts later.
//!
//! The caller gives the whole prompt each time; the longest part of it whose state is known is
//! taken over. [`Cache`]s are values: an entry is a snapshot, which no later generation changes.
//! A state that layers can take back to fewer tokens serves every prompt that shares its
//! beginning. Where they cannot (recurrent layers, windows that have moved on) the states at the
//! end of a turn and every so many tokens are kept too.

mod file;
mod fill;
mod jobs;
mod key;
mod settings;

use std::collections::HashSet;
use std::time::{Duration, Instant};

use mlex_core::Array;
use mlex_nn::Cache;

use crate::Result;

pub use file::PromptFileInfo;
pub(super) use fill::{Filling, fill};
pub use jobs::PromptCacheStats;
pub(super) use jobs::{PromptJob, serve};
pub use key::{MediaSpan, PromptKey};
pub use settings::KvSettings;

/// How much a [`PromptCache`] holds.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PromptCacheLimits {
    /// The most bytes of all states together; 0 holds none.
    pub max_bytes: usize,
    /// The most states.
    pub max_entries: usize,
    /// How long a state is held after it was used last.
    pub max_age: Duration,
    /// Where layers cannot go back, a state is kept after every so many tokens of a prompt.
    pub snapshot_every: usize,
}

impl Default for PromptCacheLimits {
    /// 2 GiB, 64 states, one hour, every 1024 tokens.
    fn default() -> Self {
        Self {
            max_bytes: 2 << 30,
            max_entries: 64,
            max_age: Duration::from_hours(1),
            snapshot_every: 1024,
        }
    }
}

/// A pool of states of prompts.
#[derive(Debug)]
pub struct PromptCache {
    limits: PromptCacheLimits,
    /// Those used last at the end.
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    key: PromptKey,
    settings: KvSettings,
    /// After all tokens of the key.
    cache: Cache,
    /// The hidden state `[1, D]` of the last one.
    hidden: Option<Array>,
    used: Instant,
}

/// The state of a prompt's beginning.
#[derive(Debug)]
pub struct Found {
    /// After `length` tokens.
    pub cache: Cache,
    /// How many tokens of the prompt it has seen: at least one, all only with `hidden`.
    pub length: usize,
    /// The hidden state `[1, D]` of the last token, if that is the prompt's last.
    pub hidden: Option<Array>,
}

impl Entry {
    /// How many tokens of `key` it can give the state of.
    fn usable(&self, key: &PromptKey) -> usize {
        let (own, common) = (self.key.len(), self.key.common(key));
        if common == own && own == key.len() && self.hidden.is_some() {
            return own;
        }
        // The last token is computed again for its hidden state.
        let length = key.cut(common.min(key.len().saturating_sub(1)));
        if self.can_be(length) { length } else { 0 }
    }

    /// Whether it can go back to `length` tokens.
    fn can_be(&self, length: usize) -> bool {
        let Some(back) = self.key.len().checked_sub(length) else {
            return false;
        };
        // What was packed is not what it was before.
        let plain = length >= self.settings.plain_before();
        back == 0 || length > 0 && plain && self.cache.can_trim(back as i32)
    }

    /// Whether `other` gives all that this one does.
    fn is_covered_by(&self, other: &Self) -> bool {
        self.settings == other.settings
            && other.key.starts_with(&self.key)
            && other.can_be(self.key.len())
            && (other.key.len() > self.key.len() || other.hidden.is_some() || self.hidden.is_none())
    }
}

impl PromptCache {
    /// An empty pool.
    pub fn new(limits: PromptCacheLimits) -> Self {
        Self {
            limits,
            entries: Vec::new(),
        }
    }

    /// A pool that holds nothing.
    pub(super) fn none() -> Self {
        Self::new(PromptCacheLimits {
            max_bytes: 0,
            ..PromptCacheLimits::default()
        })
    }

    /// How much it may hold.
    pub fn limits(&self) -> &PromptCacheLimits {
        &self.limits
    }

    /// The state of the longest beginning of `key` that the pool can give, as a value of its own.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn find(&mut self, key: &PromptKey, settings: &KvSettings) -> Result<Option<Found>> {
        let now = Instant::now();
        self.expire(now);
        let mut best = (0, 0);
        for (index, entry) in self.entries.iter().enumerate() {
            if entry.settings == *settings {
                best = best.max((entry.usable(key), index));
            }
        }
        let (length, index) = best;
        if length == 0 {
            return Ok(None);
        }
        let mut entry = self.entries.remove(index);
        let mut cache = entry.cache.clone();
        let back = entry.key.len() - length;
        let trimmed = cache.trim(back as i32);
        let hidden = entry.hidden.clone().filter(|_| length == key.len());
        entry.used = now;
        self.entries.push(entry);
        trimmed?;
        Ok(Some(Found {
            cache,
            length,
            hidden,
        }))
    }

    /// Adds the state after all tokens of `key`, all of it computed, with the hidden state
    /// `[1, D]` of the last one where it is known. What is used least is given up where there is
    /// too much.
    pub fn insert(
        &mut self,
        key: PromptKey,
        settings: KvSettings,
        cache: Cache,
        hidden: Option<Array>,
    ) {
        self.insert_at(key, settings, cache, hidden, Instant::now());
    }

    fn insert_at(
        &mut self,
        key: PromptKey,
        settings: KvSettings,
        cache: Cache,
        hidden: Option<Array>,
        now: Instant,
    ) {
        // What is not the state of exactly these tokens is not kept.
        let whole = usize::try_from(cache.len()).is_ok_and(|seen| seen == key.len());
        if !whole || key.is_empty() || cache.nbytes() > self.limits.max_bytes {
            return;
        }
        let entry = Entry {
            key,
            settings,
            cache,
            hidden,
            used: now,
        };
        let mut others = self.entries.iter();
        if let Some(index) = others.position(|other| entry.is_covered_by(other)) {
            let mut other = self.entries.remove(index);
            other.used = now;
            self.entries.push(other);
        } else {
            self.entries.retain(|other| !other.is_covered_by(&entry));
            self.entries.push(entry);
        }
        self.expire(now);
        let too_many = self.entries.len().saturating_sub(self.limits.max_entries);
        self.entries.drain(..too_many);
        while self.nbytes() > self.limits.max_bytes {
            self.entries.remove(0);
        }
    }

    /// Gives up what was not used for long.
    fn expire(&mut self, now: Instant) {
        let max_age = self.limits.max_age;
        self.entries
            .retain(|entry| now.saturating_duration_since(entry.used) <= max_age);
    }

    /// How many states it holds.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The bytes that the states take. Memory that several share counts once.
    pub fn nbytes(&self) -> usize {
        let mut known = HashSet::new();
        let parts = self.entries.iter().flat_map(|entry| entry.cache.storage());
        parts
            .filter(|(id, _)| id.is_none_or(|id| known.insert(id)))
            .map(|(_, bytes)| bytes)
            .sum()
    }

    /// Gives up all states.
    pub fn clear(&mut self) {
        self.entries.clear();
    }
}

#[cfg(test)]
mod tests {
    use mlex_nn::{KvCache, LayerCache, RecurrentCache, RecurrentState};

    use super::*;

    const HIDDEN: i32 = 4;

    /// The bytes of a state: two buffers of 256 positions in steps of 256.
    const BYTES: usize = 2 * 256 * 16 * 4;

    fn key(tokens: impl IntoIterator<Item = u32>) -> PromptKey {
        PromptKey::new(tokens.into_iter().collect())
    }

    fn pool(limits: impl FnOnce(&mut PromptCacheLimits)) -> PromptCache {
        let mut all = PromptCacheLimits::default();
        limits(&mut all);
        PromptCache::new(all)
    }

    fn attention(cache: &mut KvCache, tokens: i32) -> Result<()> {
        let zeros = Array::zeros(&[1, 1, tokens, 16], mlex_core::Dtype::Float32)?;
        cache.update(&zeros, &zeros)?;
        Ok(())
    }

    fn state(tokens: usize) -> Cache {
        let mut layer = KvCache::default();
        attention(&mut layer, tokens as i32).unwrap_or_else(|error| panic!("{error}"));
        Cache::new([LayerCache::Attention(layer)])
    }

    /// One that cannot go back.
    fn recurrent(tokens: usize) -> Cache {
        let zeros = Array::zeros(&[1, 2, 4], mlex_core::Dtype::Float32);
        let zeros = zeros.unwrap_or_else(|error| panic!("{error}"));
        let mut layer = RecurrentCache::default();
        let state = RecurrentState {
            conv: zeros.clone(),
            state: zeros,
        };
        layer.update(state, tokens as i32);
        Cache::new([LayerCache::Recurrent(layer)])
    }

    fn hidden() -> Option<Array> {
        Array::zeros(&[1, HIDDEN], mlex_core::Dtype::Float32).ok()
    }

    fn found(pool: &mut PromptCache, tokens: impl IntoIterator<Item = u32>) -> usize {
        let found = pool.find(&key(tokens), &KvSettings::default());
        let found = found.unwrap_or_else(|error| panic!("{error}"));
        found.map_or(0, |found| {
            assert_eq!(found.cache.len() as usize, found.length);
            found.length
        })
    }

    fn add(pool: &mut PromptCache, tokens: std::ops::Range<u32>, cache: fn(usize) -> Cache) {
        let length = tokens.len();
        pool.insert(key(tokens), KvSettings::default(), cache(length), None);
    }

    #[test]
    fn the_longest_beginning_is_found() {
        let mut pool = pool(|_| {});
        assert_eq!(found(&mut pool, 0..8), 0);
        add(&mut pool, 0..8, state);
        // Longer, the same, shorter, diverging, something else.
        assert_eq!(found(&mut pool, 0..12), 8);
        assert_eq!(found(&mut pool, 0..8), 7);
        assert_eq!(found(&mut pool, 0..5), 4);
        assert_eq!(found(&mut pool, [0, 1, 2, 9, 9]), 3);
        assert_eq!(found(&mut pool, 1..8), 0);
    }

    #[test]
    fn what_cannot_go_back_serves_its_own_tokens() {
        let mut pool = pool(|_| {});
        add(&mut pool, 0..4, recurrent);
        add(&mut pool, 0..8, recurrent);
        assert_eq!(pool.len(), 2);
        assert_eq!(found(&mut pool, 0..12), 8);
        assert_eq!(found(&mut pool, 0..8), 4, "the hidden state is not known");
        assert_eq!(found(&mut pool, [0, 1, 2, 3, 4, 9]), 4);
        assert_eq!(found(&mut pool, 0..3), 0);
        pool.insert(key(0..8), KvSettings::default(), recurrent(8), hidden());
        assert_eq!(found(&mut pool, 0..8), 8);
        assert_eq!(pool.len(), 2);
    }

    #[test]
    fn a_longer_state_takes_the_place_of_a_shorter_one() {
        let mut pool = pool(|_| {});
        add(&mut pool, 0..4, state);
        add(&mut pool, 0..8, state);
        assert_eq!(pool.len(), 1);
        add(&mut pool, 0..6, state);
        assert_eq!(pool.len(), 1);
        assert_eq!(found(&mut pool, 0..12), 8);
    }

    #[test]
    fn what_is_used_least_is_given_up() {
        let mut by_count = pool(|limits| limits.max_entries = 2);
        let mut by_bytes = pool(|limits| limits.max_bytes = 2 * BYTES);
        for pool in [&mut by_count, &mut by_bytes] {
            add(pool, 0..4, state);
            add(pool, 10..14, state);
            assert_eq!(pool.nbytes(), 2 * BYTES);
            assert_eq!(found(pool, 0..9), 4);
            add(pool, 20..24, state);
            assert_eq!(pool.len(), 2);
            assert_eq!(found(pool, 10..14), 0);
            assert_eq!(found(pool, 0..9), 4);
        }
        let mut none = pool(|limits| limits.max_bytes = 0);
        add(&mut none, 0..4, state);
        assert!(none.is_empty());
    }

    #[test]
    fn what_is_old_is_given_up() {
        let mut pool = pool(|limits| limits.max_age = Duration::from_secs(10));
        let now = Instant::now();
        let later = now + Duration::from_secs(11);
        pool.insert_at(key(0..4), KvSettings::default(), state(4), None, now);
        pool.insert_at(key(9..12), KvSettings::default(), state(3), None, later);
        assert_eq!(pool.len(), 1);
    }

    #[test]
    fn half_steps_are_not_kept() {
        let mut pool = pool(|_| {});
        pool.insert(key(0..4), KvSettings::default(), state(5), None);
        pool.insert(key(0..4), KvSettings::default(), state(3), None);
        assert!(pool.is_empty());
    }
}
