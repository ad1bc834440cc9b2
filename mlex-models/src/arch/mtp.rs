//! The head of Qwen3-Next and Qwen3.5 that predicts a further token (multi-token prediction): one
//! layer of attention on the model's last states and the embeddings of the tokens after them.
//!
//! Reference: vLLM `models/qwen3_5_mtp.py` and `models/qwen3_next_mtp.py`.

use mlex_core::Array;
use mlex_nn::{Cache, Linear, RmsNorm, Rope, Weights};

use super::mixed::{Block, LayerKind, MixedConfig, MixerKind};
use super::stream::{Masks, Stream, StreamScales, check_cache};
use crate::model::{Input, MtpHead};
use crate::{Error, Result};

/// `norm(layer(fc([norm(embedding of the next token), norm(state)])))`.
pub(crate) struct Mtp {
    fc: Linear,
    layer: Block,
    pre_fc_norm_embedding: RmsNorm,
    pre_fc_norm_hidden: RmsNorm,
    norm: RmsNorm,
}

impl Mtp {
    /// Takes the head of a model with this config from `weights`.
    pub(crate) fn load(config: &MixedConfig, weights: &Weights) -> Result<Self> {
        config.validate()?;
        let hidden_size = config.attention.hidden_size;
        let norm = |name: &str| RmsNorm::load(&weights.pp(name), hidden_size, config.rms_norm_eps);
        let last = config.layers.last();
        let last = last.ok_or_else(|| Error::missing("a layer before the MTP head"))?;
        let kind = LayerKind {
            mixer: MixerKind::GatedAttention,
            mlp: last.mlp,
        };
        let rope = Rope::new(&config.rope)?;
        let width = hidden_size.saturating_mul(2);
        Ok(Self {
            fc: Linear::load(&weights.pp("fc"), width, hidden_size, false)?,
            layer: Block::load(&weights.pp("layers").pp(0), config, kind, &rope)?,
            pre_fc_norm_embedding: norm("pre_fc_norm_embedding")?,
            pre_fc_norm_hidden: norm("pre_fc_norm_hidden")?,
            norm: norm("norm")?,
        })
    }
}

impl MtpHead for Mtp {
    fn new_cache(&self) -> Result<Cache> {
        Ok(Cache::attention(1))
    }

    fn forward(&self, embeddings: &Array, hidden: &Array, cache: &mut Cache) -> Result<Array> {
        check_cache(cache, 1)?;
        let embeddings = self.pre_fc_norm_embedding.forward(embeddings)?;
        let hidden = self.pre_fc_norm_hidden.forward(hidden)?;
        let both = Array::concatenate([&embeddings, &hidden], -1)?;
        let x = self.fc.forward(&both)?;
        let mut masks = Masks::new(Input::Embeddings(&x))?;
        let state = &mut cache.layers_mut()[0];
        masks.add(None, state.attention()?)?;
        let mut stream = Stream::of(x, StreamScales::default());
        self.layer.forward(&mut stream, &masks, None, state)?;
        stream.norm(&self.norm)
    }
}
