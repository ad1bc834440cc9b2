//! Streamed text to parts.

use serde_json::Value;

use super::body::{Body, Grown, Status};
use super::format::OutputFormat;
use super::tools::Tools;
use super::{Part, ToolCall};
use crate::text::search::Search;

/// Takes what a model writes apart, while it writes.
///
/// The result depends on the text alone, not on how it was cut: a marker that spans pieces, and
/// one of which the model writes only half, are what they are. Whitespace is kept as the model
/// writes it, except within the syntax of calls. What looks like a call and is none comes back
/// as [`Part::Malformed`], whole; so nothing is lost.
#[derive(Debug)]
pub struct OutputParser {
    format: OutputFormat,
    tools: Tools,
    state: State,
    /// Looks for what begins a span, within the text of the answer.
    text: Search,
    /// Looks for what ends the reasoning.
    reasoning: Search,
    /// Looks for what ends the calls.
    call: Search,
    /// Whitespace before the answer, while it may still be a call without a marker.
    lead: Option<String>,
    calls: usize,
}

#[derive(Debug)]
enum State {
    Text,
    Reasoning,
    Call(Call),
}

/// The span of calls that is being read.
#[derive(Debug)]
struct Call {
    body: Box<dyn Body>,
    /// What the model wrote since the last whole call, the marker included.
    raw: String,
    begun: Option<Begun>,
    /// Found not to be calls; the rest up to the end marker is part of it.
    failed: bool,
    /// Begun without a marker.
    bare: bool,
}

#[derive(Debug)]
struct Begun {
    name: String,
    id: Option<String>,
}

/// What a marker that was found in text or reasoning begins or ends.
#[derive(Clone, Copy)]
enum Marker {
    Reasoning,
    Call,
}

impl OutputParser {
    /// A parser for an answer in `format`. `tools` are those of the request, whose schemas say
    /// what types arguments have. With `in_reasoning` the prompt has opened the reasoning.
    pub fn new(format: OutputFormat, tools: &[Value], in_reasoning: bool) -> Self {
        let tools = Tools::new(tools);
        let (call_start, call_end) = format.tools.map(|tools| tools.span()).unwrap_or_default();
        let (start, end) = format.reasoning().unwrap_or_default();
        // A new call ends one that has no end marker of its own.
        let call_end = if call_end.is_empty() {
            call_start
        } else {
            call_end
        };
        let bare = format
            .tools
            .is_some_and(|format| format.bare(&tools).is_some());
        Self {
            state: if in_reasoning && format.reasoning.is_some() {
                State::Reasoning
            } else {
                State::Text
            },
            text: Search::new(&[start, call_start]),
            reasoning: Search::new(&[end, call_start]),
            call: Search::new(&[call_end]),
            lead: bare.then(String::new),
            calls: 0,
            format,
            tools,
        }
    }

    /// Whether the model is reasoning.
    pub fn in_reasoning(&self) -> bool {
        matches!(self.state, State::Reasoning)
    }

    /// Takes the next piece of text, and gives what is certain by now.
    pub fn push(&mut self, piece: &str) -> Vec<Part> {
        let mut parts = Vec::new();
        self.take(piece, &mut parts);
        parts
    }

    fn take(&mut self, piece: &str, parts: &mut Vec<Part>) {
        let mut rest = piece.to_owned();
        while !rest.is_empty() {
            rest = match self.state {
                State::Text => self.take_text(&rest, parts),
                State::Reasoning => self.take_reasoning(&rest, parts),
                State::Call(_) => self.take_call(&rest, parts),
            };
        }
    }

    /// Ends the answer: what was held back, and what becomes of a call without an end.
    pub fn finish(mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        match &self.state {
            State::Text => {
                let held = self.text.finish();
                // It may be a call without a marker still.
                self.answer(&held, &mut parts);
            }
            State::Reasoning => {
                let held = self.reasoning.finish();
                emit_reasoning(held, &mut parts);
            }
            State::Call(_) => {
                let held = self.call.finish();
                self.feed(&held, &mut parts);
            }
        }
        if let State::Call(_) = self.state {
            self.end_call("", &mut parts);
        }
        if let Some(lead) = self.lead.take() {
            emit_text(lead, &mut parts);
        }
        parts
    }

    fn take_text(&mut self, piece: &str, parts: &mut Vec<Part>) -> String {
        let outcome = self.text.push(piece);
        let (text, rest) = (outcome.text, outcome.rest.to_owned());
        let marker = outcome.found.map(marker);
        let left = self.answer(&text, parts);
        if let State::Call(_) = self.state {
            // The answer has turned out to be a call: the marker, if there is one, is read again
            // as a part of it.
            let held = self.text.finish();
            let found = marker.map(|marker| self.start(marker)).unwrap_or_default();
            return left + &found + &held + &rest;
        }
        if let Some(marker) = marker {
            let fresh = self.lead.is_some();
            self.flush_lead(parts);
            // After the reasoning the answer has not begun yet.
            self.lead = (fresh && matches!(marker, Marker::Reasoning)).then(String::new);
            self.begin(marker);
        }
        rest
    }

    /// Text of the answer. It may begin a call without a marker; then what comes after its
    /// first character is given back.
    fn answer(&mut self, text: &str, parts: &mut Vec<Part>) -> String {
        let Some(lead) = &mut self.lead else {
            emit_text(text.to_owned(), parts);
            return String::new();
        };
        let trimmed = text.trim_start();
        lead.push_str(&text[..text.len() - trimmed.len()]);
        let Some(first) = trimmed.chars().next() else {
            return String::new();
        };
        let bare = self
            .format
            .tools
            .and_then(|format| format.bare(&self.tools));
        match bare {
            Some((start, body)) if start == first => {
                let raw = self.lead.take().unwrap_or_default();
                self.state = State::Call(Call {
                    body,
                    raw,
                    begun: None,
                    failed: false,
                    bare: true,
                });
                trimmed.to_owned()
            }
            _ => {
                self.flush_lead(parts);
                emit_text(trimmed.to_owned(), parts);
                String::new()
            }
        }
    }

