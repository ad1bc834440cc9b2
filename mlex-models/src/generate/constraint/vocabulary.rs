//! The tokens of a model as llguidance's trie of bytes.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{
    ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId,
};
use llguidance::{Matcher, ParserFactory};

use super::{Grammar, compile};
use crate::text::Tokenizer;
use crate::{Error, Result};

/// Longer tokens are never allowed: the trie cannot hold them.
const MAX_TOKEN_BYTES: usize = 512;
/// The most bytes that all tokens may have: the trie has 22 bits for its nodes.
const MAX_BYTES: usize = 1 << 22;
/// The most tokens: the trie has 24 bits for them.
const MAX_TOKENS: i32 = (1 << 24) - 2;

/// What grammars are matched against.
pub(crate) struct Vocabulary {
    factory: Arc<ParserFactory>,
    vocab_size: i32,
    /// Tokens that end a text.
    ends: Vec<TokenId>,
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vocabulary")
            .field("vocab_size", &self.vocab_size)
            .finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// The tokens of `tokenizer` for a model with `vocab_size` logits, and those that end a text.
    ///
    /// # Errors
    /// When there are more tokens than llguidance can hold.
    pub(crate) fn new(tokenizer: &Tokenizer, vocab_size: i32, eos_ids: &[u32]) -> Result<Self> {
        let too_large = |what: &str, found: usize| {
            Error::unsupported(
                "structured output",
                format!("a vocabulary of {found} {what}"),
            )
        };
        if vocab_size > MAX_TOKENS {
            return Err(too_large("tokens", vocab_size as usize));
        }
        let count = u32::try_from(vocab_size).unwrap_or(0);
        let mut words: Vec<Vec<u8>> = (0..count).map(|id| word(tokenizer, id)).collect();
        let total: usize = words.iter().map(Vec::len).sum();
        if total > MAX_BYTES {
            return Err(too_large("bytes", total));
        }
        let mut ends: Vec<TokenId> = eos_ids.iter().copied().filter(|&id| id < count).collect();
        if ends.is_empty() {
            // The grammar's end has a token, though the model has none.
            ends.push(count);
            words.push(special("<mlex end of text>"));
        }
        let build = || {
            let info = TokRxInfo::new(words.len() as u32, ends[0]);
            let trie = TokTrie::from(&info, &words).with_eos_tokens(&ends);
            // Not canonical: the model chooses how it spells what the grammar leaves no choice of.
            let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            let slices = SlicedBiasComputer::general_slices();
            ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
        };
        // The trie asserts what it expects of tokens.
        let factory = catch_unwind(AssertUnwindSafe(build));
        let factory = factory.map_err(|_| Error::tokenizer("llguidance cannot hold its tokens"))?;
        let mut factory = factory.map_err(Error::tokenizer)?;
        *factory.limits_mut() = compile::limits();
        factory.quiet();
        Ok(Self {
            factory: Arc::new(factory),
            vocab_size,
            ends,
        })
    }

    /// How many logits the model has.
    pub(super) fn size(&self) -> i32 {
        self.vocab_size
    }

    /// Those that end a text, of which not all need have one.
    pub(super) fn ends(&self) -> &[TokenId] {
        &self.ends
    }

    /// What matches `grammar`.
    ///
    /// # Errors
    /// As [`Grammar::validate`].
    pub(super) fn matcher(&self, grammar: &Grammar) -> Result<Matcher> {
        compile::matcher(grammar, &self.factory)
    }
}

/// What the trie is given of a token: its bytes; for one that is no text its name after a marker;
/// nothing for one that is never allowed.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let Some(name) = tokenizer.id_to_token(id) else {
        return Vec::new();
    };
    // Added tokens such as <tool_call> are marks, special or not.
    let is_mark = name.starts_with('<') && name.ends_with('>') && tokenizer.is_added(id);
    let word = match tokenizer.token_bytes(id).filter(|_| !is_mark) {
        Some(bytes) => bytes,
        None => special(&name),
    };
    if word.len() > MAX_TOKEN_BYTES {
        Vec::new()
    } else {
        word
    }
}

fn special(name: &str) -> Vec<u8> {
    let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
    word.extend(name.bytes());
    word
}
