//! The feed-forward layers that a router chooses from.

use mlex_core::{Array, Device, Dtype, GpuLanguage, QuantizedWeight, Stream};

use super::MoeConfig;
use crate::activation::relu2;
use crate::host::{self, Constants, Mixture, Sequence, Value};
use crate::linear::{Matrix, Stored};
use crate::quant::packed_columns;
use crate::{Error, Result, Weights, cuda, dispatch, gpu};

/// From how many products on MLX is given them sorted by expert, as in mlx-lm.
const SORT_FROM: usize = 64;

/// The experts of a layer: `sum_i w_i down_i(activation(gate_i(x)) * up_i(x))`, or
/// `sum_i w_i down_i(relu(up_i(x))^2)` of experts without a gate, over those with the largest
/// logits, the weights being their softmax (or by [groups](Self::with_groups)).
#[derive(Clone, Debug)]
pub struct Experts {
    /// `[E, inner, hidden]`, twice, and `[E, hidden, inner]`.
    gate_proj: Option<Matrix>,
    up_proj: Matrix,
    down_proj: Matrix,
    factors: Option<Array>,
    groups: Option<(ExpertGroups, Array)>,
    constants: Constants,
    config: MoeConfig,
}

/// A router with groups: the sigmoids of the logits, and a correction with a say in the choice
/// alone ("DeepSeek-V3 Technical Report").
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertGroups {
    /// How many groups of neighbours there are.
    pub count: i32,
    /// How many of them, the best by their two best experts, a token's experts come from.
    pub active: i32,
    /// What the weights are multiplied by in the end.
    pub scale: f32,
}

impl Experts {
    /// Takes `gate_proj`, `up_proj` and `down_proj` of all experts from `weights`: stacked
    /// (`STACKED.NAME`), one by one (`experts.I.NAME`), or stacked as `experts.gate_up_proj` and
    /// `experts.down_proj`. Without a gate they are `fc1` and `fc2` where they are stacked, or
    /// `experts.up_proj`. They become one tensor per projection.
    ///
    /// # Errors
    /// When a tensor cannot be read or a setting is out of range.
    pub fn load(weights: &Weights, stacked: &str, config: &MoeConfig) -> Result<Self> {
        config.validate()?;
        let &MoeConfig {
            hidden_size: hidden,
            intermediate_size: inner,
            num_experts: experts,
            ..
        } = config;
        // What mlx-lm calls each, and the published checkpoints.
        let names: &[[&str; 2]] = if config.gate.is_some() {
            &[["gate_proj"; 2], ["up_proj"; 2], ["down_proj"; 2]]
        } else {
            &[["fc1", "up_proj"], ["fc2", "down_proj"]]
        };
        one_tensor_each(weights, stacked, names, experts);
        let stacked = weights.pp(stacked);
        let load = |name: &str, rows: i32, columns: i32| {
            load_matrices(&stacked.pp(name), [experts, rows, columns])
        };
        let (gate_proj, up_proj, down_proj) = match names {
            [[gate, _], [up, _], [down, _]] => (
                Some(load(gate, inner, hidden)?),
                load(up, inner, hidden)?,
                load(down, hidden, inner)?,
            ),
            _ => (
                None,
                load("fc1", inner, hidden)?,
                load("fc2", hidden, inner)?,
            ),
        };
        Ok(Self {
            gate_proj,
            up_proj,
            down_proj,
            factors: None,
            groups: None,
            constants: Constants::default(),
            config: *config,
        })
    }

    /// With a factor for what each expert gives, `[E]`.
    #[must_use]
    pub fn with_factors(self, factors: Array) -> Self {
        Self {
            factors: Some(factors),
            ..self
        }
    }

    /// Chosen by groups, with a correction `[E]`.
    ///
    /// # Errors
    /// When the groups do not divide the experts, or some are left out and have fewer than two.
    pub fn with_groups(self, groups: ExpertGroups, correction: Array) -> Result<Self> {
        let experts = self.config.num_experts;
        let ExpertGroups { count, active, .. } = groups;
        if !(1..=experts).contains(&count)
            || experts % count != 0
            || (active < count && experts / count < 2)
        {
            let expected =
                format!("a divisor of the {experts} experts, with two of them in a group");
            return Err(Error::setting("n_group", expected, count));
        }
        if !(1..=count).contains(&active) {
            let expected = format!("a number from 1 to the {count} groups");
            return Err(Error::setting("topk_group", expected, active));
        }
        Ok(Self {
            groups: Some((groups, correction)),
            ..self
        })
    }

