//! Keys and values of one attention layer.

mod masks;

use std::sync::Arc;

use mlex_core::{Array, Dtype, HostConstant};

use super::buffers::Buffers;
use super::memory::{Carry, Marker, Plan, Shared, Source};
use super::{KvPacking, KvState, Offset};
use crate::{Error, Result};

/// By how many positions the buffers grow, as mlx-lm's do.
pub(super) const STEP: i32 = 256;

/// Keys and values `[B, H_kv, S, D]` in buffers that grow in steps; with a window, only the
/// positions that a new query can still see are kept (and up to two steps more). A window may
/// leave the first positions in sight ("Efficient Streaming Language Models with Attention
/// Sinks").
#[derive(Clone, Debug, Default)]
pub struct KvCache {
    /// Where MLX's operations, or a mix of them and ours, keep them.
    buffers: Option<Buffers>,
    /// In place of `buffers` where only ours compute.
    shared: Option<Shared>,
    /// Tokens seen, padding included.
    seen: i32,
    /// How many it is known to see, if more.
    expected: i32,
    /// How many positions back a query sees, itself included.
    window: Option<i32>,
    /// How many of the first positions stay in the window, beside the last ones.
    sinks: i32,
    /// How keys and values are packed, if they are.
    packing: Option<KvPacking>,
    /// Tokens of padding at the start of each row; empty for none.
    left_padding: Arc<[i32]>,
    /// How far the position of a token is beyond the number of tokens before it.
    shift: i32,
    /// How many of the tokens seen have positions that do not count up, or come before such.
    fixed: i32,
}

impl KvCache {
    /// A cache for a layer whose queries see `window` positions, their own included.
    ///
    /// # Errors
    /// When the window is not positive.
    pub fn with_window(window: i32) -> Result<Self> {
        if window <= 0 {
            return Err(Error::setting(
                "sliding_window",
                "a positive number",
                window,
            ));
        }
        Ok(Self {
            window: Some(window),
            ..Self::default()
        })
    }

    /// Tokens seen, padding included.
    pub fn len(&self) -> i32 {
        self.seen
    }

    /// Whether none was seen.
    pub fn is_empty(&self) -> bool {
        self.seen == 0
    }

    /// Announces `additional` tokens, for which room is made with the first of them.
    pub fn reserve(&mut self, additional: i32) {
        self.expected = self.seen.saturating_add(additional.max(0));
    }

    /// Announces that row `b` of the batch starts with `padding[b]` tokens of padding, which
    /// no query sees and which do not count as positions.
    ///
    /// # Errors
    /// When tokens have been seen already or a number is negative.
    pub fn set_left_padding(&mut self, padding: &[i32]) -> Result<()> {
        if self.seen > 0 {
            return Err(Error::setting("left padding", "an empty cache", self.seen));
        }
        if self.sinks > 0 {
            return Err(Error::setting("left padding", "no max_kv_size", "some"));
        }
        if let Some(&count) = padding.iter().find(|&&count| count < 0) {
            return Err(Error::setting("left padding", "no negative number", count));
        }
        self.left_padding = if padding.iter().all(|&count| count == 0) {
            Arc::default()
        } else {
            padding.into()
        };
        Ok(())
    }

    /// The position of the next token.
    pub fn offset(&self) -> Offset {
        let position = self.seen + self.shift;
        if self.left_padding.is_empty() {
            return Offset::Same(position);
        }
        let rows = self.left_padding.iter();
        Offset::PerRow(rows.map(|padding| position - padding).collect())
    }

    /// Sets the position of the next token, after tokens whose positions did not count up, such
    /// as those of an image. They cannot be forgotten any more.
    pub fn set_position(&mut self, position: i32) {
        self.shift = position - self.seen;
        self.fixed = self.seen;
    }

    /// How many positions the buffers hold.
    fn used(&self) -> i32 {
        let buffers = self.buffers.as_ref().map(|buffers| buffers.used);
        let shared = self.shared.as_ref().map(|shared| shared.used);
        buffers.or(shared).unwrap_or(0)
    }

