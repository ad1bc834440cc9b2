//! Qwen3-coder's calls: `<function=name><parameter=key>value</parameter></function>`, which
//! Qwen3.5 and Nemotron 3 write too (mlx-lm `qwen3_coder.py`).

use serde_json::{Map, Value};

use super::body::{Body, Grown, Progress, Status};
use super::pending::{Begins, Pending};
use super::tools::Tools;

#[derive(Debug)]
enum At {
    Outside,
    Name,
    Inside,
    Key,
    Value(String),
}

/// Calls between `<tool_call>` and `</tool_call>`. The arguments grow by whole values: whether
/// one is a number is not known before its end.
#[derive(Debug)]
pub(super) struct XmlBody {
    tools: Tools,
    pending: Pending,
    at: At,
    name: String,
    arguments: Map<String, Value>,
    calls: usize,
}

impl XmlBody {
    pub(super) fn new(tools: Tools) -> Self {
        Self {
            tools,
            pending: Pending::default(),
            at: At::Outside,
            name: String::new(),
            arguments: Map::new(),
            calls: 0,
        }
    }

    /// One step; none when it waits for text. True when a call has ended.
    fn step(&mut self, grown: &mut Vec<Grown>) -> Result<Option<bool>, Status> {
        match &mut self.at {
            At::Outside => {
                self.pending.skip_whitespace();
                match self.pending.begins("<function=") {
                    Begins::Yes => self.at = At::Name,
                    Begins::Perhaps => return Ok(None),
                    Begins::No => return Err(Status::Failed),
                }
            }
            At::Name => {
                let Some(name) = self.pending.until(">") else {
                    return Ok(None);
                };
                if name.is_empty() || name.contains(['<', '\n']) {
                    return Err(Status::Failed);
                }
                self.name.clone_from(&name);
                grown.push(Grown::Begin { name, id: None });
                self.at = At::Inside;
            }
            At::Inside => {
                self.pending.skip_whitespace();
                let parameter = self.pending.begins("<parameter=");
                if parameter == Begins::Yes {
                    self.at = At::Key;
                    return Ok(Some(false));
                }
                match (self.pending.begins("</function>"), parameter) {
                    (Begins::Yes, _) => {
                        let arguments = std::mem::take(&mut self.arguments);
                        grown.push(Grown::Arguments(close(arguments.is_empty())));
                        grown.push(Grown::End(arguments));
                        self.calls += 1;
                        self.at = At::Outside;
                        return Ok(Some(true));
                    }
                    (Begins::No, Begins::No) => return Err(Status::Failed),
                    _ => return Ok(None),
                }
            }
            At::Key => {
                let Some(key) = self.pending.until(">") else {
                    return Ok(None);
                };
                if key.is_empty() || key.contains(['<', '\n']) {
                    return Err(Status::Failed);
                }
                self.at = At::Value(key);
            }
            At::Value(key) => {
                let Some(text) = self.pending.until("</parameter>") else {
                    return Ok(None);
                };
                let text = text.strip_prefix('\n').unwrap_or(&text);
                let text = text.strip_suffix('\n').unwrap_or(text);
                let key = std::mem::take(key);
                let value = self
                    .tools
                    .convert(&self.name, &key, text)
                    .ok_or(Status::Failed)?;
                grown.push(Grown::Arguments(field(
                    self.arguments.is_empty(),
                    &key,
                    &value,
                )));
                self.arguments.insert(key, value);
                self.at = At::Inside;
            }
        }
        Ok(Some(false))
    }
}

/// The JSON text of a field, with what stands before it.
pub(super) fn field(first: bool, key: &str, value: &Value) -> String {
    let open = if first { '{' } else { ',' };
    format!("{open}{}:{value}", Value::from(key))
}

/// The JSON text that ends the fields.
pub(super) fn close(empty: bool) -> String {
    if empty { "{}" } else { "}" }.to_owned()
}

impl Body for XmlBody {
    fn push(&mut self, text: &str, grown: &mut Vec<Grown>) -> Progress {
        self.pending.push(text);
        loop {
            match self.step(grown) {
                Ok(None) => return Progress::new(text.len(), Status::More),
                Ok(Some(false)) => {}
                Ok(Some(true)) => {
                    // What is left has come with this text: the end was not there before.
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
