//! The mixture of experts beside a layer's dense feed-forward part.

use mlex_core::Array;
use mlex_nn::{Activation, Experts, Linear, MoeConfig, RmsNorm, Sequence, Value, Weights};

use super::config::{ExpertsConfig, TextConfig};
use crate::Result;

/// A router and the experts that it chooses from.
pub(super) struct Mixture {
    router: Linear,
    /// Of what the router sees. Its weight is the router's scale by the root of the width.
    norm: RmsNorm,
    experts: Experts,
}

impl Mixture {
    /// Takes `router` and `experts` from the layer's `weights`, as mlx-lm writes them
    /// (`switch_glu`) or as transformers does (`gate_up_proj`).
    pub(super) fn load(
        weights: &Weights,
        config: &TextConfig,
        experts: ExpertsConfig,
    ) -> Result<Self> {
        let hidden_size = config.hidden_size;
        let router = weights.pp("router");
        let scale = router.get_float("scale", &[hidden_size])?;
        let norm = scale.multiply((hidden_size as f32).powf(-0.5))?;
        let settings = MoeConfig {
            hidden_size,
            intermediate_size: experts.intermediate_size,
            num_experts: experts.count,
            experts_per_token: experts.active,
            normalize: true,
            shared_intermediate_size: None,
            gate: Some(Activation::GeluTanh),
        };
        let factors = router.get_float("per_expert_scale", &[experts.count])?;
        let stacked = "experts.switch_glu";
        Ok(Self {
            router: Linear::load(&router.pp("proj"), hidden_size, experts.count, false)?,
            norm: RmsNorm::new(norm, config.rms_norm_eps),
            experts: Experts::load(weights, stacked, &settings)?.with_factors(factors),
        })
    }

    /// `x` `[B, L, hidden_size]` to the same shape; `routed` is what the router sees.
    pub(super) fn forward(&self, x: &Array, routed: &Array) -> Result<Array> {
        let logits = self.router.forward(&self.norm.forward(routed)?)?;
        Ok(self.experts.forward(x, &logits)?)
    }

    /// [`forward`](Self::forward) in steps; none where one has no kernel.
    pub(super) fn record(
        &self,
        sequence: &mut Sequence,
        x: Value,
        routed: Value,
    ) -> Result<Option<Value>> {
        let Some(normed) = self.norm.record(sequence, routed)? else {
            return Ok(None);
        };
        let Some(logits) = self.router.record(sequence, normed)? else {
            return Ok(None);
        };
        Ok(self.experts.record(sequence, x, logits)?)
    }
}
