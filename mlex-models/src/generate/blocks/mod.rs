//! Tokens that come in blocks: block diffusion and self-speculation.
//!
//! Both are for models that fill blocks of mask tokens ([`BlockModel`]), and greedy. Reference:
//! mlx-optiq `mlx_lm_patches/dhara_decode.py`.

mod diffusion;
mod penalty;
mod speculation;

use mlex_core::Array;
use mlex_nn::Cache;

use self::penalty::Penalty;
use super::token_stream::{self, prefill_by};
use super::{PrefillProgress, PrefillStep, SamplerConfig};
use crate::media::{MediaPrompt, checked};
use crate::model::{BlockModel, Model};
use crate::{Error, Result};

/// How a model's tokens come about.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Decode {
    /// One after the other, each after a step of the model.
    #[default]
    Autoregressive,
    /// A block of mask tokens is filled in some steps, those first that the model is sure of.
    Diffusion(Diffusion),
    /// A block is guessed in one step and checked in a second one, which makes the tokens those of
    /// [`Autoregressive`](Self::Autoregressive).
    SelfSpeculation(SelfSpeculation),
}

/// The settings of block diffusion.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Diffusion {
    /// Positions of a block, which see each other.
    pub block_length: usize,
    /// From which probability on a prediction is taken; the surest one is in any case.
    pub threshold: f32,
}

impl Default for Diffusion {
    fn default() -> Self {
        Self {
            block_length: 32,
            threshold: 0.5,
        }
    }
}

/// The settings of self-speculation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SelfSpeculation {
    /// How many tokens are checked at once; the first of them is known already.
    pub draft_length: usize,
    /// Positions of a block, which see each other while tokens are guessed.
    pub block_length: usize,
}

impl Default for SelfSpeculation {
    fn default() -> Self {
        Self {
            draft_length: 8,
            block_length: 32,
        }
    }
}

/// The most positions that a block or draft may have.
const LONGEST: usize = 4096;

impl Decode {
    /// Checks the ranges.
    ///
    /// # Errors
    /// When a number is outside of its range; the error names it.
    pub fn validate(&self) -> Result<()> {
        let length = |field: &str, value: usize| {
            if (1..=LONGEST).contains(&value) {
                return Ok(());
            }
            let expected = format!("a number from 1 to {LONGEST}");
            Err(Error::field(field, expected, value.to_string()))
        };
        match self {
            Self::Autoregressive => Ok(()),
            Self::Diffusion(Diffusion {
                block_length,
                threshold,
            }) => {
                if !(0.0..=1.0).contains(threshold) {
                    let expected = "a number from 0 to 1";
                    return Err(Error::field("threshold", expected, threshold.to_string()));
                }
                length("block_length", *block_length)
            }
            Self::SelfSpeculation(SelfSpeculation {
                draft_length,
                block_length,
            }) => {
                length("draft_length", *draft_length)?;
                length("block_length", *block_length)
            }
        }
    }

    /// How many of the last tokens a cache must be able to forget.
    fn spare(&self) -> usize {
        match self {
            Self::Autoregressive => 0,
            Self::Diffusion(Diffusion { block_length, .. }) => *block_length,
            Self::SelfSpeculation(SelfSpeculation { draft_length, .. }) => *draft_length,
        }
    }
}

/// The settings of a [`BlockStream`].
#[derive(Clone, Debug, PartialEq)]
pub struct BlockOptions {
    /// The most tokens that are generated.
    pub max_tokens: usize,
    /// How many prompt tokens are given to the model at once, about.
    pub prefill_step: PrefillStep,
    /// How tokens are chosen: greedy, with a repetition penalty or without.
    pub sampler: SamplerConfig,
    /// Tokens after which no further one is needed. They are given out too.
    pub eos_ids: Vec<u32>,
}

impl Default for BlockOptions {
    fn default() -> Self {
        Self {
            max_tokens: usize::MAX,
            prefill_step: PrefillStep::ByDevice,
            sampler: SamplerConfig::default(),
            eos_ids: Vec::new(),
        }
    }
}

/// Tokens that continue a prompt, some at a time.
///
/// It ends after `max_tokens`, an end-of-text token or an error. What came with an end-of-text
/// token, after it, is given out too.
pub struct BlockStream<'m> {
    parts: Parts<'m>,
    state: State,
    eos_ids: Vec<u32>,
    /// Tokens still to be given out.
    remaining: usize,
}

/// What both ways of decoding work on.
struct Parts<'m> {
    model: &'m dyn Model,
    blocks: &'m dyn BlockModel,
    cache: &'m mut Cache,
    penalty: Penalty,
}

enum State {
    Diffusion(Diffusion),
    Speculation {
        settings: SelfSpeculation,
        /// The next token.
        known: u32,
    },
}

impl std::fmt::Debug for BlockStream<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlockStream")
            .field("remaining", &self.remaining)
            .finish_non_exhaustive()
    }
}