    /// How many keys [`update`](Self::update) with `new` tokens will return.
    fn keys_after(&self, new: i32) -> i32 {
        let used = self.used();
        match self.window {
            // What lies between the first positions and the last ones is hidden by the mask until
            // there is no more room.
            Some(_) if self.sinks > 0 && used + new <= self.capacity() => used + new,
            // The first of the new queries sees `window - 1` positions before its own.
            Some(window) => used.min(window - 1) + new,
            None => used + new,
        }
    }

    /// How many positions the buffers have room for.
    fn capacity(&self) -> i32 {
        let shared = self.shared.as_ref().map(|shared| shared.memory.shape[2]);
        let buffers = self.buffers.as_ref();
        let buffers = buffers.and_then(|buffers| buffers.keys.dim(2).ok());
        shared.or(buffers).unwrap_or(0)
    }

    /// Lets queries see the first `sinks` positions and the last ones, `size` together, in place
    /// of all.
    ///
    /// # Errors
    /// When tokens have been seen, there is a window or packing already, or `size` is not more
    /// than `sinks`.
    pub(super) fn limit(&mut self, size: i32, sinks: i32) -> Result<()> {
        if size <= sinks || sinks <= 0 {
            let expected = format!("more than {sinks}");
            return Err(Error::setting("max_kv_size", expected, size));
        }
        if self.seen > 0 || !self.left_padding.is_empty() {
            return Err(Error::setting("max_kv_size", "an empty cache", self.seen));
        }
        self.window = Some(size);
        self.sinks = sinks;
        Ok(())
    }

    /// Adds keys and values `[B, H_kv, L, D]` of new tokens and returns those that their
    /// queries may see, `[B, H_kv, S, D]`, the new ones last.
    ///
    /// # Errors
    /// When the shapes do not fit what is there; then nothing is changed.
    pub fn update(&mut self, keys: &Array, values: &Array) -> Result<(Array, Array)> {
        self.leave_memory()?;
        let new = self.check(keys, values)?;
        let keep = self.keys_after(new) - new;
        let packed = match &self.packing {
            Some(packing) => Some([packing.pack(keys)?, packing.pack(values)?]),
            None => None,
        };
        let [keys, values] = packed.as_ref().map_or([keys, values], |[k, v]| [k, v]);
        let buffers = match &self.buffers {
            Some(buffers) => buffers.with_room(self.sinks, keep, new)?,
            None => Buffers::new(keys, values, new)?,
        };
        let Buffers {
            keys: key_buffer,
            values: value_buffer,
            used,
        } = buffers;
        let end = used + new;
        let key_buffer = key_buffer.slice_update_axis(keys, 2, used, end)?;
        let value_buffer = value_buffer.slice_update_axis(values, 2, used, end)?;
        let visible = (
            key_buffer.slice_axis(2, used - keep, end)?,
            value_buffer.slice_axis(2, used - keep, end)?,
        );
        self.buffers = Some(Buffers {
            keys: key_buffer,
            values: value_buffer,
            used: end,
        });
        self.seen += new;
        match &self.packing {
            Some(packing) => Ok((
                packing.unpack(&visible.0, 0)?,
                packing.unpack(&visible.1, 1)?,
            )),
            None => Ok(visible),
        }
    }

    /// Packs what is held and what will be, unless it is already. A window is left as it is.
    ///
    /// # Errors
    /// When keys and values do not have the form, or MLX fails.
    pub(super) fn pack(&mut self, bits: i32, group_size: i32) -> Result<()> {
        if self.window.is_some() || self.packing.is_some() {
            return Ok(());
        }
        let packing = if let Some(shared) = &self.shared {
            let dim = shared.memory.shape[3];
            let packing = KvPacking::new(bits, group_size, [dim; 2], shared.memory.dtype)?;
            self.shared = Some(shared.packed(&packing)?);
            packing
        } else if let Some(Buffers { keys, values, used }) = &self.buffers {
            let dims = [keys.dim(3)?, values.dim(3)?];
            let packing = KvPacking::new(bits, group_size, dims, keys.dtype())?;
            self.buffers = Some(Buffers {
                keys: packing.pack(keys)?,
                values: packing.pack(values)?,
                used: *used,
            });
            packing
        } else {
            return Ok(());
        };
        self.packing = Some(packing);
        Ok(())
    }

