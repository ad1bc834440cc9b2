//! From logits to the next token.
//!
//! Everything here is nodes of the graph, so that a step can be put on the device before the
//! one before it is done. Filters follow mlx-lm `sample_utils.py`: they look at the
//! probabilities at temperature 1, and the temperature acts on what is left.

use std::collections::BTreeMap;

use mlex_core::{Array, Dtype, random};
use mlex_nn::dispatch::argmax;

use crate::{Error, Result};

/// Below this temperature the likeliest token is taken: logits that far apart have no chance,
/// and dividing by less would leave the range of f32.
const GREEDY_BELOW: f32 = 1e-6;

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
    fn has_penalties(&self) -> bool {
        self.penalty_context > 0
            && (self.repetition_penalty != 1.0
                || self.presence_penalty != 0.0
                || self.frequency_penalty != 0.0)
    }
}

/// Chooses tokens by a [`SamplerConfig`]; remembers recent tokens and its random state.
#[derive(Clone, Debug)]
pub struct Sampler {
    config: SamplerConfig,
    key: Array,
    /// How many tokens count as recent.
    penalty_context: i32,
    /// Recent tokens, int32 `[n]`, where a penalty needs them.
    recent: Option<Array>,
    /// Ids int32 `[1, n]` and what is added to their logits, `[1, n]`.
    bias: Option<(Array, Array)>,
}

impl Sampler {
    /// A sampler for a vocabulary; `prompt` are the tokens so far, which penalties count.
    ///
    /// # Errors
    /// When a number of the config is outside of its range.
    pub fn new(config: SamplerConfig, vocab_size: i32, prompt: &[u32]) -> Result<Self> {
        config.validate(vocab_size)?;
        let key = random::key(config.seed.unwrap_or_else(entropy))?;
        let recent = if config.has_penalties() {
            let keep = (config.penalty_context as usize).min(prompt.len());
            let ids: Vec<i32> = prompt[prompt.len() - keep..]
                .iter()
                .map(|&id| id as i32)
                .collect();
            Some(Array::from_slice(&ids, &[keep as i32])?)
        } else {
            None
        };
        let bias = if config.logit_bias.is_empty() {
            None
        } else {
            let ids: Vec<i32> = config.logit_bias.keys().map(|&id| id as i32).collect();
            let values: Vec<f32> = config.logit_bias.values().copied().collect();
            let shape = [1, ids.len() as i32];
            Some((
                Array::from_slice(&ids, &shape)?,
                Array::from_slice(&values, &shape)?,
            ))
        };
        let penalty_context = i32::try_from(config.penalty_context).unwrap_or(i32::MAX);
        Ok(Self {
            config,
            key,
            penalty_context,
            recent,
            bias,
        })
    }

    /// The next token, int32 `[1]`, of logits `[1, vocab_size]`.
    ///
    /// # Errors
    /// When MLX refuses.
    pub fn sample(&mut self, logits: &Array) -> Result<Array> {
        let greedy = self.config.temperature < GREEDY_BELOW;
        if greedy && self.bias.is_none() && self.recent.is_none() {
            return Ok(argmax(logits)?);
        }
        let logits = self.penalized(logits.as_type(Dtype::Float32)?)?;
        let token = if greedy {
            argmax(&logits)?
        } else {
            let keys = random::split(&self.key, 2)?;
            self.key = keys.at(0, 0)?;
            self.draw(&logits, &keys.at(0, 1)?)?
        };
        let token = token.as_type(Dtype::Int32)?;
        if let Some(recent) = &self.recent {
            let all = Array::concatenate([recent, &token], 0)?;
            let count = all.dim(0)?;
            let start = (count - self.penalty_context).max(0);
            self.recent = Some(all.slice_axis(0, start, count)?);
        }
        Ok(token)
    }