impl<'m> BlockStream<'m> {
    /// Prefills `cache`, an empty one, with `prompt`. `on_progress` is called after every step;
    /// returning `false` from it ends the prefill, and the stream, early.
    ///
    /// # Errors
    /// When the model does not fill blocks, `decode` is autoregressive or out of range, the sampler
    /// is not greedy, the prompt is empty or has a token outside of the vocabulary, or MLX fails.
    pub fn new(
        model: &'m dyn Model,
        cache: &'m mut Cache,
        decode: Decode,
        prompt: &[u32],
        options: BlockOptions,
        on_progress: &mut dyn FnMut(PrefillProgress) -> bool,
    ) -> Result<Self> {
        check(model, decode, &options.sampler)?;
        let step = options.prefill_step;
        let hidden = prefill(model, cache, decode, prompt, step, on_progress)?;
        Self::after(model, cache, decode, prompt, options, hidden.as_ref())
    }

    /// Goes on from a prompt that `cache` holds by [`prefill`]. `hidden` `[1, D]` is the state of
    /// its last position; without one there are no tokens.
    pub(super) fn after(
        model: &'m dyn Model,
        cache: &'m mut Cache,
        decode: Decode,
        prompt: &[u32],
        options: BlockOptions,
        hidden: Option<&Array>,
    ) -> Result<Self> {
        let blocks = check(model, decode, &options.sampler)?;
        let penalty = Penalty::new(&options.sampler, model.info().vocab_size, prompt);
        let state = match (decode, hidden) {
            (Decode::SelfSpeculation(settings), Some(hidden)) => State::Speculation {
                settings,
                known: penalty.likeliest(&model.logits(hidden)?)?[0],
            },
            (Decode::SelfSpeculation(settings), None) => State::Speculation { settings, known: 0 },
            (Decode::Diffusion(settings), _) => State::Diffusion(settings),
            (Decode::Autoregressive, _) => return Err(not_in_blocks()),
        };
        Ok(Self {
            parts: Parts {
                model,
                blocks,
                cache,
                penalty,
            },
            state,
            eos_ids: options.eos_ids,
            remaining: hidden.map_or(0, |_| options.max_tokens),
        })
    }

    fn step(&mut self) -> Result<Vec<u32>> {
        let Self { parts, eos_ids, .. } = self;
        match &mut self.state {
            State::Diffusion(settings) => parts.fill(*settings),
            State::Speculation { known, .. } if eos_ids.contains(known) => Ok(vec![*known]),
            State::Speculation { settings, known } => parts.speculate(*settings, known),
        }
    }
}

impl Iterator for BlockStream<'_> {
    type Item = Result<Vec<u32>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.remaining == 0 {
            return None;
        }
        let step = self.step();
        match step {
            Ok(mut ids) => {
                ids.truncate(self.remaining);
                self.remaining -= ids.len();
                if ids.iter().any(|id| self.eos_ids.contains(id)) {
                    self.remaining = 0;
                }
                Some(Ok(ids))
            }
            Err(error) => {
                self.remaining = 0;
                Some(Err(error))
            }
        }
    }
}

impl Parts<'_> {
    /// Hidden states `[1, L, D]` of tokens that see each other in blocks; they are added to the
    /// cache.
    fn forward_blocks(&mut self, ids: &[u32], block: usize) -> Result<Array> {
        let ids = id_array(self.model, ids)?;
        self.blocks.forward_blocks(&ids, block as i32, self.cache)
    }
}

fn not_in_blocks() -> Error {
    Error::field(
        "decode",
        "a way that gives blocks",
        "the autoregressive one",
    )
}

/// The model as one that fills blocks, if `decode` and the sampler are something for it.
pub(super) fn check<'m>(
    model: &'m dyn Model,
    decode: Decode,
    sampler: &SamplerConfig,
) -> Result<&'m dyn BlockModel> {
    decode.validate()?;
    let Some(blocks) = model.blocks() else {
        let name = &model.info().model_type;
        let what = format!("other than autoregressive for a model of type {name}");
        return Err(Error::unsupported("decode", what));
    };
    sampler.validate(model.info().vocab_size)?;
    penalty::check(sampler)?;
    Ok(blocks)
}

/// Gives `prompt` to the model as `decode` needs it, in steps of about `step`. Returns the
/// hidden state `[1, D]` of the last position, or nothing when `on_progress` said to stop.
pub(super) fn prefill(
    model: &dyn Model,
    cache: &mut Cache,
    decode: Decode,
    prompt: &[u32],
    step: PrefillStep,
    on_progress: &mut dyn FnMut(PrefillProgress) -> bool,
) -> Result<Option<Array>> {
    cache.set_spare(decode.spare() as i32);
    let (Decode::Diffusion(Diffusion { block_length, .. }), Some(blocks)) =
        (decode, model.blocks())
    else {
        let (prompt, all) = (MediaPrompt::from(prompt.to_vec()), 0..prompt.len());
        return token_stream::prefill(model, cache, &prompt, all, step, on_progress);
    };
    // Positions of a block see each other, so they are given at once.
    let forward = |cache: &mut Cache, processed: usize| {
        let step = (step.after(processed)? / block_length).max(1) * block_length;
        let end = prompt.len().min(processed + step);
        let ids = id_array(model, &prompt[processed..end])?;
        let hidden = blocks.forward_blocks(&ids, block_length as i32, cache)?;
        Ok((hidden, end))
    };
    prefill_by(forward, cache, prompt.len(), on_progress)
}

/// Checked token ids, int32 `[1, L]`.
fn id_array(model: &dyn Model, ids: &[u32]) -> Result<Array> {
    let ids = checked(ids, model)?;
    Ok(Array::from_slice(&ids, &[1, ids.len() as i32])?)
}
