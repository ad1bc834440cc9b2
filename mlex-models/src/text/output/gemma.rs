//! Gemma 4's calls: `call:name{key:value,..}`, texts between `<|"|>` (mlx-lm `gemma4.py`).

use serde_json::{Map, Value};

use super::body::{Body, Grown, Progress, Status};
use super::pending::{Begins, Pending};
use super::xml::{close, field};

/// What texts stand between.
pub(super) const QUOTE: &str = "<|\"|>";
const MAX_DEPTH: usize = 64;

#[derive(Debug)]
enum At {
    Outside,
    Name,
    Arguments(Argument),
}

/// An argument as it comes.
#[derive(Debug, Default)]
struct Argument {
    text: String,
    /// Brackets open in it.
    depth: usize,
    /// Within a text.
    quoted: bool,
}

/// Calls between `<|tool_call>` and `<tool_call|>`. The arguments grow by whole values.
#[derive(Debug)]
pub(super) struct GemmaBody {
    pending: Pending,
    at: At,
    arguments: Map<String, Value>,
    calls: usize,
}

impl GemmaBody {
    pub(super) fn new() -> Self {
        Self {
            pending: Pending::default(),
            at: At::Outside,
            arguments: Map::new(),
            calls: 0,
        }
    }

    /// One step; none when it waits for text. True when a call has ended.
    fn step(&mut self, grown: &mut Vec<Grown>) -> Result<Option<bool>, Status> {
        match &mut self.at {
            At::Outside => {
                self.pending.skip_whitespace();
                if self.calls > 0 && self.pending.begins(",") == Begins::Yes {
                    return Ok(Some(false));
                }
                match self.pending.begins("call:") {
                    Begins::Yes => self.at = At::Name,
                    Begins::Perhaps => return Ok(None),
                    Begins::No => return Err(Status::Failed),
                }
                Ok(Some(false))
            }
            At::Name => {
                let Some(name) = self.pending.until("{") else {
                    return Ok(None);
                };
                let is_name = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':');
                if name.is_empty() || !name.chars().all(is_name) {
                    return Err(Status::Failed);
                }
                grown.push(Grown::Begin { name, id: None });
                self.at = At::Arguments(Argument::default());
                Ok(Some(false))
            }
            At::Arguments(argument) => {
                let text = self.pending.take();
                let Some((end, after)) = argument.scan(&text, &mut self.pending) else {
                    return Ok(None);
                };
                self.pending.push(&text[after..]);
                let argument = std::mem::take(argument).text;
                let empty = argument.trim().is_empty();
                if !(empty && end == '}') {
                    let (key, value) = Reader(&argument).pair().ok_or(Status::Failed)?;
                    grown.push(Grown::Arguments(field(
                        self.arguments.is_empty(),
                        &key,
                        &value,
                    )));
                    self.arguments.insert(key, value);
                }
                if end == ',' {
                    return Ok(Some(false));
                }
                let arguments = std::mem::take(&mut self.arguments);
                grown.push(Grown::Arguments(close(arguments.is_empty())));
                grown.push(Grown::End(arguments));
                self.at = At::Outside;
                self.calls += 1;
                Ok(Some(true))
            }
        }
    }
}

impl Argument {
    /// Takes text up to the end of the argument. Gives what ended it, and where the text goes
    /// on. What may be half a quote goes back to `pending`.
    fn scan(&mut self, text: &str, pending: &mut Pending) -> Option<(char, usize)> {
        let mut at = 0;
        while let Some(c) = text[at..].chars().next() {
            if c == '<' {
                let rest = &text[at..];
                if rest.starts_with(QUOTE) {
                    self.quoted = !self.quoted;
                    self.text.push_str(QUOTE);
                    at += QUOTE.len();
                    continue;
                }
                if QUOTE.starts_with(rest) {
                    pending.push(rest);
                    return None;
                }
            }
            let after = at + c.len_utf8();
            if !self.quoted {
                match c {
                    ',' | '}' if self.depth == 0 => return Some((c, after)),
                    '{' | '[' => self.depth += 1,
                    '}' | ']' => self.depth = self.depth.saturating_sub(1),
                    _ => {}
                }
            }
            self.text.push(c);
            at = after;
        }
        None
    }
}

