//! A mixture of experts: a router picks a few feed-forward layers for each token
//! ("Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer").

use mlex_core::{Array, Device, Dtype, QuantizedWeight, Stream};

use crate::quant::packed_columns;
use crate::{Activation, Error, GatedMlp, Linear, Result, Weights, dispatch, host};

/// From how many products on MLX is given them sorted by expert, as in mlx-lm.
const SORT_FROM: usize = 64;

/// The settings of a [`MoeMlp`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeConfig {
    /// Width of the input and output.
    pub hidden_size: i32,
    /// Width inside of an expert.
    pub intermediate_size: i32,
    /// How many experts there are.
    pub num_experts: i32,
    /// How many of them each token goes to.
    pub experts_per_token: i32,
    /// The weights of a token's experts are made to add up to 1.
    pub normalize: bool,
    /// Width inside of an expert that every token goes to, behind a gate of its own.
    pub shared_intermediate_size: Option<i32>,
    /// The function of the experts' gates.
    pub activation: Activation,
}

impl MoeConfig {
    fn validate(&self) -> Result<()> {
        if self.num_experts <= 0 {
            let expected = "a positive number";
            return Err(Error::setting("num_experts", expected, self.num_experts));
        }
        if !(1..=self.num_experts).contains(&self.experts_per_token) {
            let expected = format!("a number from 1 to the {} experts", self.num_experts);
            return Err(Error::setting(
                "num_experts_per_tok",
                expected,
                self.experts_per_token,
            ));
        }
        Ok(())
    }
}

/// One matrix `[N, K]` per expert, stacked.
#[derive(Clone, Debug)]
pub(crate) enum Experts {
    /// `[E, N, K]` as floating point, and `[E, K, N]`, a view of it.
    Dense { weight: Array, transposed: Array },
    /// Packed.
    Quantized(QuantizedWeight),
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
    /// Takes the matrices of all experts, `[rows, columns]` each, from the layer's `weights`:
    /// stacked (`switch_mlp.NAME`), one by one (`experts.I.NAME`), or as a part of a stacked
    /// tensor that is not called a weight (`experts.gate_up_proj`).
    fn load(
        weights: &Weights,
        name: &str,
        fused: Part,
        [experts, rows, columns]: [i32; 3],
    ) -> Result<Self> {
        let one_by_one = weights.pp("experts");
        if one_by_one.pp(0).pp(name).contains("weight") {
            let parts: Vec<Self> = (0..experts)
                .map(|expert| Self::load_one(&one_by_one.pp(expert).pp(name), rows, columns))
                .collect::<Result<_>>()?;
            return Self::stack(&parts, weights.is_complete());
        }
        if one_by_one.contains(fused.name) {
            return Self::load_part(&one_by_one, fused, [experts, rows, columns]);
        }
        let stacked = weights.pp("switch_mlp").pp(name);
        Self::load_shape(&stacked, &[experts, rows], columns)
    }

    /// One expert's matrix, as a stack of one.
    fn load_one(weights: &Weights, rows: i32, columns: i32) -> Result<Self> {
        Self::load_shape(weights, &[rows], columns)
    }