    /// Keys and values as arrays, wherever they have been.
    fn leave_memory(&mut self) -> Result<()> {
        if let Some(shared) = &self.shared {
            let [keys, values] = shared.to_arrays()?;
            self.buffers = Some(Buffers {
                keys,
                values,
                used: shared.used,
            });
            self.shared = None;
        }
        Ok(())
    }

    /// How a step of a sequence adds `new` positions to memory of our own, and how many of the
    /// positions before, the last ones, its queries see. None where keys and values of `heads`
    /// and `dim` do not fit what is there.
    pub(crate) fn plan(
        &self,
        [batch, heads, new, dim]: [i32; 4],
        dtype: Dtype,
    ) -> Result<Option<(Plan, i32)>> {
        let keep = self.keys_after(new) - new;
        // A window that has begun to let go of positions would be full again at once.
        let spare = if self.used() > keep { STEP } else { 0 };
        let capacity = match (self.window, self.sinks) {
            (None, _) => roomy(keep + (self.expected - self.seen).max(new)),
            (Some(_), ..=0) => rounded(keep + new + spare),
            // Positions that are hidden are still read, so that there should not be many.
            (Some(window), _) => rounded(keep + new + spare).min(keep + new + (window / 4).max(16)),
        };
        let (dim, dtype) = match &self.packing {
            Some(packing) if packing.dims != [dim; 2] || packing.dtype != dtype => return Ok(None),
            Some(packing) => (packing.words(0)?, Dtype::Uint32),
            None => (dim, dtype),
        };
        let fits = |shape: &[i32], held: Dtype| {
            held == dtype && [shape[0], shape[1], shape[3]] == [batch, heads, dim]
        };
        let plan = if let Some(shared) = &self.shared {
            if !fits(&shared.memory.shape, shared.memory.dtype) {
                return Ok(None);
            }
            match shared.append(new) {
                Some(plan) => plan,
                None => shared.moved(capacity, self.sinks, keep, new),
            }
        } else {
            let mut carry = None;
            if let Some(Buffers { keys, values, used }) = &self.buffers {
                if !fits(keys.shape(), keys.dtype()) || !fits(values.shape(), values.dtype()) {
                    return Ok(None);
                }
                let arrays = [HostConstant::new(keys)?, HostConstant::new(values)?];
                carry = Some(Carry {
                    source: Source::Arrays(Arc::new(arrays)),
                    sinks: self.sinks.min(keep),
                    end: *used,
                    count: keep,
                });
            }
            let shape = [batch, heads, capacity, dim];
            Plan::fresh(shape, dtype, self.packing, carry, new)
        };
        Ok(Some((plan, keep)))
    }

    /// The node that a step of a [`plan`](Self::plan) has to follow.
    pub(crate) fn marker(&self) -> Option<&Marker> {
        self.shared.as_ref().map(|shared| &shared.marker)
    }

    /// Takes the `new` positions of a [`plan`](Self::plan) whose step is in the node `marker`.
    pub(crate) fn commit(&mut self, plan: &Plan, new: i32, marker: Marker) {
        self.buffers = None;
        self.shared = Some(plan.done(new, marker));
        self.seen += new;
    }

    /// Whether the next update can be queued while the last one is still computed, without a
    /// copy of what is there.
    pub fn can_queue(&self) -> bool {
        self.buffers.is_none()
    }

    /// The bytes of keys and values.
    pub fn nbytes(&self) -> usize {
        let buffers = self.buffers.iter();
        let buffers = buffers.flat_map(|buffers| [&buffers.keys, &buffers.values]);
        let shared = self
            .shared
            .as_ref()
            .map_or(0, |shared| shared.memory.nbytes());
        buffers.map(Array::nbytes).sum::<usize>() + shared
    }

    /// The type of keys and values, once there are some.
    pub fn dtype(&self) -> Option<Dtype> {
        let packed = self.packing.map(|packing| packing.dtype);
        let buffers = self.buffers.as_ref().map(|buffers| buffers.keys.dtype());
        let shared = self.shared.as_ref().map(|shared| shared.memory.dtype);
        packed.or(buffers).or(shared)
    }

