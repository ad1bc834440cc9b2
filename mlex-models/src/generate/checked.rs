//! Decoding in steps of several tokens: those that a grammar allows, and guesses that one step
//! checks.
//!
//! A step computes the logits after the last token and after each guess. Tokens are chosen one
//! after the other, as without guesses, until one is not the guess. What the cache has seen too
//! much of is taken back: trimmed where layers can, else the cache goes back to before the step,
//! and the tokens that were right are given to the model again with the next one.

use std::collections::VecDeque;
use std::time::Instant;

use mlex_core::{Array, async_eval};
use mlex_nn::Checkpoint;

use super::constraint::{Allowed, Guide};
use super::request::TokenLogprobs;
use super::speculate::Speculator;
use super::token_stream::{TokenStream, forward_ids, read_logprobs};
use crate::{Error, Result};

/// What a stream needs for it.
pub(super) struct Checks<'m> {
    guide: Option<Guide>,
    pub(super) speculator: Option<Speculator<'m>>,
    /// The prompt and all tokens that were chosen.
    tokens: Vec<u32>,
    /// Those at the end of `tokens` that the cache has not seen.
    pending: Vec<u32>,
    /// Those at the end of `tokens` that were not given out.
    queue: VecDeque<Chosen>,
    /// The state of the prompt's last position, before the first token.
    first: Option<Array>,
    /// The way back to before the last step, and what it gave to the model; where tokens of
    /// `queue` cannot be trimmed.
    undo: Option<(Checkpoint, Vec<u32>)>,
    /// The logits `[1, V]` of the next token, in an answer that a grammar leads, while they are
    /// computed.
    flight: Option<Array>,
    /// The most tokens that a step may choose.
    limit: usize,
    /// Nothing comes any more.
    pub(super) ended: bool,
    /// No further step is put ahead: there are guesses to be checked.
    pub(super) leaves: bool,
    /// When the last token was given out while the next one was computed already.
    clock: Option<Instant>,
}

struct Chosen {
    id: u32,
    logprobs: Option<TokenLogprobs>,
}

/// The logits of a step.
struct Logits {
    /// `[drafts + 1, V]`.
    rows: Array,
    /// The states `[1, L, D]` of what the model was given, the guesses last.
    hidden: Array,
    drafts: Vec<u32>,
    /// The way back to before it.
    checkpoint: Option<Checkpoint>,
}

impl<'m> Checks<'m> {
    /// Of a stream after `prompt`, whose last position has the state `hidden` `[1, D]`.
    pub(super) fn new(
        prompt: &[u32],
        hidden: &Array,
        guide: Option<Guide>,
        speculator: Option<Speculator<'m>>,
    ) -> Self {
        Self {
            guide,
            speculator,
            tokens: prompt.to_vec(),
            pending: Vec::new(),
            queue: VecDeque::new(),
            first: Some(hidden.clone()),
            undo: None,
            flight: None,
            limit: usize::MAX,
            ended: false,
            leaves: false,
            clock: None,
        }
    }

    /// Sets how many tokens the next steps may choose at most; they are not taken back.
    pub(super) fn set_limit(&mut self, limit: usize) {
        self.limit = limit.max(1);
    }

    /// Whether the answer is complete by its grammar.
    pub(super) fn is_complete(&self) -> bool {
        self.ended && self.guide.is_some()
    }

    /// How many guesses to check now.
    fn depth(&mut self, remaining: usize) -> usize {
        let most = remaining.min(self.limit).saturating_sub(1);
        match &mut self.speculator {
            // A first token has no state to go on from yet.
            Some(speculator) if self.first.is_none() => speculator.depth(&self.tokens, most),
            _ => 0,
        }
    }

    /// Whether what guesses has to see the states of every step.
    fn follows(&self) -> bool {
        self.speculator.as_ref().is_some_and(Speculator::follows)
    }

    fn learn(&mut self, checked: usize, accepted: usize, since: Instant) {
        if let Some(speculator) = &mut self.speculator {
            speculator.learn(checked, accepted, since.elapsed());
        }
    }
}

