//! Speculative decoding: several tokens are guessed, and one step of the model checks them all.
//!
//! The model chooses each token as it would without guesses, with the same random numbers, and a
//! guess is kept where it is that token. So the answer is the same, token for token, and its
//! distribution is, for any sampler. For guesses without probabilities this is rejection sampling:
//! a guess of probability p is kept with p, and else the token is one of the others as they are
//! distributed. A draft model draws its guesses with the random numbers of the model's own choice
//! (a coupling by Gumbel noise), which makes them agree about as often as rejection sampling of
//! its distribution would.
//!
//! * `Ngram`: guesses by what followed the last tokens earlier.
//! * `DraftModel`: guesses of a smaller model.
//! * `Mtp`: guesses of the model's own head for further tokens.
//! * `Depth`: how many guesses are worth their time.

mod depth;
mod draft_model;
mod mtp;
mod ngram;

use std::time::Duration;

use mlex_core::Array;
use serde::{Deserialize, Serialize};

use super::{PrefillStep, Sampler};
use crate::Result;
use crate::model::{Model, MtpHead};
use depth::Depth;
use draft_model::DraftModel;
use mtp::Mtp;
use ngram::Ngram;

/// How tokens are guessed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Guesses {
    /// Not at all.
    #[default]
    Off,
    /// By what followed the last tokens earlier in prompt and answer.
    Ngram,
    /// By the session's draft model.
    Draft,
    /// By the model's own head for further tokens.
    Mtp,
}

/// Whether and how a generation speculates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speculation {
    /// How tokens are guessed.
    pub guesses: Guesses,
    /// The most tokens that are guessed at once.
    pub max_drafts: usize,
    /// Guesses fewer tokens, or none, where more would not be worth their time.
    pub adapt: bool,
}

impl Default for Speculation {
    fn default() -> Self {
        Self {
            guesses: Guesses::Off,
            max_drafts: 8,
            adapt: true,
        }
    }
}

impl Speculation {
    /// With guesses of this kind.
    pub fn new(guesses: Guesses) -> Self {
        Self {
            guesses,
            ..Self::default()
        }
    }
}

/// How many tokens were guessed, and how many of them were right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DraftCounts {
    /// Guesses that the model has checked.
    pub checked: usize,
    /// Those that were right.
    pub accepted: usize,
}

/// What guesses tokens.
trait Drafter {
    /// How sure a guess of what follows `tokens` is, as the number of a class below
    /// [`CLASSES`]; none where there is no guess.
    fn class(&mut self, tokens: &[u32]) -> Option<usize>;

    /// Whether it has to [observe](Self::observe) every step.
    fn follows(&self) -> bool {
        false
    }

    /// Takes in the hidden states `[1, L, D]` of the places from `start` on in `tokens`, each of
    /// which has a token after it.
    fn observe(&mut self, tokens: &[u32], start: usize, hidden: &Array) -> Result<()> {
        let _ = (tokens, start, hidden);
        Ok(())
    }

    /// Up to `count` tokens that may follow `tokens`, as `sampler` would choose them.
    fn draft(&mut self, tokens: &[u32], count: usize, sampler: &Sampler) -> Result<Vec<u32>>;
}

/// How many classes of guesses there are.
const CLASSES: usize = 3;

/// Guesses tokens for one answer.
pub struct Speculator<'m> {
    drafter: Box<dyn Drafter + 'm>,
    depth: Option<Depth>,
    max_drafts: usize,
    /// Of the guess that is being checked.
    class: usize,
    counts: DraftCounts,
}

impl std::fmt::Debug for Speculator<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Speculator")
            .field("max_drafts", &self.max_drafts)
            .field("counts", &self.counts)
            .finish_non_exhaustive()
    }
}

impl<'m> Speculator<'m> {
    /// Guesses by what followed the last tokens earlier.
    pub fn ngram(speculation: Speculation) -> Self {
        Self::new(Box::new(Ngram::default()), speculation)
    }

    /// Guesses of `model`, which has the same tokens; it is given so many of the prompt's at once.
    ///
    /// # Errors
    /// When MLX is out of memory.
    pub fn draft_model(
        model: &'m dyn Model,
        prefill_step: impl Into<PrefillStep>,
        speculation: Speculation,
    ) -> Result<Self> {
        let drafter = DraftModel::new(model, prefill_step.into())?;
        Ok(Self::new(Box::new(drafter), speculation))
    }

    /// Guesses of `head`, which is `model`'s.
    ///
    /// # Errors
    /// When MLX is out of memory.
    pub fn mtp(
        model: &'m dyn Model,
        head: &'m dyn MtpHead,
        speculation: Speculation,
    ) -> Result<Self> {
        Ok(Self::new(Box::new(Mtp::new(model, head)?), speculation))
    }

    fn new(drafter: Box<dyn Drafter + 'm>, speculation: Speculation) -> Self {
        let Speculation {
            max_drafts, adapt, ..
        } = speculation;
        Self {
            drafter,
            depth: adapt.then(|| Depth::new(max_drafts)),
            max_drafts,
            class: 0,
            counts: DraftCounts::default(),
        }
    }

    /// What has been guessed so far.
    pub fn counts(&self) -> DraftCounts {
        self.counts
    }

    /// How many tokens after `tokens` shall be guessed, `most` at most.
    pub(super) fn depth(&mut self, tokens: &[u32], most: usize) -> usize {
        let most = most.min(self.max_drafts);
        if most == 0 {
            return 0;
        }
        let Some(class) = self.drafter.class(tokens) else {
            return 0;
        };
        self.class = class;
        match &mut self.depth {
            Some(depth) => depth.choose(class, most),
            None => most,
        }
    }

    /// Whether it has to [observe](Self::observe) every step.
    pub(super) fn follows(&self) -> bool {
        self.drafter.follows()
    }

    /// Takes in the hidden states `[1, L, D]` of the places from `start` on in `tokens`.
    ///
    /// # Errors
    /// When MLX fails.
    pub(super) fn observe(&mut self, tokens: &[u32], start: usize, hidden: &Array) -> Result<()> {
        self.drafter.observe(tokens, start, hidden)
    }

    /// Up to `count` tokens that may follow `tokens`.
    ///
    /// # Errors
    /// When a draft model fails.
    pub(super) fn draft(
        &mut self,
        tokens: &[u32],
        count: usize,
        sampler: &Sampler,
    ) -> Result<Vec<u32>> {
        self.drafter.draft(tokens, count, sampler)
    }

    /// Learns from a step that took `time` for a token and `checked` guesses, of which `accepted`
    /// were right.
    pub(super) fn learn(&mut self, checked: usize, accepted: usize, time: Duration) {
        self.counts.checked += checked;
        self.counts.accepted += accepted;
        if let Some(depth) = &mut self.depth {
            depth.learn(self.class, checked, accepted, time.as_secs_f64());
        }
    }
}
