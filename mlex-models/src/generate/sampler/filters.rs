//! Which tokens are left to draw from.

use mlex_core::{Array, Dtype, random};

use super::{SamplerConfig, Xtc};
use crate::Result;

/// The filters of a sampler. They look at the probabilities at temperature 1.
#[derive(Clone, Debug)]
pub(super) struct Filters {
    typical_p: f32,
    top_p: f32,
    top_k: u32,
    min_p: f32,
    xtc: Option<(Xtc, Array)>,
}

impl Filters {
    pub(super) fn new(config: &SamplerConfig, vocab_size: i32) -> Result<Self> {
        let xtc = config.xtc.as_ref().filter(|xtc| xtc.probability > 0.0);
        let xtc = xtc
            .map(|xtc| -> Result<(Xtc, Array)> {
                // 1 for tokens that may be left out.
                let mut free = vec![1.0f32; usize::try_from(vocab_size).unwrap_or(0)];
                for &id in &xtc.keep {
                    if let Some(token) = free.get_mut(id as usize) {
                        *token = 0.0;
                    }
                }
                Ok((xtc.clone(), Array::from_slice(&free, &[1, vocab_size])?))
            })
            .transpose()?;
        Ok(Self {
            typical_p: config.typical_p,
            top_p: config.top_p,
            top_k: config.top_k,
            min_p: config.min_p,
            xtc,
        })
    }

    /// A token, `[1]`, drawn from what the filters leave of `logits` `[1, V]`.
    pub(super) fn draw(&self, logits: &Array, temperature: f32, key: &Array) -> Result<Array> {
        let mut logprobs = logits.subtract(&logits.logsumexp(&[-1], true)?)?;
        if self.typical_p < 1.0 {
            logprobs = keep_typical(&logprobs, self.typical_p)?;
        }
        let vocab_size = logprobs.dim(-1)?;
        let top_k = i32::try_from(self.top_k).unwrap_or(i32::MAX);
        let limited = top_k > 0 && top_k < vocab_size;
        if self.top_p >= 1.0 && !limited && self.xtc.is_none() {
            // Nothing needs an order.
            let kept = keep_min_p(&logprobs, &logprobs.max(&[-1], true)?, self.min_p)?;
            return Ok(random::categorical(
                &kept.multiply(1.0 / temperature)?,
                -1,
                key,
            )?);
        }
        // Each filter keeps the likeliest tokens up to some place, so together they keep the
        // fewest of them, in whatever order they are applied; except for XTC, which comes
        // before the limit on their number.
        let negative = logprobs.negative()?;
        let order = if limited && self.xtc.is_none() {
            let ids = negative
                .argpartition(top_k - 1, -1)?
                .slice_axis(-1, 0, top_k)?;
            let within = negative.take_along_axis(&ids, -1)?.argsort(-1)?;
            ids.take_along_axis(&within, -1)?
        } else {
            negative.argsort(-1)?
        };
        let mut sorted = logprobs.take_along_axis(&order, -1)?;
        sorted = keep_min_p(&sorted, &sorted.slice_axis(-1, 0, 1)?, self.min_p)?;
        if self.top_p < 1.0 {
            // A token stays when those before it have not reached the sum yet.
            let before = sorted.exp()?.cumsum(-1, false, false)?;
            let out = before.greater_equal(self.top_p)?;
            sorted = out.where_(f32::NEG_INFINITY, &sorted)?;
        }
        let mut key = key.clone();
        if let Some((xtc, free)) = &self.xtc {
            let keys = random::split(&key, 2)?;
            key = keys.at(0, 0)?;
            let free = free.take_along_axis(&order, -1)?;
            sorted = leave_out_top(&sorted, &free, xtc, &keys.at(0, 1)?)?;
            if limited {
                // The place of a token among those that are left.
                let left = sorted.greater(f32::NEG_INFINITY)?.as_type(Dtype::Float32)?;
                let place = left.cumsum(-1, false, true)?;
                let out = place.greater(top_k as f32)?;
                sorted = out.where_(f32::NEG_INFINITY, &sorted)?;
            }
        }
        let place = random::categorical(&sorted.multiply(1.0 / temperature)?, -1, &key)?;
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

/// Of `logprobs` `[1, V]` those nearest to the expected surprise, up to the first with which
/// they reach `mass`, as log-probabilities of their own.
fn keep_typical(logprobs: &Array, mass: f32) -> Result<Array> {
    let probabilities = logprobs.exp()?;
    // A forbidden token, 0 * -inf, counts nothing.
    let forbidden = logprobs.less_equal(f32::NEG_INFINITY)?;
    let bounded = forbidden.where_(0.0, logprobs)?;
    let expected = probabilities.multiply(&bounded)?.sum(&[-1], true)?;
    // |-log p - H|, where H is minus the expected log-probability.
    let distance = bounded.subtract(&expected)?.abs()?;
    let distance = forbidden.where_(f32::INFINITY, &distance)?;
    let order = distance.argsort(-1)?;
    let before = probabilities
        .take_along_axis(&order, -1)?
        .cumsum(-1, false, false)?;
    let sorted = logprobs.take_along_axis(&order, -1)?;
    let out = before.greater_equal(mass)?;
    let kept = out.where_(f32::NEG_INFINITY, &sorted)?;
    let kept = logprobs.put_along_axis(&order, &kept, -1)?;
    Ok(kept.subtract(&kept.logsumexp(&[-1], true)?)?)
}

/// `logprobs` `[1, n]` without those above the threshold, the least likely of them excepted;
/// with a probability, and where `free` `[1, n]` is 1.
fn leave_out_top(logprobs: &Array, free: &Array, xtc: &Xtc, key: &Array) -> Result<Array> {
    let all = logprobs.logsumexp(&[-1], true)?;
    let probabilities = logprobs.subtract(&all)?.exp()?;
    let below = probabilities.less_equal(xtc.threshold)?;
    let least = below
        .where_(f32::INFINITY, &probabilities)?
        .min(&[-1], true)?;
    let above = probabilities.greater(&least)?.as_type(Dtype::Float32)?;
    let happens = random::uniform(0.0, 1.0, &[1, 1], Dtype::Float32, key)?
        .less_equal(xtc.probability)?
        .as_type(Dtype::Float32)?;
    let out = above.multiply(free)?.multiply(&happens)?.greater(0.5)?;
    Ok(out.where_(f32::NEG_INFINITY, logprobs)?)
}
