//! Which of the keys that are held new queries see.

use std::ops::Range;

use mlex_core::{Array, Dtype};

use super::KvCache;
use crate::cache::Mask;
use crate::{Error, Result};

impl KvCache {
    /// What `new` queries see of the keys that [`update`](Self::update) will return for them.
    ///
    /// # Errors
    /// When MLX is out of memory.
    pub fn mask(&self, new: i32) -> Result<Mask> {
        self.mask_with_spans(new, &[])
    }

    /// As [`mask`](Self::mask), where the new tokens of a span, counted from the first new one,
    /// all see each other, as those of an image do: with a window, as far back as it reaches.
    ///
    /// # Errors
    /// When MLX is out of memory.
    pub fn mask_with_spans(&self, new: i32, spans: &[Range<i32>]) -> Result<Mask> {
        let keys = self.keys_after(new);
        if let (Some(window), 1..) = (self.window, self.sinks) {
            if !spans.is_empty() {
                let expected = "tokens that do not see later ones";
                return Err(Error::setting("max_kv_size", expected, window));
            }
            return self.mask_with_sinks(new, keys, window);
        }
        let window = self.window.filter(|&window| keys > window);
        if window.is_none() && self.left_padding.is_empty() && spans.is_empty() {
            return Ok(if new == 1 { Mask::None } else { Mask::Causal });
        }
        let after = self.seen + new;
        // Positions: of the queries [L, 1], of the keys [1, S].
        let queries = positions(after - new, after)?.expand_dims(1)?;
        let keys = positions(after - keys, after)?.expand_dims(0)?;
        let mut mask = queries.greater_equal(&keys)?;
        if !spans.is_empty() {
            mask = mask.logical_or(&self.together(new, spans)?)?;
        }
        if let Some(window) = window {
            mask = mask.logical_and(&queries.less(&keys.add(window)?)?)?;
        }
        if !self.left_padding.is_empty() {
            let rows = self.left_padding.len() as i32;
            let padding = Array::from_slice(&self.left_padding, &[rows, 1, 1, 1])?;
            mask = mask.logical_and(&padding.less_equal(&keys)?)?;
        }
        Ok(Mask::Array(mask))
    }

    /// [`mask`](Self::mask) of a window with sinks, as mlx-lm has it: a query sees the `window`
    /// positions that are left before its own, counted without those that are gone.
    fn mask_with_sinks(&self, new: i32, keys: i32, window: i32) -> Result<Mask> {
        let before = self.seen.min(window - 1);
        let gone = keys - new - before;
        if gone <= 0 && before + new <= window {
            return Ok(if new == 1 { Mask::None } else { Mask::Causal });
        }
        let sinks = self.sinks.min(before);
        let mut mask = Vec::with_capacity((new * keys) as usize);
        for query in before..before + new {
            mask.extend((0..keys).map(|slot| {
                let index = if slot < sinks { slot } else { slot - gone };
                let there = slot < sinks || slot >= sinks + gone;
                there && index <= query && query < index + window
            }));
        }
        Ok(Mask::Array(Array::from_slice(&mask, &[new, keys])?))
    }

    /// bool `[L, S]`: whether a query and a key are in the same span.
    fn together(&self, new: i32, spans: &[Range<i32>]) -> Result<Array> {
        // Which span a position is in; those of no span are told apart on the two sides.
        let numbers = |outside: i32, before: i32| {
            let mut numbers = vec![outside; (before + new) as usize];
            for (number, span) in spans.iter().enumerate() {
                for position in span.start.max(0)..span.end.min(new) {
                    numbers[(before + position) as usize] = number as i32;
                }
            }
            let length = numbers.len() as i32;
            Array::from_slice(&numbers, &[length])
        };
        let queries = numbers(-1, 0)?.expand_dims(1)?;
        let keys = numbers(-2, self.keys_after(new) - new)?.expand_dims(0)?;
        Ok(queries.equal(&keys)?)
    }

    /// What `new` queries see where positions, counted from the first token on, are in blocks of
    /// `block`: those of their own block, later ones too, and of all before it.
    ///
    /// # Errors
    /// When the block is not positive, or there is padding or a window.
    pub fn block_mask(&self, new: i32, block: i32) -> Result<Mask> {
        if block <= 0 {
            return Err(Error::setting("block length", "a positive number", block));
        }
        if self.window.is_some() || !self.left_padding.is_empty() {
            let expected = "a cache without window and padding";
            return Err(Error::setting("cache", expected, "one with"));
        }
        let after = self.seen + new;
        let number = |start, end| Ok::<_, Error>(positions(start, end)?.floor_divide(block)?);
        let queries = number(self.seen, after)?.expand_dims(1)?;
        let keys = number(0, after)?.expand_dims(0)?;
        Ok(Mask::Array(queries.greater_equal(&keys)?))
    }
}

/// int32 `[end - start]`: start, start + 1, ..
fn positions(start: i32, end: i32) -> Result<Array> {
    Ok(Array::arange(
        f64::from(start),
        f64::from(end),
        1.0,
        Dtype::Int32,
    )?)
}
