//! A gated delta net between its projections, in one step.

use mlex_core::Array;
use mlex_kernels::{DeltaInputs, DeltaLayer, DeltaShape, Element, gated_delta, gated_delta_tail};

use super::constants::Constants;
use super::recurrent::{Columns, Kernel, Layer, Operands, record};
use super::sequence::{Sequence, Value};
use super::size;
use super::update::CacheUpdate;
use crate::Result;
use crate::cache::RecurrentCache;
use crate::conv::CausalConv;
use crate::gated_delta::GatedDeltaConfig;

/// A layer without its projections.
pub(crate) struct Delta<'a> {
    pub(crate) conv: &'a CausalConv,
    /// `[D_v]`.
    pub(crate) norm: &'a Array,
    /// `[H_v]` each.
    pub(crate) a_log: &'a Array,
    pub(crate) dt_bias: &'a Array,
    pub(crate) constants: &'a Constants,
    pub(crate) config: &'a GatedDeltaConfig,
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
    let &GatedDeltaConfig {
        num_key_heads: key_heads,
        num_value_heads: heads,
        key_head_dim: key_dim,
        value_head_dim: value_dim,
        conv_kernel: kernel,
        norm_eps,
        ..
    } = layer.config;
    let parts = Layer {
        conv: layer.conv,
        norm: layer.norm,
        heads: &[layer.a_log, layer.dt_bias],
        constants: layer.constants,
        states: [heads, value_dim, key_dim],
        window: [kernel, layer.config.conv_dim()],
    };
    record(sequence, &parts, &projected, cache, |batch, length| Rule {
        shape: DeltaShape {
            batch,
            length,
            key_heads: size(key_heads),
            value_heads: size(heads),
            key_dim: size(key_dim),
            value_dim: size(value_dim),
            kernel: size(kernel),
        },
        norm_eps,
    })
}

struct Rule {
    shape: DeltaShape,
    norm_eps: f32,
}

impl Kernel for Rule {
    const NAME: &'static str = "gated_delta";

    fn run<T: Element>(&self, operands: Operands<'_, T>) -> mlex_kernels::Result<()> {
        let (projected, parameters) = (operands.projected, operands.parameters);
        let layer = DeltaLayer {
            conv: parameters[0],
            norm: parameters[1],
            a_log: parameters[2],
            dt_bias: parameters[3],
            norm_eps: self.norm_eps,
        };
        let inputs = DeltaInputs {
            qkv: projected[0],
            gate: projected[1],
            beta: projected[2],
            decay: projected[3],
            before: operands.before,
            padding: operands.padding,
        };
        gated_delta(operands.out, operands.state, &inputs, &layer, &self.shape)?;
        gated_delta_tail(operands.tail, &inputs, &self.shape)
    }
}