    /// `x` `[B, L, hidden]` to the same shape, `logits` `[B, L, E]` being the router's.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward(&self, x: &Array, logits: &Array) -> Result<Array> {
        if let Some((mut sequence, value)) = Sequence::start(x)? {
            let logits = sequence.input(logits);
            if let Some(y) = self.record(&mut sequence, value, logits)? {
                return sequence.finish_updating(y, &[], &mut []);
            }
        }
        let (chosen, mut weights) = match &self.groups {
            Some((groups, correction)) => self.route_by_groups(logits, *groups, correction)?,
            None => self.route(logits)?,
        };
        if let Some(factors) = &self.factors {
            weights = weights.multiply(&factors.take(&chosen, 0)?)?;
        }
        let y = self.apply(x, &chosen)?;
        let y = y.multiply(&weights.expand_dims(-1)?)?.sum(&[-2], false)?;
        // Weights may be in f32 whatever the layer computes in.
        Ok(y.as_type(x.dtype())?)
    }

    /// Experts and weights `[.., K]` by softmax.
    fn route(&self, logits: &Array) -> Result<(Array, Array)> {
        let (experts, count) = (self.config.num_experts, self.config.experts_per_token);
        let gates = logits.softmax(&[-1], true)?;
        let chosen = gates.argpartition(-count, -1)?;
        let chosen = chosen.slice_axis(-1, experts - count, experts)?;
        let weights = gates.take_along_axis(&chosen, -1)?;
        if !self.config.normalize {
            return Ok((chosen, weights));
        }
        let weights = weights.divide(&weights.sum(&[-1], true)?)?;
        Ok((chosen, weights))
    }

    /// Experts and weights (f32) `[.., K]` by groups.
    fn route_by_groups(
        &self,
        logits: &Array,
        groups: ExpertGroups,
        correction: &Array,
    ) -> Result<(Array, Array)> {
        let count = self.config.experts_per_token;
        let scores = logits.as_type(Dtype::Float32)?.sigmoid()?;
        let mut ranked = scores.add(correction)?;
        let left_out = groups.count - groups.active;
        if left_out > 0 {
            let grouped = ranked.unflatten(-1, &[groups.count, -1])?;
            let best = grouped.topk(2, -1)?.sum(&[-1], true)?;
            let worst = best.argpartition(left_out - 1, -2)?;
            let worst = worst.slice_axis(-2, 0, left_out)?;
            let zero = Array::scalar(0.0f32)?;
            ranked = grouped.put_along_axis(&worst, &zero, -2)?.flatten(-2, -1)?;
        }
        let chosen = ranked.negative()?.argpartition(count - 1, -1)?;
        let chosen = chosen.slice_axis(-1, 0, count)?;
        let mut weights = scores.take_along_axis(&chosen, -1)?;
        if count > 1 && self.config.normalize {
            let total = weights.sum(&[-1], true)?.add(1e-20)?;
            weights = weights.divide(&total)?;
        }
        Ok((chosen, weights.multiply(groups.scale)?))
    }

    /// The same as a step of `sequence`; none where there is no kernel for it.
    ///
    /// # Errors
    /// When the weights cannot be read.
    pub fn record(
        &self,
        sequence: &mut Sequence,
        x: Value,
        logits: Value,
    ) -> Result<Option<Value>> {
        let mixture = Mixture {
            gate: self.gate_proj.as_ref(),
            up: &self.up_proj,
            down: &self.down_proj,
            factors: self.factors.as_ref(),
            groups: self.groups.as_ref(),
            constants: &self.constants,
            config: self.config,
        };
        host::record_mixture(sequence, x, logits, &mixture)
    }

    /// `x` `[B, L, D]` through the experts that `chosen` `[B, L, K]` names: `[B, L, K, D]`.
    fn apply(&self, x: &Array, chosen: &Array) -> Result<Array> {
        if chosen.size() < SORT_FROM {
            let x = x.expand_dims(-2)?.expand_dims(-2)?;
            return Ok(self.products(&x, chosen, false)?.squeeze(-2)?);
        }
        // One product after another with the same expert.
        let indices = chosen.flatten(0, -1)?;
        let order = indices.argsort(0)?;
        let back = order.argsort(0)?;
        let count = Array::scalar(self.config.experts_per_token)?.as_type(order.dtype())?;
        let rows = x.flatten(0, -2)?.take(&order.floor_divide(&count)?, 0)?;
        let sorted = indices.take(&order, 0)?;
        let y = self.products(&rows.expand_dims(-2)?, &sorted, true)?;
        let y = y.squeeze(-2)?.take(&back, 0)?;
        Ok(y.unflatten(0, chosen.shape())?)
    }

    fn products(&self, x: &Array, indices: &Array, sorted: bool) -> Result<Array> {
        let up = gather(&self.up_proj, x, indices, sorted)?;
        let inner = match (&self.gate_proj, self.config.gate) {
            (Some(gate), Some(activation)) => {
                activation.gated(&gather(gate, x, indices, sorted)?, &up)?
            }
            _ => relu2(&up)?,
        };
        gather(&self.down_proj, &inner, indices, sorted)
    }
}

