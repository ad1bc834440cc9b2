//! An answer on the terminal while it is generated.

use std::io::{self, IsTerminal, Write};

use anyhow::Result;
use mlex_models::text::{Part, ToolCall};
use serde_json::{Value, json};

use crate::output::{note, print};

const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

/// Prints the parts of an answer: text and tool calls to stdout, reasoning to stderr, dimmed
/// where that is a terminal.
#[derive(Debug)]
pub(crate) struct Show {
    reasoning: bool,
    dim: bool,
    in_reasoning: bool,
    /// Whether the last thing on stdout ended its line.
    line_ended: bool,
    malformed: usize,
}

impl Show {
    /// Shows the reasoning if `reasoning`.
    pub(crate) fn new(reasoning: bool) -> Self {
        Self {
            reasoning,
            dim: io::stderr().is_terminal(),
            in_reasoning: false,
            line_ended: true,
            malformed: 0,
        }
    }

    /// Prints a part.
    ///
    /// # Errors
    /// As [`print()`].
    pub(crate) fn part(&mut self, part: &Part) -> Result<()> {
        match part {
            Part::Reasoning(text) => {
                self.think(text);
                Ok(())
            }
            Part::Text(text) => self.text(text),
            Part::Malformed { text, .. } => {
                self.malformed += 1;
                self.text(text)
            }
            Part::CallEnd { call, .. } => {
                let line = format!("{}\n", call_json(call));
                let open = if self.line_ended { "" } else { "\n" };
                self.text(&format!("{open}{line}"))
            }
            // Shown when it is whole.
            _ => Ok(()),
        }
    }

    fn text(&mut self, text: &str) -> Result<()> {
        self.end_reasoning();
        if text.is_empty() {
            return Ok(());
        }
        self.line_ended = text.ends_with('\n');
        print(text)
    }

    fn think(&mut self, text: &str) {
        if !self.reasoning {
            return;
        }
        let dim = if self.dim && !self.in_reasoning {
            DIM
        } else {
            ""
        };
        self.in_reasoning = true;
        let mut stderr = io::stderr().lock();
        let _ = write!(stderr, "{dim}{text}").and_then(|()| stderr.flush());
    }

    fn end_reasoning(&mut self) {
        if std::mem::take(&mut self.in_reasoning) {
            note(if self.dim { PLAIN } else { "" });
        }
    }

    /// Ends the answer: the last line, and a note where a call was malformed.
    ///
    /// # Errors
    /// As [`print()`].
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.end_reasoning();
        if !self.line_ended {
            self.line_ended = true;
            print("\n")?;
        }
        if self.malformed > 0 {
            note("note: the model wrote a malformed tool call; it stands in the text");
        }
        Ok(())
    }
}

/// A call as JSON.
pub(crate) fn call_json(call: &ToolCall) -> Value {
    let mut json = json!({"name": call.name, "arguments": call.arguments});
    if let Some(id) = &call.id {
        json["id"] = id.as_str().into();
    }
    json
}