    /// The bytes of the positions that a query after `tokens` tokens sees, by the size that those
    /// have which are held now; zero where none is.
    pub fn estimate(&self, tokens: u64) -> u64 {
        let buffers = self.buffers.as_ref();
        let capacity = buffers.and_then(|buffers| buffers.keys.shape().get(2).copied());
        let capacity = capacity.or(self.shared.as_ref().map(|shared| shared.memory.shape[2]));
        let seen = self.window.map_or(tokens, |window| {
            tokens.min(u64::from(window.unsigned_abs()))
        });
        let capacity = capacity.map_or(1, |capacity| capacity.unsigned_abs().max(1));
        seen.saturating_mul(self.nbytes() as u64 / u64::from(capacity))
    }

    /// A number for memory of our own, the same for the same memory.
    pub(super) fn memory_id(&self) -> Option<usize> {
        let shared = self.shared.as_ref();
        shared.map(|shared| Arc::as_ptr(&shared.memory).addr())
    }

    /// Whether queries see the first positions and the last ones.
    pub(super) fn is_limited(&self) -> bool {
        self.sinks > 0
    }

    /// Whether every token is held for good.
    pub(super) fn keeps_all(&self) -> bool {
        self.window.is_none()
    }

    /// What is held, computed now.
    pub(super) fn to_state(&self) -> Result<KvState> {
        if !self.left_padding.is_empty() {
            return Err(Error::setting("states", "no padding", "some"));
        }
        let arrays = match (&self.shared, &self.buffers) {
            (Some(shared), _) => Some(shared.to_arrays()?),
            (None, Some(buffers)) => Some([buffers.keys.clone(), buffers.values.clone()]),
            (None, None) => None,
        };
        let used = self.used();
        let held = |[keys, values]: [Array; 2]| -> Result<_> {
            Ok([keys.slice_axis(2, 0, used)?, values.slice_axis(2, 0, used)?])
        };
        Ok(KvState {
            seen: self.seen,
            shift: self.shift,
            fixed: self.fixed,
            packing: self.packing,
            arrays: arrays.map(held).transpose()?,
        })
    }

    /// Takes what was held by a cache of one sequence, in place of nothing.
    pub(super) fn restore(&mut self, state: KvState) -> Result<()> {
        let KvState {
            seen,
            shift,
            fixed,
            packing,
            arrays,
        } = state;
        if !(0..=seen).contains(&fixed) || seen.checked_add(shift).is_none() {
            let found = format!("{shift} from {fixed} on");
            return Err(Error::setting(
                "shift of positions",
                "one of the tokens seen",
                found,
            ));
        }
        let held = match &arrays {
            Some([keys, values]) => {
                let fits = keys.ndim() == 4
                    && values.ndim() == 4
                    && keys.shape()[..3] == values.shape()[..3]
                    && keys.shape()[0] == 1
                    && keys.size() > 0
                    && values.size() > 0;
                if !fits {
                    let found = format!("{:?} and {:?}", keys.shape(), values.shape());
                    let expected = "[1, heads, positions, width] of both";
                    return Err(Error::setting("keys and values", expected, found));
                }
                keys.dim(2)?
            }
            None => 0,
        };
        if let (Some(packing), Some([keys, values])) = (&packing, &arrays) {
            packing.check()?;
            let fits = |array: &Array, words| {
                array.dtype() == Dtype::Uint32 && array.shape().last() == Some(&words)
            };
            if !fits(keys, packing.words(0)?) || !fits(values, packing.words(1)?) {
                let found = format!("{:?} and {:?}", keys.shape(), values.shape());
                let expected = format!("{packing:?}");
                return Err(Error::setting("packed keys and values", expected, found));
            }
        }
        if packing.is_some() && (self.window.is_some() || arrays.is_none()) {
            let found = "packed ones";
            return Err(Error::setting("keys and values", "plain ones", found));
        }
        let needed = self.window.map_or(seen, |window| seen.min(window - 1));
        if held > seen || held < needed {
            let expected = format!("{needed} to {seen}");
            return Err(Error::setting("positions of keys", expected, held));
        }
        self.buffers = arrays.map(|[keys, values]| Buffers {
            keys,
            values,
            used: held,
        });
        self.shared = None;
        self.packing = packing;
        (self.seen, self.shift, self.fixed) = (seen, shift, fixed);
        Ok(())
    }