    /// `logits` with the bias and the penalties.
    fn penalized(&self, mut logits: Array) -> Result<Array> {
        if let Some((ids, values)) = &self.bias {
            let biased = logits.take_along_axis(ids, -1)?.add(values)?;
            logits = logits.put_along_axis(ids, &biased, -1)?;
        }
        let Some(recent) = self.recent.as_ref().filter(|recent| recent.size() > 0) else {
            return Ok(logits);
        };
        let ids = recent.expand_dims(0)?;
        let Self { config, .. } = self;
        if config.repetition_penalty != 1.0 || config.presence_penalty != 0.0 {
            // A token that occurs twice is written twice, with the same value.
            let mut chosen = logits.take_along_axis(&ids, -1)?;
            if config.repetition_penalty != 1.0 {
                let penalty = config.repetition_penalty;
                let negative = chosen.less(0.0)?;
                chosen = negative.where_(&chosen.multiply(penalty)?, &chosen.divide(penalty)?)?;
            }
            chosen = chosen.subtract(config.presence_penalty)?;
            logits = logits.put_along_axis(&ids, &chosen, -1)?;
        }
        if config.frequency_penalty != 0.0 {
            let values = Array::full(ids.shape(), -config.frequency_penalty, Dtype::Float32)?;
            logits = logits.scatter_add_axis(&ids, &values, -1)?;
        }
        Ok(logits)
    }

    /// A token drawn from what the filters leave of `logits` `[1, V]`.
    fn draw(&self, logits: &Array, key: &Array) -> Result<Array> {
        let SamplerConfig {
            temperature,
            top_p,
            top_k,
            min_p,
            ..
        } = self.config;
        let logprobs = logits.subtract(&logits.logsumexp(&[-1], true)?)?;
        let vocab_size = logprobs.dim(-1)?;
        let top_k = i32::try_from(top_k).unwrap_or(i32::MAX);
        let limited = top_k > 0 && top_k < vocab_size;
        if top_p >= 1.0 && !limited {
            // Nothing needs an order.
            let kept = keep_min_p(&logprobs, &logprobs.max(&[-1], true)?, min_p)?;
            return Ok(random::categorical(
                &kept.multiply(1.0 / temperature)?,
                -1,
                key,
            )?);
        }
        // Each filter keeps the likeliest tokens up to some place, so together they keep the
        // fewest of them, in whatever order they are applied.
        let negative = logprobs.negative()?;
        let order = if limited {
            let ids = negative
                .argpartition(top_k - 1, -1)?
                .slice_axis(-1, 0, top_k)?;
            let within = negative.take_along_axis(&ids, -1)?.argsort(-1)?;
            ids.take_along_axis(&within, -1)?
        } else {
            negative.argsort(-1)?
        };
        let mut sorted = logprobs.take_along_axis(&order, -1)?;
        sorted = keep_min_p(&sorted, &sorted.slice_axis(-1, 0, 1)?, min_p)?;
        if top_p < 1.0 {
            // A token stays when those before it have not reached the sum yet.
            let before = sorted.exp()?.cumsum(-1, false, false)?;
            let out = before.greater_equal(top_p)?;
            sorted = out.where_(f32::NEG_INFINITY, &sorted)?;
        }
        let place = random::categorical(&sorted.multiply(1.0 / temperature)?, -1, key)?;
        let token = order.take_along_axis(&place.expand_dims(-1)?, -1)?;
        Ok(token.squeeze(-1)?)
    }
}

/// `logprobs` without those below `min_p` times the likeliest, `top` `[1, 1]`.
fn keep_min_p(logprobs: &Array, top: &Array, min_p: f32) -> Result<Array> {
    if min_p == 0.0 {
        return Ok(logprobs.clone());
    }
    let out = logprobs.less(&top.add(min_p.ln())?)?;
    Ok(out.where_(f32::NEG_INFINITY, logprobs)?)
}

/// A seed that differs from run to run.
fn entropy() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::time::SystemTime::now())
}
