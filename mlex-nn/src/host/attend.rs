//! A whole attention layer between its projections, in one node: heads normalized, rotated and
//! put into the cache, then attention over it.

use std::sync::Arc;

use mlex_core::{Array, AttentionMask, HostBuffer, HostConstant, HostView, HostViewMut};
use smallvec::SmallVec;

use mlex_kernels::{AttentionOptions, AttentionShape, Frequencies, Heads, RopeOptions};

use super::attention::{Kind, kernel_mask, mask_input};
use super::norm::Parameters;
use super::rope::RopeKernel;
use super::scratch::Scratch;
use super::sequence::{Sequence, Step, Value};
use super::{by_dtype, floats, keeps_dtype, kernel_error, size};
use crate::Result;
use crate::cache::KvCache;
use crate::cache::memory::{Carry, Marker, Plan, Source, Target};

/// What a layer does between its projections.
pub(crate) struct Attend<'a> {
    pub(crate) num_heads: i32,
    pub(crate) num_kv_heads: i32,
    pub(crate) scale: f32,
    pub(crate) rope: Option<&'a RopeKernel>,
    /// The norms of queries and keys.
    pub(crate) norms: Option<[Parameters<'a>; 2]>,
}

/// What becomes of a cache when the sequence that writes to it is finished.
#[derive(Debug)]
pub struct CacheUpdate {
    plan: Plan,
    new: i32,
}

impl CacheUpdate {
    /// Tells the cache that the update was recorded for; `output` is one of the arrays that the
    /// sequence was finished with.
    pub fn apply(&self, cache: &mut KvCache, output: &Array) {
        self.apply_marked(cache, &Marker::new(output));
    }

    /// Several updates of one sequence, each for its cache.
    pub fn apply_all<'a>(
        updates: impl IntoIterator<Item = (&'a Self, &'a mut KvCache)>,
        output: &Array,
    ) {
        let marker = Marker::new(output);
        for (update, cache) in updates {
            update.apply_marked(cache, &marker);
        }
    }

    fn apply_marked(&self, cache: &mut KvCache, marker: &Marker) {
        cache.commit(&self.plan, self.new, marker.clone());
    }
}

/// `queries` `[B, L, H * D]`, `keys` and `values` `[B, L, H_kv * D]` to `[B, L, H * D]`; the
/// keys and values are added to `cache`.
pub(crate) fn attend(
    layer: &Attend<'_>,
    [queries, keys, values]: [&Array; 3],
    mask: AttentionMask<'_>,
    cache: &mut KvCache,
) -> Result<Option<Array>> {
    let Some((mut sequence, queries)) = Sequence::start(queries)? else {
        return Ok(None);
    };
    let projected = [queries, sequence.input(keys), sequence.input(values)];
    let recorded = record_attend(&mut sequence, layer, projected, mask, cache)?;
    let Some((output, update)) = recorded else {
        return Ok(None);
    };
    let output = sequence.finish(&[output])?.pop();
    if let Some(output) = &output {
        update.apply(cache, output);
    }
    Ok(output)
}