    /// A matrix `[*rows, columns]`, dense or quantized.
    fn load_shape(weights: &Weights, rows: &[i32], columns: i32) -> Result<Self> {
        let shape = |last: i32| [rows, &[last]].concat();
        let Some(layout) = weights.quantized()? else {
            return Self::dense(weights.get_float("weight", &shape(columns))?);
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
        Ok(Self::Quantized(QuantizedWeight {
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
    ) -> Result<Self> {
        if count == 1 {
            return Self::dense(weights.get_float(name, &[experts, rows, columns])?);
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
            return Self::dense(part);
        }
        if keep {
            weights.put_back(name, whole);
        }
        Self::dense(part)
    }

    fn dense(weight: Array) -> Result<Self> {
        let transposed = weight.swap_axes(-1, -2)?;
        Ok(Self::Dense { weight, transposed })
    }

    /// Matrices `[N, K]` of the same kind, one behind the other.
    fn stack(parts: &[Self], evaluate: bool) -> Result<Self> {
        let stack = |of: &dyn Fn(&Self) -> Option<Array>| -> Result<Option<Array>> {
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
        let quantized = |of: fn(&QuantizedWeight) -> Option<&Array>| {
            stack(&move |part| match part {
                Self::Quantized(weight) => of(weight).cloned(),
                Self::Dense { .. } => None,
            })
        };
        let weight = stack(&|part| match part {
            Self::Dense { weight, .. } => Some(weight.clone()),
            Self::Quantized(_) => None,
        })?;
        if let Some(weight) = weight {
            return Self::dense(weight);
        }
        let layout = parts.iter().find_map(|part| match part {
            Self::Quantized(weight) => Some(weight.layout),
            Self::Dense { .. } => None,
        });
        let (weight, scales) = (
            quantized(|weight| Some(&weight.weight))?,
            quantized(|weight| Some(&weight.scales))?,
        );
        match (weight, scales, layout) {
            (Some(weight), Some(scales), Some(layout)) => Ok(Self::Quantized(QuantizedWeight {
                weight,
                scales,
                biases: quantized(|weight| weight.biases.as_ref())?,
                layout,
            })),
            _ => Err(Error::setting(
                "experts",
                "all dense or all quantized alike",
                "some of each",
            )),
        }
    }

    /// `x` `[.., 1, K]` with the matrix that `indices` `[..]` name, transposed: `[.., 1, N]`.
    fn matmul(&self, x: &Array, indices: &Array, sorted: bool) -> Result<Array> {
        let weight = match self {
            Self::Dense { transposed, .. } => {
                return Ok(x.gather_mm(transposed, None, Some(indices), sorted)?);
            }
            Self::Quantized(weight) => weight,
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
}

/// A feed-forward layer of experts: `sum_i w_i down_i(activation(gate_i(x)) * up_i(x))` over
/// the experts that a router gives the largest softmax, plus an expert that is always used
/// where the model has one.
#[derive(Clone, Debug)]
pub struct MoeMlp {
    gate: Linear,
    gate_proj: Experts,
    up_proj: Experts,
    down_proj: Experts,
    shared: Option<SharedExpert>,
    config: MoeConfig,
}

#[derive(Clone, Debug)]
struct SharedExpert {
    mlp: GatedMlp,
    gate: Linear,
}

/// What [`host::mixture`] takes of a layer.
pub(crate) struct Mixture<'a> {
    pub(crate) gate: &'a Experts,
    pub(crate) up: &'a Experts,
    pub(crate) down: &'a Experts,
    pub(crate) config: MoeConfig,
}

impl MoeMlp {
    /// Takes the router (`gate`), the experts, and the shared one (`shared_expert`,
    /// `shared_expert_gate`) from `weights`. Experts are kept as one tensor per projection,
    /// however the checkpoint has them.
    ///
    /// # Errors
    /// When a tensor cannot be read or a setting is out of range.
    pub fn load(weights: &Weights, config: &MoeConfig) -> Result<Self> {
        config.validate()?;
        let &MoeConfig {
            hidden_size: hidden,
            intermediate_size: inner,
            num_experts: experts,
            ..
        } = config;
        let part = |name, index, count| Part { name, index, count };
        let shared = config.shared_intermediate_size.map(|inner| {
            let mlp = weights.pp("shared_expert");
            let gate = weights.pp("shared_expert_gate");
            Ok::<_, Error>(SharedExpert {
                mlp: GatedMlp::load(&mlp, hidden, inner, false, config.activation)?,
                gate: Linear::load(&gate, hidden, 1, false)?,
            })
        });
        let (gate, up) = (part("gate_up_proj", 0, 2), part("gate_up_proj", 1, 2));
        let down = part("down_proj", 0, 1);
        Ok(Self {
            gate: Linear::load(&weights.pp("gate"), hidden, experts, false)?,
            gate_proj: Experts::load(weights, "gate_proj", gate, [experts, inner, hidden])?,
            up_proj: Experts::load(weights, "up_proj", up, [experts, inner, hidden])?,
            down_proj: Experts::load(weights, "down_proj", down, [experts, hidden, inner])?,
            shared: shared.transpose()?,
            config: *config,
        })
    }

    /// `[B, L, hidden_size]` to the same shape.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        let logits = self.gate.forward(x)?;
        let mixture = Mixture {
            gate: &self.gate_proj,
            up: &self.up_proj,
            down: &self.down_proj,
            config: self.config,
        };
        let y = match host::mixture(x, &logits, &mixture)? {
            Some(y) => y,
            None => self.mixture(x, &logits)?,
        };
        let Some(SharedExpert { mlp, gate }) = &self.shared else {
            return Ok(y);
        };
        let shared = gate.forward(x)?.sigmoid()?.multiply(&mlp.forward(x)?)?;
        Ok(y.add(&shared)?)
    }

    /// The experts' part by MLX's operations.
    fn mixture(&self, x: &Array, logits: &Array) -> Result<Array> {
        let (experts, count) = (self.config.num_experts, self.config.experts_per_token);
        let gates = logits.softmax(&[-1], true)?;
        let chosen = gates.argpartition(-count, -1)?;
        let chosen = chosen.slice_axis(-1, experts - count, experts)?;
        let mut weights = gates.take_along_axis(&chosen, -1)?;
        if self.config.normalize {
            weights = weights.divide(&weights.sum(&[-1], true)?)?;
        }
        let y = self.apply(x, &chosen)?;
        Ok(y.multiply(&weights.expand_dims(-1)?)?.sum(&[-2], false)?)
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
        let gate = self.gate_proj.matmul(x, indices, sorted)?;
        let up = self.up_proj.matmul(x, indices, sorted)?;
        let inner = self.config.activation.gated(&gate, &up)?;
        self.down_proj.matmul(&inner, indices, sorted)
    }
}
