//! The mixture of experts beside a layer's dense feed-forward part.

use mlex_core::{Array, Device, Dtype, QuantizedWeight, Stream};
use mlex_nn::quant::packed_columns;
use mlex_nn::{Activation, Linear, Weights};

use super::config::{ExpertsConfig, TextConfig};
use crate::Result;

/// From how many choices on the tokens are sorted by expert, as in mlx-lm.
const SORT_FROM: usize = 64;

/// Which experts a token goes to, and how much of each.
pub(super) struct Router {
    proj: Linear,
    /// The weight of the norm: the router's scale by the root of the width.
    norm: Array,
    per_expert_scale: Array,
    eps: f32,
    active: i32,
}

impl Router {
    pub(super) fn load(
        weights: &Weights,
        config: &TextConfig,
        experts: ExpertsConfig,
    ) -> Result<Self> {
        let hidden_size = config.hidden_size;
        let scale = weights.get_float("scale", &[hidden_size])?;
        Ok(Self {
            proj: Linear::load(&weights.pp("proj"), hidden_size, experts.count, false)?,
            norm: scale.multiply((hidden_size as f32).powf(-0.5))?,
            per_expert_scale: weights.get_float("per_expert_scale", &[experts.count])?,
            eps: config.rms_norm_eps,
            active: experts.active,
        })
    }

    /// `x` `[B, L, hidden_size]` to the chosen experts and their shares, `[B, L, active]`.
    pub(super) fn forward(&self, x: &Array) -> Result<(Array, Array)> {
        let x = x.rms_norm(Some(&self.norm), self.eps)?;
        let scores = self.proj.forward(&x)?;
        let count = scores.dim(-1)?;
        let chosen =
            scores
                .argpartition(-self.active, -1)?
                .slice_axis(-1, count - self.active, count)?;
        let shares = scores.take_along_axis(&chosen, -1)?.softmax(&[-1], false)?;
        let scale = self.per_expert_scale.take(&chosen, 0)?;
        Ok((chosen, shares.multiply(&scale)?))
    }
}

/// The gated feed-forward layers of all experts, their weights stacked.
pub(super) struct Experts {
    gate_proj: Stacked,
    up_proj: Stacked,
    down_proj: Stacked,
}

impl Experts {
    /// Takes `switch_glu.gate_proj`, `up_proj` and `down_proj` as mlx-lm writes them, or
    /// `gate_up_proj` and `down_proj` as transformers does.
    pub(super) fn load(
        weights: &Weights,
        hidden_size: i32,
        experts: ExpertsConfig,
    ) -> Result<Self> {
        let ExpertsConfig {
            count,
            intermediate_size: inner,
            ..
        } = experts;
        if weights.contains("gate_up_proj") {
            let both = weights.get_float("gate_up_proj", &[count, 2 * inner, hidden_size])?;
            let part = |start: i32| -> Result<Stacked> {
                let part = both.slice_axis(1, start, start + inner)?.contiguous()?;
                Stacked::dense(&part)
            };
            let down = weights.get_float("down_proj", &[count, hidden_size, inner])?;
            return Ok(Self {
                gate_proj: part(0)?,
                up_proj: part(inner)?,
                down_proj: Stacked::dense(&down)?,
            });
        }
        let weights = weights.pp("switch_glu");
        let up = |name| Stacked::load(&weights.pp(name), [count, inner, hidden_size]);
        Ok(Self {
            gate_proj: up("gate_proj")?,
            up_proj: up("up_proj")?,
            down_proj: Stacked::load(&weights.pp("down_proj"), [count, hidden_size, inner])?,
        })
    }

