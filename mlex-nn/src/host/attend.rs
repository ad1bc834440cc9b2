//! A whole attention layer between its projections, in one node: heads normalized, rotated and
//! put into the cache, then attention over it.

use std::sync::Arc;

use mlex_core::{Array, Error, ErrorKind, HostBuffer, HostConstant, HostView, HostViewMut};
use mlex_kernels::{
    AttentionOptions, AttentionShape, Frequencies, Heads, PackedHeads, PackedRow, RopeOptions,
};
use smallvec::SmallVec;

use super::attention::{Kind, kernel_mask, mask_input};
use super::node::Place;
use super::norm::Parameters;
use super::rope::RopeKernel;
use super::scratch::Scratch;
use super::sequence::{Sequence, Value};
use super::update::CacheUpdate;
use super::{by_dtype, floats, is_kernel_float, keeps_dtype, kernel_error, size};
use crate::cache::memory::{Carry, Source, Target};
use crate::cache::{KvCache, Mask, Offset};
use crate::{Result, RmsNorm, Rope};

/// What attention does between its projections, in one step.
#[derive(Clone, Copy, Debug)]
pub struct Attend<'a> {
    /// Query heads.
    pub num_heads: i32,
    /// Key and value heads; divides the query heads.
    pub num_kv_heads: i32,
    /// Factor of the scores.
    pub scale: f32,
    /// The encoding of positions.
    pub rope: Option<&'a Rope>,
    /// The norm of each query.
    pub query_norm: Option<&'a RmsNorm>,
    /// The norm of each key.
    pub key_norm: Option<&'a RmsNorm>,
    /// Queries and keys are normalized after they are rotated, not before.
    pub norm_last: bool,
    /// Values are divided by their root mean square, with this epsilon.
    pub value_eps: Option<f32>,
}

