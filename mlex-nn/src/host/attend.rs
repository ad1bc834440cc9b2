//! A whole attention layer between its projections, in one node: heads normalized, rotated and
//! put into the cache, then attention over it.

use mlex_core::{Array, AttentionMask, HostOp, HostOutput, HostView, HostViewMut, host_op};
use mlex_kernels::{AttentionOptions, AttentionShape, Frequencies, Heads, RopeOptions};

use super::attention::{Kind, kernel_mask, mask_input};
use super::rope::RopeKernel;
use super::scratch::Scratch;
use super::{applies, by_dtype, floats, keeps_dtype, kernel_error, size};
use crate::Result;
use crate::cache::{KvCache, Offset};

/// What a layer does between its projections.
pub(crate) struct Attend<'a> {
    pub(crate) num_heads: i32,
    pub(crate) num_kv_heads: i32,
    pub(crate) scale: f32,
    pub(crate) rope: Option<&'a RopeKernel>,
    /// Weights of the norms of queries and keys, and their epsilon.
    pub(crate) norms: Option<(&'a Array, &'a Array, f32)>,
}

/// `queries` `[B, L, H * D]`, `keys` and `values` `[B, L, H_kv * D]` to `[B, L, H * D]`; the
/// keys and values are added to `cache`.
pub(crate) fn attend(
    layer: &Attend<'_>,
    [queries, keys, values]: [&Array; 3],
    mask: AttentionMask<'_>,
    cache: &mut KvCache,
) -> Result<Option<Array>> {
    let dtype = queries.dtype();
    let (shape, kv_shape) = (queries.shape(), keys.shape());
    let &[batch, length, width] = shape else {
        return Ok(None);
    };
    let head_dim = width / layer.num_heads;
    let fits = applies(queries)?
        && [keys, values]
            .iter()
            .all(|array| array.dtype() == dtype && array.shape() == kv_shape)
        && kv_shape == [batch, length, layer.num_kv_heads * head_dim]
        && head_dim % 16 == 0
        && layer
            .norms
            .is_none_or(|(q, k, _)| keeps_dtype(queries, q) && keeps_dtype(queries, k));
    if !fits {
        return Ok(None);
    }
    let Some(room) = cache.room(batch, layer.num_kv_heads, length, head_dim, dtype)? else {
        return Ok(None);
    };
    let kv_length = room.keep + length;
    let full = [batch, layer.num_heads, length, kv_length];
    let Some((kind, mask)) = mask_input(mask, full)? else {
        return Ok(None);
    };
    let offsets = match cache.offset() {
        Offset::Same(offset) => vec![offset],
        Offset::PerRow(offsets) => offsets.to_vec(),
    };
    let op = AttendOp {
        num_heads: size(layer.num_heads),
        num_kv_heads: size(layer.num_kv_heads),
        scale: layer.scale,
        rope: layer.rope.cloned(),
        norm_eps: layer.norms.map(|(_, _, eps)| eps),
        offsets,
        used: size(room.used),
        keep: size(room.keep),
        kind,
    };
    let norms = layer.norms.map(|(q, k, _)| [q, k]);
    let inputs: Vec<&Array> = [queries, keys, values, &room.keys, &room.values]
        .into_iter()
        .chain(norms.into_iter().flatten())
        .chain(&mask)
        .collect();
    let outputs = host_op(&std::sync::Arc::new(op), &inputs)?;
    let Ok([output, keys, values]) = <[Array; 3]>::try_from(outputs) else {
        return Ok(None);
    };
    cache.commit(keys, values, room.used + length, length);
    Ok(Some(output))
}

struct AttendOp {
    num_heads: usize,
    num_kv_heads: usize,
    scale: f32,
    rope: Option<RopeKernel>,
    norm_eps: Option<f32>,
    offsets: Vec<i32>,
    /// Positions of the buffers that are in use before.
    used: usize,
    /// How many of them the queries may see.
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

impl AttendOp {
    fn norms(&self) -> usize {
        if self.norm_eps.is_some() { 2 } else { 0 }
    }

    /// The heads of a projection, normalized and rotated: where they are then, and how.
    fn prepare<'a, T: Scratch>(
        &self,
        x: &'a HostView<'_>,
        norm: Option<&HostView<'_>>,
        layout: Layout,
        memory: &'a mut [T],
    ) -> mlex_core::Result<Heads<'a, T>> {
        let (normed, rotated) = memory.split_at_mut(layout.count());
        let mut data = x.as_slice::<T>()?;
        if let (Some(eps), Some(weight)) = (self.norm_eps, norm) {
            mlex_kernels::rms_norm(normed, data, layout.dim, Some(floats(weight)?), eps)
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
        let [output, key_buffer, value_buffer] = outputs else {
            return Err(mlex_core::Error::format(
                "outputs",
                "3",
                outputs.len().to_string(),
            ));
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
        let capacity = size(key_buffer.shape()[2]);
        let norms = self.norms();
        let norm = |index: usize| (norms > 0).then(|| &inputs[5 + index]);
        let mask = kernel_mask(self.kind, inputs.get(5 + norms))?;

        T::with(2 * (queries.count() + keys.count()), |memory| {
            let (for_keys, for_queries) = memory.split_at_mut(2 * keys.count());
            let key_buffer = key_buffer.as_mut_slice::<T>()?;
            let new_keys = self.prepare(&inputs[1], norm(1), keys, for_keys)?;
            store(new_keys, key_buffer, keys, capacity, self.used);
            let value_buffer = value_buffer.as_mut_slice::<T>()?;
            let new_values = Heads {
                data: inputs[2].as_slice()?,
                strides: keys.strides(),
            };
            store(new_values, value_buffer, keys, capacity, self.used);

            let q = self.prepare(&inputs[0], norm(0), queries, for_queries)?;
            // From the first position that is seen; every head has the same place in its part.
            let start = (self.used - self.keep) * dim;
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

impl HostOp for AttendOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[&Array]) -> mlex_core::Result<Vec<HostOutput>> {
        Ok(vec![
            HostOutput::new(inputs[0].shape(), inputs[0].dtype()),
            HostOutput::in_place(3, inputs[3]),
            HostOutput::in_place(4, inputs[4]),
        ])
    }

    fn contiguous(&self, index: usize) -> bool {
        // The mask is usually a broadcast view.
        self.kind != Kind::Array || index != 5 + self.norms()
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        by_dtype!(inputs[0].dtype(), T => self.compute::<T>(inputs, outputs))
    }
}
