//! MiniCPM5's calls: `<function name="f"><param name="k">value</param></function>`, where a
//! value may stand in `<![CDATA[..]]>` (SGLang's and vLLM's parsers for `minicpm5`).

use serde_json::{Map, Value};

use super::body::{Body, Grown, Progress, Status};
use super::pending::{Begins, Pending};
use super::tools::Tools;
use super::xml::{close, field};

/// What stands before the name.
pub(super) const START: &str = "<function name=";

#[derive(Debug)]
enum At {
    Quote,
    Name(&'static str),
    TagEnd,
    Inside,
    KeyQuote,
    Key(&'static str),
    KeyEnd(String),
    Value(String),
    Cdata(String),
    AfterCdata,
}

/// One call, after [`START`].
#[derive(Debug)]
pub(super) struct MiniCpmBody {
    tools: Tools,
    pending: Pending,
    at: At,
    name: String,
    arguments: Map<String, Value>,
}

impl MiniCpmBody {
    pub(super) fn new(tools: Tools) -> Self {
        Self {
            tools,
            pending: Pending::default(),
            at: At::Quote,
            name: String::new(),
            arguments: Map::new(),
        }
    }

    /// Takes the quote before a name.
    fn quote(&mut self) -> Result<Option<&'static str>, Status> {
        let quote = match self.pending.first() {
            None => return Ok(None),
            Some('"') => "\"",
            Some('\'') => "'",
            Some(_) => return Err(Status::Failed),
        };
        self.pending.begins(quote);
        Ok(Some(quote))
    }

    fn insert(&mut self, key: String, value: Value, grown: &mut Vec<Grown>) -> Result<(), Status> {
        if self.arguments.contains_key(&key) {
            return Err(Status::Failed);
        }
        grown.push(Grown::Arguments(field(
            self.arguments.is_empty(),
            &key,
            &value,
        )));
        self.arguments.insert(key, value);
        Ok(())
    }

    /// One step; none when it waits for text. True when the call has ended.
    fn step(&mut self, grown: &mut Vec<Grown>) -> Result<Option<bool>, Status> {
        match &mut self.at {
            At::Quote => match self.quote()? {
                Some(quote) => self.at = At::Name(quote),
                None => return Ok(None),
            },
            At::Name(quote) => {
                let Some(name) = self.pending.until(quote) else {
                    return Ok(None);
                };
                let name = name.trim().to_owned();
                if name.is_empty() || name.contains(['<', '>', '\n']) {
                    return Err(Status::Failed);
                }
                self.name.clone_from(&name);
                grown.push(Grown::Begin { name, id: None });
                self.at = At::TagEnd;
            }
            At::TagEnd => match self.pending.until(">") {
                Some(_) => self.at = At::Inside,
                None => return Ok(None),
            },
            At::Inside => {
                self.pending.skip_whitespace();
                let parameter = self.pending.begins("<param name=");
                if parameter == Begins::Yes {
                    self.at = At::KeyQuote;
                    return Ok(Some(false));
                }
                match (self.pending.begins("</function>"), parameter) {
                    (Begins::Yes, _) => {
                        let arguments = std::mem::take(&mut self.arguments);
                        grown.push(Grown::Arguments(close(arguments.is_empty())));
                        grown.push(Grown::End(arguments));
                        return Ok(Some(true));
                    }
                    (Begins::No, Begins::No) => return Err(Status::Failed),
                    _ => return Ok(None),
                }
            }
            At::KeyQuote => match self.quote()? {
                Some(quote) => self.at = At::Key(quote),
                None => return Ok(None),
            },
            At::Key(quote) => {
                let Some(key) = self.pending.until(quote) else {
                    return Ok(None);
                };
                self.at = At::KeyEnd(key.trim().to_owned());
            }
            At::KeyEnd(key) => match self.pending.until(">") {
                Some(_) => self.at = At::Value(std::mem::take(key)),
                None => return Ok(None),
            },
            At::Value(key) => {
                let key = std::mem::take(key);
                return self.value(key, grown);
            }
            At::Cdata(key) => {
                let Some(text) = self.pending.until("]]>") else {
                    return Ok(None);
                };
                let key = std::mem::take(key);
                let value = self.tools.guess(&self.name, &key, text.trim());
                self.insert(key, value, grown)?;
                self.at = At::AfterCdata;
            }
            At::AfterCdata => {
                self.pending.skip_whitespace();
                match self.pending.begins("</param>") {
                    Begins::Yes => self.at = At::Inside,
                    Begins::Perhaps => return Ok(None),
                    Begins::No => return Err(Status::Failed),
                }
            }
        }
        Ok(Some(false))
    }

    fn value(&mut self, key: String, grown: &mut Vec<Grown>) -> Result<Option<bool>, Status> {
        // Only of a value that has just begun: edges are no part of it.
        self.pending.skip_whitespace();
        match self.pending.begins("<![CDATA[") {
            Begins::Yes => {
                self.at = At::Cdata(key);
                return Ok(Some(false));
            }
            Begins::Perhaps => {
                self.at = At::Value(key);
                return Ok(None);
            }
            Begins::No => {}
        }
        let Some(text) = self.pending.until("</param>") else {
            self.at = At::Value(key);
            return Ok(None);
        };
        let value = self
            .tools
            .guess(&self.name, &key, unescape(text.trim()).trim());
        self.insert(key, value, grown)?;
        self.at = At::Inside;
        Ok(Some(false))
    }
}

/// `text` with XML's entities as the characters that they stand for; as it is where it is not
/// the text of an XML element.
fn unescape(text: &str) -> String {
    const ENTITIES: [(&str, char); 5] = [
        ("lt;", '<'),
        ("gt;", '>'),
        ("amp;", '&'),
        ("quot;", '"'),
        ("apos;", '\''),
    ];
    if text.contains('<') {
        return text.to_owned();
    }
    let mut pieces = text.split('&');
    let mut plain = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let entity = ENTITIES
            .iter()
            .find_map(|(name, c)| piece.strip_prefix(name).map(|rest| (*c, rest)));
        let Some((c, rest)) = entity else {
            return text.to_owned();
        };
        plain.push(c);
        plain.push_str(rest);
    }
    plain
}

impl Body for MiniCpmBody {
    fn push(&mut self, text: &str, grown: &mut Vec<Grown>) -> Progress {
        self.pending.push(text);
        loop {
            match self.step(grown) {
                Ok(None) => return Progress::new(text.len(), Status::More),
                Ok(Some(false)) => {}
                Ok(Some(true)) => {
                    let left = self.pending.take().len();
                    return Progress::new(text.len() - left, Status::Closed);
                }
                Err(status) => {
                    return Progress {
                        back: self.pending.take().len(),
                        ..Progress::new(text.len(), status)
                    };
                }
            }
        }
    }

    fn finish(&mut self) -> bool {
        false
    }
}
