//! A gated delta net between its projections, in one step.

use std::sync::Arc;

use mlex_core::{Array, Dtype, HostConstant, HostView, HostViewMut};
use mlex_kernels::{
    DeltaInputs, DeltaLayer, DeltaShape, Strided, gated_delta as run, gated_delta_tail,
};

use super::constants::Constants;
use super::sequence::{Sequence, Step, Value};
use super::update::CacheUpdate;
use super::{by_dtype, columns, floats, is_kernel_float, keeps_dtype, kernel_error, size};
use crate::cache::{RecurrentCache, RecurrentState};
use crate::gated_delta::GatedDeltaConfig;
use crate::{Error, Result};

/// A layer without its projections.
pub(crate) struct Delta<'a> {
    /// `[K, conv_dim]`.
    pub(crate) conv: &'a Array,
    /// `[D_v]`.
    pub(crate) norm: &'a Array,
    /// `[H_v]` each.
    pub(crate) a_log: &'a Array,
    pub(crate) dt_bias: &'a Array,
    pub(crate) constants: &'a Constants,
    pub(crate) config: &'a GatedDeltaConfig,
}

/// A projection of the input that may share its rows with another one: the columns from `first`
/// on of `value` `[B, L, W]`.
#[derive(Clone, Copy)]
pub(crate) struct Columns {
    pub(crate) value: Value,
    pub(crate) first: i32,
}

/// The projections (queries, keys and values before the convolution; the gate of the output;
/// the logit of the step size; the decay before softplus) to what the output projection takes,
/// `[B, L, value_dim]`. `cache` is changed by the [`CacheUpdate`].
pub(crate) fn record_gated_delta(
    sequence: &mut Sequence,
    layer: &Delta<'_>,
    projected: [Columns; 4],
    cache: &RecurrentCache,
) -> Result<Option<(Value, CacheUpdate)>> {
    let qkv = projected[0].value;
    let dtype = sequence.dtype(qkv);
    let &[batch, length, _] = sequence.shape(qkv) else {
        return Ok(None);
    };
    let &GatedDeltaConfig {
        num_key_heads: key_heads,
        num_value_heads: heads,
        key_head_dim: key_dim,
        value_head_dim: value_dim,
        conv_kernel: kernel,
        norm_eps,
        ..
    } = layer.config;
    let fits = is_kernel_float(dtype)
        && projected
            .iter()
            .all(|columns| sequence.dtype(columns.value) == dtype)
        && [layer.conv, layer.norm]
            .iter()
            .all(|array| keeps_dtype(dtype, array))
        && [layer.a_log, layer.dt_bias]
            .iter()
            .all(|array| is_kernel_float(array.dtype()));
    if !fits {
        return Ok(None);
    }
    let states = [batch, heads, value_dim, key_dim];
    let tail = [batch, kernel - 1, layer.config.conv_dim()];
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
    let arrays = [layer.conv, layer.norm, layer.a_log, layer.dt_bias];
    let step = DeltaStep {
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
        first: projected.map(|columns| size(columns.first)),
        constants: layer.constants.of(arrays)?,
    };
    let mut inputs: Vec<Value> = projected.iter().map(|columns| columns.value).collect();
    let state = match before {
        Some((state, conv)) => {
            inputs.push(conv);
            sequence.output_in_place(state)
        }
        None => sequence.output(&states, Dtype::Float32),
    };
    let y = sequence.output(&[batch, length, layer.config.value_dim()], dtype);
    let conv = sequence.output(&tail, dtype);
    sequence.step(step, &inputs, &[y, state, conv]);
    Ok(Some((y, CacheUpdate::state(state, conv, length))))
}

const NAME: &str = "gated_delta";

struct DeltaStep {
    shape: DeltaShape,
    norm_eps: f32,
    padding: Vec<usize>,
    /// The first columns of the projections.
    first: [usize; 4],
    /// Convolution, norm, rate and offset of the decay.
    constants: Arc<[HostConstant]>,
}

impl DeltaStep {
    fn compute<T: mlex_core::Element + mlex_kernels::Element>(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let [y, state, tail] = outputs else {
            return Err(super::outputs_error(3, outputs));
        };
        let projected = |index: usize| -> mlex_core::Result<Strided<'_, T>> {
            let data = inputs[index].as_slice::<T>()?;
            Ok(Strided {
                data: data.get(self.first[index]..).unwrap_or_default(),
                stride: columns(&inputs[index]),
            })
        };
        let constant = |index: usize| floats(&self.constants[index].view());
        let layer = DeltaLayer {
            conv: constant(0)?,
            norm: constant(1)?,
            a_log: constant(2)?,
            dt_bias: constant(3)?,
            norm_eps: self.norm_eps,
        };
        let state = state.as_mut_slice::<f32>()?;
        let before = match inputs.get(4) {
            Some(before) => before.as_slice::<T>()?,
            None => {
                state.fill(0.0);
                &[]
            }
        };
        let inputs = DeltaInputs {
            qkv: projected(0)?,
            gate: projected(1)?,
            beta: projected(2)?,
            decay: projected(3)?,
            before,
            padding: &self.padding,
        };
        run(y.as_mut_slice()?, state, &inputs, &layer, &self.shape).map_err(kernel_error(NAME))?;
        gated_delta_tail(tail.as_mut_slice()?, &inputs, &self.shape).map_err(kernel_error(NAME))
    }
}

impl Step for DeltaStep {
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
