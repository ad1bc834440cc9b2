//! Mistral's calls after `[TOOL_CALLS]`: `name[ARGS]{..}`, and the list of JSON objects that
//! older models write.
//!
//! mlx-lm's `mistral.py` reads one call of the first kind; several, each with its marker,
//! with an id (`name[CALL_ID]id[ARGS]{..}`) or without `[ARGS]`, are what Mistral's own
//! tokenizers of versions 11 to 13 write.

use super::body::{Body, Grown, Progress, Status};
use super::json::{JsonBody, Span};

/// No name and id are longer.
const MAX_HEAD: usize = 512;

#[derive(Debug)]
enum At {
    Start,
    /// The name, up to the brace of the arguments.
    Head(String),
    Arguments {
        raw: String,
        span: Span,
    },
    List(JsonBody),
}

/// What stands after one `[TOOL_CALLS]`.
#[derive(Debug)]
pub(super) struct MistralBody(At);

impl MistralBody {
    pub(super) fn new() -> Self {
        Self(At::Start)
    }

    fn arguments(
        raw: &mut String,
        span: &mut Span,
        text: &str,
        grown: &mut Vec<Grown>,
    ) -> Progress {
        for (at, byte) in text.bytes().enumerate() {
            if span.step(byte) {
                let last = &text[..=at];
                raw.push_str(last);
                grown.push(Grown::Arguments(last.to_owned()));
                return match serde_json::from_str(raw) {
                    Ok(arguments) => {
                        grown.push(Grown::End(arguments));
                        Progress::new(at + 1, Status::Closed)
                    }
                    Err(_) => Progress::new(at + 1, Status::Failed),
                };
            }
        }
        raw.push_str(text);
        grown.push(Grown::Arguments(text.to_owned()));
        Progress::new(text.len(), Status::More)
    }
}

/// The name and the id of `name[CALL_ID]id[ARGS]`.
fn parts(head: &str) -> Option<(String, Option<String>)> {
    let head = head.trim();
    let head = head.strip_suffix("[ARGS]").unwrap_or(head).trim();
    let (name, id) = match head.split_once("[CALL_ID]") {
        Some((name, id)) => (name.trim(), Some(id.trim().to_owned())),
        None => (head, None),
    };
    let is_name = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/');
    (!name.is_empty() && name.chars().all(is_name)).then(|| (name.to_owned(), id))
}

impl Body for MistralBody {
    fn push(&mut self, text: &str, grown: &mut Vec<Grown>) -> Progress {
        let mut from = 0;
        if let At::Start = self.0 {
            let rest = text.trim_start();
            from = text.len() - rest.len();
            match rest.chars().next() {
                None => return Progress::new(text.len(), Status::More),
                Some('[' | '{') => self.0 = At::List(JsonBody::open(None)),
                Some(_) => self.0 = At::Head(String::new()),
            }
        }
        if let At::Head(head) = &mut self.0 {
            let rest = &text[from..];
            let room = MAX_HEAD - head.len();
            let brace = rest.find('{').filter(|&brace| brace <= room);
            let Some(brace) = brace else {
                if rest.len() > room {
                    let end = from + rest.floor_char_boundary(room);
                    return Progress::new(end, Status::Failed);
                }
                head.push_str(rest);
                return Progress::new(text.len(), Status::More);
            };
            head.push_str(&rest[..brace]);
            let Some((name, id)) = parts(head) else {
                return Progress::new(from + brace, Status::Failed);
            };
            grown.push(Grown::Begin { name, id });
            from += brace;
            self.0 = At::Arguments {
                raw: String::new(),
                span: Span::default(),
            };
        }
        let mut progress = match &mut self.0 {
            At::Arguments { raw, span } => Self::arguments(raw, span, &text[from..], grown),
            At::List(list) => list.push(&text[from..], grown),
            At::Start | At::Head(_) => Progress::new(0, Status::Failed),
        };
        progress.consumed += from;
        progress
    }

    fn finish(&mut self) -> bool {
        match &mut self.0 {
            At::List(list) => list.finish(),
            _ => false,
        }
    }
}
