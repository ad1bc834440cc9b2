//! One generation from request to end, on the thread that owns the model.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mlex_core::{Stream, memory};

use super::request::{Completion, Event, FinishReason, Prompt, Request, Timings, Usage};
use super::{PrefillProgress, Sampler, StreamOptions, TokenStream};
use crate::model::Model;
use crate::text::{ChatRequest, ChatTemplate, StopSequences, StreamingDetokenizer, Tokenizer};
use crate::{Error, Result};

/// The parts of a session that turn requests into tokens; shared with the asking threads.
#[derive(Debug)]
pub(super) struct TextParts {
    pub(super) tokenizer: Tokenizer,
    pub(super) chat_template: Option<ChatTemplate>,
    /// Tokens that end a text.
    pub(super) eos_ids: Vec<u32>,
}

impl TextParts {
    /// The prompt of a request as text; none when it is tokens already.
    pub(super) fn render(&self, request: &Request) -> Result<Option<String>> {
        match &request.prompt {
            Prompt::Raw(text) => Ok(Some(text.clone())),
            Prompt::Tokens(_) => Ok(None),
            Prompt::Messages(messages) => {
                let template = self
                    .chat_template
                    .as_ref()
                    .ok_or_else(|| Error::missing("a chat template; use a raw prompt"))?;
                let text = template.render(&ChatRequest {
                    messages,
                    tools: (!request.tools.is_empty()).then_some(&*request.tools),
                    add_generation_prompt: true,
                    variables: request.template_variables.clone(),
                    ..ChatRequest::default()
                })?;
                Ok(Some(text))
            }
        }
    }

    /// The prompt of a request as tokens.
    pub(super) fn prompt_tokens(&self, request: &Request) -> Result<Vec<u32>> {
        match (&request.prompt, self.render(request)?) {
            (Prompt::Tokens(ids), _) => Ok(ids.clone()),
            // A template writes its special tokens itself.
            (Prompt::Messages(_), Some(text)) => self.tokenizer.encode(&text, false),
            (_, text) => {
                let text = text.unwrap_or_default();
                let bos = self
                    .tokenizer
                    .bos_id()
                    .and_then(|id| self.tokenizer.id_to_token(id));
                // As mlx-lm: a prompt that brings its first token is not given another one.
                let has_bos = bos.is_some_and(|bos| text.starts_with(&bos));
                self.tokenizer.encode(&text, !has_bos)
            }
        }
    }
}

/// Where events go. `send` says whether anyone still listens.
pub(super) struct Sink<'a> {
    pub(super) send: &'a mut dyn FnMut(Event) -> bool,
    pub(super) cancelled: &'a AtomicBool,
}

impl Sink<'_> {
    /// Sends `event`; false when the generation shall end.
    fn event(&mut self, event: Event) -> bool {
        (self.send)(event) && !self.cancelled.load(Ordering::Relaxed)
    }
}

/// Runs `request` and sends what happens to `sink`.
///
/// # Errors
/// When the request is not valid or MLX fails.
pub(super) fn run(
    model: &dyn Model,
    text: &Arc<TextParts>,
    request: &Request,
    sink: &mut Sink<'_>,
) -> Result<()> {
    let prompt = text.prompt_tokens(request)?;
    let prompt_tokens = prompt.len();
    if let Some(limit) = model.info().max_context
        && prompt_tokens as i64 > i64::from(limit)
    {
        tracing::warn!(
            prompt_tokens,
            limit,
            "the prompt is longer than the model's context"
        );
    }
    let sampler = Sampler::new(request.sampler.clone(), model.info().vocab_size, &prompt)?;
    let mut cache = model.new_cache()?;
    let options = StreamOptions {
        max_tokens: request.max_tokens,
        prefill_step: request.prefill_step,
    };

    let mut listening = sink.event(Event::Prompt(prompt.clone()));
    let start = Instant::now();
    if !listening {
        // Nobody waits for it any more: the prompt is not worth its time.
        let usage = Usage {
            prompt_tokens,
            completion_tokens: 0,
        };
        sink.event(Event::Done(Completion {
            finish_reason: FinishReason::Cancelled,
            usage,
            timings: Timings::default(),
        }));
        return Ok(());
    }
    let mut on_progress = |progress: PrefillProgress| {
        listening = listening && sink.event(Event::Prefill(progress));
        listening
    };
    let mut stream = TokenStream::new(
        model,
        &mut cache,
        sampler,
        &prompt,
        options,
        &mut on_progress,
    )?;

    let mut output = Output::new(text, request);
    let mut finish_reason = if listening {
        FinishReason::Length
    } else {
        FinishReason::Cancelled
    };
    let mut first: Option<Instant> = None;
    while finish_reason == FinishReason::Length {
        let Some(id) = stream.next().transpose()? else {
            break;
        };
        first.get_or_insert_with(Instant::now);
        let (event, stopped) = output.push(id);
        let listening = sink.event(event);
        if stopped {
            finish_reason = FinishReason::Stop;
        } else if !listening {
            finish_reason = FinishReason::Cancelled;
        }
    }
    let end = Instant::now();
    // The step after the last token is on the device already: when the end is announced,
    // nothing runs any more.
    drop(stream);
    Stream::current()?.synchronize()?;
    let rest = output.finish();
    if !rest.is_empty() {
        sink.event(Event::Text(rest));
    }
    let timings = Timings {
        prefill: first.unwrap_or(end) - start,
        decode: first.map_or(Duration::ZERO, |first| end - first),
        peak_memory_bytes: memory::peak()?,
    };
    let usage = Usage {
        prompt_tokens,
        completion_tokens: output.count,
    };
    sink.event(Event::Done(Completion {
        finish_reason,
        usage,
        timings,
    }));
    Ok(())
}

/// Tokens to text, up to a stop.
struct Output<'a> {
    eos_ids: &'a [u32],
    detokenizer: StreamingDetokenizer,
    stops: StopSequences,
    count: usize,
    stopped: bool,
}

impl<'a> Output<'a> {
    fn new(text: &'a TextParts, request: &Request) -> Self {
        Self {
            eos_ids: if request.ignore_eos {
                &[]
            } else {
                &text.eos_ids
            },
            detokenizer: StreamingDetokenizer::new(&text.tokenizer, true),
            stops: StopSequences::new(&request.stop),
            count: 0,
            stopped: false,
        }
    }

    /// The event of a token, and whether the generation ends with it.
    fn push(&mut self, id: u32) -> (Event, bool) {
        self.count += 1;
        if self.eos_ids.contains(&id) {
            return (
                Event::Token {
                    id,
                    text: String::new(),
                },
                true,
            );
        }
        let piece = self.detokenizer.push(id);
        let outcome = self.stops.push(&piece);
        self.stopped = outcome.stop.is_some();
        (
            Event::Token {
                id,
                text: outcome.text,
            },
            self.stopped,
        )
    }

    /// What was held back, unless a stop text has ended it.
    fn finish(&mut self) -> String {
        if self.stopped {
            return String::new();
        }
        let piece = self.detokenizer.finish();
        let outcome = self.stops.push(&piece);
        if outcome.stop.is_some() {
            return outcome.text;
        }
        outcome.text + &self.stops.finish()
    }
}
