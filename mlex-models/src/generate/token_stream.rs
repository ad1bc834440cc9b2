//! The loop of prefill and decode, as an iterator of tokens.

use std::ops::Range;

use mlex_core::{Array, Device, Stream, async_eval, eval, memory};
use mlex_nn::Cache;

use super::checked::Checks;
use super::constraint::Guide;
use super::request::TokenLogprobs;
use super::score::likeliest;
use super::speculate::{DraftCounts, Speculator};
use super::{PrefillStep, Sampler};
use crate::media::MediaPrompt;
use crate::model::{Input, Model};
use crate::{Error, Result};

/// After so many tokens the buffers that MLX keeps for reuse are given back, as mlx-lm does:
/// the cache's growth leaves sizes behind that do not come again.
const CLEAR_CACHE_EVERY: usize = 256;

/// How far a prefill is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillProgress {
    /// Prompt tokens that the model has seen.
    pub processed: usize,
    /// Prompt tokens in all.
    pub total: usize,
}

/// The settings of a [`TokenStream`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamOptions {
    /// The most tokens that are generated.
    pub max_tokens: usize,
    /// How many prompt tokens are given to the model at once.
    pub prefill_step: PrefillStep,
    /// Computes the log-probability of each token, and so many of the likeliest ones.
    pub logprobs: Option<usize>,
}

impl Default for StreamOptions {
    fn default() -> Self {
        Self {
            max_tokens: usize::MAX,
            prefill_step: PrefillStep::ByDevice,
            logprobs: None,
        }
    }
}

/// Tokens that continue a prompt, one after the other.
///
/// While the caller handles a token, the device computes the next one already. It ends after
/// `max_tokens` or an error; end-of-text tokens are the caller's to notice.
pub struct TokenStream<'m> {
    pub(super) model: &'m dyn Model,
    pub(super) cache: &'m mut Cache,
    pub(super) sampler: Sampler,
    pub(super) next: Option<Step>,
    /// How many of the likeliest tokens are given beside each.
    pub(super) top: Option<i32>,
    /// The log-probabilities at the token that was given last.
    pub(super) last: Option<TokenLogprobs>,
    /// Tokens still to be given out.
    pub(super) remaining: usize,
    given: usize,
    /// Where a grammar leads it, or tokens are guessed.
    checks: Option<Box<Checks<'m>>>,
}

/// A token that is being computed.
pub(super) struct Step {
    /// int32 `[1]`.
    pub(super) token: Array,
    /// Those of all tokens, f32 `[1, V]`, where they are asked for.
    logprobs: Option<Array>,
}

impl std::fmt::Debug for TokenStream<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TokenStream")
            .field("remaining", &self.remaining)
            .finish_non_exhaustive()
    }
}

impl<'m> TokenStream<'m> {
    /// Prefills `cache` with `prompt`, in steps, and starts on the first token.
    /// `on_progress` is called after every step; returning `false` from it ends the prefill,
    /// and the stream, early.
    ///
    /// # Errors
    /// When the prompt is empty, has a token outside of the vocabulary, or MLX fails.
    pub fn new(
        model: &'m dyn Model,
        cache: &'m mut Cache,
        sampler: Sampler,
        prompt: &[u32],
        options: StreamOptions,
        on_progress: &mut dyn FnMut(PrefillProgress) -> bool,
    ) -> Result<Self> {
        let prompt = MediaPrompt::from(prompt.to_vec());
        let all = 0..prompt.ids().len();
        let step = options.prefill_step;
        let hidden = prefill(model, cache, &prompt, all, step, on_progress)?;
        let mut stream = Self::empty(model, cache, sampler, options);
        if let Some(hidden) = hidden {
            stream.start(&hidden, options.max_tokens)?;
        }
        Ok(stream)
    }