impl Attend<'_> {
    /// `queries` `[B, L, H * D]`, `keys` and `values` `[B, L, H_kv * D]` to `[B, L, H * D]`. The
    /// keys and values are added to `cache` by the [`CacheUpdate`], after the sequence is
    /// finished. None where there is no kernel for it.
    ///
    /// # Errors
    /// When the weights cannot be read or the mask does not fit.
    pub fn record(
        &self,
        sequence: &mut Sequence,
        [queries, keys, values]: [Value; 3],
        mask: &Mask,
        cache: &KvCache,
    ) -> Result<Option<(Value, CacheUpdate)>> {
        let dtype = sequence.dtype(queries);
        let kv_shape = sequence.shape(keys);
        let Some([batch, length, head_dim]) = self.sizes(sequence, queries) else {
            return Ok(None);
        };
        let fits = [keys, values]
            .iter()
            .all(|&value| sequence.dtype(value) == dtype && sequence.shape(value) == kv_shape)
            && kv_shape == [batch, length, self.num_kv_heads * head_dim];
        if !fits {
            return Ok(None);
        }
        let heads = [batch, self.num_kv_heads, length, head_dim];
        let Some((plan, keep)) = cache.plan(heads, dtype)? else {
            return Ok(None);
        };
        let (seen, offset) = (keep + length, cache.offset());
        let step = self.step(sequence, queries, mask, (&plan.target, seen))?;
        let Some((step, mask)) = step else {
            return Ok(None);
        };
        let update = CacheUpdate::keys(plan, seen, length);
        if let Some(marker) = cache.marker() {
            sequence.after(marker);
        }
        let output = sequence.output_like(queries);
        let inputs = [queries, keys, values];
        let inputs: SmallVec<[Value; 4]> = inputs.into_iter().chain(mask).collect();
        let step = AttendStep { new: true, ..step };
        if let Some(place) = update.place(&offset) {
            sequence.attend(step, place, &inputs, output);
        }
        Ok(Some((output, update)))
    }

    /// `queries` `[B, L, H * D]` at `offset` over the keys and values of another layer, which
    /// has been recorded for the same tokens; as [`record`](Self::record).
    ///
    /// # Errors
    /// As [`record`](Self::record).
    pub fn record_over(
        &self,
        sequence: &mut Sequence,
        queries: Value,
        mask: &Mask,
        other: &CacheUpdate,
        offset: &Offset,
    ) -> Result<Option<Value>> {
        let Some((target, seen)) = other.seen() else {
            return Ok(None);
        };
        let Some([batch, _, head_dim]) = self.sizes(sequence, queries) else {
            return Ok(None);
        };
        let [rows, heads, ..] = target.memory.shape;
        let (dim, dtype) = target.memory.vectors();
        let fits = [rows, heads, dim] == [batch, self.num_kv_heads, head_dim]
            && dtype == sequence.dtype(queries);
        if !fits {
            return Ok(None);
        }
        let step = self.step(sequence, queries, mask, (target, seen))?;
        let Some((step, mask)) = step else {
            return Ok(None);
        };
        let output = sequence.output_like(queries);
        let inputs: SmallVec<[Value; 4]> = [queries].into_iter().chain(mask).collect();
        if let Some(place) = other.place(offset) {
            sequence.attend(step, place, &inputs, output);
        }
        Ok(Some(output))
    }

    /// Batch, length and width of a head.
    fn sizes(&self, sequence: &Sequence, queries: Value) -> Option<[i32; 3]> {
        let &[batch, length, width] = sequence.shape(queries) else {
            return None;
        };
        let head_dim = width / self.num_heads;
        let dtype = sequence.dtype(queries);
        let mut norms = self.query_norm.into_iter().chain(self.key_norm);
        let fits = head_dim % 16 == 0
            && is_kernel_float(dtype)
            && norms.all(|norm| keeps_dtype(dtype, norm.parameters().weight));
        fits.then_some([batch, length, head_dim])
    }

    /// The step over the last `seen` positions of a memory, without new ones, and its mask. None
    /// for a mask or a rope that the kernels do not have.
    fn step(
        &self,
        sequence: &mut Sequence,
        queries: Value,
        mask: &Mask,
        (target, seen): (&Target, i32),
    ) -> Result<Option<(AttendStep, Option<Value>)>> {
        let &[batch, length, _] = sequence.shape(queries) else {
            return Ok(None);
        };
        let rope = match self.rope {
            Some(rope) => match rope.kernel() {
                Some(kernel) => Some(kernel.clone()),
                None => return Ok(None),
            },
            None => None,
        };
        let full = [batch, self.num_heads, length, seen];
        let Some((kind, mask)) = mask_input(mask.as_attention(), full)? else {
            return Ok(None);
        };
        let norm = |norm: &RmsNorm| {
            let Parameters {
                weight,
                constants,
                eps,
                ..
            } = norm.parameters();
            Ok::<_, crate::Error>(Norm {
                weight: Some(constants.of([weight])?),
                eps,
            })
        };
        let packing = target.memory.packing.as_ref();
        let packed = packing.map(|packing| packing.row(packing.dims[0]));
        let step = AttendStep {
            packed: packed.transpose()?,
            num_heads: size(self.num_heads),
            num_kv_heads: size(self.num_kv_heads),
            scale: self.scale,
            rope,
            query_norm: self.query_norm.map(norm).transpose()?,
            key_norm: self.key_norm.map(norm).transpose()?,
            norm_last: self.norm_last,
            value_norm: self.value_eps.map(|eps| Norm { weight: None, eps }),
            new: false,
            kind,
        };
        // A mask is usually a broadcast view.
        let mask = mask.map(|mask| sequence.input_with(&mask, false));
        Ok(Some((step, mask)))
    }
}

/// [`Attend::record`] alone.
pub(crate) fn attend(
    layer: &Attend<'_>,
    [queries, keys, values]: [&Array; 3],
    mask: &Mask,
    cache: &mut KvCache,
) -> Result<Option<Array>> {
    let Some((mut sequence, queries)) = Sequence::start(queries)? else {
        return Ok(None);
    };
    let projected = [queries, sequence.input(keys), sequence.input(values)];
    let Some((output, update)) = layer.record(&mut sequence, projected, mask, cache)? else {
        return Ok(None);
    };
    sequence.finish_keys(output, &update, cache).map(Some)
}

