//! A layer: attention, a dense feed-forward part with experts beside it, and the gate on the
//! layer's own embedding of each token. Each part is normalized before and after.

use mlex_core::Array;
use mlex_nn::{Activation, GatedMlp, Linear, Mask, Offset, RmsNorm, Weights};

use super::attention::{Attention, KeysValues, Source};
use super::config::{ExpertsConfig, LayerConfig, TextConfig};
use super::experts::{Experts, Router};
use crate::Result;

pub(super) struct Layer {
    self_attn: Attention,
    mlp: GatedMlp,
    experts: Option<ExpertPart>,
    per_layer: Option<PerLayerPart>,
    input_layernorm: RmsNorm,
    post_attention_layernorm: RmsNorm,
    pre_feedforward_layernorm: RmsNorm,
    post_feedforward_layernorm: RmsNorm,
    layer_scalar: Array,
}

impl Layer {
    pub(super) fn load(
        weights: &Weights,
        config: &TextConfig,
        layer: &LayerConfig,
    ) -> Result<Self> {
        let norm = |name| load_norm(weights, config, name);
        let experts = config.experts;
        let per_layer = config.per_layer;
        Ok(Self {
            self_attn: Attention::load(&weights.pp("self_attn"), config, layer)?,
            mlp: GatedMlp::load(
                &weights.pp("mlp"),
                config.hidden_size,
                layer.intermediate_size,
                false,
                Activation::GeluTanh,
            )?,
            experts: experts
                .map(|experts| ExpertPart::load(weights, config, experts))
                .transpose()?,
            per_layer: per_layer
                .map(|sizes| PerLayerPart::load(weights, config, sizes.hidden_size))
                .transpose()?,
            input_layernorm: norm("input_layernorm")?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            pre_feedforward_layernorm: norm("pre_feedforward_layernorm")?,
            post_feedforward_layernorm: norm("post_feedforward_layernorm")?,
            layer_scalar: weights.get_float("layer_scalar", &[1])?,
        })
    }

    /// `x` `[B, L, hidden_size]` to the same shape, and the keys and values that were seen.
    /// `embedding` `[B, L, D]` is the layer's own one.
    pub(super) fn forward(
        &self,
        x: &Array,
        embedding: Option<&Array>,
        mask: &Mask,
        offset: &Offset,
        source: Source<'_>,
    ) -> Result<(Array, KeysValues)> {
        let normed = self.input_layernorm.forward(x)?;
        let (attended, seen) = self.self_attn.forward(&normed, mask, offset, source)?;
        let attended = self.post_attention_layernorm.forward(&attended)?;
        let (x, normed) = self.pre_feedforward_layernorm.forward_sum(x, &attended)?;
        let mut fed = self.mlp.forward(&normed)?;
        if let Some(experts) = &self.experts {
            fed = experts.forward(&fed, &x)?;
        }
        let mut x = x.add(&self.post_feedforward_layernorm.forward(&fed)?)?;
        if let (Some(part), Some(embedding)) = (&self.per_layer, embedding) {
            x = x.add(&part.forward(&x, embedding)?)?;
        }
        Ok((x.multiply(&self.layer_scalar)?, seen))
    }
}

fn load_norm(weights: &Weights, config: &TextConfig, name: &str) -> Result<RmsNorm> {
    let norm = RmsNorm::load(&weights.pp(name), config.hidden_size, config.rms_norm_eps);
    Ok(norm?)
}

/// The experts and their norms.
struct ExpertPart {
    router: Router,
    experts: Experts,
    post_feedforward_layernorm_1: RmsNorm,
    post_feedforward_layernorm_2: RmsNorm,
    pre_feedforward_layernorm_2: RmsNorm,
}

impl ExpertPart {
    fn load(weights: &Weights, config: &TextConfig, experts: ExpertsConfig) -> Result<Self> {
        let norm = |name| load_norm(weights, config, name);
        Ok(Self {
            router: Router::load(&weights.pp("router"), config, experts)?,
            experts: Experts::load(&weights.pp("experts"), config.hidden_size, experts)?,
            post_feedforward_layernorm_1: norm("post_feedforward_layernorm_1")?,
            post_feedforward_layernorm_2: norm("post_feedforward_layernorm_2")?,
            pre_feedforward_layernorm_2: norm("pre_feedforward_layernorm_2")?,
        })
    }

    /// The sum of both parts: `dense` is what the dense one gave, `x` the stream before it.
    fn forward(&self, dense: &Array, x: &Array) -> Result<Array> {
        let (chosen, shares) = self.router.forward(x)?;
        let normed = self.pre_feedforward_layernorm_2.forward(x)?;
        let sparse = self.experts.forward(&normed, &chosen, &shares)?;
        let dense = self.post_feedforward_layernorm_1.forward(dense)?;
        Ok(dense.add(&self.post_feedforward_layernorm_2.forward(&sparse)?)?)
    }
}

/// The gate on a layer's own embeddings.
struct PerLayerPart {
    per_layer_input_gate: Linear,
    per_layer_projection: Linear,
    post_per_layer_input_norm: RmsNorm,
}

impl PerLayerPart {
    fn load(weights: &Weights, config: &TextConfig, size: i32) -> Result<Self> {
        let (gate, projection) = ("per_layer_input_gate", "per_layer_projection");
        let hidden_size = config.hidden_size;
        Ok(Self {
            per_layer_input_gate: Linear::load(&weights.pp(gate), hidden_size, size, false)?,
            per_layer_projection: Linear::load(&weights.pp(projection), size, hidden_size, false)?,
            post_per_layer_input_norm: load_norm(weights, config, "post_per_layer_input_norm")?,
        })
    }

    fn forward(&self, x: &Array, embedding: &Array) -> Result<Array> {
        let gate = self.per_layer_input_gate.forward(x)?;
        let gated = Activation::GeluTanh.gated(&gate, embedding)?;
        let projected = self.per_layer_projection.forward(&gated)?;
        Ok(self.post_per_layer_input_norm.forward(&projected)?)
    }
}