    /// Goes on from a prompt that `cache` holds. `hidden` `[1, D]` is the state of its last
    /// position.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn after(
        model: &'m dyn Model,
        cache: &'m mut Cache,
        sampler: Sampler,
        hidden: &Array,
        options: StreamOptions,
    ) -> Result<Self> {
        let mut stream = Self::empty(model, cache, sampler, options);
        stream.start(hidden, options.max_tokens)?;
        Ok(stream)
    }

    /// Prefills `cache` with `prompt`, as [`new`](Self::new), and goes on with guesses.
    ///
    /// # Errors
    /// When the prompt is empty, has a token outside of the vocabulary, or MLX fails.
    pub fn speculating(
        model: &'m dyn Model,
        cache: &'m mut Cache,
        sampler: Sampler,
        prompt: &[u32],
        options: StreamOptions,
        speculator: Speculator<'m>,
    ) -> Result<Self> {
        let whole = prompt.to_vec().into();
        let (all, step) = (0..prompt.len(), options.prefill_step);
        let hidden = prefill(model, cache, &whole, all, step, &mut |_| true)?;
        let hidden = hidden.ok_or_else(|| Error::missing("a prompt"))?;
        let stream = Self::empty(model, cache, sampler, options);
        Ok(stream.checked(prompt, &hidden, options, None, Some(speculator)))
    }

    /// [`after`](Self::after) `prompt`, with a grammar or guesses.
    pub(super) fn after_checked(
        model: &'m dyn Model,
        cache: &'m mut Cache,
        sampler: Sampler,
        (prompt, hidden): (&[u32], &Array),
        options: StreamOptions,
        (guide, speculator): (Option<Guide>, Option<Speculator<'m>>),
    ) -> Result<Self> {
        if guide.is_none() && speculator.is_none() {
            return Self::after(model, cache, sampler, hidden, options);
        }
        let stream = Self::empty(model, cache, sampler, options);
        Ok(stream.checked(prompt, hidden, options, guide, speculator))
    }

    fn checked(
        mut self,
        prompt: &[u32],
        hidden: &Array,
        options: StreamOptions,
        guide: Option<Guide>,
        speculator: Option<Speculator<'m>>,
    ) -> Self {
        self.remaining = options.max_tokens;
        let checks = Checks::new(prompt, hidden, guide, speculator);
        self.checks = Some(Box::new(checks));
        self
    }

    fn empty(
        model: &'m dyn Model,
        cache: &'m mut Cache,
        sampler: Sampler,
        options: StreamOptions,
    ) -> Self {
        let vocab_size = model.info().vocab_size;
        let top = |top| i32::try_from(top).unwrap_or(i32::MAX).min(vocab_size);
        Self {
            model,
            cache,
            sampler,
            next: None,
            top: options.logprobs.map(top),
            last: None,
            remaining: 0,
            given: 0,
            checks: None,
        }
    }

    fn start(&mut self, hidden: &Array, max_tokens: usize) -> Result<()> {
        if max_tokens > 0 {
            let next = self.choose(hidden)?;
            async_eval([&next.token])?;
            self.next = Some(next);
            self.remaining = max_tokens;
        }
        Ok(())
    }

    /// The log-probabilities at the token that was given last, where they were asked for. A
    /// token that was put in has none.
    pub fn logprobs(&self) -> Option<&TokenLogprobs> {
        self.last.as_ref()
    }

    /// Puts `id` in place of the next token. Nothing happens when there is none.
    ///
    /// # Errors
    /// When the vocabulary does not have it, or MLX fails.
    pub fn put_in(&mut self, id: u32) -> Result<()> {
        let vocab_size = self.model.info().vocab_size;
        let id = i32::try_from(id).ok().filter(|id| *id < vocab_size);
        let id = id.ok_or_else(|| {
            let expected = format!("an id below {vocab_size}");
            Error::field("token", expected, "a greater one")
        })?;
        if self.next.is_none()
            && let Some(mut checks) = self.checks.take()
        {
            let done = self.put_in_checked(id as u32, &mut checks);
            self.checks = Some(checks);
            return done;
        }
        if let Some(next) = &mut self.next {
            next.token = Array::from_slice(&[id], &[1])?;
            next.logprobs = None;
            self.sampler.replace_last(&next.token)?;
        }
        Ok(())
    }

    /// Sets how many tokens may be computed before they are asked for, at least one; where a token
    /// shall be [put in](Self::put_in), none may be.
    pub fn set_limit(&mut self, limit: usize) {
        if let Some(checks) = &mut self.checks {
            checks.set_limit(limit);
        }
    }

    /// Whether it has ended because a grammar allows nothing more.
    pub(super) fn is_complete(&self) -> bool {
        self.checks
            .as_ref()
            .is_some_and(|checks| checks.is_complete())
    }

    /// How many tokens were guessed.
    pub fn draft_counts(&self) -> DraftCounts {
        let checks = self.checks.as_ref();
        let speculator = checks.and_then(|checks| checks.speculator.as_ref());
        speculator.map(Speculator::counts).unwrap_or_default()
    }

    /// Takes back what the cache has seen of tokens that were not given out. Nothing comes after.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn finish(&mut self) -> Result<()> {
        self.remaining = 0;
        match self.checks.take() {
            Some(mut checks) => {
                let done = self.take_back(&mut checks);
                checks.ended = true;
                self.checks = Some(checks);
                done
            }
            None => Ok(()),
        }
    }

    /// The token after the position whose state is `hidden` `[1, D]`, not started yet.
    pub(super) fn choose(&mut self, hidden: &Array) -> Result<Step> {
        let logits = self.model.logits(hidden)?;
        self.choose_of(&logits)
    }

    /// The token of `logits` `[1, V]`, not started yet.
    pub(super) fn choose_of(&mut self, logits: &Array) -> Result<Step> {
        if self.top.is_none() {
            let token = self.sampler.sample(logits)?;
            return Ok(Step {
                token,
                logprobs: None,
            });
        }
        let (token, logprobs) = self.sampler.sample_scored(logits)?;
        Ok(Step {
            token,
            logprobs: Some(logprobs),
        })
    }

    /// The state `[1, D]` after `token` `[1]`, not started yet.
    pub(super) fn forward_token(&mut self, token: &Array) -> Result<Array> {
        let input = token.expand_dims(0)?;
        let hidden = self.model.forward(Input::Tokens(&input), self.cache)?;
        self.cache.settle()?;
        Ok(hidden.squeeze(1)?)
    }

    /// The token of `step`; unless it is the last one or `ahead` is not set, the next step is
    /// started.
    pub(super) fn step(&mut self, step: &Step, ahead: bool) -> Result<u32> {
        let token = &step.token;
        // Built while the device still computes `token`.
        self.next = if self.remaining > 0 && ahead {
            let hidden = self.forward_token(token)?;
            Some(self.choose(&hidden)?)
        } else {
            None
        };
        if self.waits()? {
            token.eval()?;
        }
        async_eval(self.next.as_ref().map(|next| &next.token))?;
        self.read(step)
    }

    /// Whether a step is to be done before the next one is given to the device. In general the
    /// device is given that first, except where a finished step lets the cache be updated in place:
    /// until then its arrays are in use, and on a CPU the copy would cost more than the wait.
    pub(super) fn waits(&self) -> Result<bool> {
        Ok(Stream::current()?.device() == Device::Cpu && !self.cache.can_queue())
    }

    /// Waits for the token of `step`, which is given out.
    pub(super) fn read(&mut self, step: &Step) -> Result<u32> {
        let id: i32 = step.token.item()?;
        self.last = match (&step.logprobs, self.top) {
            (Some(logprobs), Some(top)) => Some(read_logprobs(logprobs, &step.token, top)?),
            _ => None,
        };
        self.given(1)?;
        Ok(id as u32)
    }

    /// Counts tokens that were given out.
    pub(super) fn given(&mut self, count: usize) -> Result<()> {
        self.given += count;
        if self.given.is_multiple_of(CLEAR_CACHE_EVERY) {
            memory::clear_cache()?;
        }
        Ok(())
    }
}

