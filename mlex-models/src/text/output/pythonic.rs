//! Calls as Python writes them, `[f(a=1, b="x"), g()]`: LFM2 between
//! `<|tool_call_start|>` and `<|tool_call_end|>` (mlx-lm `pythonic.py`), Llama 3.2 and 4 without
//! markers.
//!
//! mlx-lm reads one call, by patterns: a comma within an unquoted value ends it, and `"12"` is
//! a number. Here values are Python's literals, and what is none is text.

use serde_json::{Map, Value};

use super::body::{Body, Grown, Progress, Status};
use super::json::Strict;
use super::literal;
use super::xml::{close, field};

/// No name is longer.
const MAX_NAME: usize = 256;

#[derive(Debug)]
enum At {
    Start,
    Name(String),
    Argument(Argument),
    After,
    End,
}

/// An argument as it comes.
#[derive(Debug, Default)]
struct Argument {
    text: String,
    depth: usize,
    quote: Option<char>,
    escaped: bool,
}

impl Argument {
    /// Takes a character; true when it ends the argument, which it is no part of.
    fn ends(&mut self, c: char) -> bool {
        match self.quote {
            Some(_) if self.escaped => self.escaped = false,
            Some(_) if c == '\\' => self.escaped = true,
            Some(quote) if c == quote => self.quote = None,
            Some(_) => {}
            None => match c {
                ',' | ')' if self.depth == 0 => return true,
                '"' | '\'' => self.quote = Some(c),
                '(' | '[' | '{' => self.depth += 1,
                ')' | ']' | '}' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            },
        }
        self.text.push(c);
        false
    }
}

/// A list of calls.
#[derive(Debug)]
pub(super) struct PythonicBody {
    at: At,
    /// Without an end marker: the bracket ends it.
    open: bool,
    strict: Option<Strict>,
    arguments: Map<String, Value>,
    calls: usize,
}

impl PythonicBody {
    /// A list that an end marker closes.
    pub(super) fn closed() -> Self {
        Self {
            at: At::Start,
            open: false,
            strict: None,
            arguments: Map::new(),
            calls: 0,
        }
    }

    /// A list without markers.
    pub(super) fn open(strict: Strict) -> Self {
        Self {
            open: true,
            strict: Some(strict),
            ..Self::closed()
        }
    }

    fn begin(&mut self, grown: &mut Vec<Grown>) -> Option<()> {
        let At::Name(name) = &mut self.at else {
            return None;
        };
        let name = name.trim().to_owned();
        let known = self
            .strict
            .as_ref()
            .is_none_or(|strict| strict.names.contains(&name));
        if name.is_empty() || !known {
            return None;
        }
        grown.push(Grown::Begin { name, id: None });
        self.at = At::Argument(Argument::default());
        Some(())
    }

    /// An argument has ended with a comma or a parenthesis. True when the call has.
    fn argument(&mut self, end: char, grown: &mut Vec<Grown>) -> Option<bool> {
        let At::Argument(argument) = &mut self.at else {
            return None;
        };
        let text = std::mem::take(argument).text;
        // A comma may stand before the parenthesis.
        if !(text.trim().is_empty() && end == ')') {
            let (key, value) = text.split_once('=')?;
            let is_key = |c: char| c.is_alphanumeric() || c == '_';
            let key = key.trim();
            if key.is_empty() || !key.chars().all(is_key) {
                return None;
            }
            let value = literal::parse(value)
                .or_else(|| serde_json::from_str(value).ok())
                .unwrap_or_else(|| value.trim().into());
            grown.push(Grown::Arguments(field(
                self.arguments.is_empty(),
                key,
                &value,
            )));
            self.arguments.insert(key.to_owned(), value);
        }
        if end == ',' {
            return Some(false);
        }
        let arguments = std::mem::take(&mut self.arguments);
        grown.push(Grown::Arguments(close(arguments.is_empty())));
        grown.push(Grown::End(arguments));
        self.calls += 1;
        self.at = At::After;
        Some(true)
    }
}

impl Body for PythonicBody {
    fn push(&mut self, text: &str, grown: &mut Vec<Grown>) -> Progress {
        for (at, c) in text.char_indices() {
            let after = at + c.len_utf8();
            let failed = Progress::new(after, Status::Failed);
            match &mut self.at {
                At::Argument(argument) => {
                    if argument.ends(c) {
                        match self.argument(c, grown) {
                            None => return failed,
                            Some(true) => return Progress::new(after, Status::More),
                            Some(false) => {}
                        }
                    }
                }
                At::Name(name) => match c {
                    '(' => {
                        if self.begin(grown).is_none() {
                            return failed;
                        }
                    }
                    c if c.is_alphanumeric()
                        || matches!(c, '_' | '.' | '-') && !name.trim().is_empty()
                        || c == '_' =>
                    {
                        if name.len() == MAX_NAME {
                            return failed;
                        }
                        name.push(c);
                    }
                    c if c.is_whitespace() && name.is_empty() => {}
                    _ => return failed,
                },
                _ if c.is_whitespace() => {}
                At::Start if c == '[' => self.at = At::Name(String::new()),
                At::After if c == ',' => self.at = At::Name(String::new()),
                At::After if c == ']' && self.open => return Progress::new(after, Status::Closed),
                At::After if c == ']' => self.at = At::End,
                _ => return failed,
            }
        }
        Progress::new(text.len(), Status::More)
    }

    fn finish(&mut self) -> bool {
        self.calls > 0 && matches!(self.at, At::After | At::End)
    }
}
