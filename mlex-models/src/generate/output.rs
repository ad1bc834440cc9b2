//! Generated tokens to parts of an answer, up to a stop.

use super::engine::TextParts;
use super::request::{Prompt, Request};
use crate::text::{OutputParser, Part, StopSequences, StreamingDetokenizer};

/// One answer while it is generated.
pub(super) struct Output<'a> {
    eos_ids: &'a [u32],
    detokenizer: StreamingDetokenizer,
    stops: StopSequences,
    parser: Option<OutputParser>,
    /// Tokens so far.
    pub(super) count: usize,
    /// Tokens of reasoning so far.
    reasoning: usize,
    stopped: bool,
    calls: bool,
}

impl<'a> Output<'a> {
    /// An answer to `request`, whose prompt is `prompt` as text where it is one.
    pub(super) fn new(text: &'a TextParts, request: &Request, prompt: Option<&str>) -> Self {
        let format = &text.format;
        let parses = request.parse && matches!(request.prompt, Prompt::Messages(_));
        let parser = parses.then(|| {
            let in_reasoning = prompt.is_some_and(|prompt| format.opens_reasoning(prompt));
            OutputParser::new(format.clone(), &request.tools, in_reasoning)
        });
        let mut detokenizer = StreamingDetokenizer::new(&text.tokenizer, true);
        if parses {
            detokenizer = detokenizer.with_shown(|token| format.needs(token));
        }
        Self {
            eos_ids: if request.ignore_eos {
                &[]
            } else {
                &text.eos_ids
            },
            detokenizer,
            stops: StopSequences::new(&request.stop),
            parser,
            count: 0,
            reasoning: 0,
            stopped: false,
            calls: false,
        }
    }

    /// What has become final with a token, and whether the generation ends with it.
    pub(super) fn push(&mut self, id: u32) -> (Vec<Part>, bool) {
        self.count += 1;
        self.reasoning += usize::from(self.in_reasoning());
        if self.eos_ids.contains(&id) {
            return (Vec::new(), true);
        }
        let piece = self.detokenizer.push(id);
        let outcome = self.stops.push(&piece);
        self.stopped = outcome.stop.is_some();
        (self.parse(outcome.text), self.stopped)
    }

    /// Whether the model reasons, and has done so for `budget` tokens.
    pub(super) fn is_over(&self, budget: usize) -> bool {
        self.in_reasoning() && self.reasoning >= budget
    }

    /// How many tokens may come before it [is over](Self::is_over), as far as is known.
    pub(super) fn reasoning_left(&self, budget: usize) -> usize {
        if self.in_reasoning() {
            budget.saturating_sub(self.reasoning)
        } else {
            usize::MAX
        }
    }

    pub(super) fn in_reasoning(&self) -> bool {
        self.parser.as_ref().is_some_and(OutputParser::in_reasoning)
    }

    /// Whether there were tool calls.
    pub(super) fn has_calls(&self) -> bool {
        self.calls
    }

    fn parse(&mut self, text: String) -> Vec<Part> {
        let parts = match &mut self.parser {
            Some(parser) => parser.push(&text),
            None if text.is_empty() => Vec::new(),
            None => vec![Part::Text(text)],
        };
        self.note_calls(&parts);
        parts
    }

    fn note_calls(&mut self, parts: &[Part]) {
        let is_call = |part: &Part| matches!(part, Part::CallEnd { .. });
        self.calls = self.calls || parts.iter().any(is_call);
    }

    /// What was held back. After a stop text there is nothing more, but what may be half a
    /// marker before it.
    pub(super) fn finish(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        if !self.stopped {
            let piece = self.detokenizer.finish();
            let outcome = self.stops.push(&piece);
            let mut text = outcome.text;
            if outcome.stop.is_none() {
                text += &self.stops.finish();
            }
            parts = self.parse(text);
        }
        if let Some(parser) = self.parser.take() {
            for part in parser.finish() {
                Part::join(&mut parts, part);
            }
        }
        self.note_calls(&parts);
        parts
    }
}
