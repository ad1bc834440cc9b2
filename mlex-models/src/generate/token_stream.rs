//! The loop of prefill and decode, as an iterator of tokens.

use mlex_core::{Array, Device, Stream, async_eval, eval, memory};
use mlex_nn::Cache;

use super::Sampler;
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
    pub prefill_step: usize,
}

impl Default for StreamOptions {
    fn default() -> Self {
        Self {
            max_tokens: usize::MAX,
            prefill_step: 512,
        }
    }
}

/// Tokens that continue a prompt, one after the other.
///
/// While the caller handles a token, the device computes the next one already. It ends after
/// `max_tokens` or an error; end-of-text tokens are the caller's to notice.
pub struct TokenStream<'m> {
    model: &'m dyn Model,
    cache: &'m mut Cache,
    sampler: Sampler,
    /// The next token, being computed: int32 `[1]`.
    next: Option<Array>,
    /// Tokens still to be given out.
    remaining: usize,
    given: usize,
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
        mut sampler: Sampler,
        prompt: &[u32],
        options: StreamOptions,
        on_progress: &mut dyn FnMut(PrefillProgress) -> bool,
    ) -> Result<Self> {
        let hidden = prefill(model, cache, prompt, options.prefill_step, on_progress)?;
        let next = match hidden {
            Some(hidden) if options.max_tokens > 0 => {
                let next = sampler.sample(&model.logits(&hidden)?)?;
                async_eval([&next])?;
                Some(next)
            }
            _ => None,
        };
        let remaining = if next.is_some() {
            options.max_tokens
        } else {
            0
        };
        Ok(Self {
            model,
            cache,
            sampler,
            next,
            remaining,
            given: 0,
        })
    }

    /// The graph of the step after `token`, not started yet.
    fn build(&mut self, token: &Array) -> Result<Array> {
        let hidden = self
            .model
            .forward(Input::Tokens(&token.expand_dims(0)?), self.cache)?;
        self.sampler
            .sample(&self.model.logits(&hidden.squeeze(1)?)?)
    }

    fn step(&mut self, token: &Array) -> Result<u32> {
        // Built while the device still computes `token`.
        self.next = if self.remaining > 0 {
            Some(self.build(token)?)
        } else {
            None
        };
        // The device is given its next step before this one is waited for, except where a
        // finished step lets the cache be updated in place: until then its arrays are in use, and
        // on a CPU the copy would cost more than the wait.
        if Stream::current()?.device() == Device::Cpu && !self.cache.can_queue() {
            token.eval()?;
        }
        async_eval(&self.next)?;
        let id: i32 = token.item()?;
        self.given += 1;
        if self.given.is_multiple_of(CLEAR_CACHE_EVERY) {
            memory::clear_cache()?;
        }
        Ok(id as u32)
    }
}

impl Iterator for TokenStream<'_> {
    type Item = Result<u32>;

    fn next(&mut self) -> Option<Self::Item> {
        let token = self.next.take()?;
        self.remaining -= 1;
        Some(self.step(&token))
    }
}

/// Gives `prompt` to the model in steps of at most `step` tokens. Returns the hidden state
/// `[1, D]` of the last position, or nothing when `on_progress` said to stop.
///
/// # Errors
/// When the prompt is empty, has a token outside of the vocabulary, or MLX fails.
pub(super) fn prefill(
    model: &dyn Model,
    cache: &mut Cache,
    prompt: &[u32],
    step: usize,
    on_progress: &mut dyn FnMut(PrefillProgress) -> bool,
) -> Result<Option<Array>> {
    let total = prompt.len();
    let mut processed = 0;
    let mut last = None;
    for chunk in prompt.chunks(step.max(1)) {
        let hidden = forward_ids(model, cache, chunk)?;
        processed += chunk.len();
        if processed < total {
            eval(cache.arrays())?;
            memory::clear_cache()?;
        } else {
            // Computed before it is reported, as the chunks before it are.
            let hidden = hidden.at(1, -1)?;
            hidden.eval()?;
            last = Some(hidden);
        }
        if !on_progress(PrefillProgress { processed, total }) {
            return Ok(None);
        }
    }
    last.map(Some)
        .ok_or_else(|| Error::field("prompt", "at least one token", "none"))
}

/// Hidden states `[1, L, D]` of checked token ids.
pub(super) fn forward_ids(model: &dyn Model, cache: &mut Cache, ids: &[u32]) -> Result<Array> {
    let vocab_size = model.info().vocab_size;
    let check = |&id: &u32| match i32::try_from(id) {
        Ok(id) if id < vocab_size => Ok(id),
        _ => {
            let expected = format!("an id below {vocab_size}");
            Err(Error::field("token", expected, id.to_string()))
        }
    };
    let ids = ids.iter().map(check).collect::<Result<Vec<_>>>()?;
    let tokens = Array::from_slice(&ids, &[1, ids.len() as i32])?;
    model.forward(Input::Tokens(&tokens), cache)
}
