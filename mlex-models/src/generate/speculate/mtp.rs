//! Guesses of a model's own head for further tokens.
//!
//! The head sees the states of the model and the tokens after them, from the end of the prompt on:
//! what it guesses first, it guesses with little context.

use mlex_core::{Array, Device, Stream};
use mlex_nn::Cache;

use super::Drafter;
use crate::Result;
use crate::generate::Sampler;
use crate::model::{Model, MtpHead};

/// A head, and the states that it has seen.
pub(super) struct Mtp<'m> {
    model: &'m dyn Model,
    head: &'m dyn MtpHead,
    cache: Cache,
    /// The place after the last state that it has seen.
    end: usize,
    /// What it made `[1, D]` of the last one.
    last: Option<Array>,
    /// States of guesses at the end of the cache.
    guessed: i32,
}

impl<'m> Mtp<'m> {
    pub(super) fn new(model: &'m dyn Model, head: &'m dyn MtpHead) -> Result<Self> {
        Ok(Self {
            model,
            head,
            cache: head.new_cache()?,
            end: 0,
            last: None,
            guessed: 0,
        })
    }

    /// Forgets guesses, and states whose next token is none of `tokens`.
    fn go_back(&mut self, tokens: &[u32]) -> Result<()> {
        self.cache.trim(self.guessed)?;
        self.guessed = 0;
        let end = self.end.min(tokens.len().saturating_sub(1));
        if end < self.end {
            // It may have begun after these.
            let count = (self.end - end) as i32;
            self.cache.trim(count.min(self.cache.len()))?;
            self.end = end;
            self.last = None;
        }
        Ok(())
    }
}

impl Drafter for Mtp<'_> {
    fn follows(&self) -> bool {
        true
    }

    fn observe(&mut self, tokens: &[u32], start: usize, hidden: &Array) -> Result<()> {
        self.go_back(tokens)?;
        let end = start + hidden.dim(1)? as usize;
        let from = self.end.max(start);
        if from >= end || end >= tokens.len() {
            return Ok(());
        }
        let count = (end - from) as i32;
        let next: Vec<i32> = tokens[from + 1..=end].iter().map(|&id| id as i32).collect();
        let next = self.model.embed(&Array::from_slice(&next, &[1, count])?)?;
        let (first, last) = ((from - start) as i32, (end - start) as i32);
        let hidden = hidden.slice_axis(1, first, last)?;
        let states = self.head.forward(&next, &hidden, &mut self.cache)?;
        self.last = Some(states.at(1, -1)?);
        self.end = end;
        Ok(())
    }

    fn class(&mut self, tokens: &[u32]) -> Option<usize> {
        (self.last.is_some() && self.end + 1 == tokens.len()).then_some(0)
    }

    fn draft(&mut self, tokens: &[u32], count: usize, sampler: &Sampler) -> Result<Vec<u32>> {
        self.go_back(tokens)?;
        let Some(mut state) = self.last.clone() else {
            return Ok(Vec::new());
        };
        let mut sampler = sampler.clone();
        let waits = Stream::current()?.device() == Device::Cpu;
        let mut drafts: Vec<Array> = Vec::with_capacity(count);
        for _ in 0..count {
            if let Some(token) = drafts.last() {
                if waits {
                    token.eval()?;
                }
                let next = self.model.embed(&token.expand_dims(0)?)?;
                let states = self
                    .head
                    .forward(&next, &state.expand_dims(1)?, &mut self.cache)?;
                self.guessed += 1;
                state = states.squeeze(1)?;
            }
            drafts.push(sampler.sample(&self.model.logits(&state)?)?);
        }
        let ids: Vec<i32> = Array::concatenate(&drafts, 0)?.to_vec()?;
        Ok(ids.into_iter().map(|id| id as u32).collect())
    }
}
