//! One generation from request to end, on the thread that owns the model.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use mlex_core::{Array, Stream, eval, memory};
use mlex_nn::Cache;

use super::blocks::{self, BlockOptions, BlockStream, Decode};
use super::constraint::{Gate, Guide, Vocabulary};
use super::output::Output;
use super::prompt_cache::{Filling, PromptCache, fill};
use super::request::{Completion, Event, FinishReason, Prompt, Request, Timings, Usage};
use super::speculate::{DraftCounts, Guesses, Speculator};
use super::tokens::Tokens;
use super::{KvSettings, PrefillProgress, Sampler, StreamOptions, TokenStream};
use crate::files::ModelFiles;
use crate::media::{Media, MediaEngine, MediaPrompt, Placeholders};
use crate::model::{Model, MtpHead};
use crate::text::{ChatRequest, ChatTemplate, OutputFormat, Tokenizer, chat_messages, media_parts};
use crate::towers::{MediaKind, Processor, interruptible, refused};
use crate::{Error, ErrorKind, Result};

/// The parts of a session that turn requests into tokens; shared with the asking threads.
#[derive(Debug)]
pub(super) struct TextParts {
    pub(super) tokenizer: Tokenizer,
    pub(super) chat_template: Option<ChatTemplate>,
    /// Tokens that end a text.
    pub(super) eos_ids: Vec<u32>,
    /// How the model marks reasoning and tool calls.
    pub(super) format: OutputFormat,
    /// The architecture's name.
    pub(super) model_type: String,
    /// What it takes beside text.
    pub(super) kinds: Vec<MediaKind>,
    /// What stands for that in a prompt.
    pub(super) placeholders: Option<Placeholders>,
    /// The tokens as grammars see them, once one is asked for.
    pub(super) vocabulary: OnceLock<Vocabulary>,
    /// Where the model is.
    pub(super) path: PathBuf,
    /// What prepares media, once some are counted.
    pub(super) processor: OnceLock<Processor>,
}

impl TextParts {
    /// The prompt of a request as text; none when it is tokens already.
    pub(super) fn render(&self, request: &Request) -> Result<Option<String>> {
        self.render_with(request, true)
    }

    /// The same, with what announces the answer to a conversation or without it.
    fn render_with(&self, request: &Request, announced: bool) -> Result<Option<String>> {
        match &request.prompt {
            Prompt::Raw(text) => Ok(Some(text.clone())),
            Prompt::Tokens(_) => Ok(None),
            Prompt::Messages(messages) => {
                let template = self
                    .chat_template
                    .as_ref()
                    .ok_or_else(|| Error::missing("a chat template; use a raw prompt"))?;
                let mut variables = request.template_variables.clone();
                // As mlx-lm: a model that can reason does, unless it is told not to.
                variables
                    .entry("enable_thinking")
                    .or_insert_with(|| self.format.reasoning().is_some().into());
                let text = template.render(&ChatRequest {
                    messages: &chat_messages(messages)?,
                    tools: (!request.tools.is_empty()).then_some(&*request.tools),
                    add_generation_prompt: announced,
                    variables,
                    ..ChatRequest::default()
                })?;
                Ok(Some(text))
            }
        }
    }

    /// The prompt of a request as tokens. Its media are read for that; no tower runs.
    pub(super) fn prompt_tokens(&self, request: &Request) -> Result<Vec<u32>> {
        let media = self.media(request)?;
        let mut rendered = self.render(request)?;
        if let (Some(text), Some(placeholders)) = (&rendered, self.placeholders_for(&media)) {
            let processor = self.processor()?;
            let counted = media
                .iter()
                .map(|one| one.count(processor, request.media_options));
            let counted = counted.collect::<Result<_>>()?;
            rendered = Some(placeholders.expand(text, counted)?.0);
        }
        self.encode(request, rendered)
    }

    /// What stands for `media` in a prompt; none where there are none.
    fn placeholders_for(&self, media: &[Media]) -> Option<&Placeholders> {
        self.placeholders.as_ref().filter(|_| !media.is_empty())
    }

