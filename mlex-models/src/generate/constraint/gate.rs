//! Whether the answer has begun: reasoning before it is free.

use super::super::engine::TextParts;
use super::super::request::{Prompt, Request};
use crate::Result;
use crate::text::{OutputFormat, OutputParser, StreamingDetokenizer};

/// What the next token belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Next {
    /// The answer.
    Answer,
    /// The answer, or reasoning if it is this token.
    AnswerOr(u32),
    /// A marker, which is this token.
    Marker(u32),
    /// Reasoning.
    Reasoning,
}

/// Follows an answer up to the end of its reasoning.
pub(in super::super) struct Gate {
    state: State,
}

enum State {
    /// The model may open its reasoning with these tokens, of which `given` were written.
    Start {
        marker: Vec<u32>,
        given: usize,
        watch: Box<Watch>,
    },
    Reasoning(Box<Watch>),
    Open,
}

/// Reads reasoning up to its end marker.
struct Watch {
    detokenizer: StreamingDetokenizer,
    parser: OutputParser,
}

impl Gate {
    /// For an answer to `request`, whose prompt is `prompt` as text where it is one.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub(in super::super) fn new(
        text: &TextParts,
        request: &Request,
        prompt: Option<&str>,
    ) -> Result<Self> {
        let open = Self { state: State::Open };
        let is_chat = request.parse && matches!(request.prompt, Prompt::Messages(_));
        let (Some((start, end)), Some(prompt)) = (text.format.reasoning(), prompt) else {
            return Ok(open);
        };
        if !is_chat {
            return Ok(open);
        }
        let opened = text.format.opens_reasoning(prompt);
        let watch = |in_reasoning| {
            // Calls of tools are not looked for in reasoning.
            let format = OutputFormat::new(Some((start, end)), None);
            let detokenizer = StreamingDetokenizer::new(&text.tokenizer, true);
            Box::new(Watch {
                detokenizer: detokenizer.with_shown({
                    let format = format.clone();
                    move |token| format.needs(token)
                }),
                parser: OutputParser::new(format, &[], in_reasoning),
            })
        };
        if opened {
            return Ok(Self {
                state: State::Reasoning(watch(true)),
            });
        }
        let off = request.template_variables.get("enable_thinking") == Some(&false.into());
        if off || prompt.trim_end().ends_with(end) {
            return Ok(open);
        }
        let marker = text.tokenizer.encode(start, false)?;
        // A marker of plain text could as well be the answer's own beginning.
        let is_mark = |&id: &u32| text.tokenizer.is_added(id);
        if !marker.first().is_some_and(is_mark) {
            return Ok(open);
        }
        Ok(Self {
            state: State::Start {
                marker,
                given: 0,
                watch: watch(false),
            },
        })
    }

    /// What the next token belongs to.
    pub(in super::super) fn next(&self) -> Next {
        match &self.state {
            State::Open => Next::Answer,
            State::Reasoning(_) => Next::Reasoning,
            State::Start { marker, given, .. } => match (given, marker.get(*given)) {
                (0, Some(&id)) => Next::AnswerOr(id),
                (_, Some(&id)) => Next::Marker(id),
                (_, None) => Next::Answer,
            },
        }
    }

    /// Takes a token; says whether it was one of the answer.
    pub(in super::super) fn push(&mut self, id: u32) -> bool {
        let state = std::mem::replace(&mut self.state, State::Open);
        let (state, is_answer) = match state {
            State::Open => (State::Open, true),
            State::Start {
                marker,
                given,
                mut watch,
            } => {
                if given == 0 && marker.first() != Some(&id) {
                    (State::Open, true)
                } else {
                    watch.push(id);
                    let given = given + 1;
                    if given < marker.len() {
                        (
                            State::Start {
                                marker,
                                given,
                                watch,
                            },
                            false,
                        )
                    } else {
                        (State::Reasoning(watch), false)
                    }
                }
            }
            State::Reasoning(mut watch) => {
                watch.push(id);
                if watch.parser.in_reasoning() {
                    (State::Reasoning(watch), false)
                } else {
                    (State::Open, false)
                }
            }
        };
        self.state = state;
        is_answer
    }
}

impl Watch {
    fn push(&mut self, id: u32) {
        let piece = self.detokenizer.push(id);
        self.parser.push(&piece);
    }
}
