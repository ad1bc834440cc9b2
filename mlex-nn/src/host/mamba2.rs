//! A Mamba 2 layer between its projections, in one step.

use mlex_core::Array;
use mlex_kernels::{Element, Mamba2Inputs, Mamba2Layer, Mamba2Shape, mamba2, mamba2_tail};

use super::constants::Constants;
use super::recurrent::{Columns, Kernel, Layer, Operands, record};
use super::sequence::{Sequence, Value};
use super::size;
use super::update::CacheUpdate;
use crate::Result;
use crate::cache::RecurrentCache;
use crate::conv::CausalConv;
use crate::mamba2::Mamba2Config;

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
    if sequence.shape(projected).last() != Some(&(inner + channels + heads)) {
        return Ok(None);
    }
    let parts = Layer {
        conv: layer.conv,
        norm: layer.norm,
        heads: &[layer.a_log, layer.dt_bias, layer.d],
        constants: layer.constants,
        states: [heads, head_dim, state_size],
        window: [kernel, channels],
    };
    let projected = [0, inner, inner + channels].map(|first| Columns {
        value: projected,
        first,
    });
    record(sequence, &parts, &projected, cache, |batch, length| Scan {
        shape: Mamba2Shape {
            batch,
            length,
            heads: size(heads),
            head_dim: size(head_dim),
            groups: size(num_groups),
            state: size(state_size),
            kernel: size(kernel),
        },
        dt_limit: time_step_limit,
        norm_eps,
    })
}

struct Scan {
    shape: Mamba2Shape,
    dt_limit: (f32, f32),
    norm_eps: f32,
}

impl Kernel for Scan {
    const NAME: &'static str = "mamba2";

    fn run<T: Element>(&self, operands: Operands<'_, T>) -> mlex_kernels::Result<()> {
        let (projected, parameters) = (operands.projected, operands.parameters);
        let layer = Mamba2Layer {
            conv: parameters[0],
            norm: parameters[1],
            a_log: parameters[2],
            dt_bias: parameters[3],
            d: parameters[4],
            conv_bias: parameters.get(5).copied(),
            dt_limit: self.dt_limit,
            norm_eps: self.norm_eps,
        };
        let inputs = Mamba2Inputs {
            gate: projected[0],
            channels: projected[1],
            dt: projected[2],
            before: operands.before,
            padding: operands.padding,
        };
        mamba2(operands.out, operands.state, &inputs, &layer, &self.shape)?;
        mamba2_tail(operands.tail, &inputs, &self.shape)
    }
}
