//! A recurrent layer between its projections, in one step.

use std::sync::Arc;

use mlex_core::{Array, Dtype, HostConstant, HostView, HostViewMut};
use mlex_kernels::{Element, Floats, Strided};

use super::constants::Constants;
use super::sequence::{Sequence, Step, Value};
use super::update::CacheUpdate;
use super::{by_dtype, columns, floats, is_kernel_float, keeps_dtype, kernel_error, size};
use crate::cache::{RecurrentCache, RecurrentState};
use crate::conv::CausalConv;
use crate::{Error, Result};

/// A projection of the input that may share its rows with another one: the columns from `first`
/// on of `value` `[B, L, W]`.
#[derive(Clone, Copy)]
pub(crate) struct Columns {
    pub(crate) value: Value,
    pub(crate) first: i32,
}

/// The kernel of a kind of layer, with its settings.
pub(super) trait Kernel: Send + Sync + 'static {
    /// The name, for errors.
    const NAME: &'static str;

    /// Computes all outputs.
    fn run<T: Element>(&self, operands: Operands<'_, T>) -> mlex_kernels::Result<()>;
}

/// What a kernel computes, and from what.
pub(super) struct Operands<'a, T> {
    /// In the order in which they were recorded.
    pub(super) projected: Vec<Strided<'a, T>>,
    /// The taps of the convolution, the weight of the norm, those of the heads, and the bias of
    /// the convolution where it has one.
    pub(super) parameters: Vec<Floats<'a>>,
    /// The last inputs of the convolution before these; none at the start.
    pub(super) before: &'a [T],
    pub(super) padding: &'a [usize],
    pub(super) out: &'a mut [T],
    pub(super) state: &'a mut [f32],
    /// Becomes the last inputs of the convolution.
    pub(super) tail: &'a mut [T],
}

/// A layer without its projections.
pub(super) struct Layer<'a> {
    pub(super) conv: &'a CausalConv,
    pub(super) norm: &'a Array,
    /// One number for each head.
    pub(super) heads: &'a [&'a Array],
    pub(super) constants: &'a Constants,
    /// The heads, and rows and columns of their states.
    pub(super) states: [i32; 3],
    /// Positions that the convolution sees, and its channels.
    pub(super) window: [i32; 2],
}

/// The projections to what the output projection takes, `[B, L, heads * rows of a state]`, by the
/// kernel that `kernel` makes of rows of the batch and positions. `cache` is changed by the
/// [`CacheUpdate`].
pub(super) fn record<K: Kernel>(
    sequence: &mut Sequence,
    layer: &Layer<'_>,
    projected: &[Columns],
    cache: &RecurrentCache,
    kernel: impl FnOnce(usize, usize) -> K,
) -> Result<Option<(Value, CacheUpdate)>> {
    let Some(&Columns { value: first, .. }) = projected.first() else {
        return Ok(None);
    };
    let dtype = sequence.dtype(first);
    let &[batch, length, _] = sequence.shape(first) else {
        return Ok(None);
    };
    let rounded = [layer.conv.weight(), layer.norm];
    let others = || layer.heads.iter().copied().chain(layer.conv.bias());
    let fits = is_kernel_float(dtype)
        && projected
            .iter()
            .all(|columns| sequence.dtype(columns.value) == dtype)
        && rounded.iter().all(|array| keeps_dtype(dtype, array))
        && others().all(|array| is_kernel_float(array.dtype()));
    if !fits {
        return Ok(None);
    }
    let [heads, rows, row] = layer.states;
    let states = [batch, heads, rows, row];
    let [seen, channels] = layer.window;
    let tail = [batch, seen - 1, channels];
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
    let step = RecurrentStep {
        kernel: kernel(size(batch), size(length)),
        first: projected.iter().map(|part| size(part.first)).collect(),
        padding: cache
            .padding(length)
            .map(|rows| rows.into_iter().map(size).collect())
            .unwrap_or_default(),
        constants: layer.constants.of(rounded.into_iter().chain(others()))?,
    };
    let mut inputs: Vec<Value> = projected.iter().map(|columns| columns.value).collect();
    let state = match before {
        Some((state, conv)) => {
            inputs.push(conv);
            sequence.output_in_place(state)
        }
        None => sequence.output(&states, Dtype::Float32),
    };
    let y = sequence.output(&[batch, length, heads * rows], dtype);
    let conv = sequence.output(&tail, dtype);
    sequence.step(step, &inputs, &[y, state, conv]);
    Ok(Some((y, CacheUpdate::state(state, conv, length))))
}

struct RecurrentStep<K> {
    kernel: K,
    /// The first columns of the projections.
    first: Vec<usize>,
    padding: Vec<usize>,
    /// As [`Operands::parameters`].
    constants: Arc<[HostConstant]>,
}

impl<K: Kernel> RecurrentStep<K> {
    fn compute<T: mlex_core::Element + Element>(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let [y, state, tail] = outputs else {
            return Err(super::outputs_error(3, outputs));
        };
        let projected = inputs.iter().zip(&self.first).map(|(view, &first)| {
            let data = view.as_slice::<T>()?;
            Ok(Strided {
                data: data.get(first..).unwrap_or_default(),
                stride: columns(view),
            })
        });
        let parameters = self.constants.iter().map(|array| floats(&array.view()));
        let state = state.as_mut_slice::<f32>()?;
        let before = match inputs.get(self.first.len()) {
            Some(before) => before.as_slice::<T>()?,
            None => {
                state.fill(0.0);
                &[]
            }
        };
        let operands = Operands {
            projected: projected.collect::<mlex_core::Result<_>>()?,
            parameters: parameters.collect::<mlex_core::Result<_>>()?,
            before,
            padding: &self.padding,
            out: y.as_mut_slice()?,
            state,
            tail: tail.as_mut_slice()?,
        };
        self.kernel.run(operands).map_err(kernel_error(K::NAME))
    }
}

impl<K: Kernel> Step for RecurrentStep<K> {
    fn name(&self) -> &'static str {
        K::NAME
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        by_dtype!(inputs[0].dtype(), T => self.compute::<T>(inputs, outputs))
    }
}