    /// What prepares media, read with the first one that is counted.
    fn processor(&self) -> Result<&Processor> {
        if let Some(processor) = self.processor.get() {
            return Ok(processor);
        }
        let files = ModelFiles::open(&self.path)?;
        let processor = Processor::load(&files, &self.kinds)?;
        let processor = processor.ok_or_else(|| Error::missing("towers"))?;
        Ok(self.processor.get_or_init(|| processor))
    }

    /// The media of a request: those that it names, or what its messages hold.
    fn media(&self, request: &Request) -> Result<Vec<Media>> {
        let mut media = request.media.clone();
        if let Prompt::Messages(messages) = &request.prompt {
            if media.is_empty() {
                let parts = media_parts(messages);
                let inline = parts.map(|(kind, part)| Media::inline(kind, part));
                media = inline.collect::<Result<_>>()?;
            }
            let kinds = |kinds: Vec<String>| match kinds.is_empty() {
                true => "none".to_owned(),
                false => kinds.join(", "),
            };
            let parts = media_parts(messages).map(|(kind, _)| kind.to_string());
            let (parts, given) = (
                parts.collect::<Vec<_>>(),
                media.iter().map(|media| media.kind.to_string()).collect(),
            );
            if parts != given {
                return Err(Error::field("media", kinds(parts), kinds(given)));
            }
        }
        match media.iter().find(|media| !self.kinds.contains(&media.kind)) {
            Some(media) => Err(refused(&self.model_type, media.kind)),
            None => Ok(media),
        }
    }

    /// The prompt of a request, its media made into features.
    pub(super) fn prompt(
        &self,
        request: &Request,
        rendered: Option<String>,
        engine: &mut MediaEngine,
    ) -> Result<MediaPrompt> {
        let media = self.media(request)?;
        let Some(placeholders) = self.placeholders_for(&media) else {
            return Ok(self.encode(request, rendered)?.into());
        };
        let encoded = engine.encode(&media, request.media_options)?;
        let (rendered, encoded) = match rendered {
            Some(text) => {
                let (text, encoded) = placeholders.expand(&text, encoded)?;
                (Some(text), encoded)
            }
            None => (None, encoded),
        };
        let ids = self.encode(request, rendered)?;
        MediaPrompt::new(ids, &encoded, placeholders.tokens)
    }

    /// How many tokens of `prompt`, that of a request, come before what announces the answer;
    /// none where that cannot be told.
    pub(super) fn turn_end(&self, request: &Request, prompt: &[u32]) -> Option<usize> {
        if !matches!(request.prompt, Prompt::Messages(_)) {
            return None;
        }
        let before = self.render_with(request, false).ok()?;
        let before = self.encode(request, before).ok()?;
        let pairs = before.iter().zip(prompt);
        Some(pairs.take_while(|(a, b)| a == b).count())
    }

    /// The tokens as grammars see them, for a model with so many logits.
    fn vocabulary(&self, size: i32) -> Result<&Vocabulary> {
        if let Some(vocabulary) = self.vocabulary.get() {
            return Ok(vocabulary);
        }
        let vocabulary = Vocabulary::new(&self.tokenizer, size, &self.eos_ids)?;
        Ok(self.vocabulary.get_or_init(|| vocabulary))
    }

    /// The rendered prompt of a request as tokens.
    fn encode(&self, request: &Request, rendered: Option<String>) -> Result<Vec<u32>> {
        match (&request.prompt, rendered) {
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

/// What a session has that guesses tokens.
#[derive(Clone, Copy)]
pub(super) struct Guessers<'a> {
    pub(super) draft: Option<&'a dyn Model>,
    pub(super) mtp: Option<&'a dyn MtpHead>,
}

impl Guessers<'_> {
    /// Refuses guesses that nothing can make.
    fn check(self, guesses: Guesses) -> Result<()> {
        let missing = match guesses {
            Guesses::Draft if self.draft.is_none() => "a draft model",
            Guesses::Mtp if self.mtp.is_none() => "an MTP head",
            _ => return Ok(()),
        };
        let what = format!("{missing}, which was not loaded with the session");
        Err(Error::missing(what))
    }
}

/// Where events go. `send` says whether anyone still listens.
pub(super) struct Sink<'a> {
    pub(super) send: &'a mut dyn FnMut(Event) -> bool,
    pub(super) cancelled: &'a Arc<AtomicBool>,
}

