//! The fields of Dhara's config.json.

use mlex_nn::{Canon, CanonConfig, Weights};
use serde::Deserialize;

use crate::config::{ModelConfig, check, check_layers, check_positive, check_size, head_dim};
use crate::{Error, Result};

/// The repetition penalty of the model card, which mlx-optiq takes too.
const REPETITION_PENALTY: f32 = 1.3;

/// The fields of config.json.
#[derive(Debug, Deserialize)]
#[serde(default)]
pub(super) struct Config {
    pub(super) model_type: String,
    pub(super) hidden_size: i32,
    pub(super) num_hidden_layers: i32,
    pub(super) intermediate_size: i32,
    pub(super) num_attention_heads: i32,
    pub(super) num_key_value_heads: i32,
    pub(super) vocab_size: i32,
    pub(super) rms_norm_eps: f32,
    pub(super) rope_theta: f32,
    pub(super) max_position_embeddings: Option<i32>,
    pub(super) tie_word_embeddings: bool,
    pub(super) use_qk_norm: bool,
    pub(super) use_logit_softcap: bool,
    pub(super) logit_softcap: f32,
    pub(super) canon_set: String,
    pub(super) canon_kernel: i32,
    pub(super) canon_residual: bool,
    pub(super) canon_activation: bool,
    pub(super) canon_bias: bool,
    pub(super) mask_token_id: u32,
    head_dim: Option<i32>,
    /// Of generation_config.json.
    #[serde(skip)]
    repetition_penalty: Option<f32>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            model_type: "dhara_ar".to_owned(),
            hidden_size: 768,
            num_hidden_layers: 32,
            intermediate_size: 2176,
            num_attention_heads: 12,
            num_key_value_heads: 4,
            vocab_size: 49155,
            rms_norm_eps: 1e-6,
            rope_theta: 8_000_000.0,
            max_position_embeddings: None,
            tie_word_embeddings: true,
            use_qk_norm: true,
            use_logit_softcap: true,
            logit_softcap: 30.0,
            canon_set: "ABCD".to_owned(),
            canon_kernel: 4,
            canon_residual: true,
            canon_activation: false,
            canon_bias: false,
            mask_token_id: 49152,
            head_dim: None,
            repetition_penalty: None,
        }
    }
}

impl Config {
    pub(super) fn new(config: &ModelConfig) -> Result<Self> {
        let mut parsed: Self = config.parse()?;
        parsed.repetition_penalty = config.repetition_penalty()?;
        parsed.validate()?;
        Ok(parsed)
    }

    fn validate(&mut self) -> Result<()> {
        check_size("vocab_size", self.vocab_size)?;
        check_size("hidden_size", self.hidden_size)?;
        check_size("intermediate_size", self.intermediate_size)?;
        check_layers("num_hidden_layers", self.num_hidden_layers)?;
        check_size("num_attention_heads", self.num_attention_heads)?;
        let kv_heads = self.num_key_value_heads;
        check(
            "num_key_value_heads",
            kv_heads,
            1..=self.num_attention_heads,
        )?;
        if self.num_attention_heads % kv_heads != 0 {
            let expected = format!("a divisor of the {} query heads", self.num_attention_heads);
            let found = kv_heads.to_string();
            return Err(Error::field("num_key_value_heads", expected, found));
        }
        check_positive("rms_norm_eps", self.rms_norm_eps)?;
        let head_dim = match self.head_dim {
            Some(head_dim) => head_dim,
            None => head_dim(self.hidden_size, self.num_attention_heads)?,
        };
        check_size("head_dim", head_dim)?;
        let width = self.num_attention_heads.saturating_mul(head_dim);
        check_size("num_attention_heads * head_dim", width)?;
        self.head_dim = Some(head_dim);
        if let Some(place) = self
            .canon_set
            .chars()
            .find(|place| !"ABCD".contains(*place))
        {
            return Err(Error::unsupported("canon_set", format!("{place:?}")));
        }
        if !self.logit_softcap.is_finite() {
            let found = self.logit_softcap.to_string();
            return Err(Error::field("logit_softcap", "a number", found));
        }
        Ok(())
    }

    /// The width of a head, once the config is checked.
    pub(super) fn head_dim(&self) -> i32 {
        self.head_dim.unwrap_or_default()
    }

    /// The Canon layer `name` of a place, where the model has any there.
    pub(super) fn canon(
        &self,
        weights: &Weights,
        place: char,
        name: &str,
        channels: i32,
    ) -> Result<Option<Canon>> {
        if !self.has_canon(place) {
            return Ok(None);
        }
        let config = CanonConfig {
            kernel: self.canon_kernel,
            bias: self.canon_bias,
            activation: self.canon_activation,
            residual: self.canon_residual,
        };
        Ok(Some(Canon::load(&weights.pp(name), channels, config)?))
    }

    /// The logits' bound, where there is one.
    pub(super) fn cap(&self) -> Option<f32> {
        (self.use_logit_softcap && self.logit_softcap > 0.0).then_some(self.logit_softcap)
    }

    /// Whether there are Canon layers at a place.
    pub(super) fn has_canon(&self, place: char) -> bool {
        self.canon_set.contains(place)
    }

    /// What greedy decoding of these models is made for, where generation_config.json does not say
    /// something else.
    pub(super) fn repetition_penalty(&self) -> f32 {
        self.repetition_penalty.unwrap_or(REPETITION_PENALTY)
    }
}