    fn flush_lead(&mut self, parts: &mut Vec<Part>) {
        if let Some(lead) = self.lead.take() {
            emit_text(lead, parts);
        }
    }

    fn take_reasoning(&mut self, piece: &str, parts: &mut Vec<Part>) -> String {
        let outcome = self.reasoning.push(piece);
        emit_reasoning(outcome.text, parts);
        match outcome.found.map(marker) {
            Some(Marker::Reasoning) => self.state = State::Text,
            Some(Marker::Call) => self.begin(Marker::Call),
            None => {}
        }
        outcome.rest.to_owned()
    }

    fn start(&self, marker: Marker) -> String {
        match marker {
            Marker::Reasoning => self.format.reasoning().map(|(start, _)| start),
            Marker::Call => self.format.tools.map(|format| format.span().0),
        }
        .unwrap_or_default()
        .to_owned()
    }

    fn begin(&mut self, marker: Marker) {
        match (marker, self.format.tools) {
            (Marker::Call, Some(format)) => {
                self.state = State::Call(Call {
                    body: format.body(&self.tools),
                    raw: format.span().0.to_owned(),
                    begun: None,
                    failed: false,
                    bare: false,
                });
            }
            _ => self.state = State::Reasoning,
        }
    }

    fn take_call(&mut self, piece: &str, parts: &mut Vec<Part>) -> String {
        let outcome = self.call.push(piece);
        let (text, found) = (outcome.text, outcome.found.is_some());
        let rest = outcome.rest.to_owned();
        let (start, end) = self
            .format
            .tools
            .map(|format| format.span())
            .unwrap_or_default();
        let end = if found && end.is_empty() { start } else { end };
        if let Some(left) = self.feed(&text, parts) {
            // Over before the marker: that belongs to the text.
            let held = self.call.finish();
            let marker = if found { end } else { "" };
            return left + marker + &held + &rest;
        }
        if found {
            let restarts = end == start;
            self.end_call(if restarts { "" } else { end }, parts);
            if restarts {
                self.begin(Marker::Call);
            }
        }
        rest
    }

    /// Gives text to the reader of calls. When that is over, gives back what it did not take.
    fn feed(&mut self, mut text: &str, parts: &mut Vec<Part>) -> Option<String> {
        let State::Call(call) = &mut self.state else {
            return Some(text.to_owned());
        };
        while !text.is_empty() {
            if call.failed {
                call.raw.push_str(text);
                return None;
            }
            let mut grown = Vec::new();
            let progress = call.body.push(text, &mut grown);
            let (taken, rest) = text.split_at(progress.consumed);
            call.raw.push_str(taken);
            text = rest;
            for event in grown {
                call.grow(event, &mut self.calls, parts);
            }
            match progress.status {
                Status::More => {}
                Status::Closed => {
                    self.state = State::Text;
                    return Some(text.to_owned());
                }
                Status::Left => {
                    emit_text(std::mem::take(&mut call.raw), parts);
                    self.state = State::Text;
                    return Some(text.to_owned());
                }
                Status::Failed => {
                    call.failed = true;
                    let closed = self
                        .format
                        .tools
                        .is_some_and(|format| !format.span().1.is_empty());
                    if call.bare || !closed {
                        let read = call.raw.len() - progress.back;
                        let back = call.raw.split_off(read);
                        self.end_call("", parts);
                        return Some(back + text);
                    }
                }
            }
        }
        None
    }

    /// The calls end, with `marker` or with the text.
    fn end_call(&mut self, marker: &str, parts: &mut Vec<Part>) {
        let State::Call(mut call) = std::mem::replace(&mut self.state, State::Text) else {
            return;
        };
        if !call.failed && call.body.finish() {
            return;
        }
        call.raw.push_str(marker);
        let index = call.begun.is_some().then_some(self.calls);
        if call.bare && index.is_none() {
            // Nothing has said yet that it is a call.
            emit_text(call.raw, parts);
            return;
        }
        if index.is_some() {
            self.calls += 1;
        }
        parts.push(Part::Malformed {
            index,
            text: call.raw,
        });
    }
}

impl Call {
    fn grow(&mut self, event: Grown, calls: &mut usize, parts: &mut Vec<Part>) {
        let index = *calls;
        match event {
            Grown::Begin { name, id } => {
                self.begun = Some(Begun {
                    name: name.clone(),
                    id,
                });
                parts.push(Part::CallBegin { index, name });
            }
            Grown::Arguments(json) => Part::join(parts, Part::CallArguments { index, json }),
            Grown::End(arguments) => {
                self.raw.clear();
                if let Some(Begun { name, id }) = self.begun.take() {
                    *calls += 1;
                    let call = ToolCall {
                        name,
                        arguments,
                        id,
                    };
                    parts.push(Part::CallEnd { index, call });
                }
            }
        }
    }
}

fn marker(index: usize) -> Marker {
    if index == 0 {
        Marker::Reasoning
    } else {
        Marker::Call
    }
}

fn emit_text(text: String, parts: &mut Vec<Part>) {
    if !text.is_empty() {
        Part::join(parts, Part::Text(text));
    }
}

fn emit_reasoning(text: String, parts: &mut Vec<Part>) {
    if !text.is_empty() {
        Part::join(parts, Part::Reasoning(text));
    }
}