impl Sink<'_> {
    /// Ends all `choices` answers, before the first of them, as cancelled.
    fn cancelled(&mut self, choices: usize, prompt_tokens: usize) {
        let usage = Usage {
            prompt_tokens,
            ..Usage::default()
        };
        for _ in 0..choices {
            self.event(Event::Done(Completion {
                finish_reason: FinishReason::Cancelled,
                usage,
                timings: Timings::default(),
                drafts: DraftCounts::default(),
            }));
        }
    }

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
    guessers: Guessers<'_>,
    media: &mut MediaEngine,
    text: &Arc<TextParts>,
    request: &Request,
    pool: &mut PromptCache,
    sink: &mut Sink<'_>,
) -> Result<()> {
    let choices = request.choices.max(1);
    let rendered = text.render(request)?;
    let cancelled = Arc::clone(sink.cancelled);
    let stop = move || cancelled.load(Ordering::Relaxed);
    let prompt = match interruptible(stop, || text.prompt(request, rendered.clone(), media)) {
        Err(error) if matches!(error.kind(), ErrorKind::Cancelled) => {
            sink.cancelled(choices, 0);
            return Ok(());
        }
        prompt => prompt?,
    };
    let prompt_tokens = prompt.ids().len();
    if let Some(limit) = model.info().max_context
        && prompt_tokens as i64 > i64::from(limit)
    {
        tracing::warn!(
            prompt_tokens,
            limit,
            "the prompt is longer than the model's context"
        );
    }
    // A wrong number is told before the prompt is computed.
    Sampler::new(request.sampler.clone(), model.info().vocab_size, &[])?;
    if let Some(grammar) = &request.grammar {
        grammar.validate()?;
    }
    guessers.check(request.speculation.guesses)?;
    check_decode(model, request)?;
    let mut unused = PromptCache::none();
    let one_by_one = request.decode == Decode::Autoregressive;
    // What a cache holds after blocks is not what it would hold after the same tokens alone.
    let pool = if request.use_prompt_cache && one_by_one {
        pool
    } else {
        &mut unused
    };

    let mut listening = sink.event(Event::Prompt(prompt.ids().to_vec()));
    let start = Instant::now();
    if !listening {
        // Nobody waits for it any more: the prompt is not worth its time.
        sink.cancelled(choices, prompt_tokens);
        return Ok(());
    }
    let mut on_progress = |progress: PrefillProgress| {
        listening = listening && sink.event(Event::Prefill(progress));
        listening
    };
    let key = prompt.key()?;
    let (hidden, cached_tokens, cache) = if one_by_one {
        let filling = Filling {
            key: &key,
            prompt: &prompt,
            settings: &request.kv,
            step: request.prefill_step,
            turn_end: &|| text.turn_end(request, key.tokens()),
        };
        let filled = fill(model, pool, &filling, &mut on_progress)?;
        (filled.hidden, filled.known, filled.cache)
    } else {
        let mut cache = model.new_cache()?;
        let (ids, step) = (prompt.ids(), request.prefill_step);
        let decode = request.decode;
        let hidden = blocks::prefill(model, &mut cache, decode, ids, step, &mut on_progress)?;
        (hidden, 0, cache)
    };
    let mut cache = Some(cache);
    for choice in 0..choices {
        // The last answer takes the cache itself: a second one in use would be copied.
        let last = choice + 1 == choices;
        let used = if last { cache.take() } else { cache.clone() };
        let Some(mut used) = used else { break };
        let started = if choice == 0 { start } else { Instant::now() };
        if choices > 1 {
            listening = sink.event(Event::Choice(choice)) && listening;
        }
        let hidden = hidden.as_ref().filter(|_| listening);
        let answer = Answering {
            model,
            guessers,
            text,
            request,
            prompt: prompt.ids(),
            rendered: rendered.as_deref(),
            choice,
            started,
            cached_tokens,
        };
        let mut ids = Vec::new();
        listening = answer.run(&mut used, hidden, &mut ids, sink)?;
        // The last token may not have been given to the model.
        let fed = usize::try_from(used.len()).unwrap_or(0);
        let fed = fed.checked_sub(prompt_tokens);
        if let (Some(_), Some(fed)) = (hidden, fed.and_then(|fed| ids.get(..fed)))
            && eval(used.arrays()).is_ok()
        {
            pool.insert(key.followed_by(fed), request.kv, used, None);
        }
    }
    Ok(())
}

