//! Attention over strided keys and values.

use mlex_core::{Array, AttentionMask, Dtype, HostView, HostViewMut};
use mlex_kernels::{AttentionOptions, AttentionShape, Heads, Mask as KernelMask, OutputOrder};

use super::sequence::{Sequence, Step};
use super::{applies, by_dtype, floats, heads, is_kernel_float, kernel_error, size};
use crate::Result;

/// `softmax(scale * q k^T + mask) v` of `[B, H, L, D]`, as `[B, L, H * D_v]`.
pub(crate) fn attention(
    queries: &Array,
    keys: &Array,
    values: &Array,
    scale: f32,
    mask: AttentionMask<'_>,
    sinks: Option<&Array>,
) -> Result<Option<Array>> {
    let same = queries.dtype() == keys.dtype() && queries.dtype() == values.dtype();
    let four = [queries, keys, values]
        .iter()
        .all(|array| array.ndim() == 4);
    // The kernels take heads in whole vectors.
    let whole = four && keys.dim(3)? % 16 == 0 && values.dim(3)? % 16 == 0;
    let sinks_fit = sinks.is_none_or(|sinks| sinks.dtype() == Dtype::Float32);
    if !applies(queries)? || !same || !whole || !sinks_fit {
        return Ok(None);
    }
    let shape = queries.shape();
    let full = [shape[0], shape[1], shape[2], keys.dim(2)?];
    let Some((kind, mask)) = mask_input(mask, full)? else {
        return Ok(None);
    };
    let mut sequence = Sequence::default();
    // Queries and sinks are small; keys, values and masks are read where they are.
    let mut inputs = vec![sequence.input(queries)];
    for array in [Some(keys), Some(values), mask.as_ref()]
        .into_iter()
        .flatten()
    {
        inputs.push(sequence.input_with(array, false));
    }
    inputs.extend(sinks.map(|sinks| sequence.input(sinks)));
    let merged = [shape[0], shape[2], shape[1] * values.dim(3)?];
    let y = sequence.output(&merged, queries.dtype());
    let step = AttentionStep {
        scale,
        kind,
        has_sinks: sinks.is_some(),
    };
    sequence.step(step, &inputs, &[y]);
    Ok(sequence.finish(&[y])?.pop())
}

/// A mask as the kernels take it: an array broadcast to `shape` `[B, H, L, S]`, as a further
/// input. None for a kind that they do not know.
pub(super) fn mask_input(
    mask: AttentionMask<'_>,
    shape: [i32; 4],
) -> Result<Option<(Kind, Option<Array>)>> {
    Ok(match mask {
        AttentionMask::None => Some((Kind::None, None)),
        AttentionMask::Causal => Some((Kind::Causal, None)),
        AttentionMask::Array(mask)
            if mask.dtype() == Dtype::Bool || is_kernel_float(mask.dtype()) =>
        {
            Some((Kind::Array, Some(mask.broadcast_to(&shape)?)))
        }
        _ => None,
    })
}

/// The kernels' mask, `array` being the input of [`mask_input`].
pub(super) fn kernel_mask<'a>(
    kind: Kind,
    array: Option<&HostView<'a>>,
) -> mlex_core::Result<KernelMask<'a>> {
    Ok(match (kind, array) {
        (Kind::Causal, _) => KernelMask::Causal { window: None },
        (Kind::Array, Some(view)) => mask(view)?,
        _ => KernelMask::None,
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    None,
    Causal,
    /// A further input.
    Array,
}

struct AttentionStep {
    scale: f32,
    kind: Kind,
    /// The last input.
    has_sinks: bool,
}

impl Step for AttentionStep {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let [q, k, v] = [inputs[0], inputs[1], inputs[2]];
        let shape = AttentionShape {
            batch: size(q.shape()[0]),
            q_heads: size(q.shape()[1]),
            kv_heads: size(k.shape()[1]),
            q_len: size(q.shape()[2]),
            kv_len: size(k.shape()[2]),
            head_dim: size(q.shape()[3]),
            value_dim: size(v.shape()[3]),
        };
        let mask = kernel_mask(self.kind, inputs.get(3))?;
        let sinks = match inputs.last() {
            Some(sinks) if self.has_sinks => Some(sinks.as_slice::<f32>()?),
            _ => None,
        };
        let options = AttentionOptions {
            scale: self.scale,
            mask,
            sinks,
            output: OutputOrder::LengthFirst,
        };
        by_dtype!(q.dtype(), T => {
            let ((keys, k_strides), (values, v_strides)) = (heads::<T>(&k)?, heads::<T>(&v)?);
            let keys = Heads { data: &keys, strides: k_strides };
            let values = Heads { data: &values, strides: v_strides };
            let queries = Heads::contiguous(
                q.as_slice::<T>()?, shape.q_heads, shape.q_len, shape.head_dim,
            );
            let out = outputs[0].as_mut_slice::<T>()?;
            mlex_kernels::attention(out, queries, keys, values, shape, options)
        })
        .map_err(kernel_error("attention"))
    }
}

fn mask<'a>(view: &HostView<'a>) -> mlex_core::Result<KernelMask<'a>> {
    let stride = |axis: usize| usize::try_from(view.strides()[axis]).unwrap_or_default();
    let strides = [stride(0), stride(1), stride(2), stride(3)];
    Ok(if view.dtype() == Dtype::Bool {
        KernelMask::Bool {
            data: view.as_slice()?,
            strides,
        }
    } else {
        KernelMask::Additive {
            data: floats(view)?,
            strides,
        }
    })
}
