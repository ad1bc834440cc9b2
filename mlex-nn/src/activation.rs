//! Activations and the gated feed-forward layer.

use mlex_core::Array;

use crate::chain::{self, Chain};
use crate::host::{Sequence, Value};
use crate::{Linear, Result, Weights, cuda, host};

/// `x * sigmoid(x)`.
///
/// # Errors
/// When MLX refuses the dtype.
pub fn silu(x: &Array) -> Result<Array> {
    Activation::Silu.apply(x)
}

/// The Gaussian error linear unit, `x * Phi(x)`, with the error function.
///
/// # Errors
/// When MLX refuses the dtype.
pub fn gelu(x: &Array) -> Result<Array> {
    Activation::Gelu.apply(x)
}

/// The same by tanh: `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
///
/// # Errors
/// When MLX refuses the dtype.
pub fn gelu_tanh(x: &Array) -> Result<Array> {
    Activation::GeluTanh.apply(x)
}

/// The same by a sigmoid: `x * sigmoid(1.702 x)`.
///
/// # Errors
/// When MLX refuses the dtype.
pub fn gelu_fast(x: &Array) -> Result<Array> {
    Ok(x.multiply(&x.multiply(1.702)?.sigmoid()?)?)
}

/// The square of the positive part, `max(x, 0)^2` ("Primer: Searching for Efficient
/// Transformers for Language Modeling").
///
/// # Errors
/// When MLX refuses the dtype.
pub fn relu2(x: &Array) -> Result<Array> {
    Ok(x.maximum(0.0)?.square()?)
}

/// The function of a [`GatedMlp`]'s gate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activation {
    /// [`silu`]: the layer is SwiGLU.
    #[default]
    Silu,
    /// [`gelu`]: the layer is GeGLU.
    Gelu,
    /// [`gelu_tanh`]: the layer is GeGLU.
    GeluTanh,
    /// The sigmoid: the layer is GLU.
    Sigmoid,
}

impl Activation {
    /// `activation(x)`.
    ///
    /// # Errors
    /// When MLX refuses the dtype.
    pub fn apply(self, x: &Array) -> Result<Array> {
        if let Some(y) = host::activate(self, x)? {
            return Ok(y);
        }
        chain::call(Chain::Alone(self), std::slice::from_ref(x))
    }

    /// `activation(gate) * up`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn gated(self, gate: &Array, up: &Array) -> Result<Array> {
        if let Some(y) = host::gated(self, gate, up)? {
            return Ok(y);
        }
        chain::call(Chain::Gated(self), &[gate.clone(), up.clone()])
    }

    /// The function itself, by MLX's operations.
    pub(crate) fn of(self, x: &Array) -> mlex_core::Result<Array> {
        match self {
            Self::Silu => x.multiply(&x.sigmoid()?),
            Self::Gelu => {
                let phi = x.multiply(std::f32::consts::FRAC_1_SQRT_2)?.erf()?;
                x.multiply(&phi.add(1.0)?)?.multiply(0.5)
            }
            Self::GeluTanh => {
                let inner = x.square()?.multiply(x)?.multiply(0.044_715)?.add(x)?;
                let tanh = inner.multiply((2.0 / std::f32::consts::PI).sqrt())?;
                x.multiply(0.5)?.multiply(&tanh.tanh()?.add(1.0)?)
            }
            Self::Sigmoid => x.sigmoid(),
        }
    }
}

/// `down(activation(gate(x)) * up(x))` ("GLU Variants Improve Transformer").
#[derive(Clone, Debug)]
pub struct GatedMlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
    activation: Activation,
}

impl GatedMlp {
    /// Takes `gate_proj`, `up_proj` and `down_proj` from `weights`.
    ///
    /// # Errors
    /// When a tensor cannot be read.
    pub fn load(
        weights: &Weights,
        hidden_size: i32,
        intermediate_size: i32,
        bias: bool,
        activation: Activation,
    ) -> Result<Self> {
        let up = |name| Linear::load(&weights.pp(name), hidden_size, intermediate_size, bias);
        Ok(Self {
            gate_proj: up("gate_proj")?,
            up_proj: up("up_proj")?,
            down_proj: Linear::load(
                &weights.pp("down_proj"),
                intermediate_size,
                hidden_size,
                bias,
            )?,
            activation,
        })
    }

    /// `[.., hidden_size]` to the same shape.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        self.down_proj.forward(&self.inner(x)?)
    }

    /// What `down_proj` takes, `[.., intermediate_size]`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn inner(&self, x: &Array) -> Result<Array> {
        let (gate, up) = (self.gate_proj.weight(), self.up_proj.weight());
        if let Some(inner) = host::gated_linear(x, self.activation, gate, up)? {
            return Ok(inner);
        }
        if let Some(inner) = cuda::gated_linear(x, self.activation, gate, up)? {
            return Ok(inner);
        }
        let gate = self.gate_proj.forward(x)?;
        let up = self.up_proj.forward(x)?;
        self.activation.gated(&gate, &up)
    }

    /// The last projection.
    pub fn down_proj(&self) -> &Linear {
        &self.down_proj
    }

    /// The same as steps of `sequence`; none where there is no kernel for one.
    ///
    /// # Errors
    /// When the weights cannot be read.
    pub fn record(&self, sequence: &mut Sequence, x: Value) -> Result<Option<Value>> {
        match self.record_inner(sequence, x)? {
            Some(inner) => self.down_proj.record(sequence, inner),
            None => Ok(None),
        }
    }

    /// [`inner`](Self::inner) as a step of `sequence`; none where there is no kernel for it.
    ///
    /// # Errors
    /// When the weights cannot be read.
    pub fn record_inner(&self, sequence: &mut Sequence, x: Value) -> Result<Option<Value>> {
        let (gate, up) = (self.gate_proj.weight(), self.up_proj.weight());
        host::record_gated(sequence, x, self.activation, gate, up)
    }
}
