//! Text in and out: tokenizers, chat templates, streamed decoding and stop strings.
//!
//! * [`Tokenizer`]: text to token ids and back, from a `tokenizer.json` or a GGUF vocabulary.
//! * [`ChatTemplate`]: messages to the prompt the model was trained on.
//! * [`StreamingDetokenizer`]: token ids to text, piece by piece.
//! * [`StopSequences`]: stop strings in streamed text.

mod byte_level;
mod decoder;
mod detokenizer;
mod files;
mod gguf_vocab;
mod pre_tokenizer;
mod stop;
mod template;
mod tokenizer;
mod tokenizer_config;
mod vocab_check;

pub use detokenizer::StreamingDetokenizer;
pub use gguf_vocab::GgufVocab;
pub use stop::{StopOutcome, StopSequences};
pub use template::{ChatRequest, ChatTemplate, LocalTime};
pub use tokenizer::Tokenizer;