/// Reads the text of one argument.
struct Reader<'a>(&'a str);

impl Reader<'_> {
    fn space(&mut self) {
        self.0 = self.0.trim_start();
    }

    fn take(&mut self, wanted: &str) -> bool {
        match self.0.strip_prefix(wanted) {
            Some(rest) => {
                self.0 = rest;
                true
            }
            None => false,
        }
    }

    /// `key:value`, and nothing after it.
    fn pair(mut self) -> Option<(String, Value)> {
        let pair = self.field(0)?;
        self.space();
        self.0.is_empty().then_some(pair)
    }

    fn field(&mut self, depth: usize) -> Option<(String, Value)> {
        self.space();
        let key = if self.0.starts_with(QUOTE) || self.0.starts_with('"') {
            self.text()?
        } else {
            let is_key = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '$' | '@');
            let end = self.0.find(|c: char| !is_key(c)).unwrap_or(self.0.len());
            let (key, rest) = self.0.split_at(end);
            self.0 = rest;
            key.to_owned()
        };
        self.space();
        if key.is_empty() || !self.take(":") {
            return None;
        }
        Some((key, self.value(depth)?))
    }

    fn text(&mut self) -> Option<String> {
        if self.take(QUOTE) {
            let (text, rest) = self.0.split_once(QUOTE)?;
            self.0 = rest;
            return Some(text.to_owned());
        }
        // A text as JSON has them.
        let mut stream = serde_json::Deserializer::from_str(self.0).into_iter::<String>();
        let text = stream.next()?.ok()?;
        self.0 = &self.0[stream.byte_offset()..];
        Some(text)
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth == MAX_DEPTH {
            return None;
        }
        self.space();
        if self.0.starts_with(QUOTE) || self.0.starts_with('"') {
            return self.text().map(Value::String);
        }
        if self.take("{") {
            let mut fields = Map::new();
            self.items("}", |reader| {
                let (key, value) = reader.field(depth + 1)?;
                fields.insert(key, value);
                Some(())
            })?;
            return Some(Value::Object(fields));
        }
        if self.take("[") {
            let mut items = Vec::new();
            self.items("]", |reader| {
                items.push(reader.value(depth + 1)?);
                Some(())
            })?;
            return Some(Value::Array(items));
        }
        let end = self.0.find([',', '}', ']']).unwrap_or(self.0.len());
        let (word, rest) = self.0.split_at(end);
        self.0 = rest;
        serde_json::from_str(word.trim()).ok()
    }

    /// What stands between commas up to `end`.
    fn items(&mut self, end: &str, mut item: impl FnMut(&mut Self) -> Option<()>) -> Option<()> {
        self.space();
        if self.take(end) {
            return Some(());
        }
        loop {
            item(self)?;
            self.space();
            if self.take(end) {
                return Some(());
            }
            if !self.take(",") {
                return None;
            }
        }
    }
}

impl Body for GemmaBody {
    fn push(&mut self, text: &str, grown: &mut Vec<Grown>) -> Progress {
        self.pending.push(text);
        loop {
            match self.step(grown) {
                Ok(None) => return Progress::new(text.len(), Status::More),
                Ok(Some(false)) => {}
                Ok(Some(true)) => {
                    let left = self.pending.take().len();
                    return Progress::new(text.len() - left, Status::More);
                }
                Err(status) => return Progress::new(text.len(), status),
            }
        }
    }

    fn finish(&mut self) -> bool {
        self.calls > 0 && matches!(self.at, At::Outside) && self.pending.is_empty()
    }
}
