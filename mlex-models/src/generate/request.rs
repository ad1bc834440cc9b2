//! What is asked of a session, and what it answers.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{PrefillProgress, SamplerConfig};

/// What a generation continues.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Prompt {
    /// Text as it is, with the special tokens that the tokenizer adds by itself.
    Raw(String),
    /// A conversation, put into the model's chat template: `{"role": .., "content": ..}`.
    Messages(Vec<Value>),
    /// Token ids as they are.
    Tokens(Vec<u32>),
}

/// A generation to be done.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Request {
    /// What is continued.
    pub prompt: Prompt,
    /// Tools that the chat template offers to the model.
    pub tools: Vec<Value>,
    /// Further variables of the chat template, such as `enable_thinking`.
    pub template_variables: Map<String, Value>,
    /// The most tokens that are generated.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampler: SamplerConfig,
    /// Texts that end the generation and do not appear in it.
    pub stop: Vec<String>,
    /// Goes on after an end-of-text token, up to `max_tokens`.
    pub ignore_eos: bool,
    /// How many prompt tokens are given to the model at once.
    pub prefill_step: usize,
}

impl Request {
    /// A generation that continues `prompt`: greedy, at most 256 tokens.
    pub fn new(prompt: Prompt) -> Self {
        Self {
            prompt,
            tools: Vec::new(),
            template_variables: Map::new(),
            max_tokens: 256,
            sampler: SamplerConfig::default(),
            stop: Vec::new(),
            ignore_eos: false,
            prefill_step: 512,
        }
    }

    /// A generation that answers one message of a user.
    pub fn chat(text: impl Into<String>) -> Self {
        let message = serde_json::json!({"role": "user", "content": text.into()});
        Self::new(Prompt::Messages(vec![message]))
    }

    /// Sets the most tokens that are generated.
    #[must_use]
    pub fn with_max_tokens(mut self, max_tokens: usize) -> Self {
        self.max_tokens = max_tokens;
        self
    }

    /// Sets how tokens are chosen.
    #[must_use]
    pub fn with_sampler(mut self, sampler: SamplerConfig) -> Self {
        self.sampler = sampler;
        self
    }

    /// Sets the texts that end the generation.
    #[must_use]
    pub fn with_stop(mut self, stop: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.stop = stop.into_iter().map(Into::into).collect();
        self
    }
}

/// What happens in a generation.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Event {
    /// The prompt's tokens, before the first of them is processed.
    Prompt(Vec<u32>),
    /// A part of the prompt has been processed.
    Prefill(PrefillProgress),
    /// A token, and the text that has become final with it (it may be empty).
    Token {
        /// The token.
        id: u32,
        /// The text.
        text: String,
    },
    /// Text that was held back, because it could have become a stop text or was an unfinished
    /// character.
    Text(String),
    /// The end.
    Done(Completion),
}

/// Why a generation has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FinishReason {
    /// An end-of-text token or a stop text.
    Stop,
    /// `max_tokens` were generated.
    Length,
    /// The caller stopped it.
    Cancelled,
}

impl fmt::Display for FinishReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
        })
    }
}

/// How many tokens a generation took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated, the end-of-text token included.
    pub completion_tokens: usize,
}

/// How long a generation took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Timings {
    /// From the first prompt token to the first generated one.
    pub prefill: Duration,
    /// From the first generated token to the last.
    pub decode: Duration,
    /// The most bytes that arrays have held at once since the model was loaded.
    pub peak_memory_bytes: usize,
}

/// The end of a generation.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Completion {
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// How many tokens it took.
    pub usage: Usage,
    /// How long it took.
    pub timings: Timings,
}

impl Completion {
    /// Prompt tokens per second.
    pub fn prefill_tps(&self) -> f64 {
        rate(self.usage.prompt_tokens, self.timings.prefill)
    }

    /// Generated tokens per second; the first counts to the prefill.
    pub fn decode_tps(&self) -> f64 {
        rate(
            self.usage.completion_tokens.saturating_sub(1),
            self.timings.decode,
        )
    }
}

/// 0 where nothing was measured, so that it is a number in JSON.
fn rate(count: usize, time: Duration) -> f64 {
    if time.is_zero() {
        0.0
    } else {
        count as f64 / time.as_secs_f64()
    }
}

/// A token and the logarithm of its probability.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// The token.
    pub id: u32,
    /// The natural logarithm of its probability.
    pub logprob: f32,
}