impl TokenStream<'_> {
    /// The next token of a stream with `checks`.
    pub(super) fn next_checked(&mut self, checks: &mut Checks<'_>) -> Result<Option<u32>> {
        while !checks.ended {
            if let Some(chosen) = checks.queue.pop_front() {
                self.remaining -= 1;
                self.last = chosen.logprobs;
                self.given(1)?;
                return Ok(Some(chosen.id));
            }
            if self.remaining == 0 {
                break;
            }
            if let Some(step) = self.next.take() {
                self.remaining -= 1;
                return self.next_ahead(&step, checks).map(Some);
            }
            if let Some(logits) = checks.flight.take() {
                return self.next_guided(&logits, checks);
            }
            checks.leaves = false;
            match checks.depth(self.remaining) {
                0 if !checks.follows() => self.go_ahead(checks)?,
                depth => self.check(checks, depth)?,
            }
        }
        Ok(None)
    }

    /// Starts on the next token without guesses: the steps after it are put ahead.
    fn go_ahead(&mut self, checks: &mut Checks<'_>) -> Result<()> {
        let hidden = match checks.first.take() {
            Some(hidden) => {
                checks.leaves = checks.depth(self.remaining) > 0;
                hidden
            }
            None => {
                let pending = std::mem::take(&mut checks.pending);
                forward_ids(self.model, self.cache, &pending)?.at(1, -1)?
            }
        };
        checks.undo = None;
        if let Some(guide) = &mut checks.guide {
            let logits = self.model.logits(&hidden)?;
            async_eval([&logits])?;
            guide.look_ahead(&[])?;
            checks.flight = Some(logits);
        } else {
            let next = self.choose(&hidden)?;
            async_eval([&next.token])?;
            self.next = Some(next);
        }
        Ok(())
    }

    /// The token of `logits` `[1, V]` that a grammar allows; none at its end. The step after it is
    /// on the device before the token is known, and what may come then is found meanwhile.
    fn next_guided(&mut self, logits: &Array, checks: &mut Checks<'_>) -> Result<Option<u32>> {
        let Some(mut guide) = checks.guide.take() else {
            return Ok(None);
        };
        let next = self.guided(logits, checks, &mut guide);
        checks.guide = Some(guide);
        next
    }

    fn guided(
        &mut self,
        logits: &Array,
        checks: &mut Checks<'_>,
        guide: &mut Guide,
    ) -> Result<Option<u32>> {
        let allowed = guide.allowed()?;
        if matches!(allowed, Allowed::End) {
            checks.ended = true;
            return Ok(None);
        }
        let step = self.choose_of(&allowed.apply(logits)?)?;
        let token = &step.token;
        self.remaining -= 1;
        if self.remaining > 0 && !checks.leaves {
            if self.waits()? {
                token.eval()?;
            }
            let hidden = self.forward_token(token)?;
            let logits = self.model.logits(&hidden)?;
            async_eval([token, &logits])?;
            checks.flight = Some(logits);
        }
        let id = self.read(&step)?;
        checks.tokens.push(id);
        guide.push(id)?;
        if let Some(since) = checks.clock.take() {
            checks.learn(0, 0, since);
        }
        if guide.is_finished() {
            checks.ended = true;
        } else if checks.flight.is_some() {
            guide.look_ahead(&[])?;
            checks.clock = Some(Instant::now());
            checks.leaves = checks.depth(self.remaining) > 0;
        } else {
            checks.pending.push(id);
        }
        Ok(Some(id))
    }

    /// The token of `step`, while the one after it is computed.
    fn next_ahead(
        &mut self,
        step: &super::token_stream::Step,
        checks: &mut Checks<'_>,
    ) -> Result<u32> {
        let id = self.step(step, !checks.leaves)?;
        checks.tokens.push(id);
        if let Some(since) = checks.clock.take() {
            checks.learn(0, 0, since);
        }
        if self.next.is_some() {
            checks.clock = Some(Instant::now());
            // The token after this one is on its way; the one after that may be guessed.
            checks.leaves = checks.depth(self.remaining) > 0;
        } else {
            checks.pending.push(id);
        }
        Ok(id)
    }

    /// One step with `depth` guesses at most.
    fn check(&mut self, checks: &mut Checks<'_>, depth: usize) -> Result<()> {
        let begun = Instant::now();
        let before = checks.pending.clone();
        let is_first = checks.first.is_some();
        let logits = self.logits(checks, depth)?;
        let chosen = self.choose_checked(checks, &logits)?;
        let Logits {
            drafts,
            checkpoint,
            hidden,
            ..
        } = logits;
        // The last token that was chosen has not been seen by the model, the guesses before it have.
        let right = chosen.saturating_sub(1);
        let excess = drafts.len() - right;
        let last = checks.tokens[checks.tokens.len() - chosen.min(1)..].to_vec();
        let seen = |right: usize| [&before[..], &drafts[..right]].concat();
        checks.undo = None;
        if let Some(checkpoint) = checkpoint {
            if excess == 0 {
                if !checkpoint.is_trim() {
                    checks.undo = Some((checkpoint, seen(right)));
                }
                checks.pending = last;
            } else if checkpoint.is_trim() {
                self.cache.trim(excess as i32)?;
                checks.pending = last;
            } else {
                self.cache.rewind(checkpoint)?;
                checks.pending = [seen(right), last].concat();
            }
        } else {
            checks.pending = last;
        }
        if let (Some(speculator), true) = (&mut checks.speculator, chosen > 0)
            && speculator.follows()
        {
            let count = hidden.dim(1)? - excess as i32;
            let start = checks.tokens.len() - 1 - count as usize;
            speculator.observe(&checks.tokens, start, &hidden.slice_axis(1, 0, count)?)?;
        }
        if !is_first {
            checks.learn(drafts.len(), right, begun);
        }
        Ok(())
    }

    /// Computes the logits after what the cache has not seen, and after guesses. While the device
    /// does, the grammar is asked what may come.
    fn logits(&mut self, checks: &mut Checks<'_>, depth: usize) -> Result<Logits> {
        let mut drafts = Vec::new();
        if let (Some(speculator), true) = (&mut checks.speculator, depth > 0) {
            drafts = speculator.draft(&checks.tokens, depth, &self.sampler)?;
            if let Some(guide) = &mut checks.guide {
                drafts.truncate(guide.count_allowed(&drafts)?);
            }
        }
        let (rows, hidden, checkpoint) = if let Some(hidden) = checks.first.take() {
            (self.model.logits(&hidden)?, hidden.expand_dims(1)?, None)
        } else {
            let input = [&checks.pending[..], &drafts[..]].concat();
            let guessed = (!drafts.is_empty()).then(|| self.cache.checkpoint(input.len() as i32));
            let hidden = forward_ids(self.model, self.cache, &input)?;
            let (count, first) = (input.len() as i32, checks.pending.len() as i32 - 1);
            let last = hidden.slice_axis(1, first, count)?.squeeze(0)?;
            (self.model.logits(&last)?, hidden, guessed)
        };
        if let Some(guide) = &mut checks.guide {
            async_eval([&rows])?;
            guide.look_ahead(&drafts)?;
        }
        Ok(Logits {
            rows,
            hidden,
            drafts,
            checkpoint,
        })
    }

    /// Chooses tokens up to the first that was not guessed. Gives their number, which is at most
    /// one more than the guesses.
    fn choose_checked(&mut self, checks: &mut Checks<'_>, logits: &Logits) -> Result<usize> {
        let Logits { rows, drafts, .. } = logits;
        let mut likeliest: Option<Vec<i32>> = None;
        if checks.guide.is_none() && self.top.is_none() && self.sampler.is_stateless() {
            likeliest = Some(self.sampler.sample(rows)?.to_vec()?);
        }
        for at in 0..=drafts.len() {
            let mut allowed = Allowed::All;
            if let Some(guide) = &mut checks.guide {
                allowed = guide.allowed()?;
                if matches!(allowed, Allowed::End) {
                    checks.ended = true;
                    return Ok(at);
                }
            }
            let mut logprobs = None;
            let id = if let Some(ids) = &likeliest {
                ids[at]
            } else {
                let row = rows.slice_axis(0, at as i32, at as i32 + 1)?;
                let row = allowed.apply(&row)?;
                if let Some(top) = self.top {
                    let (token, all) = self.sampler.sample_scored(&row)?;
                    logprobs = Some(read_logprobs(&all, &token, top)?);
                    token.item()?
                } else {
                    self.sampler.sample(&row)?.item()?
                }
            };
            let id = id as u32;
            checks.tokens.push(id);
            checks.queue.push_back(Chosen { id, logprobs });
            let mut complete = false;
            if let Some(guide) = &mut checks.guide {
                guide.push(id)?;
                complete = guide.is_finished();
            }
            if complete || drafts.get(at) != Some(&id) {
                return Ok(at + 1);
            }
        }
        Ok(drafts.len() + 1)
    }

    /// Puts `id` in place of the next token.
    pub(super) fn put_in_checked(&mut self, id: u32, checks: &mut Checks<'_>) -> Result<()> {
        if self.remaining == 0 || checks.ended {
            return Ok(());
        }
        if !checks.queue.is_empty() {
            if checks.guide.is_some() {
                let found = "a token within a step that was computed ahead";
                return Err(Error::unsupported("structured output", found));
            }
            self.take_back(checks)?;
            self.sampler.remember(&checks.tokens)?;
        }
        let token = Array::from_slice(&[id as i32], &[1])?;
        self.sampler.skip(&token)?;
        if let Some(guide) = &mut checks.guide {
            guide.put_in(id)?;
        }
        checks.first = None;
        checks.flight = None;
        checks.tokens.push(id);
        checks.pending.push(id);
        checks.queue.push_back(Chosen { id, logprobs: None });
        Ok(())
    }

    /// Takes back the tokens that were chosen and not given out.
    pub(super) fn take_back(&mut self, checks: &mut Checks<'_>) -> Result<()> {
        let count = checks.queue.len();
        checks.queue.clear();
        checks.tokens.truncate(checks.tokens.len() - count);
        let pending = count.min(checks.pending.len());
        checks.pending.truncate(checks.pending.len() - pending);
        let seen = count - pending;
        if seen == 0 {
            return Ok(());
        }
        match checks.undo.take() {
            Some((checkpoint, mut input)) => {
                self.cache.rewind(checkpoint)?;
                input.truncate(input.len() - seen);
                checks.pending = input;
            }
            None => self.cache.trim(seen as i32)?,
        }
        Ok(())
    }
}
