//! The experts of a mixture in one step: the choice of experts, their products with the rows
//! of each expert together, and the weighted sum.

use std::sync::Arc;

use mlex_core::{Array, HostConstant, HostView, HostViewMut};
use mlex_kernels::{Activation, Floats, Linear, Precision, Routes, gather_quantized_matmul};

use super::constants::Constants;
use super::scratch::Scratch;
use super::sequence::{Sequence, Step, Value};
use super::weight::{ExpertWeights, Part, Weight, precision};
use super::{activation, by_dtype, floats, is_kernel_float, kernel_error, size};
use crate::linear::Matrix;
use crate::{ExpertGroups, MoeConfig, Result};

/// The experts of a layer.
pub(crate) struct Mixture<'a> {
    /// `[E, inner, hidden]`, twice, and `[E, hidden, inner]`.
    pub(crate) gate: Option<&'a Matrix>,
    pub(crate) up: &'a Matrix,
    pub(crate) down: &'a Matrix,
    /// Factors of what the experts give, `[E]`.
    pub(crate) factors: Option<&'a Array>,
    /// Groups that experts are chosen by, and their corrections `[E]`.
    pub(crate) groups: Option<&'a (ExpertGroups, Array)>,
    pub(crate) constants: &'a Constants,
    pub(crate) config: MoeConfig,
}

/// `x` `[.., D]` through the experts that `logits` `[.., E]` choose: `[.., D]`.
pub(crate) fn record_mixture(
    sequence: &mut Sequence,
    x: Value,
    logits: Value,
    layer: &Mixture<'_>,
) -> Result<Option<Value>> {
    let dtype = sequence.dtype(x);
    let correction = layer.groups.map(|(_, correction)| correction);
    let arrays = || layer.factors.into_iter().chain(correction);
    let arrays_fit = arrays().all(|array| is_kernel_float(array.dtype()));
    if sequence.dtype(logits) != dtype || !is_kernel_float(dtype) || !arrays_fit {
        return Ok(None);
    }
    let part = |matrix| Part::new(dtype, Weight { matrix, bias: None });
    let gate = match layer.gate {
        Some(gate) => match part(gate)? {
            Some(gate) => Some(gate),
            None => return Ok(None),
        },
        None => None,
    };
    let (Some(up), Some(down)) = (part(layer.up)?, part(layer.down)?) else {
        return Ok(None);
    };
    let config = &layer.config;
    let step = MixtureStep {
        gate: gate.zip(config.gate.map(activation::kernel)),
        up,
        down,
        constants: layer.constants.of(arrays())?,
        has_factors: layer.factors.is_some(),
        groups: layer.groups.map(|&(groups, _)| groups),
        experts: size(config.num_experts),
        per_token: size(config.experts_per_token),
        normalize: config.normalize,
        hidden: size(config.hidden_size),
        inner: size(config.intermediate_size),
        precision: precision(dtype),
    };
    let y = sequence.output_like(x);
    sequence.step(step, &[x, logits], &[y]);
    Ok(Some(y))
}

const NAME: &str = "mixture";

struct MixtureStep {
    /// Without it there is the square of the positive part.
    gate: Option<(Part, Activation)>,
    up: Part,
    down: Part,
    /// Factors, where there are any, and corrections, where there are groups.
    constants: Arc<[HostConstant]>,
    has_factors: bool,
    groups: Option<ExpertGroups>,
    experts: usize,
    per_token: usize,
    normalize: bool,
    hidden: usize,
    inner: usize,
    precision: Precision,
}

impl MixtureStep {
    fn route(&self, logits: Floats<'_>) -> mlex_core::Result<Routes> {
        let Self {
            experts,
            per_token,
            normalize,
            ..
        } = *self;
        let routes = match self.groups {
            None => Routes::top(logits, experts, per_token, normalize),
            Some(groups) => {
                let correction = &self.constants[usize::from(self.has_factors)];
                let groups = mlex_kernels::ExpertGroups {
                    count: size(groups.count),
                    active: size(groups.active),
                    scale: groups.scale,
                    correction: floats(&correction.view())?,
                };
                Routes::grouped(logits, experts, per_token, normalize, &groups)
            }
        };
        routes.map_err(kernel_error(NAME))
    }

    /// `y[row] = x[row]`, rows of `k`, times the matrix of the row's expert.
    fn product<T: Scratch>(
        &self,
        part: &Part,
        experts: &[u32],
        k: usize,
        x: &[T],
        y: &mut [T],
    ) -> mlex_core::Result<()> {
        match part.experts(k)? {
            ExpertWeights::Quantized(weight) => {
                gather_quantized_matmul(y, x, experts, &weight, self.precision)
            }
            ExpertWeights::Dense { weight: all, n } => {
                let mut start = 0;
                // Experts ascend, so that the rows of each are together.
                let blocks = experts.chunk_by(|a, b| a == b);
                blocks.map(<[u32]>::len).try_for_each(|count| {
                    let expert = experts[start] as usize;
                    let weight = all.slice(expert * n * k..(expert + 1) * n * k);
                    let rows = start..start + count;
                    start = rows.end;
                    let x = &x[rows.start * k..rows.end * k];
                    let y = &mut y[rows.start * n..rows.end * n];
                    mlex_kernels::linear(y, x, &Linear::new(n, k, weight, None)?, self.precision)
                })
            }
        }
        .map_err(kernel_error(NAME))
    }

    fn compute<T: Scratch>(&self, inputs: &[HostView<'_>], out: &mut [T]) -> mlex_core::Result<()> {
        let (hidden, inner) = (self.hidden, self.inner);
        let x = inputs[0].as_slice::<T>()?;
        let logits = floats(&inputs[1])?;
        let mut routes = self.route(logits)?;
        if self.has_factors {
            let factors = floats(&self.constants[0].view())?;
            routes.scale(factors).map_err(kernel_error(NAME))?;
        }
        let rows = routes.experts().len();
        T::with(rows * (2 * hidden + 3 * inner), |memory| {
            let (gathered, memory) = memory.split_at_mut(rows * hidden);
            let (y, memory) = memory.split_at_mut(rows * hidden);
            let (gate, memory) = memory.split_at_mut(rows * inner);
            let (up, between) = memory.split_at_mut(rows * inner);
            let experts = routes.experts();
            routes
                .gather(gathered, x, hidden)
                .map_err(kernel_error(NAME))?;
            self.product(&self.up, experts, hidden, gathered, up)?;
            match &self.gate {
                Some((part, activation)) => {
                    self.product(part, experts, hidden, gathered, gate)?;
                    mlex_kernels::gated(between, gate, up, *activation)
                }
                None => mlex_kernels::relu2(between, up),
            }
            .map_err(kernel_error(NAME))?;
            self.product(&self.down, experts, inner, between, y)?;
            routes.combine(out, y, hidden).map_err(kernel_error(NAME))
        })
    }
}

impl Step for MixtureStep {
    fn name(&self) -> &'static str {
        NAME
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        by_dtype!(inputs[0].dtype(), T => self.compute::<T>(inputs, outputs[0].as_mut_slice()?))
    }
}
