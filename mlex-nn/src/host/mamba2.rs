//! A Mamba 2 layer between its projections, in one step.

use std::sync::Arc;

use mlex_core::{Array, Dtype, HostConstant, HostView, HostViewMut};
use mlex_kernels::{Mamba2Inputs, Mamba2Layer, Mamba2Shape, Strided, mamba2 as run, mamba2_tail};

use super::constants::Constants;
use super::sequence::{Sequence, Step, Value};
use super::update::CacheUpdate;
use super::{by_dtype, columns, floats, is_kernel_float, keeps_dtype, kernel_error, size};
use crate::cache::{RecurrentCache, RecurrentState};
use crate::conv::CausalConv;
use crate::mamba2::Mamba2Config;
use crate::{Error, Result};

/// A layer without its projections.
pub(crate) struct Selective<'a> {
    pub(crate) conv: &'a CausalConv,
    /// `[H]` each.
    pub(crate) a_log: &'a Array,
    pub(crate) dt_bias: &'a Array,
    pub(crate) d: &'a Array,
    /// `[H P]`.
    pub(crate) norm: &'a Array,
    pub(crate) constants: &'a Constants,
    pub(crate) config: &'a Mamba2Config,
}

/// The projection of the input (gate, channels of the convolution and step sizes side by side) to
/// what the output projection takes, `[B, L, H P]`. `cache` is changed by the [`CacheUpdate`].
pub(crate) fn record_mamba2(
    sequence: &mut Sequence,
    layer: &Selective<'_>,
    projected: Value,
    cache: &RecurrentCache,
) -> Result<Option<(Value, CacheUpdate)>> {
    let dtype = sequence.dtype(projected);
    let &[batch, length, width] = sequence.shape(projected) else {
        return Ok(None);
    };
    let &Mamba2Config {
        num_heads: heads,
        head_dim,
        state_size,
        num_groups,
        conv_kernel: kernel,
        time_step_limit,
        norm_eps,
        ..
    } = layer.config;
    let (inner, channels) = (layer.config.inner_size(), layer.config.conv_dim());
    let parameters = [
        layer.conv.weight(),
        layer.norm,
        layer.a_log,
        layer.dt_bias,
        layer.d,
    ];
    let arrays = || parameters.into_iter().chain(layer.conv.bias());
    let fits = is_kernel_float(dtype)
        && width == inner + channels + heads
        && [layer.conv.weight(), layer.norm]
            .into_iter()
            .all(|array| keeps_dtype(dtype, array))
        && arrays().all(|array| is_kernel_float(array.dtype()));
    if !fits {
        return Ok(None);
    }
    let states = [batch, heads, head_dim, state_size];
    let tail = [batch, kernel - 1, channels];
    let before = match cache.state() {
        Some(RecurrentState { conv, state }) => {
            if state.dtype() != Dtype::Float32 || conv.dtype() != dtype {
                return Ok(None);
            }
            if state.shape() != states || conv.shape() != tail {
                let found = format!("{:?} and {:?}", state.shape(), conv.shape());
                let expected = format!("shapes {states:?} and {tail:?}");
                return Err(Error::setting("recurrent cache", expected, found));
            }
            Some((sequence.input(state), sequence.input(conv)))
        }
        None => None,
    };
    let step = SelectiveStep {
        shape: Mamba2Shape {
            batch: size(batch),
            length: size(length),
            heads: size(heads),
            head_dim: size(head_dim),
            groups: size(num_groups),
            state: size(state_size),
            kernel: size(kernel),
        },
        dt_limit: time_step_limit,
        norm_eps,
        padding: cache
            .padding(length)
            .map(|rows| rows.into_iter().map(size).collect())
            .unwrap_or_default(),
        constants: layer.constants.of(arrays())?,
    };
    let mut inputs = vec![projected];
    let state = match before {
        Some((state, conv)) => {
            inputs.push(conv);
            sequence.output_in_place(state)
        }
        None => sequence.output(&states, Dtype::Float32),
    };
    let y = sequence.output(&[batch, length, inner], dtype);
    let conv = sequence.output(&tail, dtype);
    sequence.step(step, &inputs, &[y, state, conv]);
    Ok(Some((y, CacheUpdate::state(state, conv, length))))
}

const NAME: &str = "mamba2";

struct SelectiveStep {
    shape: Mamba2Shape,
    dt_limit: (f32, f32),
    norm_eps: f32,
    padding: Vec<usize>,
    /// Convolution, norm, rate, offset of the step sizes, what goes by the state; the
    /// convolution's bias, where it has one.
    constants: Arc<[HostConstant]>,
}

impl SelectiveStep {
    fn compute<T: mlex_core::Element + mlex_kernels::Element>(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let [y, state, tail] = outputs else {
            return Err(super::outputs_error(3, outputs));
        };
        let (data, stride) = (inputs[0].as_slice::<T>()?, columns(&inputs[0]));
        let from = |first: usize| Strided {
            data: data.get(first..).unwrap_or_default(),
            stride,
        };
        let constant = |index: usize| floats(&self.constants[index].view());
        let bias = self.constants.get(5).map(|bias| floats(&bias.view()));
        let layer = Mamba2Layer {
            conv: constant(0)?,
            conv_bias: bias.transpose()?,
            norm: constant(1)?,
            a_log: constant(2)?,
            dt_bias: constant(3)?,
            dt_limit: self.dt_limit,
            d: constant(4)?,
            norm_eps: self.norm_eps,
        };
        let state = state.as_mut_slice::<f32>()?;
        let before = match inputs.get(1) {
            Some(before) => before.as_slice::<T>()?,
            None => {
                state.fill(0.0);
                &[]
            }
        };
        let inner = self.shape.inner();
        let inputs = Mamba2Inputs {
            gate: from(0),
            channels: from(inner),
            dt: from(inner + self.shape.channels()),
            before,
            padding: &self.padding,
        };
        run(y.as_mut_slice()?, state, &inputs, &layer, &self.shape).map_err(kernel_error(NAME))?;
        mamba2_tail(tail.as_mut_slice()?, &inputs, &self.shape).map_err(kernel_error(NAME))
    }
}

impl Step for SelectiveStep {
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