/// A norm, without a weight where it has none.
struct Norm {
    weight: Option<Arc<[HostConstant]>>,
    eps: f32,
}

impl Norm {
    /// Rows of `size`, normalized into `memory`.
    fn apply<'a, T: Scratch>(
        &self,
        x: &[T],
        memory: &'a mut [T],
        size: usize,
    ) -> mlex_core::Result<&'a [T]> {
        let weight = self.weight.as_ref().map(|weight| floats(&weight[0].view()));
        mlex_kernels::rms_norm(memory, x, size, weight.transpose()?, self.eps)
            .map_err(kernel_error(NAME))?;
        Ok(memory)
    }
}

/// What [`Attend`] records; the rest is a [`Place`].
pub(super) struct AttendStep {
    /// The form of packed keys and values.
    packed: Option<PackedRow>,
    num_heads: usize,
    num_kv_heads: usize,
    scale: f32,
    rope: Option<RopeKernel>,
    query_norm: Option<Norm>,
    key_norm: Option<Norm>,
    norm_last: bool,
    value_norm: Option<Norm>,
    /// Inputs 1 and 2 are keys and values to be put into the memory; otherwise they are there.
    new: bool,
    kind: Kind,
}

const NAME: &str = "attend";

/// Sizes of heads in memory, as projections lay them out: `[B, L, heads, D]`.
#[derive(Clone, Copy)]
struct Layout {
    batch: usize,
    length: usize,
    heads: usize,
    dim: usize,
}

impl Layout {
    fn count(self) -> usize {
        self.batch * self.length * self.heads * self.dim
    }

    /// Strides of batch, head and position.
    fn strides(self) -> [usize; 3] {
        [
            self.length * self.heads * self.dim,
            self.dim,
            self.heads * self.dim,
        ]
    }
}

