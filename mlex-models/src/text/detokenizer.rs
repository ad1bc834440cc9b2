//! Token ids to text, as they come.

use super::Tokenizer;
use super::decoder::Decoder;

/// Turns token ids into text one at a time.
///
/// Each call returns the text that is certain by then, so the pieces put together are what
/// [`Tokenizer::decode`] gives for all ids. A character whose bytes come as several tokens is
/// returned when it is complete. The work per token does not grow with the text.
#[derive(Clone)]
pub struct StreamingDetokenizer {
    tokenizer: Tokenizer,
    decoder: Decoder,
    skip_special: bool,
    /// Special tokens that have text all the same.
    shown: Vec<u32>,
}

impl StreamingDetokenizer {
    /// Begins a text; with `skip_special` special tokens have no text.
    pub fn new(tokenizer: &Tokenizer, skip_special: bool) -> Self {
        Self {
            tokenizer: tokenizer.clone(),
            decoder: tokenizer.decoder(),
            skip_special,
            shown: Vec::new(),
        }
    }

    /// Gives the special tokens their text that `shows` says so of, by their spelling.
    #[must_use]
    pub fn with_shown(mut self, shows: impl Fn(&str) -> bool) -> Self {
        let special = self.tokenizer.special_ids();
        let shown = special.filter(|&id| {
            self.tokenizer
                .id_to_token(id)
                .is_some_and(|token| shows(&token))
        });
        self.shown = shown.collect();
        self
    }

    /// Takes the next token and returns the text that is certain by now; it may be empty.
    ///
    /// An id that no token has is passed over: models have more embeddings than tokens, and
    /// one of the spare ones can be sampled.
    pub fn push(&mut self, id: u32) -> String {
        if self.skip_special && self.tokenizer.is_special(id) && !self.shown.contains(&id) {
            return String::new();
        }
        match self.tokenizer.id_to_token(id) {
            Some(token) => self.decoder.push(token),
            None => String::new(),
        }
    }

    /// Ends the text and returns its rest; bytes that are no whole character become U+FFFD.
    /// A new text can begin afterwards.
    pub fn finish(&mut self) -> String {
        let rest = self.decoder.finish();
        self.decoder = self.tokenizer.decoder();
        rest
    }
}

impl std::fmt::Debug for StreamingDetokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StreamingDetokenizer")
            .field("tokenizer", &self.tokenizer)
            .field("skip_special", &self.skip_special)
            .finish_non_exhaustive()
    }
}
