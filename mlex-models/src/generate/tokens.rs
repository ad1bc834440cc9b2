//! The tokens of an answer, whatever decodes them.

use super::blocks::BlockStream;
use super::request::TokenLogprobs;
use super::speculate::DraftCounts;
use super::token_stream::TokenStream;
use crate::Result;

/// The tokens of an answer, as its request wants them decoded.
#[allow(clippy::large_enum_variant, reason = "one for each answer")]
pub(super) enum Tokens<'m> {
    OneByOne(TokenStream<'m>),
    Blocks(BlockStream<'m>),
}

impl Tokens<'_> {
    /// The next ones. `put_in` takes the place of the next one, where they come one by one.
    pub(super) fn next(&mut self, put_in: Option<u32>) -> Result<Option<Vec<u32>>> {
        match self {
            Self::OneByOne(stream) => {
                if let Some(id) = put_in {
                    stream.put_in(id)?;
                }
                Ok(stream.next().transpose()?.map(|id| vec![id]))
            }
            Self::Blocks(stream) => stream.next().transpose(),
        }
    }

    /// As [`TokenStream::set_limit`].
    pub(super) fn set_limit(&mut self, limit: usize) {
        if let Self::OneByOne(stream) = self {
            stream.set_limit(limit);
        }
    }

    /// Whether they ended because a grammar allows nothing more.
    pub(super) fn is_complete(&self) -> bool {
        match self {
            Self::OneByOne(stream) => stream.is_complete(),
            Self::Blocks(_) => false,
        }
    }

    /// The log-probabilities at the last token, where they were asked for.
    pub(super) fn logprobs(&self) -> Option<TokenLogprobs> {
        match self {
            Self::OneByOne(stream) => stream.logprobs().cloned(),
            Self::Blocks(_) => None,
        }
    }

    /// Takes back what the cache has seen of tokens that were not given out, and says how many
    /// were guessed.
    pub(super) fn finish(&mut self) -> Result<DraftCounts> {
        match self {
            Self::OneByOne(stream) => {
                stream.finish()?;
                Ok(stream.draft_counts())
            }
            Self::Blocks(_) => Ok(DraftCounts::default()),
        }
    }
}