/// As [`attend`]; `cache` is changed by the [`CacheUpdate`].
pub(crate) fn record_attend(
    sequence: &mut Sequence,
    layer: &Attend<'_>,
    [queries, keys, values]: [Value; 3],
    mask: AttentionMask<'_>,
    cache: &KvCache,
) -> Result<Option<(Value, CacheUpdate)>> {
    let dtype = sequence.dtype(queries);
    let kv_shape = sequence.shape(keys);
    let &[batch, length, width] = sequence.shape(queries) else {
        return Ok(None);
    };
    let head_dim = width / layer.num_heads;
    let fits = [keys, values]
        .iter()
        .all(|&value| sequence.dtype(value) == dtype && sequence.shape(value) == kv_shape)
        && kv_shape == [batch, length, layer.num_kv_heads * head_dim]
        && head_dim % 16 == 0
        && layer
            .norms
            .is_none_or(|norms| norms.iter().all(|norm| keeps_dtype(dtype, norm.weight)));
    if !fits {
        return Ok(None);
    }
    let heads = [batch, layer.num_kv_heads, length, head_dim];
    let Some((plan, keep)) = cache.plan(heads, dtype)? else {
        return Ok(None);
    };
    let kv_length = keep + length;
    let full = [batch, layer.num_heads, length, kv_length];
    let Some((kind, mask)) = mask_input(mask, full)? else {
        return Ok(None);
    };
    let offsets = SmallVec::from_slice(cache.offset().positions());
    let norms = match layer.norms {
        Some([q, k]) => Some(Norms {
            eps: q.eps,
            queries: q.constants.of([q.weight])?,
            keys: k.constants.of([k.weight])?,
        }),
        None => None,
    };
    let step = AttendStep {
        num_heads: size(layer.num_heads),
        num_kv_heads: size(layer.num_kv_heads),
        scale: layer.scale,
        rope: layer.rope.cloned(),
        norms,
        offsets,
        target: plan.target.clone(),
        keep: size(keep),
        kind,
    };
    if let Some(marker) = cache.marker() {
        sequence.after(marker);
    }
    // A mask is usually a broadcast view.
    let mask = mask.map(|mask| sequence.input_with(&mask, false));
    let inputs: SmallVec<[Value; 4]> = [queries, keys, values].into_iter().chain(mask).collect();
    let output = sequence.output_like(queries);
    sequence.step(step, &inputs, &[output]);
    Ok(Some((output, CacheUpdate { plan, new: length })))
}

/// The weights of the norms of queries and keys.
struct Norms {
    eps: f32,
    queries: Arc<[HostConstant]>,
    keys: Arc<[HostConstant]>,
}

struct AttendStep {
    num_heads: usize,
    num_kv_heads: usize,
    scale: f32,
    rope: Option<RopeKernel>,
    norms: Option<Norms>,
    offsets: SmallVec<[i32; 2]>,
    target: Target,
    /// How many of the positions before the queries may see.
    keep: usize,
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
        norm: Option<&Arc<[HostConstant]>>,
        layout: Layout,
        memory: &'a mut [T],
    ) -> mlex_core::Result<Heads<'a, T>> {
        let (normed, rotated) = memory.split_at_mut(layout.count());
        let mut data = x.as_slice::<T>()?;
        if let (Some(Norms { eps, .. }), Some(weight)) = (&self.norms, norm) {
            let weight = floats(&weight[0].view())?;
            mlex_kernels::rms_norm(normed, data, layout.dim, Some(weight), *eps)
                .map_err(kernel_error(NAME))?;
            data = normed;
        }
        let heads = Heads {
            data,
            strides: layout.strides(),
        };
        let Some(rope) = &self.rope else {
            return Ok(heads);
        };
        let options = RopeOptions {
            dims: size(rope.dims),
            traditional: rope.traditional,
            frequencies: Frequencies::Inverse(&rope.inverse),
            scale: rope.scale,
            offsets: &self.offsets,
        };
        let Layout {
            batch,
            length,
            heads: count,
            dim,
        } = layout;
        let rotated = &mut rotated[..layout.count()];
        mlex_kernels::rope(rotated, heads, [batch, count, length, dim], options)
            .map_err(kernel_error(NAME))?;
        Ok(Heads::contiguous(rotated, count, length, dim))
    }

    fn compute<T: Scratch>(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let [output] = outputs else {
            return Err(super::outputs_error(1, outputs));
        };
        let (batch, length) = (size(inputs[0].shape()[0]), size(inputs[0].shape()[1]));
        let dim = size(inputs[0].shape()[2]) / self.num_heads;
        let queries = Layout {
            batch,
            length,
            heads: self.num_heads,
            dim,
        };
        let keys = Layout {
            heads: self.num_kv_heads,
            ..queries
        };
        let Target {
            memory,
            fresh,
            used,
        } = &self.target;
        let capacity = size(memory.shape[2]);
        let used = size(*used);
        let norms = self.norms.as_ref();
        let mask = kernel_mask(self.kind, inputs.get(3))?;
        let mut buffers = memory.lock();
        if let Some(carry) = fresh {
            for (index, buffer) in buffers.iter_mut().enumerate() {
                buffer.resize(&memory.shape, memory.dtype)?;
                if let Some(carry) = carry {
                    carry_over(carry, index, buffer);
                }
            }
        }
        let [key_buffer, value_buffer] = &mut *buffers;
        let (mut key_buffer, mut value_buffer) = (key_buffer.view_mut(), value_buffer.view_mut());

        T::with(2 * (queries.count() + keys.count()), |memory| {
            let (for_keys, for_queries) = memory.split_at_mut(2 * keys.count());
            let key_buffer = key_buffer.as_mut_slice::<T>()?;
            let new_keys =
                self.prepare(&inputs[1], norms.map(|norms| &norms.keys), keys, for_keys)?;
            store(new_keys, key_buffer, keys, capacity, used);
            let value_buffer = value_buffer.as_mut_slice::<T>()?;
            let new_values = Heads {
                data: inputs[2].as_slice()?,
                strides: keys.strides(),
            };
            store(new_values, value_buffer, keys, capacity, used);

            let q = self.prepare(
                &inputs[0],
                norms.map(|norms| &norms.queries),
                queries,
                for_queries,
            )?;
            // From the first position that is seen; every head has the same place in its part.
            let start = (used - self.keep) * dim;
            let strides = [self.num_kv_heads * capacity * dim, capacity * dim, dim];
            let seen = |data| Heads { data, strides };
            let shape = AttentionShape {
                batch,
                q_heads: self.num_heads,
                kv_heads: self.num_kv_heads,
                q_len: length,
                kv_len: self.keep + length,
                head_dim: dim,
                value_dim: dim,
            };
            let options = AttentionOptions {
                scale: self.scale,
                mask,
                sinks: None,
                output: mlex_kernels::OutputOrder::LengthFirst,
            };
            let (k, v) = (seen(&key_buffer[start..]), seen(&value_buffer[start..]));
            mlex_kernels::attention(output.as_mut_slice::<T>()?, q, k, v, shape, options)
                .map_err(kernel_error(NAME))
        })
    }
}