impl AttendStep {
    /// The heads of a projection, normalized and rotated: where they are then, and how.
    fn prepare<'a, T: Scratch>(
        &self,
        x: &'a HostView<'_>,
        norm: Option<&Norm>,
        rope: Option<RopeOptions<'_>>,
        layout: Layout,
        memory: &'a mut [T],
    ) -> mlex_core::Result<Heads<'a, T>> {
        let (first, second) = memory.split_at_mut(layout.count());
        let second = &mut second[..layout.count()];
        let data = x.as_slice::<T>()?;
        let Some(options) = rope else {
            let data = match norm {
                Some(norm) => norm.apply(data, first, layout.dim)?,
                None => data,
            };
            let strides = layout.strides();
            return Ok(Heads { data, strides });
        };
        let Layout {
            batch,
            length,
            heads: count,
            dim,
        } = layout;
        let sizes = [batch, count, length, dim];
        let before = norm.filter(|_| !self.norm_last);
        let data = match before {
            Some(norm) => norm.apply(data, first, dim)?,
            None => data,
        };
        let heads = Heads {
            data,
            strides: layout.strides(),
        };
        mlex_kernels::rope(second, heads, sizes, options).map_err(kernel_error(NAME))?;
        let after = norm.filter(|_| self.norm_last);
        let data = match after {
            Some(norm) => norm.apply(second, first, dim)?,
            None => second,
        };
        Ok(Heads::contiguous(data, count, length, dim))
    }

    fn compute<T: Scratch>(
        &self,
        place: &Place,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let [output] = outputs else {
            return Err(super::outputs_error(1, outputs));
        };
        let (batch, length) = (size(inputs[0].shape()[0]), size(inputs[0].shape()[1]));
        let queries = Layout {
            batch,
            length,
            heads: self.num_heads,
            dim: size(inputs[0].shape()[2]) / self.num_heads,
        };
        let keys = Layout {
            heads: self.num_kv_heads,
            ..queries
        };
        let rope = self.rope.as_ref().map(|rope| RopeOptions {
            dims: size(rope.dims),
            traditional: rope.traditional,
            frequencies: Frequencies::Inverse(&rope.inverse),
            scale: rope.scale,
            offsets: &place.offsets,
        });
        let for_keys = if self.new { keys.count() } else { 0 };
        T::with(2 * (queries.count() + for_keys), |memory| {
            let (for_queries, for_keys) = memory.split_at_mut(2 * queries.count());
            let norm = self.query_norm.as_ref();
            let q = self.prepare(&inputs[0], norm, rope, queries, for_queries)?;
            let mut buffers = place.target.memory.lock();
            if self.new {
                prepare_memory(&place.target, &mut buffers)?;
                let [key_buffer, value_buffer] = &mut *buffers;
                let norm = self.key_norm.as_ref();
                let new = self.prepare::<T>(&inputs[1], norm, rope, keys, for_keys)?;
                self.store(new, &place.target, key_buffer, keys)?;
                let norm = self.value_norm.as_ref();
                let new = self.prepare::<T>(&inputs[2], norm, None, keys, for_keys)?;
                self.store(new, &place.target, value_buffer, keys)?;
            }
            let seen = [buffers[0].view(), buffers[1].view()];
            let mask = inputs.get(if self.new { 3 } else { 1 });
            self.attend(output, q, (place, seen), mask, queries)
        })
    }

    /// Puts heads into a buffer `[B, heads, capacity, D]`, behind the positions in use.
    fn store<T: Scratch>(
        &self,
        from: Heads<'_, T>,
        target: &Target,
        to: &mut HostBuffer,
        layout: Layout,
    ) -> mlex_core::Result<()> {
        let (capacity, used) = (size(target.memory.shape[2]), size(target.used));
        let mut view = to.view_mut();
        let Some(row) = self.packed else {
            let to = view.as_mut_slice::<T>()?;
            store(from, layout, |head, position, vector| {
                let target = (head * capacity + used + position) * layout.dim;
                to[target..target + layout.dim].copy_from_slice(vector);
                Ok(())
            })
            .map_err(kernel_error(NAME))?;
            return Ok(());
        };
        let (to, words) = (view.as_mut_slice::<u32>()?, row.words());
        store(from, layout, |head, position, vector| {
            let target = (head * capacity + used + position) * words;
            mlex_kernels::pack_rows(&mut to[target..target + words], vector, row)
        })
        .map_err(kernel_error(NAME))
    }

    /// Attention over buffers `[B, H_kv, capacity, D]`.
    fn attend<T: Scratch>(
        &self,
        output: &mut HostViewMut<'_>,
        q: Heads<'_, T>,
        (place, [k, v]): (&Place, [HostView<'_>; 2]),
        mask: Option<&HostView<'_>>,
        queries: Layout,
    ) -> mlex_core::Result<()> {
        let (capacity, dim) = (size(k.shape()[2]), queries.dim);
        // From the first position that is seen; every head has the same place in its part.
        let end = size(place.target.used) + queries.length;
        let width = size(k.shape()[3]);
        let start = (end - place.seen) * width;
        let strides = [
            self.num_kv_heads * capacity * width,
            capacity * width,
            width,
        ];
        let shape = AttentionShape {
            batch: queries.batch,
            q_heads: self.num_heads,
            kv_heads: self.num_kv_heads,
            q_len: queries.length,
            kv_len: place.seen,
            head_dim: dim,
            value_dim: dim,
        };
        let options = AttentionOptions {
            scale: self.scale,
            mask: kernel_mask(self.kind, mask)?,
            sinks: None,
            output: mlex_kernels::OutputOrder::LengthFirst,
        };
        let output = output.as_mut_slice::<T>()?;
        let Some(row) = self.packed else {
            let (k, v) = (k.as_slice::<T>()?, v.as_slice::<T>()?);
            let seen = |data| Heads { data, strides };
            let (k, v) = (seen(&k[start..]), seen(&v[start..]));
            return mlex_kernels::attention(output, q, k, v, shape, options)
                .map_err(kernel_error(NAME));
        };
        let (k, v) = (k.as_slice::<u32>()?, v.as_slice::<u32>()?);
        let seen = |words| PackedHeads {
            words: Heads {
                data: words,
                strides,
            },
            row,
        };
        let (k, v) = (seen(&k[start..]), seen(&v[start..]));
        mlex_kernels::attention_packed(output, q, k, v, shape, options).map_err(kernel_error(NAME))
    }
}

/// Makes the memory what it is before the new positions are put into it.
fn prepare_memory(target: &Target, buffers: &mut [HostBuffer; 2]) -> mlex_core::Result<()> {
    let Target { memory, fresh, .. } = target;
    let Some(carry) = fresh else {
        return Ok(());
    };
    for (index, buffer) in buffers.iter_mut().enumerate() {
        buffer.resize(&memory.shape, memory.dtype)?;
        if let Some(carry) = carry {
            carry_over(carry, index, buffer)?;
        }
    }
    Ok(())
}

/// Copies the keys (`index` 0) or values of some positions to the front of a new buffer.
fn carry_over(carry: &Carry, index: usize, to: &mut HostBuffer) -> mlex_core::Result<()> {
    match &carry.source {
        Source::Memory(memory, _) => copy_rows(carry, memory.lock()[index].view(), to),
        Source::Arrays(arrays) => copy_rows(carry, arrays[index].view(), to),
    }
}

/// Both are `[B, heads, capacity, D]`, of the same type and of other capacities.
fn copy_rows(carry: &Carry, from: HostView<'_>, to: &mut HostBuffer) -> mlex_core::Result<()> {
    let &[batch, heads, from_capacity, dim] = from.shape() else {
        // The step that was to make it has failed.
        return Err(Error::new(ErrorKind::Length {
            what: "dimensions of the keys before",
            expected: 4,
            found: from.shape().len() as u64,
        }));
    };
    let row = size(dim) * from.dtype().size_in_bytes();
    let to_capacity = size(to.view().shape()[2]);
    let sinks = size(carry.sinks) * row;
    let rest = size(carry.count - carry.sinks) * row;
    let first = size(carry.end) * row - rest;
    let mut view = to.view_mut();
    let to = view.as_mut_bytes();
    for head in 0..size(batch) * size(heads) {
        let from = &from.as_bytes()[head * size(from_capacity) * row..];
        let to = &mut to[head * to_capacity * row..][..sinks + rest];
        to[..sinks].copy_from_slice(&from[..sinks]);
        to[sinks..].copy_from_slice(&from[first..][..rest]);
    }
    Ok(())
}

/// Gives each vector of heads to `put`, with the number of its head over all sequences and its
/// position.
fn store<T: Copy>(
    from: Heads<'_, T>,
    layout: Layout,
    mut put: impl FnMut(usize, usize, &[T]) -> mlex_kernels::Result<()>,
) -> mlex_kernels::Result<()> {
    let Layout {
        batch,
        length,
        heads,
        dim,
    } = layout;
    let [b_stride, h_stride, l_stride] = from.strides;
    for b in 0..batch {
        for h in 0..heads {
            for l in 0..length {
                let source = b * b_stride + h * h_stride + l * l_stride;
                put(b * heads + h, l, &from.data[source..source + dim])?;
            }
        }
    }
    Ok(())
}

impl AttendStep {
    pub(super) fn name(&self) -> &'static str {
        NAME
    }

    pub(super) fn run(
        &self,
        place: &Place,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        by_dtype!(inputs[0].dtype(), T => self.compute::<T>(place, inputs, outputs))
    }

    /// Lets idle threads read the keys and values that are there, of a step of one query.
    pub(super) fn announce(&self, place: &Place) {
        let Place { target, seen, .. } = place;
        if target.fresh.is_some() || self.packed.is_some() {
            return;
        }
        let [batch, heads, capacity, dim] = target.memory.shape.map(size);
        let start = (size(target.used) + usize::from(self.new)).saturating_sub(*seen) * dim;
        let strides = [heads * capacity * dim, capacity * dim, dim];
        let buffers = target.memory.lock();
        by_dtype!(target.memory.dtype, T => {
            let [k, v] = buffers.each_ref().map(|buffer| buffer.view().as_slice::<T>());
            if let (Ok(k), Ok(v)) = (k, v)
                && let (Some(k), Some(v)) = (k.get(start..), v.get(start..))
            {
                let seen_heads = [k, v].map(|data| Heads { data, strides });
                mlex_kernels::expect_attention(seen_heads, [batch, heads, *seen]).announce();
            }
        });
    }
}
