//! How likely a text is: teacher-forced log-probabilities.

use mlex_core::{Array, Dtype, memory};

use super::request::TokenLogprob;
use super::token_stream::forward_ids;
use crate::model::Model;
use crate::{Error, Result};

/// How many positions are projected to logits at once.
const STEP: usize = 128;

/// The log-probabilities of a sequence of tokens.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Score {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// The natural logarithm of each token's probability after those before it; the first has
    /// none.
    pub logprobs: Vec<Option<f32>>,
    /// The likeliest tokens at each position, likeliest first; none at the first.
    pub top: Vec<Vec<TokenLogprob>>,
}

impl Score {
    /// `exp` of the mean negative log-probability; none for a single token.
    pub fn perplexity(&self) -> Option<f64> {
        let known: Vec<f64> = self
            .logprobs
            .iter()
            .flatten()
            .map(|&lp| f64::from(lp))
            .collect();
        let mean = known.iter().sum::<f64>() / known.len() as f64;
        (!known.is_empty()).then(|| (-mean).exp())
    }
}

/// Scores `tokens`, with the `top` likeliest alternatives of each position.
///
/// # Errors
/// When there are no tokens, one is outside of the vocabulary, or MLX fails.
pub fn score(model: &dyn Model, tokens: &[u32], top: usize) -> Result<Score> {
    if tokens.is_empty() {
        return Err(Error::field("tokens", "at least one", "none"));
    }
    let top = i32::try_from(top)
        .unwrap_or(i32::MAX)
        .min(model.info().vocab_size);
    let mut cache = model.new_cache()?;
    let mut score = Score {
        tokens: tokens.to_vec(),
        logprobs: vec![None],
        top: vec![Vec::new()],
    };
    // The last token is only predicted, so it is not given to the model.
    let (inputs, targets) = (&tokens[..tokens.len() - 1], &tokens[1..]);
    if let Some(&id) = tokens.last() {
        check_last(model, id)?;
    }
    for (inputs, targets) in inputs.chunks(STEP).zip(targets.chunks(STEP)) {
        let hidden = forward_ids(model, &mut cache, inputs)?;
        let logits = model.logits(&hidden)?.squeeze(0)?.as_type(Dtype::Float32)?;
        let logprobs = logits.subtract(&logits.logsumexp(&[-1], true)?)?;
        let ids: Vec<i32> = targets.iter().map(|&id| id as i32).collect();
        let ids = Array::from_slice(&ids, &[ids.len() as i32, 1])?;
        let chosen: Vec<f32> = logprobs.take_along_axis(&ids, -1)?.to_vec()?;
        score.logprobs.extend(chosen.into_iter().map(Some));
        score.top.extend(likeliest(&logprobs, top)?);
        memory::clear_cache()?;
    }
    Ok(score)
}

fn check_last(model: &dyn Model, id: u32) -> Result<()> {
    let vocab_size = model.info().vocab_size;
    if i64::from(id) < i64::from(vocab_size) {
        return Ok(());
    }
    Err(Error::field(
        "token",
        format!("an id below {vocab_size}"),
        id.to_string(),
    ))
}

/// The `count` likeliest tokens of each row of `logprobs` `[L, V]`, likeliest first.
pub(super) fn likeliest(logprobs: &Array, count: i32) -> Result<Vec<Vec<TokenLogprob>>> {
    let rows = logprobs.dim(0)? as usize;
    if count <= 0 {
        return Ok(vec![Vec::new(); rows]);
    }
    let negative = logprobs.negative()?;
    let ids = negative
        .argpartition(count - 1, -1)?
        .slice_axis(-1, 0, count)?;
    let order = negative.take_along_axis(&ids, -1)?.argsort(-1)?;
    let ids = ids.take_along_axis(&order, -1)?;
    let values: Vec<f32> = logprobs.take_along_axis(&ids, -1)?.to_vec()?;
    let ids: Vec<u32> = ids.as_type(Dtype::Uint32)?.to_vec()?;
    let count = count as usize;
    let row = |(ids, values): (&[u32], &[f32])| {
        ids.iter()
            .zip(values)
            .map(|(&id, &logprob)| TokenLogprob { id, logprob })
            .collect()
    };
    Ok(ids
        .chunks(count)
        .zip(values.chunks(count))
        .map(row)
        .collect())
}
