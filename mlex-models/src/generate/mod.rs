//! Generation: sampling, the stream of tokens, sessions, scoring.
//!
//! [`Session`] is what an application uses: any thread may ask it for text. [`TokenStream`]
//! is the layer below, for callers who stay on the model's thread.

mod blocks;
mod checked;
mod constraint;
mod engine;
mod output;
mod prefill_step;
mod prompt_cache;
mod request;
mod sampler;
mod score;
mod session;
mod speculate;
mod token_stream;
mod tokens;

pub use blocks::{BlockOptions, BlockStream, Decode, Diffusion, SelfSpeculation};
pub use constraint::Grammar;
pub use prefill_step::PrefillStep;
pub use prompt_cache::{
    Found, KvSettings, MediaSpan, PromptCache, PromptCacheLimits, PromptCacheStats, PromptFileInfo,
    PromptKey,
};
pub use request::{
    Completion, Event, FinishReason, Prompt, Request, Timings, TokenLogprob, TokenLogprobs, Usage,
};
pub use sampler::{Dry, Sampler, SamplerConfig, Xtc};
pub use score::{Score, score};
pub use session::{CancelHandle, Generation, LoadOptions, LoadProgress, Session, SessionInfo};
pub use speculate::{DraftCounts, Guesses, Speculation, Speculator};
pub use token_stream::{PrefillProgress, StreamOptions, TokenStream};