    /// The shares of the chosen experts' outputs for `x` `[B, L, hidden_size]`, summed.
    pub(super) fn forward(&self, x: &Array, chosen: &Array, shares: &Array) -> Result<Array> {
        let y = if chosen.size() >= SORT_FROM {
            self.sorted(x, chosen)?
        } else {
            // [B, L, 1, 1, D] with [B, L, active] gives [B, L, active, 1, D].
            let x = x.expand_dims(-2)?.expand_dims(-2)?;
            self.apply(&x, chosen, false)?.squeeze(-2)?
        };
        Ok(shares.expand_dims(-1)?.multiply(&y)?.sum(&[-2], false)?)
    }

    /// The outputs `[B, L, active, D]`, computed in the order of the experts.
    fn sorted(&self, x: &Array, chosen: &Array) -> Result<Array> {
        let active = chosen.dim(-1)?;
        let flat = chosen.flatten(0, -1)?;
        let order = flat.argsort(0)?;
        let rows = order.floor_divide(&Array::scalar(active)?.as_type(order.dtype())?)?;
        let x = x.flatten(0, -2)?.take(&rows, 0)?.expand_dims(-2)?;
        let y = self.apply(&x, &flat.take(&order, 0)?, true)?.squeeze(-2)?;
        let y = y.take(&order.argsort(0)?, 0)?;
        let mut shape = chosen.shape().to_vec();
        shape.push(y.dim(-1)?);
        Ok(y.reshape(&shape)?)
    }

    fn apply(&self, x: &Array, chosen: &Array, sorted: bool) -> Result<Array> {
        let gate = self.gate_proj.forward(x, chosen, sorted)?;
        let up = self.up_proj.forward(x, chosen, sorted)?;
        let inner = Activation::GeluTanh.gated(&gate, &up)?;
        self.down_proj.forward(&inner, chosen, sorted)
    }
}

/// Matrices `[E, N, K]`.
enum Stacked {
    /// Transposed, `[E, K, N]`.
    Dense(Array),
    Quantized(QuantizedWeight),
}

impl Stacked {
    fn dense(weight: &Array) -> Result<Self> {
        Ok(Self::Dense(weight.swap_axes(-1, -2)?))
    }

    fn load(weights: &Weights, [count, rows, columns]: [i32; 3]) -> Result<Self> {
        let Some(layout) = weights.quantized()? else {
            return Self::dense(&weights.get_float("weight", &[count, rows, columns])?);
        };
        let (words, groups) =
            packed_columns(layout, columns).map_err(|error| error.with_layer(weights.prefix()))?;
        let groups = [count, rows, groups];
        let biases = layout.mode.has_biases();
        Ok(Self::Quantized(QuantizedWeight {
            weight: weights.get_dtype("weight", &[count, rows, words], Dtype::Uint32)?,
            scales: if biases {
                weights.get_float("scales", &groups)?
            } else {
                weights.get_dtype("scales", &groups, Dtype::Uint8)?
            },
            biases: biases
                .then(|| weights.get_float("biases", &groups))
                .transpose()?,
            layout,
        }))
    }

    /// Rows `x` `[.., M, K]` times the transposed matrices that `chosen` names.
    fn forward(&self, x: &Array, chosen: &Array, sorted: bool) -> Result<Array> {
        match self {
            Self::Dense(weight) => Ok(x.gather_mm(weight, None, Some(chosen), sorted)?),
            Self::Quantized(weight) if Stream::current()?.device() == Device::Cpu => {
                // MLX's CPU backend adds up in the type of `x`.
                let wide = |array: &Array| array.as_type(Dtype::Float32);
                let floats = weight.layout.mode.has_biases();
                let weight = QuantizedWeight {
                    weight: weight.weight.clone(),
                    scales: if floats {
                        wide(&weight.scales)?
                    } else {
                        weight.scales.clone()
                    },
                    biases: weight.biases.as_ref().map(wide).transpose()?,
                    layout: weight.layout,
                };
                let y = weight.gather_matmul(&wide(x)?, None, Some(chosen), sorted)?;
                Ok(y.as_type(x.dtype())?)
            }
            Self::Quantized(weight) => Ok(weight.gather_matmul(x, None, Some(chosen), sorted)?),
        }
    }
}
