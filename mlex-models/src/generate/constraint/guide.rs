//! Which tokens may come next in an answer of a given form.

use std::collections::VecDeque;

use llguidance::Matcher;
use llguidance::toktrie::SimpleVob;
use mlex_core::{Array, Dtype};

use super::gate::Next;
use super::{Gate, Grammar, Vocabulary};
use crate::Result;

/// Added to the logit of a token that may not come.
const OUT: f32 = f32::NEG_INFINITY;

/// Leads one answer.
pub(in super::super) struct Guide {
    grammar: Grammar,
    matcher: Matcher,
    gate: Gate,
    vocab_size: i32,
    /// What reasoning may be: all but the end of the text, since an answer shall follow.
    free: Allowed,
    /// What is allowed at the next positions, as far as it is known already.
    known: VecDeque<Allowed>,
}

/// What may come next.
#[derive(Clone, Debug)]
pub(in super::super) enum Allowed {
    /// Any token.
    All,
    /// f32 `[1, V]`: what is added to the logits, -inf for tokens that may not come.
    Mask(Array),
    /// Nothing: the answer is complete.
    End,
}

impl Allowed {
    /// `logits` `[1, V]`, those of tokens that may not come at -inf.
    ///
    /// # Errors
    /// When MLX refuses.
    pub(in super::super) fn apply(&self, logits: &Array) -> Result<Array> {
        Ok(match self {
            Self::All | Self::End => logits.clone(),
            Self::Mask(mask) => logits.as_type(Dtype::Float32)?.add(mask)?,
        })
    }
}

impl Guide {
    /// For an answer in the form of `grammar`, once `gate` says that it has begun.
    ///
    /// # Errors
    /// As [`Grammar::validate`].
    pub(in super::super) fn new(
        grammar: &Grammar,
        vocabulary: &Vocabulary,
        gate: Gate,
    ) -> Result<Self> {
        let size = vocabulary.size();
        let mut free = vec![0.0; usize::try_from(size).unwrap_or(0)];
        for &end in vocabulary.ends() {
            if let Some(added) = free.get_mut(end as usize) {
                *added = OUT;
            }
        }
        Ok(Self {
            free: Allowed::Mask(Array::from_slice(&free, &[1, size])?),
            grammar: grammar.clone(),
            matcher: vocabulary.matcher(grammar)?,
            gate,
            vocab_size: size,
            known: VecDeque::new(),
        })
    }

    /// Finds what is allowed at the next position and after each of `drafts`, which may come, for
    /// [`allowed`](Self::allowed). It takes time in which the device computes.
    ///
    /// # Errors
    /// When llguidance meets one of its limits.
    pub(in super::super) fn look_ahead(&mut self, drafts: &[u32]) -> Result<()> {
        self.known.clear();
        // Where reasoning ends is not known before its tokens are.
        if self.gate.next() != Next::Answer {
            return Ok(());
        }
        let mut taken = 0;
        loop {
            let allowed = self.of_matcher(None)?;
            let ends = matches!(allowed, Allowed::End);
            self.known.push_back(allowed);
            let Some(&draft) = drafts.get(taken).filter(|_| !ends) else {
                break;
            };
            let consumed = self.matcher.try_consume_tokens(&[draft]);
            if consumed.map_err(|error| self.grammar.error(error))? == 0 {
                break;
            }
            taken += 1;
        }
        let back = self.matcher.rollback(taken);
        back.map_err(|error| self.grammar.error(error))
    }

    /// How many of `drafts` may come one after the other.
    ///
    /// # Errors
    /// When llguidance meets one of its limits.
    pub(in super::super) fn count_allowed(&mut self, drafts: &[u32]) -> Result<usize> {
        match self.gate.next() {
            Next::Answer if self.matcher.is_stopped() => Ok(0),
            Next::Answer => {
                let count = self.matcher.validate_tokens(drafts);
                count.map_err(|error| self.grammar.error(error))
            }
            Next::Reasoning => Ok(drafts.len()),
            Next::AnswerOr(_) | Next::Marker(_) => Ok(0),
        }
    }

    /// What is allowed next.
    ///
    /// # Errors
    /// When llguidance meets one of its limits.
    pub(in super::super) fn allowed(&mut self) -> Result<Allowed> {
        if let Some(allowed) = self.known.pop_front() {
            return Ok(allowed);
        }
        match self.gate.next() {
            Next::Answer => self.of_matcher(None),
            Next::AnswerOr(id) => self.of_matcher(Some(id)),
            Next::Marker(id) => self.mask(None, Some(id)),
            Next::Reasoning => Ok(self.free.clone()),
        }
    }

    /// Whether the answer is complete.
    pub(in super::super) fn is_finished(&self) -> bool {
        self.gate.next() == Next::Answer && self.matcher.is_stopped()
    }

    /// Takes a token that was chosen.
    ///
    /// # Errors
    /// When the grammar does not allow it.
    pub(in super::super) fn push(&mut self, id: u32) -> Result<()> {
        if self.gate.push(id) {
            let consumed = self.matcher.try_consume_tokens(&[id]);
            if consumed.map_err(|error| self.grammar.error(error))? == 0 {
                let message = "no token that it allows can be chosen";
                return Err(self.grammar.error(message));
            }
        }
        Ok(())
    }

    /// Takes a token that was put in, whatever the grammar says; what was looked at ahead is void.
    pub(in super::super) fn put_in(&mut self, id: u32) -> Result<()> {
        self.known.clear();
        self.push(id)
    }

    /// What the grammar allows, and `or`.
    fn of_matcher(&mut self, or: Option<u32>) -> Result<Allowed> {
        if self.matcher.is_stopped() {
            return match self.matcher.get_error() {
                Some(error) => Err(self.grammar.error(error)),
                None => Ok(Allowed::End),
            };
        }
        let mask = self.matcher.compute_mask();
        match mask {
            Ok(mask) => self.mask(Some(&mask), or),
            // Nothing can follow what was found complete only now.
            Err(_) if self.matcher.stop_reason().is_ok() => Ok(Allowed::End),
            Err(error) => Err(self.grammar.error(error)),
        }
    }

    fn mask(&self, allowed: Option<&SimpleVob>, or: Option<u32>) -> Result<Allowed> {
        let mut added = vec![OUT; usize::try_from(self.vocab_size).unwrap_or(0)];
        let mut any = false;
        if let Some(allowed) = allowed {
            for (added, &bits) in added.chunks_mut(32).zip(allowed.as_slice()) {
                if bits == 0 {
                    continue;
                }
                for (bit, added) in added.iter_mut().enumerate() {
                    let is_allowed = bits >> bit & 1 == 1;
                    any |= is_allowed;
                    *added = if is_allowed { 0.0 } else { OUT };
                }
            }
        }
        if let Some(added) = or.and_then(|id| added.get_mut(id as usize)) {
            *added = 0.0;
            any = true;
        }
        if !any {
            if self.matcher.is_stopped() || allowed.is_some_and(|mask| mask.num_set() > 0) {
                // The end of a text, for which the model has no token.
                return Ok(Allowed::End);
            }
            return Err(self.grammar.error("no token is allowed"));
        }
        let mask = Array::from_slice(&added, &[1, self.vocab_size])?;
        Ok(Allowed::Mask(mask))
    }
}

impl std::fmt::Debug for Guide {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guide")
            .field("grammar", &self.grammar)
            .finish_non_exhaustive()
    }
}
