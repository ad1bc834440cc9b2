//! A layer: attention, a dense feed-forward part with experts beside it, and the gate on the
//! layer's own embedding of each token. Each part is normalized before and after.

use mlex_core::Array;
use mlex_nn::{
    Activation, CacheUpdate, GatedMlp, KvCache, Linear, Mask, Offset, RmsNorm, Sequence, Value,
    Weights, add_normed, record_add_normed,
};

use super::attention::{Attention, KeysValues, Source};
use super::config::{ExpertsConfig, LayerConfig, TextConfig};
use super::experts::Mixture;
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
        source: Source<&mut KvCache, &KeysValues>,
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

    /// [`forward`](Self::forward) in steps; none where one has no kernel. A layer with keys and
    /// values of its own gives what becomes of its cache.
    #[expect(
        clippy::too_many_arguments,
        reason = "those of `forward` and the sequence"
    )]
    pub(super) fn record(
        &self,
        sequence: &mut Sequence,
        stream: RecordedStream,
        embedding: Option<Value>,
        mask: &Mask,
        offset: &Offset,
        source: Source<&KvCache, &CacheUpdate>,
        next: &RmsNorm,
    ) -> Result<Option<(RecordedStream, Option<CacheUpdate>)>> {
        let attention = &self.self_attn;
        let attended = attention.record(sequence, stream.normed, mask, offset, source)?;
        let Some((attended, update)) = attended else {
            return Ok(None);
        };
        let post = &self.post_attention_layernorm;
        let between = &self.pre_feedforward_layernorm;
        let Some(between) = stream.add(sequence, attended, post, None, between)? else {
            return Ok(None);
        };
        let stream = self.record_rest(sequence, between, embedding, next)?;
        Ok(stream.map(|stream| (stream, update)))
    }

    /// What follows after the attention.
    fn record_rest(
        &self,
        sequence: &mut Sequence,
        between: RecordedStream,
        embedding: Option<Value>,
        next: &RmsNorm,
    ) -> Result<Option<RecordedStream>> {
        let mut fed = self.mlp.record(sequence, between.normed)?;
        if let (Some(dense), Some(experts)) = (fed, &self.experts) {
            fed = experts.record(sequence, dense, between.x)?;
        }
        let Some(fed) = fed else {
            return Ok(None);
        };
        let post = &self.post_feedforward_layernorm;
        let scalar = Some(&self.layer_scalar);
        let (Some(part), Some(embedding)) = (&self.per_layer, embedding) else {
            return between.add(sequence, fed, post, scalar, next);
        };
        let Some((x, _)) = record_add_normed(sequence, between.x, fed, post, None, None)? else {
            return Ok(None);
        };
        let Some(gated) = part.record(sequence, x, embedding)? else {
            return Ok(None);
        };
        let between = RecordedStream { x, ..between };
        between.add(
            sequence,
            gated,
            &part.post_per_layer_input_norm,
            scalar,
            next,
        )
    }
}

/// A [`Stream`] in steps of a sequence.
#[derive(Clone, Copy)]
pub(super) struct RecordedStream {
    x: Value,
    pub(super) normed: Value,
}

impl RecordedStream {
    /// As [`Stream::new`]; none where there is no kernel for it.
    pub(super) fn new(sequence: &mut Sequence, x: Value, next: &RmsNorm) -> Result<Option<Self>> {
        let normed = next.record(sequence, x)?;
        Ok(normed.map(|normed| Self { x, normed }))
    }

    /// As [`Stream::add`]; none where there is no kernel for it.
    fn add(
        self,
        sequence: &mut Sequence,
        part: Value,
        norm: &RmsNorm,
        scale: Option<&Array>,
        next: &RmsNorm,
    ) -> Result<Option<Self>> {
        let added = record_add_normed(sequence, self.x, part, norm, scale, Some(next))?;
        Ok(added.and_then(|(x, normed)| Some(Self { x, normed: normed? })))
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
    mixture: Mixture,
    post_feedforward_layernorm_1: RmsNorm,
    post_feedforward_layernorm_2: RmsNorm,
    pre_feedforward_layernorm_2: RmsNorm,
}

impl ExpertPart {
    fn load(weights: &Weights, config: &TextConfig, experts: ExpertsConfig) -> Result<Self> {
        let norm = |name| load_norm(weights, config, name);
        Ok(Self {
            mixture: Mixture::load(weights, config, experts)?,
            post_feedforward_layernorm_1: norm("post_feedforward_layernorm_1")?,
            post_feedforward_layernorm_2: norm("post_feedforward_layernorm_2")?,
            pre_feedforward_layernorm_2: norm("pre_feedforward_layernorm_2")?,
        })
    }

    /// The sum of both parts: `dense` is what the dense one gave, `x` the stream before it.
    fn forward(&self, dense: &Array, x: &Array) -> Result<Array> {
        let normed = self.pre_feedforward_layernorm_2.forward(x)?;
        let sparse = self.mixture.forward(&normed, x)?;
        let dense = self.post_feedforward_layernorm_1.forward(dense)?;
        Ok(dense.add(&self.post_feedforward_layernorm_2.forward(&sparse)?)?)
    }

    /// [`forward`](Self::forward) in steps; none where one has no kernel.
    fn record(&self, sequence: &mut Sequence, dense: Value, x: Value) -> Result<Option<Value>> {
        let Some(normed) = self.pre_feedforward_layernorm_2.record(sequence, x)? else {
            return Ok(None);
        };
        let Some(sparse) = self.mixture.record(sequence, normed, x)? else {
            return Ok(None);
        };
        let dense = self.post_feedforward_layernorm_1.record(sequence, dense)?;
        let sparse = self.post_feedforward_layernorm_2.record(sequence, sparse)?;
        let (Some(dense), Some(sparse)) = (dense, sparse) else {
            return Ok(None);
        };
        Ok(sequence.add(dense, sparse, 1.0))
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

    /// [`forward`](Self::forward) in steps; none where one has no kernel.
    fn record(&self, sequence: &mut Sequence, x: Value, embedding: Value) -> Result<Option<Value>> {
        let Some(gate) = self.per_layer_input_gate.record(sequence, x)? else {
            return Ok(None);
        };
        let Some(gated) = sequence.gate(Activation::GeluTanh, gate, embedding) else {
            return Ok(None);
        };
        Ok(self.per_layer_projection.record(sequence, gated)?)
    }
}
