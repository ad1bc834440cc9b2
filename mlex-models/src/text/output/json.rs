//! Calls as JSON: `{"name": .., "arguments": {..}}`, alone, in a list or one after the other.
//!
//! Hermes and Qwen (`<tool_call>{..}</tool_call>`, mlx-lm `json_tools.py`), NemotronH
//! (`<TOOLCALL>[{..}]</TOOLCALL>`), older Mistral (`[TOOL_CALLS][{..}]`) and Llama 3
//! (`{"name": .., "parameters": {..}}`, more of them behind `;`).

use serde_json::{Map, Value};

use super::body::{Body, Grown, Progress, Status};

/// Follows JSON text to the end of its first object or list.
#[derive(Debug, Default)]
pub(super) struct Span {
    pub(super) depth: usize,
    pub(super) string: bool,
    escaped: bool,
}

impl Span {
    /// Takes a byte. True with the one that closes the outermost bracket.
    pub(super) fn step(&mut self, byte: u8) -> bool {
        if self.string {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => self.string = false,
                _ => {}
            }
            return false;
        }
        match byte {
            b'"' => self.string = true,
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                return self.depth == 0;
            }
            _ => {}
        }
        false
    }
}

/// The arguments of a call: an object, or a text that holds one, or nothing.
pub(super) fn arguments(value: Option<Value>) -> Option<Map<String, Value>> {
    match value {
        None | Some(Value::Null) => Some(Map::new()),
        Some(Value::Object(arguments)) => Some(arguments),
        Some(Value::String(text)) => serde_json::from_str(&text).ok(),
        Some(_) => None,
    }
}

/// JSON text of arguments that were not streamed.
pub(super) fn text_of(arguments: &Map<String, Value>) -> String {
    serde_json::to_string(arguments).unwrap_or_else(|_| "{}".to_owned())
}

/// What a call without a marker in front must look like to be one.
#[derive(Clone, Debug)]
pub(super) struct Strict {
    /// The names of the tools.
    pub(super) names: Vec<String>,
}

/// One `{"name": .., "arguments": ..}` as it grows.
#[derive(Debug, Default)]
struct CallObject {
    raw: String,
    span: Span,
    /// After the colon of a field of the object itself.
    value: bool,
    key: String,
    string_start: usize,
    name: Option<String>,
    /// Where the arguments start and end.
    start: Option<usize>,
    end: Option<usize>,
    sent: usize,
}

const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];
const KEYS: [&str; 6] = ["name", "arguments", "parameters", "id", "type", "function"];

impl CallObject {
    /// Takes `text`. Gives how much of it belongs to the object when it is whole; as an error,
    /// how far it may be one.
    fn push(
        &mut self,
        text: &str,
        strict: Option<&Strict>,
        grown: &mut Vec<Grown>,
    ) -> Result<Option<usize>, usize> {
        let before = self.raw.len();
        self.raw.push_str(text);
        for at in before..self.raw.len() {
            let byte = self.raw.as_bytes()[at];
            let (was_string, was_depth) = (self.span.string, self.span.depth);
            let closed = self.span.step(byte);
            let fits = match byte {
                _ if was_depth != 1 && self.span.depth != 1 => true,
                b'"' if was_depth == 1 && !was_string => {
                    self.string_start = at;
                    true
                }
                b'"' if was_depth == 1 && !self.span.string => {
                    self.field(at, strict, grown).is_some()
                }
                _ if was_string => true,
                b':' => {
                    self.value = true;
                    true
                }
                b',' => {
                    self.value = false;
                    true
                }
                b'{' if was_depth == 1 && self.value && ARGUMENTS.contains(&&*self.key) => {
                    let first = self.start.is_none();
                    if first {
                        self.start = Some(at);
                        self.sent = at;
                    }
                    first
                }
                b'}' if was_depth == 2 && self.start.is_some() => {
                    self.end.get_or_insert(at + 1);
                    true
                }
                _ => true,
            };
            if !fits {
                return Err(self.fail(at + 1, grown) - before);
            }
            if closed {
                self.raw.truncate(at + 1);
                self.send(grown);
                return Ok(Some(at + 1 - before));
            }
        }
        self.send(grown);
        Ok(None)
    }

    /// Sends what has come before `end`, where the object turned out to be none.
    fn fail(&mut self, end: usize, grown: &mut Vec<Grown>) -> usize {
        self.raw.truncate(end);
        self.send(grown);
        end
    }