/// `x` `[.., 1, K]` with the matrix that `indices` `[..]` name, transposed: `[.., 1, N]`.
fn gather(matrices: &Matrix, x: &Array, indices: &Array, sorted: bool) -> Result<Array> {
    let weight = match &matrices.stored {
        Stored::Dense { transposed, .. } => {
            return Ok(x.gather_mm(transposed, None, Some(indices), sorted)?);
        }
        Stored::Quantized { weight, .. } => weight,
    };
    if Stream::current()?.device() != Device::Cpu {
        return match gpu::language()? {
            Some(GpuLanguage::Cuda) => cuda::gather_matmul(x, weight, indices, sorted),
            _ => Ok(weight.gather_matmul(x, None, Some(indices), sorted)?),
        };
    }
    // See `dispatch::linear`: MLX's CPU adds up in the type of `x`.
    let wide = x.as_type(Dtype::Float32)?;
    let weight = dispatch::widened(weight)?;
    let product = weight.gather_matmul(&wide, None, Some(indices), sorted)?;
    Ok(product.as_type(x.dtype())?)
}

/// Brings the experts' matrices into one tensor per projection (`STACKED.NAME`), where the
/// checkpoint has one for each expert (`experts.I.NAME`), or one that is not called a weight
/// (`experts.NAME`, or `experts.gate_up_proj` for both).
fn one_tensor_each(weights: &Weights, stacked: &str, names: &[[&str; 2]], count: i32) {
    for [name, published] in names {
        for part in ["weight", "scales", "biases"] {
            let parts = (0..count).map(|expert| format!("experts.{expert}.{published}.{part}"));
            weights.stack(parts, &format!("{stacked}.{name}.{part}"));
        }
    }
    let weight = |name: &str| format!("{stacked}.{name}.weight");
    if let [_, _, _] = names {
        let both = [weight("gate_proj"), weight("up_proj")];
        weights.split("experts.gate_up_proj", 1, &both);
    }
    for [name, published] in names {
        weights.split(&format!("experts.{published}"), 1, &[weight(name)]);
    }
}

/// Matrices `[experts, rows, columns]`, dense or quantized.
fn load_matrices(weights: &Weights, [experts, rows, columns]: [i32; 3]) -> Result<Matrix> {
    let shape = |last: i32| [experts, rows, last];
    let Some(layout) = weights.quantized()? else {
        let weight = weights.get_float("weight", &shape(columns))?;
        let transposed = weight.swap_axes(-1, -2)?;
        return Ok(Stored::Dense { weight, transposed }.into());
    };
    let (words, groups) =
        packed_columns(layout, columns).map_err(|error| error.with_layer(weights.prefix()))?;
    let (scales, biases) = if layout.mode.has_biases() {
        (
            weights.get_float("scales", &shape(groups))?,
            Some(weights.get_float("biases", &shape(groups))?),
        )
    } else {
        let scales = weights.get_dtype("scales", &shape(groups), Dtype::Uint8)?;
        (scales, None)
    };
    let weight = QuantizedWeight {
        weight: weights.get_dtype("weight", &shape(words), Dtype::Uint32)?,
        scales,
        biases,
        layout,
    };
    let dtype = None;
    Ok(Stored::Quantized { weight, dtype }.into())
}
