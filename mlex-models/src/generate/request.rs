//! What is asked of a session, and what it answers.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{
    Decode, DraftCounts, Dry, Grammar, KvSettings, PrefillProgress, PrefillStep, SamplerConfig,
    Speculation,
};
use crate::media::Media;
use crate::text::{Answer, Part};
use crate::towers::MediaOptions;

/// What a generation continues.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Prompt {
    /// Text as it is, with the special tokens that the tokenizer adds by itself.
    Raw(String),
    /// A conversation in the OpenAI shape, put into the model's chat template as
    /// [`chat_messages`](crate::text::chat_messages) prepares it.
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
    /// The images, videos and sounds of the prompt, in its order: one for each part
    /// `{"type": "image"}` (or `video`, `audio`) of the messages, or for each placeholder of
    /// a raw text.
    pub media: Vec<Media>,
    /// How much of them the model is given.
    pub media_options: MediaOptions,
    /// Tools that the chat template offers to the model.
    pub tools: Vec<Value>,
    /// Further variables of the chat template, such as `enable_thinking`.
    pub template_variables: Map<String, Value>,
    /// The most tokens that are generated.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampler: SamplerConfig,
    /// How they come about, for a model that has several ways.
    pub decode: Decode,
    /// Texts that end the generation and do not appear in it.
    pub stop: Vec<String>,
    /// Goes on after an end-of-text token, up to `max_tokens`.
    pub ignore_eos: bool,
    /// How many prompt tokens are given to the model at once.
    pub prefill_step: PrefillStep,
    /// How many answers are generated, one after the other. The first uses the sampler's seed,
    /// each further one the next number.
    pub choices: usize,
    /// Gives the log-probability of each token, and of so many of the likeliest ones beside it.
    pub logprobs: Option<usize>,
    /// The most tokens of reasoning: then its end marker is put in, and the answer begins.
    pub reasoning_budget: Option<usize>,
    /// Texts that end a passage for the sampler's [`Dry`], besides its own breakers.
    pub dry_breakers: Vec<String>,
    /// Takes the answer to a conversation apart by the model's
    /// [`OutputFormat`](crate::text::OutputFormat). Otherwise, and without a conversation, all is
    /// text.
    pub parse: bool,
    /// How keys and values are held.
    pub kv: KvSettings,
    /// Begins with what the session knows of the prompt already, and leaves the states of this one
    /// for others.
    pub use_prompt_cache: bool,
    /// The form of the answer, after its reasoning. Tool calls are then text of the answer.
    pub grammar: Option<Grammar>,
    /// Whether tokens are guessed, so that one step may give several.
    pub speculation: Speculation,
}

impl Request {
    /// A generation that continues `prompt`: greedy, at most 256 tokens.
    pub fn new(prompt: Prompt) -> Self {
        Self {
            prompt,
            media: Vec::new(),
            media_options: MediaOptions::default(),
            tools: Vec::new(),
            template_variables: Map::new(),
            max_tokens: 256,
            sampler: SamplerConfig::default(),
            decode: Decode::default(),
            stop: Vec::new(),
            ignore_eos: false,
            prefill_step: PrefillStep::ByDevice,
            choices: 1,
            logprobs: None,
            reasoning_budget: None,
            dry_breakers: Dry::BREAKERS.map(str::to_owned).to_vec(),
            parse: true,
            kv: KvSettings::default(),
            use_prompt_cache: true,
            grammar: None,
            speculation: Speculation::default(),
        }
    }

    /// A generation that answers one message of a user.
    pub fn chat(text: impl Into<String>) -> Self {
        let message = serde_json::json!({"role": "user", "content": text.into()});
        Self::new(Prompt::Messages(vec![message]))
    }

    /// Sets the images, videos and sounds of the prompt.
    #[must_use]
    pub fn with_media(mut self, media: impl IntoIterator<Item = Media>) -> Self {
        self.media = media.into_iter().collect();
        self
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
    /// An answer begins, where the request asks for several; its number, from 0.
    Choice(usize),
    /// A token, and what has become final with it.
    Token {
        /// The token.
        id: u32,
        /// Parts of the answer; often one, or none.
        parts: Vec<Part>,
        /// Its log-probability, if the request asks for it. A token that was put in has none.
        logprobs: Option<TokenLogprobs>,
    },
    /// What was held back at the end, because it could have become a stop text or a marker, or
    /// was an unfinished character.
    Rest(Vec<Part>),
    /// The end of an answer. The last one ends the generation.
    Done(Completion),
}

impl Event {
    /// What has become final with this event.
    pub fn parts(&self) -> &[Part] {
        match self {
            Self::Token { parts, .. } | Self::Rest(parts) => parts,
            _ => &[],
        }
    }

    /// Adds what has become final to `answer`.
    pub fn add_to(&self, answer: &mut Answer) {
        for part in self.parts() {
            answer.push(part);
        }
    }
}

/// Why a generation has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FinishReason {
    /// An end-of-text token or a stop text.
    Stop,
    /// The same, after tool calls.
    ToolCalls,
    /// `max_tokens` were generated.
    Length,
    /// The caller stopped it.
    Cancelled,
}

impl fmt::Display for FinishReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stop => "stop",
            Self::ToolCalls => "tool_calls",
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
    /// Those of them whose state was known.
    pub cached_tokens: usize,
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
    /// What was guessed.
    pub drafts: DraftCounts,
}

impl Completion {
    /// Prompt tokens per second, without those whose state was known.
    pub fn prefill_tps(&self) -> f64 {
        let Usage {
            prompt_tokens,
            cached_tokens,
            ..
        } = self.usage;
        rate(prompt_tokens - cached_tokens, self.timings.prefill)
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

/// The log-probabilities at a generated token, with the sampler's bias and penalties, before its
/// temperature and filters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// The natural logarithm of the token's probability.
    pub logprob: f32,
    /// The likeliest tokens, likeliest first.
    pub top: Vec<TokenLogprob>,
}