    /// A text of the object itself has ended at `at`: a key, or a value.
    fn field(&mut self, at: usize, strict: Option<&Strict>, grown: &mut Vec<Grown>) -> Option<()> {
        let text: String = serde_json::from_str(&self.raw[self.string_start..=at]).ok()?;
        if !self.value {
            if strict.is_some() && !KEYS.contains(&&*text) {
                return None;
            }
            self.key = text;
        } else if self.key == "name" {
            let known = strict.is_none_or(|strict| strict.names.contains(&text));
            if !known || text.is_empty() || self.name.is_some() {
                return None;
            }
            self.name = Some(text.clone());
            grown.push(Grown::Begin {
                name: text,
                id: None,
            });
        }
        Some(())
    }

    /// Sends what has come of the arguments, once the name is known.
    fn send(&mut self, grown: &mut Vec<Grown>) {
        if self.start.is_none() || self.name.is_none() {
            return;
        }
        let end = self.end.unwrap_or(self.raw.len());
        if self.sent < end {
            grown.push(Grown::Arguments(self.raw[self.sent..end].to_owned()));
            self.sent = end;
        }
    }

    /// The arguments of the whole object.
    fn finish(&self, grown: &mut Vec<Grown>) -> Option<Map<String, Value>> {
        let Ok(Value::Object(mut fields)) = serde_json::from_str(&self.raw) else {
            return None;
        };
        self.name.as_ref()?;
        let [one, two] = ARGUMENTS.map(|key| fields.remove(key));
        let arguments = arguments(one.or(two))?;
        if self.start.is_none() {
            grown.push(Grown::Arguments(text_of(&arguments)));
        }
        Some(arguments)
    }
}

#[derive(Debug)]
enum At {
    Start,
    /// Before an object of a list, or after a semicolon.
    Item,
    Object(CallObject),
    Between,
    End,
}

/// Calls as JSON objects.
#[derive(Debug)]
pub(super) struct JsonBody {
    at: At,
    list: bool,
    /// Without an end marker: what comes after the last call is text.
    open: bool,
    /// Where a call without a marker is looked for.
    strict: Option<Strict>,
    calls: usize,
}

impl JsonBody {
    /// Calls that an end marker closes.
    pub(super) fn closed() -> Self {
        Self {
            at: At::Start,
            list: false,
            open: false,
            strict: None,
            calls: 0,
        }
    }

    /// Calls without an end marker.
    pub(super) fn open(strict: Option<Strict>) -> Self {
        Self {
            open: true,
            strict,
            ..Self::closed()
        }
    }

    fn object(&mut self, text: &str, from: usize, grown: &mut Vec<Grown>) -> Progress {
        let At::Object(object) = &mut self.at else {
            return Progress::new(from, Status::Failed);
        };
        match object.push(&text[from..], self.strict.as_ref(), grown) {
            Err(consumed) => Progress::new(from + consumed, Status::Failed),
            Ok(None) => Progress::new(text.len(), Status::More),
            Ok(Some(consumed)) => {
                let consumed = from + consumed;
                let Some(arguments) = object.finish(grown) else {
                    return Progress::new(consumed, Status::Failed);
                };
                grown.push(Grown::End(arguments));
                self.at = At::Between;
                self.calls += 1;
                Progress::new(consumed, Status::More)
            }
        }
    }
}

impl Body for JsonBody {
    fn push(&mut self, text: &str, grown: &mut Vec<Grown>) -> Progress {
        if let At::Object(_) = self.at {
            return self.object(text, 0, grown);
        }
        for (at, c) in text.char_indices() {
            if c.is_whitespace() {
                continue;
            }
            let after = at + c.len_utf8();
            match (&self.at, c) {
                (At::Start | At::Item, '{') => {
                    self.at = At::Object(CallObject::default());
                    return self.object(text, at, grown);
                }
                (At::Start, '[') => {
                    self.list = true;
                    self.at = At::Item;
                }
                (At::Between, ',') if self.list => self.at = At::Item,
                (At::Between, ';') if self.open && !self.list => self.at = At::Item,
                (At::Between, ']') if self.list => {
                    if self.open {
                        return Progress::new(after, Status::Closed);
                    }
                    self.at = At::End;
                }
                (At::Between | At::Item, _) if self.open && !self.list && self.calls > 0 => {
                    return Progress::new(at, Status::Left);
                }
                _ => return Progress::new(after, Status::Failed),
            }
        }
        Progress::new(text.len(), Status::More)
    }

    fn finish(&mut self) -> bool {
        self.calls > 0 && matches!(self.at, At::Between | At::End | At::Item)
    }
}
