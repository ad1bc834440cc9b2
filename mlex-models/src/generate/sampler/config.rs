//! How tokens are chosen, as numbers.

use std::collections::{BTreeMap, BTreeSet};

use super::Dry;
use crate::{Error, Result};

/// How tokens are chosen. The default is greedy: the likeliest token.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerConfig {
    /// Flattens (above 1) or sharpens (below 1) the distribution; 0 is greedy, and so is
    /// anything below 1e-6.
    pub temperature: f32,
    /// Only the likeliest tokens whose probabilities reach this sum; 1 is all.
    pub top_p: f32,
    /// Only so many of the likeliest tokens; 0 is all.
    pub top_k: u32,
    /// Only tokens with at least this share of the likeliest one's probability; 0 is all.
    pub min_p: f32,
    /// Only the tokens whose surprise is nearest to the expected one, that together reach this
    /// probability; 1 is all. It acts before the other filters ("Locally Typical Sampling",
    /// arXiv 2202.00666, as transformers' `TypicalLogitsWarper`).
    pub typical_p: f32,
    /// Leaves out likely tokens now and then.
    pub xtc: Option<Xtc>,
    /// Makes repetitions of longer and longer passages less likely.
    pub dry: Option<Dry>,
    /// Makes sampling repeatable; without one it differs from run to run.
    pub seed: Option<u64>,
    /// Divides (if positive, else multiplies) the logits of recent tokens; 1 is none
    /// ("CTRL: A Conditional Transformer Language Model").
    pub repetition_penalty: f32,
    /// Subtracted from the logits of recent tokens.
    pub presence_penalty: f32,
    /// Subtracted from the logits of recent tokens for each time that they occur.
    pub frequency_penalty: f32,
    /// How many tokens, of the prompt too, count as recent.
    pub penalty_context: u32,
    /// Added to the logits of single tokens.
    pub logit_bias: BTreeMap<u32, f32>,
}

impl Default for SamplerConfig {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            typical_p: 1.0,
            xtc: None,
            dry: None,
            seed: None,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_context: 64,
            logit_bias: BTreeMap::new(),
        }
    }
}

impl SamplerConfig {
    /// Checks the ranges.
    ///
    /// # Errors
    /// When a number is outside of its range; the error names it.
    pub fn validate(&self, vocab_size: i32) -> Result<()> {
        let check = |field: &str, ok: bool, expected: &str, found: f32| {
            if ok {
                Ok(())
            } else {
                Err(Error::field(field, expected, found.to_string()))
            }
        };
        let Self {
            temperature,
            top_p,
            min_p,
            typical_p,
            repetition_penalty,
            ..
        } = *self;
        let at_least_0 = temperature.is_finite() && temperature >= 0.0;
        check(
            "temperature",
            at_least_0,
            "a number of at least 0",
            temperature,
        )?;
        check(
            "top_p",
            top_p > 0.0 && top_p <= 1.0,
            "a number above 0 and up to 1",
            top_p,
        )?;
        check(
            "min_p",
            (0.0..=1.0).contains(&min_p),
            "a number from 0 to 1",
            min_p,
        )?;
        check(
            "typical_p",
            typical_p > 0.0 && typical_p <= 1.0,
            "a number above 0 and up to 1",
            typical_p,
        )?;
        if let Some(xtc) = &self.xtc {
            xtc.validate(&check)?;
        }
        if let Some(dry) = &self.dry {
            dry.validate(&check)?;
        }
        let positive = repetition_penalty.is_finite() && repetition_penalty > 0.0;
        check(
            "repetition_penalty",
            positive,
            "a positive number",
            repetition_penalty,
        )?;
        for (field, value) in [
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ] {
            check(field, value.is_finite(), "a number", value)?;
        }
        for (&id, &bias) in &self.logit_bias {
            if i64::from(id) >= i64::from(vocab_size) {
                let expected = format!("token ids below {vocab_size}");
                return Err(Error::field("logit_bias", expected, id.to_string()));
            }
            check("logit_bias", bias < f32::INFINITY, "a number or -inf", bias)?;
        }
        Ok(())
    }

    /// Whether the choice depends on the tokens before.
    pub(super) fn has_penalties(&self) -> bool {
        self.penalty_context > 0
            && (self.repetition_penalty != 1.0
                || self.presence_penalty != 0.0
                || self.frequency_penalty != 0.0)
    }
}

/// Exclude Top Choices: with some probability, of the tokens above a threshold all but the
/// least likely one are left out (text-generation-webui, as mlx-lm's `apply_xtc`: after `top_p`
/// and `min_p`, before `top_k`, on what they leave).
#[derive(Clone, Debug, PartialEq)]
pub struct Xtc {
    /// How often, from 0 to 1.
    pub probability: f32,
    /// The probability above which a token is a top choice, up to 0.5.
    pub threshold: f32,
    /// Tokens that are never left out. A session adds the end-of-text tokens and the line break,
    /// as mlx-lm's server does.
    pub keep: BTreeSet<u32>,
}

impl Xtc {
    /// With this probability and threshold, for all tokens.
    pub fn new(probability: f32, threshold: f32) -> Self {
        Self {
            probability,
            threshold,
            keep: BTreeSet::new(),
        }
    }

    fn validate(&self, check: &dyn Fn(&str, bool, &str, f32) -> Result<()>) -> Result<()> {
        let Self {
            probability,
            threshold,
            ..
        } = *self;
        check(
            "xtc.probability",
            (0.0..=1.0).contains(&probability),
            "a number from 0 to 1",
            probability,
        )?;
        check(
            "xtc.threshold",
            (0.0..=0.5).contains(&threshold),
            "a number from 0 to 0.5",
            threshold,
        )
    }
}
