//! A short causal convolution in one step.

use std::sync::Arc;

use mlex_core::{HostConstant, HostView, HostViewMut};
use mlex_kernels::{ConvInputs, ConvLayer, ConvShape, Strided, causal_conv, causal_conv_tail};

use super::constants::Constants;
use super::sequence::{Sequence, Step, Value};
use super::update::CacheUpdate;
use super::{by_dtype, floats, is_kernel_float, keeps_dtype, kernel_error, size};
use crate::cache::ConvCache;
use crate::conv::CausalConv;
use crate::{Error, Result};

/// A convolution, and what is done with its output.
pub(crate) struct ShortConv<'a> {
    pub(crate) conv: &'a CausalConv,
    pub(crate) constants: &'a Constants,
    /// It goes through SiLU.
    pub(crate) activate: bool,
    /// The input is added to it.
    pub(crate) residual: bool,
}

/// `x` `[B, L, C]` to the same shape. `cache` is changed by the [`CacheUpdate`].
pub(crate) fn record_conv(
    sequence: &mut Sequence,
    x: Value,
    layer: &ShortConv<'_>,
    cache: &ConvCache,
) -> Result<Option<(Value, CacheUpdate)>> {
    let dtype = sequence.dtype(x);
    let &[batch, length, channels] = sequence.shape(x) else {
        return Ok(None);
    };
    let weight = layer.conv.weight();
    let arrays = || [weight].into_iter().chain(layer.conv.bias());
    let &[kernel, width] = weight.shape() else {
        return Ok(None);
    };
    let fits = is_kernel_float(dtype)
        && width == channels
        && arrays().all(|array| keeps_dtype(dtype, array));
    if !fits {
        return Ok(None);
    }
    let needed = kernel - 1;
    let before = match cache.rows() {
        Some(rows) => {
            if rows.dtype() != dtype {
                return Ok(None);
            }
            let found = rows.shape();
            if found.len() != 3 || [found[0], found[2]] != [batch, channels] || found[1] < needed {
                let expected = format!("shape [{batch}, {needed}, {channels}] or more rows");
                let found = format!("{found:?}");
                return Err(Error::setting("cache of a convolution", expected, found));
            }
            Some(sequence.input(rows))
        }
        None => None,
    };
    let step = ConvStep {
        shape: ConvShape {
            batch: size(batch),
            length: size(length),
            channels: size(channels),
            kernel: size(kernel),
        },
        activate: layer.activate,
        residual: layer.residual,
        padding: cache
            .padding(length)
            .map(|rows| rows.into_iter().map(size).collect())
            .unwrap_or_default(),
        constants: layer.constants.of(arrays())?,
    };
    let inputs: Vec<Value> = [x].into_iter().chain(before).collect();
    let y = sequence.output_like(x);
    let rows = sequence.output(&[batch, cache.keep(needed), channels], dtype);
    sequence.step(step, &inputs, &[y, rows]);
    Ok(Some((y, CacheUpdate::rows(rows, needed, length))))
}

const NAME: &str = "causal_conv";

struct ConvStep {
    shape: ConvShape,
    activate: bool,
    residual: bool,
    padding: Vec<usize>,
    /// Taps, and the bias where there is one.
    constants: Arc<[HostConstant]>,
}

impl ConvStep {
    fn compute<T: mlex_core::Element + mlex_kernels::Element>(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let [y, rows] = outputs else {
            return Err(super::outputs_error(2, outputs));
        };
        let before = inputs.get(1).map(|before| before.as_slice::<T>());
        let bias = self.constants.get(1).map(|bias| floats(&bias.view()));
        let inputs = ConvInputs {
            x: Strided {
                data: inputs[0].as_slice::<T>()?,
                stride: self.shape.channels,
            },
            before: before.transpose()?.unwrap_or_default(),
            padding: &self.padding,
        };
        let layer = ConvLayer {
            taps: floats(&self.constants[0].view())?,
            bias: bias.transpose()?,
            activate: self.activate,
            residual: self.residual,
        };
        causal_conv(y.as_mut_slice()?, &inputs, &layer, &self.shape).map_err(kernel_error(NAME))?;
        causal_conv_tail(rows.as_mut_slice()?, &inputs, &self.shape).map_err(kernel_error(NAME))
    }
}

impl Step for ConvStep {
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
