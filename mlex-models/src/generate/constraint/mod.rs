//! Answers of a given form: JSON, a JSON schema, a regular expression, a grammar.
//!
//! * [`Grammar`]: the form, as a caller gives it.
//! * `Vocabulary`: the tokens as llguidance's trie of bytes, made once for a model.
//! * `Gate`: whether the answer has begun, since reasoning before it is free.
//! * `Guide`: which tokens may come next.
//!
//! The grammars are llguidance's (<https://github.com/guidance-ai/llguidance>). It says which
//! tokens may come next while the device computes their logits, on the thread that waits for it.

mod compile;
mod gate;
mod guide;
mod vocabulary;

pub(super) use gate::Gate;
pub(super) use guide::{Allowed, Guide};
pub(super) use vocabulary::Vocabulary;

use std::fmt::Display;

use serde_json::Value;

use crate::{Error, Result};

/// The form that an answer must have.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Grammar {
    /// A JSON object.
    JsonObject,
    /// What a JSON schema allows. llguidance's `x-guidance` in it sets how JSON is written;
    /// without one there is at most a line break with its indentation where whitespace may be.
    JsonSchema(Value),
    /// A regular expression, which the whole answer matches (llguidance's syntax: that of the
    /// Rust crate regex, without anchors and lookaround).
    Regex(String),
    /// A context-free grammar in llguidance's variant of Lark, with `start` as its first rule.
    Lark(String),
}

impl Grammar {
    /// Checks it without a model.
    ///
    /// # Errors
    /// When it is wrong, larger or more deeply nested than it may be, or asks for something that
    /// cannot be enforced; the error is one line.
    pub fn validate(&self) -> Result<()> {
        compile::validate(self)
    }

    /// What errors call it.
    fn name(&self) -> &'static str {
        match self {
            Self::JsonObject | Self::JsonSchema(_) => "JSON schema",
            Self::Regex(_) => "regular expression",
            Self::Lark(_) => "grammar",
        }
    }

    /// An error about it: what was said of it, in one line of bounded length.
    fn error(&self, message: impl Display) -> Error {
        Error::grammar(self.name(), message)
    }
}
