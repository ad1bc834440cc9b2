//! The repetition penalty of greedy decoding, for many positions at once.

use mlex_core::{Array, Dtype};
use mlex_nn::dispatch::argmax;

use crate::generate::SamplerConfig;
use crate::{Error, Result};

/// Tokens so far, and how those that have occurred are penalized: as [`Sampler`] does it.
///
/// [`Sampler`]: crate::generate::Sampler
pub(super) struct Penalty {
    /// Divides positive logits, multiplies others.
    factor: f32,
    /// How many of the last tokens count.
    context: usize,
    vocab_size: usize,
    seen: Vec<u32>,
}

/// Refuses a sampler that is not greedy, or does more than a repetition penalty.
pub(super) fn check(sampler: &SamplerConfig) -> Result<()> {
    let greedy = "0, since blocks are decoded greedily";
    let refuse = |field: &str, found: String| Err(Error::field(field, greedy, found));
    if sampler.temperature >= super::super::sampler::GREEDY_BELOW {
        return refuse("temperature", sampler.temperature.to_string());
    }
    if sampler.presence_penalty != 0.0 {
        return refuse("presence_penalty", sampler.presence_penalty.to_string());
    }
    if sampler.frequency_penalty != 0.0 {
        return refuse("frequency_penalty", sampler.frequency_penalty.to_string());
    }
    if let Some(dry) = &sampler.dry {
        return refuse("dry.multiplier", dry.multiplier.to_string());
    }
    if !sampler.logit_bias.is_empty() {
        let found = format!("{} of them", sampler.logit_bias.len());
        return Err(Error::field("logit_bias", "none for blocks", found));
    }
    Ok(())
}

impl Penalty {
    pub(super) fn new(sampler: &SamplerConfig, vocab_size: i32, prompt: &[u32]) -> Self {
        let factor = sampler.repetition_penalty;
        Self {
            factor,
            context: sampler.penalty_context as usize,
            vocab_size: usize::try_from(vocab_size).unwrap_or_default(),
            seen: prompt.to_vec(),
        }
    }

    /// Notes tokens that have been given out.
    pub(super) fn extend(&mut self, ids: &[u32]) {
        self.seen.extend_from_slice(ids);
    }

    fn is_off(&self) -> bool {
        self.factor == 1.0 || self.context == 0
    }

    /// The last tokens that count.
    fn recent(&self) -> &[u32] {
        &self.seen[self.seen.len().saturating_sub(self.context)..]
    }

    /// Logits `[N, V]` in f32, those of tokens that have occurred penalized.
    pub(super) fn apply(&self, logits: &Array) -> Result<Array> {
        let logits = logits.as_type(Dtype::Float32)?;
        if self.is_off() || self.recent().is_empty() {
            return Ok(logits);
        }
        let mut occurs = vec![false; self.vocab_size];
        for &id in self.recent() {
            if let Some(occurs) = occurs.get_mut(id as usize) {
                *occurs = true;
            }
        }
        let occurs = Array::from_slice(&occurs, &[1, self.vocab_size as i32])?;
        let negative = logits.less(0.0)?;
        let penalized =
            negative.where_(&logits.multiply(self.factor)?, &logits.divide(self.factor)?)?;
        Ok(occurs.where_(&penalized, &logits)?)
    }

    /// The likeliest token of each row of logits `[N, V]`, after the tokens so far.
    pub(super) fn likeliest(&self, logits: &Array) -> Result<Vec<u32>> {
        let logits = if self.is_off() {
            logits.clone()
        } else {
            self.apply(logits)?
        };
        let ids: Vec<i32> = argmax(&logits)?.to_vec()?;
        Ok(ids.into_iter().map(|id| id as u32).collect())
    }

    /// The likeliest token of each row of logits `[N, V]`, row `i` after the tokens so far and
    /// `ids[..= i]`.
    pub(super) fn likeliest_after(&self, logits: &Array, ids: &[u32]) -> Result<Vec<u32>> {
        if self.is_off() {
            return self.likeliest(logits);
        }
        let mut all: Vec<f32> = logits.as_type(Dtype::Float32)?.to_vec()?;
        let mut seen = self.seen.clone();
        let mut found = Vec::with_capacity(ids.len());
        let mut occurs = vec![false; self.vocab_size];
        for (row, &id) in all.chunks_exact_mut(self.vocab_size.max(1)).zip(ids) {
            seen.push(id);
            let recent = &seen[seen.len().saturating_sub(self.context)..];
            for &id in recent {
                let id = id as usize;
                if id < row.len() && !std::mem::replace(&mut occurs[id], true) {
                    let logit = &mut row[id];
                    *logit = if *logit < 0.0 {
                        *logit * self.factor
                    } else {
                        *logit / self.factor
                    };
                }
            }
            for &id in recent {
                if let Some(occurs) = occurs.get_mut(id as usize) {
                    *occurs = false;
                }
            }
            found.push(first_largest(row));
        }
        Ok(found)
    }
}

/// The place of the largest number, of several the first.
fn first_largest(row: &[f32]) -> u32 {
    let mut best = 0;
    for (index, value) in row.iter().enumerate() {
        if *value > row[best] {
            best = index;
        }
    }
    best as u32
}