/// Refuses what goes with one way of decoding alone.
fn check_decode(model: &dyn Model, request: &Request) -> Result<()> {
    if request.decode == Decode::Autoregressive {
        return Ok(());
    }
    blocks::check(model, request.decode, &request.sampler)?;
    let none = "none where tokens come in blocks";
    if let Some(top) = request.logprobs {
        return Err(Error::field("logprobs", none, top.to_string()));
    }
    if request.grammar.is_some() {
        return Err(Error::field("grammar", none, "one"));
    }
    let guesses = request.speculation.guesses;
    if guesses != Guesses::Off {
        return Err(Error::field("guesses", none, format!("{guesses:?}")));
    }
    if let Some(budget) = request.reasoning_budget {
        return Err(Error::field("reasoning_budget", none, budget.to_string()));
    }
    if request.kv != KvSettings::default() {
        return Err(Error::field("kv", none, "settings of the cache"));
    }
    Ok(())
}

/// One answer to a request.
struct Answering<'a> {
    model: &'a dyn Model,
    guessers: Guessers<'a>,
    text: &'a TextParts,
    request: &'a Request,
    prompt: &'a [u32],
    rendered: Option<&'a str>,
    choice: usize,
    started: Instant,
    cached_tokens: usize,
}

impl Answering<'_> {
    /// Generates it after the prompt in `cache`, whose last state is `hidden` `[1, D]`; without
    /// one it was cancelled. The tokens are added to `ids`. Says whether anyone still listens.
    fn run(
        &self,
        cache: &mut Cache,
        hidden: Option<&Array>,
        ids: &mut Vec<u32>,
        sink: &mut Sink<'_>,
    ) -> Result<bool> {
        let Self { text, request, .. } = *self;
        let mut output = Output::new(text, request, self.rendered);
        let mut finish_reason = FinishReason::Cancelled;
        let mut first: Option<Instant> = None;
        let mut drafts = DraftCounts::default();
        if let Some(hidden) = hidden {
            finish_reason = FinishReason::Length;
            let mut tokens = self.tokens(cache, hidden)?;
            let mut closing = Closing::new(text, request)?;
            while finish_reason == FinishReason::Length {
                tokens.set_limit(closing.room(&output));
                let Some(block) = tokens.next(closing.next(&output))? else {
                    if tokens.is_complete() {
                        finish_reason = FinishReason::Stop;
                    }
                    break;
                };
                first.get_or_insert_with(Instant::now);
                for id in block {
                    ids.push(id);
                    let (parts, stopped) = output.push(id);
                    let logprobs = tokens.logprobs();
                    let listening = sink.event(Event::Token {
                        id,
                        parts,
                        logprobs,
                    });
                    if stopped {
                        finish_reason = FinishReason::Stop;
                    } else if !listening {
                        finish_reason = FinishReason::Cancelled;
                    }
                    if finish_reason != FinishReason::Length {
                        break;
                    }
                }
            }
            drafts = tokens.finish()?;
        }
        let end = Instant::now();
        // The step after the last token is on the device already: when the end is announced,
        // nothing runs any more.
        Stream::current()?.synchronize()?;
        let rest = output.finish();
        if !rest.is_empty() {
            sink.event(Event::Rest(rest));
        }
        if finish_reason == FinishReason::Stop && output.has_calls() {
            finish_reason = FinishReason::ToolCalls;
        }
        let timings = Timings {
            prefill: first.unwrap_or(end) - self.started,
            decode: first.map_or(Duration::ZERO, |first| end - first),
            peak_memory_bytes: memory::peak()?,
        };
        let usage = Usage {
            prompt_tokens: self.prompt.len(),
            cached_tokens: self.cached_tokens,
            completion_tokens: output.count,
        };
        Ok(sink.event(Event::Done(Completion {
            finish_reason,
            usage,
            timings,
            drafts,
        })))
    }

    /// What leads the answer, where it must have a form.
    fn guide(&self) -> Result<Option<Guide>> {
        let Self { text, request, .. } = *self;
        let Some(grammar) = &request.grammar else {
            return Ok(None);
        };
        let vocabulary = text.vocabulary(self.model.info().vocab_size)?;
        let gate = Gate::new(text, request, self.rendered)?;
        Guide::new(grammar, vocabulary, gate).map(Some)
    }

    /// What guesses tokens, where something shall.
    fn speculator(&self) -> Result<Option<Speculator<'_>>> {
        let speculation = self.request.speculation;
        Ok(match speculation.guesses {
            Guesses::Off => None,
            Guesses::Ngram => Some(Speculator::ngram(speculation)),
            Guesses::Draft => {
                let step = self.request.prefill_step;
                let guess = |draft| Speculator::draft_model(draft, step, speculation);
                self.guessers.draft.map(guess).transpose()?
            }
            Guesses::Mtp => {
                let guess = |head| Speculator::mtp(self.model, head, speculation);
                self.guessers.mtp.map(guess).transpose()?
            }
        })
    }

    /// The tokens after the prompt in `cache`, whose last state is `hidden` `[1, D]`.
    fn tokens<'m>(&'m self, cache: &'m mut Cache, hidden: &Array) -> Result<Tokens<'m>> {
        let Self { model, request, .. } = *self;
        let (max_tokens, prefill_step) = (request.max_tokens, request.prefill_step);
        if request.decode == Decode::Autoregressive {
            let options = StreamOptions {
                max_tokens,
                prefill_step,
                logprobs: request.logprobs,
            };
            let sampler = self.sampler()?;
            let state = (self.prompt, hidden);
            let checks = (self.guide()?, self.speculator()?);
            let stream = TokenStream::after_checked(model, cache, sampler, state, options, checks)?;
            return Ok(Tokens::OneByOne(stream));
        }
        let options = BlockOptions {
            max_tokens,
            prefill_step,
            sampler: request.sampler.clone(),
            eos_ids: if request.ignore_eos {
                Vec::new()
            } else {
                self.text.eos_ids.clone()
            },
        };
        let (decode, hidden) = (request.decode, Some(hidden));
        let stream = BlockStream::after(model, cache, decode, self.prompt, options, hidden)?;
        Ok(Tokens::Blocks(stream))
    }

    /// The sampler of this answer, with what it needs of the tokenizer.
    fn sampler(&self) -> Result<Sampler> {
        let Self { text, request, .. } = *self;
        let mut config = request.sampler.clone();
        config.seed = config
            .seed
            .map(|seed| seed.wrapping_add(self.choice as u64));
        if let Some(dry) = &mut config.dry {
            dry.break_at(&text.tokenizer, &request.dry_breakers)?;
        }
        let vocab_size = self.model.info().vocab_size;
        if let Some(xtc) = &mut config.xtc {
            xtc.keep.extend(&text.eos_ids);
            xtc.keep.extend(text.tokenizer.encode("\n", false)?);
        }
        Sampler::new(config, vocab_size, self.prompt)
    }
}

