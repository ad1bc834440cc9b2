//! A layer: attention, a dense feed-forward part with experts beside it, and the gate on the
//! layer's own embedding of each token. Each part is normalized before and after.

use mlex_core::Array;
use mlex_nn::{Activation, GatedMlp, Linear, Mask, Offset, RmsNorm, Weights, add_normed};

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

    /// The norm of what the layer takes.
    pub(super) fn input_norm(&self) -> &RmsNorm {
        &self.input_layernorm
    }

    /// The stream behind the layer, and the keys and values that were seen. `embedding`
    /// `[B, L, D]` is the layer's own one, `next` the norm of what follows.
    pub(super) fn forward(
        &self,
        Stream { x, normed }: &Stream,
        embedding: Option<&Array>,
        mask: &Mask,
        offset: &Offset,
        source: Source<'_>,
        next: &RmsNorm,
    ) -> Result<(Stream, KeysValues)> {
        let (attended, seen) = self.self_attn.forward(normed, mask, offset, source)?;
        let post = &self.post_attention_layernorm;
        let between = Stream::add(x, &attended, post, None, &self.pre_feedforward_layernorm)?;
        let mut fed = self.mlp.forward(&between.normed)?;
        if let Some(experts) = &self.experts {
            fed = experts.forward(&fed, &between.x)?;
        }
        let post = &self.post_feedforward_layernorm;
        let scalar = Some(&self.layer_scalar);
        let stream = match (&self.per_layer, embedding) {
            (Some(part), Some(embedding)) => {
                let (x, _) = add_normed(&between.x, &fed, post, None, None)?;
                let gated = part.forward(&x, embedding)?;
                Stream::add(&x, &gated, &part.post_per_layer_input_norm, scalar, next)?
            }
            _ => Stream::add(&between.x, &fed, post, scalar, next)?,
        };
        Ok((stream, seen))
    }
}

/// The residual stream `[B, L, hidden_size]` between two parts of the model, and the norm of it
/// that the second one takes.
pub(super) struct Stream {
    x: Array,
    pub(super) normed: Array,
}

impl Stream {
    /// The stream before the first part, whose norm is `next`.
    pub(super) fn new(x: Array, next: &RmsNorm) -> Result<Self> {
        let normed = next.forward(&x)?;
        Ok(Self { x, normed })
    }

    /// The stream `x` with the output of a part, normalized by `norm`, added.
    fn add(
        x: &Array,
        part: &Array,
        norm: &RmsNorm,
        scale: Option<&Array>,
        next: &RmsNorm,
    ) -> Result<Self> {
        match add_normed(x, part, norm, scale, Some(next))? {
            (x, Some(normed)) => Ok(Self { x, normed }),
            (x, None) => Self::new(x, next),
        }
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

    /// What is added to the stream once it is normalized.
    fn forward(&self, x: &Array, embedding: &Array) -> Result<Array> {
        let gate = self.per_layer_input_gate.forward(x)?;
        let gated = Activation::GeluTanh.gated(&gate, embedding)?;
        Ok(self.per_layer_projection.forward(&gated)?)
    }
}