    /// The number of new tokens. Shapes that would only broadcast into the buffers are wrong.
    fn check(&self, keys: &Array, values: &Array) -> Result<i32> {
        let &[batch, heads, new, key_dim] = keys.shape() else {
            let found = format!("{:?}", keys.shape());
            return Err(Error::setting("keys", "four dimensions", found));
        };
        let held = |of: fn(&Buffers) -> &Array, index: usize| {
            let dim = |buffers| of(buffers).shape().last().copied();
            let packed = self.packing.map(|packing| packing.dims[index]);
            packed.or_else(|| self.buffers.as_ref().and_then(dim))
        };
        let (batch, heads) = match &self.buffers {
            Some(buffers) => (buffers.keys.dim(0)?, buffers.keys.dim(1)?),
            None => (batch, heads),
        };
        let key_dim = held(|buffers| &buffers.keys, 0).unwrap_or(key_dim);
        let value_dim = held(|buffers| &buffers.values, 1).or(values.shape().last().copied());
        let fits = |name, array: &Array, dim: i32| {
            let expected = [batch, heads, new, dim];
            if array.shape() == expected {
                return Ok(());
            }
            let found = format!("{:?}", array.shape());
            Err(Error::setting(name, format!("shape {expected:?}"), found))
        };
        fits("keys", keys, key_dim)?;
        fits("values", values, value_dim.unwrap_or(0))?;
        Ok(new)
    }

    /// Whether the last `count` tokens can be forgotten: a window that has let go of older
    /// positions cannot bring them back.
    pub fn can_trim(&self, count: i32) -> bool {
        let used = self.used();
        let complete = used == self.seen;
        let enough = self.window.is_some_and(|window| used - count >= window - 1);
        (0..=self.seen - self.fixed).contains(&count) && (complete || enough)
    }

    /// Whether any of the next `new` tokens can be forgotten again, whatever is done until then.
    pub(crate) fn can_take_back(&self, new: i32) -> bool {
        let used = self.used();
        // A window lets go of positions when its buffers are full, unless it keeps all.
        self.window
            .is_none_or(|window| used == self.seen && used + new < window)
    }

    /// Forgets the last `count` tokens.
    ///
    /// # Errors
    /// When it cannot ([`can_trim`](Self::can_trim)); then nothing is changed.
    pub fn trim(&mut self, count: i32) -> Result<()> {
        if !self.can_trim(count) {
            return Err(Error::setting(
                "tokens to trim",
                "at most those that are held",
                count,
            ));
        }
        if let Some(buffers) = &mut self.buffers {
            buffers.used -= count;
        }
        if let Some(shared) = &mut self.shared {
            shared.used -= count;
        }
        self.seen -= count;
        Ok(())
    }

    /// Arrays whose evaluation makes the state complete: those that hold it, or one of the node
    /// that writes it to memory of our own.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.buffers
            .iter()
            .flat_map(|buffers| [&buffers.keys, &buffers.values])
            .chain(self.shared.iter().map(|shared| &shared.marker.array))
    }
}

/// Room for more than so many positions: copying what is there takes less the more of it there is.
fn roomy(positions: i32) -> i32 {
    rounded(positions.saturating_add((positions / 8).max(STEP / 2)))
}

/// Positions in whole steps.
pub(super) fn rounded(positions: i32) -> i32 {
    positions.saturating_add(STEP - 1).div_euclid(STEP) * STEP
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By arithmetic: an eighth more than is known to come, at least half a step, in whole steps.
    #[test]
    fn room_is_made_for_what_is_announced() {
        let capacity = |cache: &KvCache, new: i32| {
            let plan = cache.plan([1, 2, new, 64], Dtype::Float32);
            plan.unwrap().unwrap().0.target.memory.shape[2]
        };
        let mut cache = KvCache::default();
        assert_eq!(capacity(&cache, 1), 256);
        assert_eq!(capacity(&cache, 512), 768);
        assert_eq!(capacity(&cache, 4096), 4608);
        cache.reserve(4096);
        assert_eq!(capacity(&cache, 512), 4608);
        assert_eq!(capacity(&cache, 5000), 5632);
        let mut window = KvCache::with_window(100).unwrap();
        window.reserve(4096);
        assert_eq!(capacity(&window, 50), 256);
    }
}