/// Copies the keys (`index` 0) or values of some positions to the front of a new buffer.
fn carry_over(carry: &Carry, index: usize, to: &mut HostBuffer) {
    match &carry.source {
        Source::Memory(memory) => copy_rows(carry, memory.lock()[index].view(), to),
        Source::Arrays(arrays) => copy_rows(carry, arrays[index].view(), to),
    }
}

/// Both are `[B, heads, capacity, D]`, of the same type and of other capacities.
fn copy_rows(carry: &Carry, from: HostView<'_>, to: &mut HostBuffer) {
    let &[batch, heads, from_capacity, dim] = from.shape() else {
        return;
    };
    let row = size(dim) * from.dtype().size_in_bytes();
    let to_capacity = size(to.view().shape()[2]);
    let (first, count) = (size(carry.first) * row, size(carry.count) * row);
    let mut view = to.view_mut();
    let to = view.as_mut_bytes();
    for head in 0..size(batch) * size(heads) {
        let source = &from.as_bytes()[head * size(from_capacity) * row + first..][..count];
        to[head * to_capacity * row..][..count].copy_from_slice(source);
    }
}

/// Puts heads into a buffer `[B, heads, capacity, D]` from position `used` on.
fn store<T: Copy>(from: Heads<'_, T>, to: &mut [T], layout: Layout, capacity: usize, used: usize) {
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
                let target = ((b * heads + h) * capacity + used + l) * dim;
                to[target..target + dim].copy_from_slice(&from.data[source..source + dim]);
            }
        }
    }
}

impl Step for AttendStep {
    fn name(&self) -> &'static str {
        NAME
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        by_dtype!(inputs[0].dtype(), T => self.compute::<T>(inputs, outputs))
    }
}
