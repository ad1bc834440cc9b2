//! Guesses of a smaller model.

use mlex_core::{Array, Device, Stream, eval};
use mlex_nn::{Cache, Checkpoint};

use super::Drafter;
use crate::Result;
use crate::generate::PrefillStep;
use crate::generate::Sampler;
use crate::generate::token_stream::forward_ids;
use crate::model::{Input, Model};

/// A model and what it has seen.
pub(super) struct DraftModel<'m> {
    model: &'m dyn Model,
    cache: Cache,
    /// The tokens in `cache`.
    seen: Vec<u32>,
    /// The way back to before the last guesses.
    checkpoint: Option<Checkpoint>,
    prefill_step: PrefillStep,
}

impl<'m> DraftModel<'m> {
    pub(super) fn new(model: &'m dyn Model, prefill_step: PrefillStep) -> Result<Self> {
        Ok(Self {
            model,
            cache: model.new_cache()?,
            seen: Vec::new(),
            checkpoint: None,
            prefill_step,
        })
    }

    /// Forgets what is not at the start of `tokens`, and their last one, whose state is needed.
    fn go_back(&mut self, tokens: &[u32]) -> Result<()> {
        let same = self.seen.iter().zip(tokens);
        let same = same.take_while(|(a, b)| a == b).count();
        let keep = same.min(tokens.len().saturating_sub(1));
        let extra = (self.seen.len() - keep) as i32;
        let checkpoint = self.checkpoint.take();
        if self.cache.can_trim(extra) {
            self.cache.trim(extra)?;
            self.seen.truncate(keep);
            return Ok(());
        }
        let usable = |checkpoint: &Checkpoint| checkpoint.len() as usize <= keep;
        if let Some(checkpoint) = checkpoint.filter(usable) {
            self.seen.truncate(checkpoint.len() as usize);
            self.cache.rewind(checkpoint)?;
        } else {
            self.seen.clear();
            self.cache = self.model.new_cache()?;
        }
        Ok(())
    }

    /// Takes `tokens` in, and gives the state `[1, D]` of the last one.
    fn follow(&mut self, tokens: &[u32]) -> Result<Option<Array>> {
        self.go_back(tokens)?;
        let mut last = None;
        while self.seen.len() < tokens.len() {
            let rest = &tokens[self.seen.len()..];
            let step = self.prefill_step.after(self.seen.len())?;
            let chunk = &rest[..step.min(rest.len())];
            let hidden = forward_ids(self.model, &mut self.cache, chunk)?;
            self.seen.extend_from_slice(chunk);
            if self.seen.len() < tokens.len() {
                eval(self.cache.arrays())?;
            }
            last = Some(hidden.at(1, -1)?);
        }
        Ok(last)
    }
}

impl Drafter for DraftModel<'_> {
    fn class(&mut self, tokens: &[u32]) -> Option<usize> {
        // A model may know more tokens than its tokenizer does, and the smaller one fewer.
        let limit = self.model.info().vocab_size;
        let known = |&id: &u32| i64::from(id) < i64::from(limit);
        (!tokens.is_empty() && tokens.iter().all(known)).then_some(0)
    }

    fn draft(&mut self, tokens: &[u32], count: usize, sampler: &Sampler) -> Result<Vec<u32>> {
        let Some(hidden) = self.follow(tokens)? else {
            return Ok(Vec::new());
        };
        let mut sampler = sampler.clone();
        let mut drafts = vec![sampler.sample(&self.model.logits(&hidden)?)?];
        self.checkpoint = Some(self.cache.checkpoint(count as i32));
        let waits = Stream::current()?.device() == Device::Cpu && !self.cache.can_queue();
        for at in 1..count {
            let last = &drafts[at - 1];
            if waits {
                last.eval()?;
            }
            let input = last.expand_dims(0)?;
            let hidden = self.model.forward(Input::Tokens(&input), &mut self.cache)?;
            let logits = self.model.logits(&hidden.squeeze(1)?)?;
            drafts.push(sampler.sample(&logits)?);
        }
        let ids: Vec<i32> = Array::concatenate(&drafts, 0)?.to_vec()?;
        let ids: Vec<u32> = ids.into_iter().map(|id| id as u32).collect();
        self.seen.extend(ids.iter().take(count - 1));
        Ok(ids)
    }
}
