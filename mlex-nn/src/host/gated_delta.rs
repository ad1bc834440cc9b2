//! A gated delta net between its projections, in one node.

use std::borrow::Cow;

use mlex_core::{Array, Dtype, Element, HostOp, HostOutput, HostView, HostViewMut, host_op};
use mlex_kernels::{
    DeltaInputs, DeltaLayer, DeltaShape, Strided, gated_delta as run, gated_delta_tail,
};

use super::{applies, by_dtype, floats, is_kernel_float, keeps_dtype, kernel_error, size};
use crate::cache::{RecurrentCache, RecurrentState};
use crate::gated_delta::{Delta, GatedDeltaConfig, Projected};
use crate::{Error, Result};

/// What the layer's output projection takes, `[B, L, value_dim]`, and the state after it.
pub(crate) fn gated_delta(
    layer: &Delta<'_>,
    projected: &Projected,
    cache: &RecurrentCache,
) -> Result<Option<(Array, RecurrentState)>> {
    let Projected { qkv, z, b, a } = projected;
    let &[batch, length, channels] = qkv.shape() else {
        return Ok(None);
    };
    let GatedDeltaConfig {
        num_key_heads: key_heads,
        num_value_heads: heads,
        key_head_dim: key_dim,
        value_head_dim: value_dim,
        conv_kernel: kernel,
        norm_eps,
        ..
    } = *layer.config;
    let rates = [layer.a_log, layer.dt_bias];
    let fits = applies(qkv)?
        && [z, b, a].iter().all(|array| array.dtype() == qkv.dtype())
        && [layer.conv, layer.norm]
            .iter()
            .all(|array| keeps_dtype(qkv.dtype(), array))
        && rates.iter().all(|array| is_kernel_float(array.dtype()));
    if !fits {
        return Ok(None);
    }
    let states = [batch, heads, value_dim, key_dim];
    let tail = [batch, kernel - 1, channels];
    if let Some(RecurrentState { conv, state }) = cache.state() {
        if state.dtype() != Dtype::Float32 || conv.dtype() != qkv.dtype() {
            return Ok(None);
        }
        if state.shape() != states || conv.shape() != tail {
            let found = format!("{:?} and {:?}", state.shape(), conv.shape());
            let expected = format!("shapes {states:?} and {tail:?}");
            return Err(Error::setting("recurrent cache", expected, found));
        }
    }
    let op = DeltaOp {
        shape: DeltaShape {
            batch: size(batch),
            length: size(length),
            key_heads: size(key_heads),
            value_heads: size(heads),
            key_dim: size(key_dim),
            value_dim: size(value_dim),
            kernel: size(kernel),
        },
        norm_eps,
        padding: cache
            .padding(length)
            .map(|rows| rows.into_iter().map(size).collect())
            .unwrap_or_default(),
        goes_on: cache.state().is_some(),
        states,
        tail,
    };
    let before = cache.state().map(|state| [&state.state, &state.conv]);
    let inputs: Vec<&Array> = [qkv, z, b, a, layer.conv, layer.norm]
        .into_iter()
        .chain(rates)
        .chain(before.into_iter().flatten())
        .collect();
    let outputs = host_op(&std::sync::Arc::new(op), &inputs)?;
    Ok(<[Array; 3]>::try_from(outputs)
        .ok()
        .map(|[y, state, conv]| (y, RecurrentState { conv, state })))
}

const NAME: &str = "gated_delta";

/// Where the inputs are that not every call has.
const STATE: usize = 8;
const TAIL: usize = 9;

struct DeltaOp {
    shape: DeltaShape,
    norm_eps: f32,
    padding: Vec<usize>,
    /// There is a state from before.
    goes_on: bool,
    states: [i32; 4],
    tail: [i32; 3],
}

/// `[B, L, W]` as rows at a fixed distance; copied where they are not.
fn rows<'a, T: Element>(view: &HostView<'a>) -> mlex_core::Result<(Cow<'a, [T]>, usize)> {
    let data = view.as_slice::<T>()?;
    let sizes: Vec<usize> = view.shape().iter().map(|&dim| size(dim)).collect();
    let strides: Vec<usize> = view
        .strides()
        .iter()
        .map(|&stride| usize::try_from(stride).unwrap_or_default())
        .collect();
    let [batch, length, width] = [sizes[0], sizes[1], sizes[2]];
    let stride = if length > 1 { strides[1] } else { strides[0] };
    let even = length <= 1 || batch <= 1 || strides[0] == length * strides[1];
    if even && (width <= 1 || strides[2] == 1) && (stride >= width || batch * length <= 1) {
        return Ok((Cow::Borrowed(data), stride.max(width)));
    }
    let mut packed = Vec::with_capacity(batch * length * width);
    for b in 0..batch {
        for l in 0..length {
            let start = b * strides[0] + l * strides[1];
            packed.extend((0..width).map(|w| data[start + w * strides[2]]));
        }
    }
    Ok((Cow::Owned(packed), width))
}

impl DeltaOp {
    fn compute<T: Element + mlex_kernels::Element>(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let [y, state, tail] = outputs else {
            let found = outputs.len().to_string();
            return Err(mlex_core::Error::format("outputs", "3", found));
        };
        let (qkv, z) = (rows::<T>(&inputs[0])?, rows::<T>(&inputs[1])?);
        let (b, a) = (rows::<T>(&inputs[2])?, rows::<T>(&inputs[3])?);
        fn strided<'a, T: Clone>(rows: &'a (Cow<'_, [T]>, usize)) -> Strided<'a, T> {
            Strided {
                data: &rows.0,
                stride: rows.1,
            }
        }
        let layer = DeltaLayer {
            conv: floats(&inputs[4])?,
            norm: floats(&inputs[5])?,
            a_log: floats(&inputs[6])?,
            dt_bias: floats(&inputs[7])?,
            norm_eps: self.norm_eps,
        };
        let before: &[T] = if self.goes_on {
            inputs[TAIL].as_slice()?
        } else {
            &[]
        };
        let inputs = DeltaInputs {
            qkv: strided(&qkv),
            gate: strided(&z),
            beta: strided(&b),
            decay: strided(&a),
            before,
            padding: &self.padding,
        };
        let state = state.as_mut_slice::<f32>()?;
        if !self.goes_on {
            state.fill(0.0);
        }
        run(y.as_mut_slice()?, state, &inputs, &layer, &self.shape).map_err(kernel_error(NAME))?;
        gated_delta_tail(tail.as_mut_slice()?, &inputs, &self.shape).map_err(kernel_error(NAME))
    }
}

impl HostOp for DeltaOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[&Array]) -> mlex_core::Result<Vec<HostOutput>> {
        let state = if self.goes_on {
            HostOutput::in_place(STATE, inputs[STATE])
        } else {
            HostOutput::new(self.states, Dtype::Float32)
        };
        Ok(vec![
            HostOutput::new(inputs[1].shape(), inputs[1].dtype()),
            state,
            HostOutput::new(self.tail, inputs[0].dtype()),
        ])
    }

    fn contiguous(&self, index: usize) -> bool {
        // Projections may be parts of rows.
        index > 3
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        by_dtype!(inputs[0].dtype(), T => self.compute::<T>(inputs, outputs))
    }
}
