//! What a model writes, taken apart: text, reasoning and tool calls, while it is written.
//!
//! * [`OutputFormat`]: how a model marks its reasoning and its tool calls.
//! * [`OutputParser`]: streamed text to [`Part`]s.
//! * [`Answer`]: the parts put together again.
//!
//! The formats follow mlx-lm's `tool_parsers` and its server's state machine. One file per
//! syntax reads the calls.

mod answer;
mod body;
mod format;
mod gemma;
mod json;
mod literal;
mod minicpm;
mod mistral;
mod parser;
mod pending;
mod pythonic;
mod tools;
mod xml;

pub use answer::Answer;
pub use format::{OutputFormat, ToolFormat};
pub use parser::OutputParser;

use serde_json::{Map, Value};

/// A piece of what a model has written.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Part {
    /// Text of the answer.
    Text(String),
    /// Text of the reasoning before it, without its markers.
    Reasoning(String),
    /// A tool call begins; its name is known.
    CallBegin {
        /// Which call of the answer it is, from 0.
        index: usize,
        /// The tool.
        name: String,
    },
    /// The arguments of a call grow: JSON text, to be put behind what came before.
    CallArguments {
        /// Which call.
        index: usize,
        /// The next characters of a JSON object.
        json: String,
    },
    /// A call is whole.
    CallEnd {
        /// Which call.
        index: usize,
        /// The call.
        call: ToolCall,
    },
    /// What began as a tool call and is none, markers included, as the model wrote it.
    Malformed {
        /// Which call, where [`Part::CallBegin`] announced one: there is no such call.
        index: Option<usize>,
        /// The text.
        text: String,
    },
}

impl Part {
    /// Adds `next` to `parts`, put together with the last one where they are of one kind.
    pub fn join(parts: &mut Vec<Self>, next: Self) {
        match (parts.last_mut(), &next) {
            (Some(Self::Text(text)), Self::Text(more))
            | (Some(Self::Reasoning(text)), Self::Reasoning(more)) => text.push_str(more),
            (
                Some(Self::CallArguments { index, json }),
                Self::CallArguments {
                    index: same,
                    json: more,
                },
            ) if index == same => json.push_str(more),
            _ => parts.push(next),
        }
    }
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ToolCall {
    /// The tool.
    pub name: String,
    /// Its arguments.
    pub arguments: Map<String, Value>,
    /// The id that the model gave it; few do.
    pub id: Option<String>,
}
