//! The feed-forward layers that a router chooses from.

use mlex_core::{Array, Device, Dtype, QuantizedWeight, Stream};

use super::MoeConfig;
use crate::host::{self, Constants, Mixture, Sequence, Value};
use crate::linear::{Matrix, Stored};
use crate::quant::packed_columns;
use crate::{Result, Weights, dispatch};

/// From how many products on MLX is given them sorted by expert, as in mlx-lm.
const SORT_FROM: usize = 64;

/// The experts of a layer: `sum_i w_i down_i(activation(gate_i(x)) * up_i(x))` over those with
/// the largest logits, the weights being their softmax.
#[derive(Clone, Debug)]
pub struct Experts {
    /// `[E, inner, hidden]`, twice, and `[E, hidden, inner]`.
    gate_proj: Matrix,
    up_proj: Matrix,
    down_proj: Matrix,
    factors: Option<Array>,
    constants: Constants,
    config: MoeConfig,
}

impl Experts {
    /// Takes `gate_proj`, `up_proj` and `down_proj` of all experts from `weights`: stacked
    /// (`STACKED.NAME`), one by one (`experts.I.NAME`), or stacked as `experts.gate_up_proj` and
    /// `experts.down_proj`. They become one tensor per projection.
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
        one_tensor_each(weights, stacked, experts);
        let stacked = weights.pp(stacked);
        let load = |name: &str, rows: i32, columns: i32| {
            load_matrices(&stacked.pp(name), [experts, rows, columns])
        };
        Ok(Self {
            gate_proj: load("gate_proj", inner, hidden)?,
            up_proj: load("up_proj", inner, hidden)?,
            down_proj: load("down_proj", hidden, inner)?,
            factors: None,
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
        let (experts, count) = (self.config.num_experts, self.config.experts_per_token);
        let gates = logits.softmax(&[-1], true)?;
        let chosen = gates.argpartition(-count, -1)?;
        let chosen = chosen.slice_axis(-1, experts - count, experts)?;
        let mut weights = gates.take_along_axis(&chosen, -1)?;
        if self.config.normalize {
            weights = weights.divide(&weights.sum(&[-1], true)?)?;
        }
        if let Some(factors) = &self.factors {
            weights = weights.multiply(&factors.take(&chosen, 0)?)?;
        }
        let y = self.apply(x, &chosen)?;
        Ok(y.multiply(&weights.expand_dims(-1)?)?.sum(&[-2], false)?)
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
        let factors = self.factors.as_ref();
        let mixture = Mixture {
            gate: &self.gate_proj,
            up: &self.up_proj,
            down: &self.down_proj,
            factors: factors.map(|factors| (factors, &self.constants)),
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
        let gate = gather(&self.gate_proj, x, indices, sorted)?;
        let up = gather(&self.up_proj, x, indices, sorted)?;
        let inner = self.config.activation.gated(&gate, &up)?;
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
        return Ok(weight.gather_matmul(x, None, Some(indices), sorted)?);
    }
    // See `dispatch::linear`: MLX's CPU adds up in the type of `x`.
    let wide = x.as_type(Dtype::Float32)?;
    let weight = dispatch::widened(weight)?;
    let product = weight.gather_matmul(&wide, None, Some(indices), sorted)?;
    Ok(product.as_type(x.dtype())?)
}

/// Brings the experts' matrices into one tensor per projection (`STACKED.NAME`), where the
/// checkpoint has one for each expert (`experts.I.NAME`), or one for gate and up projection that
/// is not called a weight (`experts.gate_up_proj`).
fn one_tensor_each(weights: &Weights, stacked: &str, count: i32) {
    for name in ["gate_proj", "up_proj", "down_proj"] {
        for part in ["weight", "scales", "biases"] {
            let parts = (0..count).map(|expert| format!("experts.{expert}.{name}.{part}"));
            weights.stack(parts, &format!("{stacked}.{name}.{part}"));
        }
    }
    let weight = |name: &str| format!("{stacked}.{name}.weight");
    let both = [weight("gate_proj"), weight("up_proj")];
    weights.split("experts.gate_up_proj", 1, &both);
    weights.split("experts.down_proj", 1, &[weight("down_proj")]);
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
