//! Whether tokens are guessed, and by what.

use std::path::PathBuf;

use anyhow::Result;
use mlex_models::generate::{Guesses, Speculation};

use crate::failure;
use crate::hub::Source;

/// Speculative decoding.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Speculative decoding")]
pub(crate) struct SpeculateArgs {
    /// Guess tokens, several of which one step can check; the answer stays the same
    /// [default: draft with --draft-model, else off]
    #[arg(long, value_name = "HOW")]
    speculate: Option<How>,
    /// A smaller model with the same tokens that guesses: a directory, a GGUF file or a Hub id
    #[arg(long, value_name = "MODEL")]
    draft_model: Option<PathBuf>,
    /// The most tokens that are guessed at once; fewer are where more do not pay
    #[arg(long, default_value_t = Speculation::default().max_drafts as u16, value_name = "N",
          value_parser = clap::value_parser!(u16).range(1..=64))]
    num_draft_tokens: u16,
}

/// By what tokens are guessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum How {
    /// By what followed the last tokens earlier in prompt and answer
    Ngram,
    /// By the draft model
    Draft,
    /// By the model's own head for further tokens (MTP)
    Mtp,
    /// Not at all
    Off,
}

impl SpeculateArgs {
    /// The settings.
    ///
    /// # Errors
    /// A usage error when there is no draft model, or one that nothing uses.
    pub(crate) fn speculation(&self) -> Result<Speculation> {
        let has_draft = self.draft_model.is_some();
        let how = self
            .speculate
            .unwrap_or(if has_draft { How::Draft } else { How::Off });
        let guesses = match how {
            How::Draft if !has_draft => {
                let message = "--speculate draft: no draft model: give --draft-model MODEL";
                return Err(failure::usage("generate", message));
            }
            How::Draft => Guesses::Draft,
            _ if has_draft => {
                let message = "--draft-model: used with --speculate draft only";
                return Err(failure::usage("generate", message));
            }
            How::Ngram => Guesses::Ngram,
            How::Mtp => Guesses::Mtp,
            How::Off => Guesses::Off,
        };
        Ok(Speculation {
            max_drafts: self.num_draft_tokens.into(),
            ..Speculation::new(guesses)
        })
    }

    /// Where the draft model is.
    ///
    /// # Errors
    /// When it cannot be brought from the Hub.
    pub(crate) fn locate(&self) -> Result<Option<PathBuf>> {
        let model = self.draft_model.clone();
        model
            .map(|model| Source::of(model).locate("generate"))
            .transpose()
    }
}
