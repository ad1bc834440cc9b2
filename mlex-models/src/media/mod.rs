//! Images, videos and sounds as parts of prompts: where they come from, what stands for them in
//! a prompt's text and tokens, and their features, kept by what the media hold.

mod cache;
mod placeholders;
mod prompt;
mod source;

pub(crate) use cache::MediaEngine;
pub(crate) use placeholders::Placeholders;
pub use prompt::MediaPrompt;
pub(crate) use prompt::checked;
pub use source::{Media, MediaSource};