/// Ends the reasoning when its budget is spent.
struct Closing {
    budget: Option<usize>,
    /// The tokens of the end marker.
    marker: Vec<u32>,
    /// How many of them have been put in.
    given: usize,
}

impl Closing {
    fn new(text: &TextParts, request: &Request) -> Result<Self> {
        let end = text.format.reasoning().map(|(_, end)| end);
        let marker = match (request.reasoning_budget, end) {
            (Some(_), Some(end)) => text.tokenizer.encode(end, false)?,
            _ => Vec::new(),
        };
        Ok(Self {
            budget: request.reasoning_budget,
            marker,
            given: 0,
        })
    }

    /// How many tokens may come before one may have to be put in, that one included.
    fn room(&self, output: &Output<'_>) -> usize {
        match self.budget {
            None => usize::MAX,
            Some(_) if self.given > 0 && self.given < self.marker.len() => 1,
            Some(budget) => output.reasoning_left(budget),
        }
    }

    /// The token to put in.
    fn next(&mut self, output: &Output<'_>) -> Option<u32> {
        let budget = self.budget?;
        let begins = self.given == 0 && output.is_over(budget);
        if self.given == self.marker.len() {
            if output.in_reasoning() {
                // The tokenizer has no way to write the marker: once is enough.
                self.budget = None;
                return None;
            }
            self.given = 0;
        }
        if !begins && self.given == 0 {
            return None;
        }
        let id = self.marker.get(self.given).copied();
        self.given += 1;
        id
    }
}
