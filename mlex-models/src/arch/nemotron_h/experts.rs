//! The feed-forward parts: dense, and of experts behind a router with groups.

use mlex_core::Array;
use mlex_nn::activation::relu2;
use mlex_nn::{ExpertGroups, Experts, Linear, MoeConfig, Sequence, Value, Weights};

use super::config::{Config, ExpertsConfig};
use crate::Result;

/// `down(relu(up(x))^2)`.
pub(super) struct Mlp {
    up_proj: Linear,
    down_proj: Linear,
}

impl Mlp {
    pub(super) fn load(weights: &Weights, config: &Config, intermediate_size: i32) -> Result<Self> {
        let (hidden_size, bias) = (config.hidden_size, config.mlp_bias);
        let (up, down) = (weights.pp("up_proj"), weights.pp("down_proj"));
        Ok(Self {
            up_proj: Linear::load(&up, hidden_size, intermediate_size, bias)?,
            down_proj: Linear::load(&down, intermediate_size, hidden_size, bias)?,
        })
    }

    pub(super) fn forward(&self, x: &Array) -> Result<Array> {
        Ok(self.down_proj.forward(&relu2(&self.up_proj.forward(x)?)?)?)
    }

    /// [`forward`](Self::forward) in steps; none where one has no kernel.
    pub(super) fn record(&self, sequence: &mut Sequence, x: Value) -> Result<Option<Value>> {
        let up = self.up_proj.record(sequence, x)?;
        match up.and_then(|up| sequence.relu2(up)) {
            Some(inner) => Ok(self.down_proj.record(sequence, inner)?),
            None => Ok(None),
        }
    }
}

/// Experts that a router with groups chooses ("DeepSeek-V3 Technical Report"), in a narrower space
/// where the config says so, and one that every token goes to.
pub(super) struct Moe {
    gate: Linear,
    experts: Experts,
    shared_experts: Option<Mlp>,
    latent: Option<Latent>,
}

/// The way into the experts' space and back.
struct Latent {
    fc1_latent_proj: Linear,
    fc2_latent_proj: Linear,
}

impl Moe {
    pub(super) fn load(weights: &Weights, config: &Config, experts: ExpertsConfig) -> Result<Self> {
        let hidden_size = config.hidden_size;
        let gate = weights.pp("gate");
        let sizes = MoeConfig {
            hidden_size: experts.latent_size.unwrap_or(hidden_size),
            intermediate_size: experts.intermediate_size,
            num_experts: experts.count,
            experts_per_token: experts.active,
            normalize: experts.normalize,
            shared_intermediate_size: None,
            gate: None,
        };
        let groups = ExpertGroups {
            count: experts.groups,
            active: experts.active_groups,
            scale: experts.scale,
        };
        let correction = gate.get_float("e_score_correction_bias", &[experts.count])?;
        let latent = experts.latent_size.map(|size| {
            let (first, second) = ("fc1_latent_proj", "fc2_latent_proj");
            let bias = config.mlp_bias;
            Ok::<_, crate::Error>(Latent {
                fc1_latent_proj: Linear::load(&weights.pp(first), hidden_size, size, bias)?,
                fc2_latent_proj: Linear::load(&weights.pp(second), size, hidden_size, bias)?,
            })
        });
        let shared = weights.pp("shared_experts");
        Ok(Self {
            gate: Linear::load(&gate, hidden_size, experts.count, false)?,
            experts: Experts::load(weights, "switch_mlp", &sizes)?
                .with_groups(groups, correction)?,
            shared_experts: experts
                .shared_size
                .map(|size| Mlp::load(&shared, config, size))
                .transpose()?,
            latent: latent.transpose()?,
        })
    }

    pub(super) fn forward(&self, x: &Array) -> Result<Array> {
        let logits = self.gate.forward(x)?;
        let routed = match &self.latent {
            Some(latent) => {
                let inner = latent.fc1_latent_proj.forward(x)?;
                let y = self.experts.forward(&inner, &logits)?;
                latent.fc2_latent_proj.forward(&y)?
            }
            None => self.experts.forward(x, &logits)?,
        };
        match &self.shared_experts {
            Some(shared) => Ok(routed.add(&shared.forward(x)?)?),
            None => Ok(routed),
        }
    }

    /// [`forward`](Self::forward) in steps; none where one has no kernel.
    pub(super) fn record(&self, sequence: &mut Sequence, x: Value) -> Result<Option<Value>> {
        let Some(logits) = self.gate.record(sequence, x)? else {
            return Ok(None);
        };
        let inner = match &self.latent {
            Some(latent) => latent.fc1_latent_proj.record(sequence, x)?,
            None => Some(x),
        };
        let Some(inner) = inner else {
            return Ok(None);
        };
        let Some(y) = self.experts.record(sequence, inner, logits)? else {
            return Ok(None);
        };
        let routed = match &self.latent {
            Some(latent) => latent.fc2_latent_proj.record(sequence, y)?,
            None => Some(y),
        };
        let (Some(routed), Some(shared)) = (routed, &self.shared_experts) else {
            return Ok(routed);
        };
        let shared = shared.record(sequence, x)?;
        Ok(shared.and_then(|shared| sequence.add(routed, shared, 1.0)))
    }
}
