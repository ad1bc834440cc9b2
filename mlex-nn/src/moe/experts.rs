//! The feed-forward layers that a router chooses from.

use mlex_core::{Array, Device, Dtype, QuantizedWeight, Stream};

use super::MoeConfig;
use crate::host::{self, Constants, Mixture, Sequence, Value};
use crate::linear::{Matrix, Stored};
use crate::quant::packed_columns;
use crate::{Error, Result, Weights, dispatch};

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

/// Which rows of a tensor that holds several projections are one of them.
#[derive(Clone, Copy)]
struct Part {
    name: &'static str,
    /// Of how many it is which one.
    index: i32,
    count: i32,
}

impl Experts {
    /// Takes `gate_proj`, `up_proj` and `down_proj` of all experts from `weights`: stacked
    /// (`STACKED.NAME`), one by one (`experts.I.NAME`), or stacked as `experts.gate_up_proj` and
    /// `experts.down_proj`. They are kept as one tensor per projection.
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
        let load = |name: &str, part: Part, rows: i32, columns: i32| {
            load_stack(weights, [stacked, name], part, [experts, rows, columns])
        };
        let part = |name, index, count| Part { name, index, count };
        let (gate, up) = (part("gate_up_proj", 0, 2), part("gate_up_proj", 1, 2));
        Ok(Self {
            gate_proj: load("gate_proj", gate, inner, hidden)?,
            up_proj: load("up_proj", up, inner, hidden)?,
            down_proj: load("down_proj", part("down_proj", 0, 1), hidden, inner)?,
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

/// The matrices of all experts, `[rows, columns]` each, from where the checkpoint has them.
fn load_stack(
    weights: &Weights,
    [stacked, name]: [&str; 2],
    fused: Part,
    [experts, rows, columns]: [i32; 3],
) -> Result<Matrix> {
    let one_by_one = weights.pp("experts");
    if one_by_one.pp(0).pp(name).contains("weight") {
        let parts: Vec<Matrix> = (0..experts)
            .map(|expert| load_shape(&one_by_one.pp(expert).pp(name), &[rows], columns))
            .collect::<Result<_>>()?;
        return stack(&parts, weights.is_complete());
    }
    if one_by_one.contains(fused.name) {
        return load_part(&one_by_one, fused, [experts, rows, columns]);
    }
    load_shape(&weights.pp(stacked).pp(name), &[experts, rows], columns)
}

/// A matrix `[*rows, columns]`, dense or quantized.
fn load_shape(weights: &Weights, rows: &[i32], columns: i32) -> Result<Matrix> {
    let shape = |last: i32| [rows, &[last]].concat();
    let Some(layout) = weights.quantized()? else {
        return dense(weights.get_float("weight", &shape(columns))?);
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
    Ok(quantized(QuantizedWeight {
        weight: weights.get_dtype("weight", &shape(words), Dtype::Uint32)?,
        scales,
        biases,
        layout,
    }))
}

/// A part of a tensor `[experts, count * rows, columns]`, which is left for the other parts.
fn load_part(
    weights: &Weights,
    Part { name, index, count }: Part,
    [experts, rows, columns]: [i32; 3],
) -> Result<Matrix> {
    if count == 1 {
        return dense(weights.get_float(name, &[experts, rows, columns])?);
    }
    let shape = [experts, count.saturating_mul(rows), columns];
    let keep = index + 1 < count;
    let whole = weights.get_float(name, &shape)?;
    let part = whole.slice_axis(1, index * rows, (index + 1) * rows)?;
    if weights.is_complete() {
        let part = part.contiguous()?;
        part.eval()?;
        if keep {
            weights.put_back(name, whole);
        }
        return dense(part);
    }
    if keep {
        weights.put_back(name, whole);
    }
    dense(part)
}

fn dense(weight: Array) -> Result<Matrix> {
    let transposed = weight.swap_axes(-1, -2)?;
    Ok(Stored::Dense { weight, transposed }.into())
}

/// Matrices `[N, K]` of the same kind, one behind the other.
fn stack(parts: &[Matrix], evaluate: bool) -> Result<Matrix> {
    let stack = |of: &dyn Fn(&Matrix) -> Option<Array>| -> Result<Option<Array>> {
        let Some(arrays) = parts.iter().map(of).collect::<Option<Vec<Array>>>() else {
            return Ok(None);
        };
        let stacked = Array::stack(&arrays, 0)?;
        // At once, so that the single ones are gone before the next projection is read.
        if evaluate {
            stacked.eval()?;
        }
        Ok(Some(stacked))
    };
    let packed = |of: fn(&QuantizedWeight) -> Option<&Array>| {
        stack(&move |part| match &part.stored {
            Stored::Quantized { weight, .. } => of(weight).cloned(),
            Stored::Dense { .. } => None,
        })
    };
    let weight = stack(&|part| match &part.stored {
        Stored::Dense { weight, .. } => Some(weight.clone()),
        Stored::Quantized { .. } => None,
    })?;
    if let Some(weight) = weight {
        return dense(weight);
    }
    let layout = parts.iter().find_map(|part| match &part.stored {
        Stored::Quantized { weight, .. } => Some(weight.layout),
        Stored::Dense { .. } => None,
    });
    let (weight, scales) = (
        packed(|weight| Some(&weight.weight))?,
        packed(|weight| Some(&weight.scales))?,
    );
    match (weight, scales, layout) {
        (Some(weight), Some(scales), Some(layout)) => Ok(quantized(QuantizedWeight {
            weight,
            scales,
            biases: packed(|weight| weight.biases.as_ref())?,
            layout,
        })),
        _ => Err(Error::setting(
            "experts",
            "all dense or all quantized alike",
            "some of each",
        )),
    }
}

fn quantized(weight: QuantizedWeight) -> Matrix {
    let dtype = None;
    Stored::Quantized { weight, dtype }.into()
}