/// The log-probabilities at `token` `[1]`, of all `[1, V]`.
pub(super) fn read_logprobs(logprobs: &Array, token: &Array, top: i32) -> Result<TokenLogprobs> {
    let chosen = logprobs.take_along_axis(&token.expand_dims(0)?, -1)?;
    let mut likeliest = likeliest(logprobs, top)?;
    Ok(TokenLogprobs {
        logprob: chosen.item()?,
        top: likeliest.pop().unwrap_or_default(),
    })
}

impl Iterator for TokenStream<'_> {
    type Item = Result<u32>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(mut checks) = self.checks.take() {
            let next = self.next_checked(&mut checks);
            checks.ended |= next.is_err();
            self.checks = Some(checks);
            return next.transpose();
        }
        let step = self.next.take()?;
        self.remaining -= 1;
        Some(self.step(&step, true))
    }
}

/// Gives the tokens `range` of `prompt` to the model in steps of `step`. Returns the
/// hidden state `[1, D]` of the last position, or nothing when `on_progress` said to stop.
///
/// # Errors
/// When the prompt is empty, has a token outside of the vocabulary, or MLX fails.
pub(super) fn prefill(
    model: &dyn Model,
    cache: &mut Cache,
    prompt: &MediaPrompt,
    range: Range<usize>,
    step: PrefillStep,
    on_progress: &mut dyn FnMut(PrefillProgress) -> bool,
) -> Result<Option<Array>> {
    let forward = |cache: &mut Cache, processed: usize| {
        let start = range.start + processed;
        let step = step.after(start)?.min(range.end - start);
        let end = prompt.step_end(start, step);
        let end = end.min(range.end);
        let hidden = prompt.forward(model, cache, start..end)?;
        Ok((hidden, end - range.start))
    };
    prefill_by(forward, cache, range.len(), on_progress)
}

/// Gives `total` tokens to a model by a function that takes how many it has been given and returns
/// the hidden states of some more, and how many there are then; as [`prefill`].
pub(super) fn prefill_by(
    mut forward: impl FnMut(&mut Cache, usize) -> Result<(Array, usize)>,
    cache: &mut Cache,
    total: usize,
    on_progress: &mut dyn FnMut(PrefillProgress) -> bool,
) -> Result<Option<Array>> {
    let mut processed = 0;
    let mut last = None;
    cache.reserve(total);
    while processed < total {
        let (hidden, given) = forward(cache, processed)?;
        cache.settle()?;
        processed = given;
        if processed < total {
            eval(cache.arrays())?;
        } else {
            // Computed before it is reported, as the chunks before it are.
            let hidden = hidden.at(1, -1)?;
            hidden.eval()?;
            last = Some(hidden);
        }
        // The large buffers of a piece do not come again in a step of decoding.
        memory::clear_cache()?;
        if !on_progress(PrefillProgress { processed, total }) {
            return Ok(None);
        }
    }
    last.map(Some)
        .ok_or_else(|| Error::field("prompt", "at least one token", "none"))
}

/// Hidden states `[1, L, D]` of checked token ids.
pub(super) fn forward_ids(model: &dyn Model, cache: &mut Cache, ids: &[u32]) -> Result<Array> {
    let prompt = MediaPrompt::from(ids.to_vec());
    prompt.forward(model, cache, 0..ids.len())
}
