//! From logits to the next token.
//!
//! Everything here is nodes of the graph, so that a step can be put on the device before the
//! one before it is done. Filters follow mlx-lm `sample_utils.py`: they look at the
//! probabilities at temperature 1, and the temperature acts on what is left.

mod config;
mod dry;
mod filters;

use std::sync::Arc;

use mlex_core::{Array, Dtype, random};
use mlex_nn::dispatch::argmax;

pub use config::{SamplerConfig, Xtc};
pub use dry::Dry;

use crate::Result;
use dry::History;
use filters::Filters;

/// Below this temperature the likeliest token is taken: logits that far apart have no chance,
/// and dividing by less would leave the range of f32.
pub(super) const GREEDY_BELOW: f32 = 1e-6;

/// Chooses tokens by a [`SamplerConfig`]; remembers recent tokens and its random state.
#[derive(Clone, Debug)]
pub struct Sampler {
    config: Arc<SamplerConfig>,
    key: Array,
    /// How many tokens count as recent.
    penalty_context: i32,
    /// Recent tokens, int32 `[n]`, where a penalty needs them.
    recent: Option<Array>,
    /// Ids int32 `[1, n]` and what is added to their logits, `[1, n]`.
    bias: Option<(Array, Array)>,
    /// The tokens so far, where repeated passages are looked for.
    history: Option<History>,
    filters: Filters,
}

impl Sampler {
    /// A sampler for a vocabulary; `prompt` are the tokens so far, which penalties count.
    ///
    /// # Errors
    /// When a number of the config is outside of its range.
    pub fn new(config: SamplerConfig, vocab_size: i32, prompt: &[u32]) -> Result<Self> {
        config.validate(vocab_size)?;
        let key = random::key(config.seed.unwrap_or_else(entropy))?;
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
        let filters = Filters::new(&config, vocab_size)?;
        let penalty_context = i32::try_from(config.penalty_context).unwrap_or(i32::MAX);
        let mut sampler = Self {
            config: Arc::new(config),
            key,
            penalty_context,
            recent: None,
            bias,
            history: None,
            filters,
        };
        sampler.remember(prompt)?;
        Ok(sampler)
    }

    /// Takes `tokens` for all that there are so far.
    ///
    /// # Errors
    /// When MLX is out of memory.
    pub fn remember(&mut self, tokens: &[u32]) -> Result<()> {
        if self.config.has_penalties() {
            let keep = (self.config.penalty_context as usize).min(tokens.len());
            let ids = tokens[tokens.len() - keep..].iter();
            let ids: Vec<i32> = ids.map(|&id| id as i32).collect();
            self.recent = Some(Array::from_slice(&ids, &[keep as i32])?);
        }
        self.history = self.config.dry.is_some().then(|| History::new(tokens));
        Ok(())
    }

    /// The next token, int32 `[1]`, of logits `[1, vocab_size]`.
    ///
    /// # Errors
    /// When MLX refuses.
    pub fn sample(&mut self, logits: &Array) -> Result<Array> {
        if self.is_stateless() {
            return Ok(argmax(logits)?);
        }
        let logits = self.penalized(logits.as_type(Dtype::Float32)?)?;
        self.choose(&logits)
    }

    /// The next token, and the log-probabilities of all, f32 `[1, vocab_size]`, with bias and
    /// penalties, before temperature and filters; so mlx-lm gives them.
    ///
    /// # Errors
    /// When MLX refuses.
    pub fn sample_scored(&mut self, logits: &Array) -> Result<(Array, Array)> {
        let logits = self.penalized(logits.as_type(Dtype::Float32)?)?;
        let logprobs = logits.subtract(&logits.logsumexp(&[-1], true)?)?;
        Ok((self.choose(&logits)?, logprobs))
    }

    /// Puts `token`, int32 `[1]`, in place of the one that was chosen last.
    ///
    /// # Errors
    /// When MLX refuses.
    pub fn replace_last(&mut self, token: &Array) -> Result<()> {
        if let Some(recent) = &self.recent {
            let count = recent.dim(0)?;
            let before = recent.slice_axis(0, 0, (count - 1).max(0))?;
            self.recent = Some(Array::concatenate([&before, token], 0)?);
        }
        if let Some(history) = &mut self.history {
            history.push(token);
        }
        Ok(())
    }

    /// Takes `token`, int32 `[1]`, for one that it has chosen: it draws the same numbers after it.
    ///
    /// # Errors
    /// When MLX refuses.
    pub fn skip(&mut self, token: &Array) -> Result<()> {
        if !self.is_greedy() {
            self.key = random::split(&self.key, 2)?.at(0, 0)?;
        }
        if let Some(history) = &mut self.history {
            history.settle()?;
        }
        self.note(token)
    }

    /// Whether it takes the likeliest token whatever there was before, so that
    /// [`sample`](Self::sample) takes logits of several positions, `[n, vocab_size]`, and gives
    /// `[n]`.
    pub fn is_stateless(&self) -> bool {
        self.is_greedy() && !self.changes_logits()
    }

    fn is_greedy(&self) -> bool {
        self.config.temperature < GREEDY_BELOW
    }

    fn changes_logits(&self) -> bool {
        self.bias.is_some() || self.recent.is_some() || self.history.is_some()
    }

    /// A token by penalized logits, which is remembered.
    fn choose(&mut self, logits: &Array) -> Result<Array> {
        let token = if self.is_greedy() {
            argmax(logits)?
        } else {
            let keys = random::split(&self.key, 2)?;
            self.key = keys.at(0, 0)?;
            self.filters
                .draw(logits, self.config.temperature, &keys.at(0, 1)?)?
        };
        let token = token.as_type(Dtype::Int32)?;
        self.note(&token)?;
        Ok(token)
    }

    fn note(&mut self, token: &Array) -> Result<()> {
        if let Some(recent) = &self.recent {
            let all = Array::concatenate([recent, token], 0)?;
            let count = all.dim(0)?;
            let start = (count - self.penalty_context).max(0);
            self.recent = Some(all.slice_axis(0, start, count)?);
        }
        if let Some(history) = &mut self.history {
            history.push(token);
        }
        Ok(())
    }

    /// `logits` with the bias and the penalties.
    fn penalized(&mut self, mut logits: Array) -> Result<Array> {
        if let Some((ids, values)) = &self.bias {
            let biased = logits.take_along_axis(ids, -1)?.add(values)?;
            logits = logits.put_along_axis(ids, &biased, -1)?;
        }
        if let (Some(history), Some(dry)) = (&mut self.history, &self.config.dry) {
            logits = history.penalize(dry, logits)?;
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
}

/// A seed that differs from run to run.
fn entropy() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::time::SystemTime::now())
}
