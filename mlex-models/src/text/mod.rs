//! Text in and out: tokenizers, chat templates, streamed decoding and stop strings.
//!
//! * [`Tokenizer`]: text to token ids and back, from a `tokenizer.json` or a GGUF vocabulary.
//! * [`ChatTemplate`]: messages to the prompt the model was trained on.
//! * [`StreamingDetokenizer`]: token ids to text, piece by piece.
//! * [`StopSequences`]: stop strings in streamed text.
//! * [`OutputParser`]: streamed text to text, reasoning and tool calls.

mod byte_level;
mod decoder;
mod detokenizer;
mod files;
mod gguf_vocab;
mod messages;
mod output;
mod pre_tokenizer;
mod search;
mod stop;
mod template;
mod tokenizer;
mod tokenizer_config;
mod vocab_check;

pub use detokenizer::StreamingDetokenizer;
pub use gguf_vocab::GgufVocab;
pub use messages::{chat_messages, media_parts};
pub use output::{Answer, OutputFormat, OutputParser, Part, ToolCall, ToolFormat};
pub use stop::{StopOutcome, StopSequences};
pub use template::{ChatRequest, ChatTemplate, LocalTime};
pub use tokenizer::Tokenizer;
