//! A mixture of experts: a router picks a few feed-forward layers for each token
//! ("Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer").

mod experts;

use mlex_core::Array;

pub use experts::{ExpertGroups, Experts};

use crate::{Activation, Error, GatedMlp, Linear, Result, Sequence, Value, Weights};

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
    /// The function of the experts' gates. Without it they have none, and the square of the
    /// positive part in between.
    pub gate: Option<Activation>,
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

/// A feed-forward layer of experts: `sum_i w_i down_i(activation(gate_i(x)) * up_i(x))` over
/// the experts that a router gives the largest softmax, plus an expert that is always used
/// where the model has one.
#[derive(Clone, Debug)]
pub struct MoeMlp {
    gate: Linear,
    experts: Experts,
    shared: Option<SharedExpert>,
}

#[derive(Clone, Debug)]
struct SharedExpert {
    mlp: GatedMlp,
    gate: Linear,
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
        let hidden = config.hidden_size;
        let shared = config.shared_intermediate_size.map(|inner| {
            let mlp = weights.pp("shared_expert");
            let gate = weights.pp("shared_expert_gate");
            Ok::<_, Error>(SharedExpert {
                mlp: GatedMlp::load(&mlp, hidden, inner, false, config.gate.unwrap_or_default())?,
                gate: Linear::load(&gate, hidden, 1, false)?,
            })
        });
        Ok(Self {
            gate: Linear::load(&weights.pp("gate"), hidden, config.num_experts, false)?,
            experts: Experts::load(weights, "switch_mlp", config)?,
            shared: shared.transpose()?,
        })
    }

    /// `[B, L, hidden_size]` to the same shape.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        if let Some((mut sequence, value)) = Sequence::start(x)?
            && let Some(y) = self.record(&mut sequence, value)?
        {
            return sequence.finish_updating(y, &[], &mut []);
        }
        let y = self.experts.forward(x, &self.gate.forward(x)?)?;
        let Some(SharedExpert { mlp, gate }) = &self.shared else {
            return Ok(y);
        };
        let shared = gate.forward(x)?.sigmoid()?.multiply(&mlp.forward(x)?)?;
        Ok(y.add(&shared)?)
    }

    /// The same as steps of `sequence`; none where there is no kernel for one.
    ///
    /// # Errors
    /// When the weights cannot be read.
    pub fn record(&self, sequence: &mut Sequence, x: Value) -> Result<Option<Value>> {
        let Some(logits) = self.gate.record(sequence, x)? else {
            return Ok(None);
        };
        let y = self.experts.record(sequence, x, logits)?;
        let (Some(y), Some(SharedExpert { mlp, gate })) = (y, &self.shared) else {
            return Ok(y);
        };
        let (gate, shared) = (gate.record(sequence, x)?, mlp.record(sequence, x)?);
        let (Some(gate), Some(shared)) = (gate, shared) else {
            return Ok(None);
        };
        Ok(sequence.add_gated(y, shared, gate))
    }
}
