//! `mlex generate`.

mod form;
mod prompt;
mod speculate;

use std::mem::ManuallyDrop;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use mlex_models::ModelFiles;
use mlex_models::generate::{
    Completion, DraftCounts, Event, FinishReason, Guesses, KvSettings, LoadOptions, Request,
    Session, TokenLogprob, TokenLogprobs,
};
use mlex_models::text::Answer;
use serde_json::{Map, Value, json};

use crate::args::{KvArgs, ModelArgs, SamplerArgs};
use crate::decode::DecodeArgs;
use crate::failure::{self, INTERRUPTED};
use crate::interrupt::cancel_on_interrupt;
use crate::output::{note, number, print_json, size};
use crate::progress::{ByteBar, PrefillBar};
use crate::show::{Show, call_json};
use form::FormArgs;
pub(crate) use prompt::Conversation;
pub(crate) use prompt::PromptArgs;
use speculate::SpeculateArgs;

/// Generate text from a prompt or a conversation
///
/// The text goes to stdout while it is generated, statistics go to stderr. Ctrl-C ends the
/// generation and keeps the text so far (exit code 130).
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The most tokens to generate
    #[arg(long, default_value_t = 256, value_name = "N")]
    max_tokens: usize,
    /// End before this text (repeatable)
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Go on after an end-of-text token, up to --max-tokens
    #[arg(long)]
    ignore_eos: bool,
    /// Do not show the reasoning
    #[arg(long)]
    hide_reasoning: bool,
    /// End the reasoning after this many tokens, and go on with the answer
    #[arg(long, value_name = "N")]
    reasoning_budget: Option<usize>,
    /// Generate so many answers; the seeds of further ones are the next numbers
    #[arg(long, short = 'n', default_value = "1", value_name = "N")]
    choices: NonZeroUsize,
    /// With --json, log-probabilities of each token and of the K likeliest ones
    #[arg(long, value_name = "K", requires = "json")]
    logprobs: Option<usize>,
    /// How many prompt tokens are computed at once; by default 512 on a CPU and 2048 on a GPU,
    /// where less in long contexts
    #[arg(long, value_name = "N")]
    prefill_step: Option<NonZeroUsize>,
    /// Print one JSON document in place of the text and statistics
    #[arg(long)]
    json: bool,
    /// Begin with the state of a prompt from `mlex cache save`, where this one begins alike; how
    /// keys and values are held is then as it was saved
    #[arg(long, value_name = "FILE", conflicts_with_all = ["max_kv_size", "kv_bits"])]
    prompt_cache: Option<PathBuf>,
    // Their help headings hold for what follows, so they come last.
    #[command(flatten)]
    prompt: PromptArgs,
    #[command(flatten)]
    kv: KvArgs,
    #[command(flatten)]
    decode: DecodeArgs,
    #[command(flatten)]
    sampler: SamplerArgs,
    #[command(flatten)]
    form: FormArgs,
    #[command(flatten)]
    speculate: SpeculateArgs,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    // What can be wrong without the model is looked at before the long load.
    let sampler = args.sampler.config("generate")?;
    let decode = args.decode.decode("generate")?;
    if args.stop.iter().any(String::is_empty) {
        return Err(failure::usage(
            "generate",
            "--stop: expected a text, found an empty one",
        ));
    }
    let grammar = args.form.read()?;
    let speculation = args.speculate.speculation()?;
    let input = args.prompt.read()?;
    let draft_model = args.speculate.locate()?;
    let path = args.model.source.locate("generate")?;
    let files = ModelFiles::open(&path).map_err(failure::no_model)?;
    let has_template = files.chat_template()?.is_some();
    let mut request: Request = input.request(has_template)?;
    request.max_tokens = args.max_tokens;
    if let Some(step) = args.prefill_step {
        request.prefill_step = step.get().into();
    }
    request.stop.clone_from(&args.stop);
    request.ignore_eos = args.ignore_eos;
    request.reasoning_budget = args.reasoning_budget;
    request.choices = args.choices.get();
    request.logprobs = args.logprobs;
    request.kv = args.kv.settings();
    request.grammar = grammar;
    request.speculation = speculation;
    request.decode = decode;
    args.sampler.apply(sampler, &mut request);

    // Never dropped: its thread waits, idle, until the program has ended. Taking the model
    // apart would only delay the end.
    let session = ManuallyDrop::new(load(
        &path,
        speculation.guesses == Guesses::Mtp,
        draft_model,
        &args.model,
    )?);
    args.sampler.follow(session.info(), &mut request);
    if let Some(file) = &args.prompt_cache {
        request.kv = load_prompt(&session, file)?;
    }
    let show = (!args.json).then(|| Show::new(!args.hide_reasoning));
    let output = generate(&session, request, show)?;
    if args.json {
        let load_s = session.info().load_time.as_secs_f64();
        print_json(&output.json(args.logprobs.is_some(), load_s)?)?;
    } else {
        for choice in &output.choices {
            choice.print_statistics()?;
        }
    }
    let mut cancelled = false;
    for choice in &output.choices {
        cancelled |= choice.completion()?.finish_reason == FinishReason::Cancelled;
    }
    Ok(if cancelled {
        ExitCode::from(INTERRUPTED)
    } else {
        ExitCode::SUCCESS
    })
}

/// Loads a model, with a bar on the terminal, and one that guesses for it.
pub(crate) fn load(
    path: &Path,
    mtp: bool,
    draft: Option<PathBuf>,
    args: &ModelArgs,
) -> Result<Session> {
    let bar = ByteBar::new("loading");
    let mut options = LoadOptions::default();
    options.dtype = args.dtype;
    options.device = Some(args.set_up()?);
    options.draft_model = draft;
    options.mtp = mtp;
    let moved = bar.clone();
    options.on_progress = Some(Box::new(move |progress| moved.set(progress)));
    let session = Session::load(path, options);
    bar.finish();
    Ok(session?)
}

/// Takes the state of a prompt from a file. Returns how it is held.
pub(crate) fn load_prompt(session: &Session, file: &Path) -> Result<KvSettings> {
    let info = session.load_prompt(file)?;
    note(&format!(
        "prompt cache: {} tokens from {}",
        info.tokens,
        file.display()
    ));
    Ok(info.settings)
}

/// All that a generation has given.
struct Output {
    prompt_tokens: Vec<u32>,
    choices: Vec<Choice>,
}

/// One answer.
#[derive(Default)]
struct Choice {
    answer: Answer,
    tokens: Vec<u32>,
    logprobs: Vec<Option<TokenLogprobs>>,
    completion: Option<Completion>,
}

/// Runs `request`, printing the answer as it comes if there is a `show`.
fn generate(session: &Session, request: Request, mut show: Option<Show>) -> Result<Output> {
    let choices = request.choices;
    let events = session.generate(request);
    let handle = events.cancel_handle();
    let cancel = handle.clone();
    cancel_on_interrupt(move || cancel.cancel())?;
    let mut output = Output {
        prompt_tokens: Vec::new(),
        choices: Vec::new(),
    };
    let mut choice = Choice::default();
    let mut printed = Ok(());
    let mut bar = PrefillBar::new();
    for event in events {
        let event = event?;
        event.add_to(&mut choice.answer);
        if !matches!(event, Event::Prompt(_) | Event::Prefill(_)) {
            bar.finish();
        }
        if let Some(show) = &mut show {
            for part in event.parts() {
                if printed.is_ok() {
                    printed = show.part(part);
                }
            }
            if printed.is_err() {
                // Not left at once: the program must not end while the model computes.
                handle.cancel();
            }
        }
        match event {
            Event::Prompt(ids) => {
                bar.start(ids.len());
                output.prompt_tokens = ids;
            }
            Event::Prefill(progress) => bar.set(progress),
            Event::Choice(index) if show.is_some() => {
                note(&format!("answer {} of {choices}:", index + 1));
            }
            Event::Token { id, logprobs, .. } => {
                choice.tokens.push(id);
                choice.logprobs.push(logprobs);
            }
            Event::Done(done) => {
                choice.completion = Some(done);
                output.choices.push(std::mem::take(&mut choice));
                if let Some(show) = &mut show
                    && printed.is_ok()
                {
                    printed = show.finish();
                }
            }
            _ => {}
        }
    }
    bar.finish();
    printed?;
    Ok(output)
}

impl Choice {
    fn completion(&self) -> Result<&Completion> {
        let missing = "the generation has ended without a result";
        self.completion.as_ref().context(missing)
    }

    fn print_statistics(&self) -> Result<()> {
        let completion = self.completion()?;
        let Completion {
            usage,
            timings,
            finish_reason,
            ..
        } = completion;
        let prefill = rate(completion.prefill_tps());
        let decode = rate(completion.decode_tps());
        let cached = match usage.cached_tokens {
            0 => String::new(),
            cached => format!(" ({cached} from the prompt cache)"),
        };
        note(&format!(
            "prompt:     {} tokens{cached}{prefill}",
            usage.prompt_tokens
        ));
        note(&format!(
            "generated:  {} tokens{decode} ({finish_reason})",
            usage.completion_tokens
        ));
        let DraftCounts { checked, accepted } = completion.drafts;
        if checked > 0 {
            note(&format!(
                "guessed:    {checked} tokens, {accepted} of them right"
            ));
        }
        note(&format!(
            "peak memory: {}",
            size(timings.peak_memory_bytes as u64)
        ));
        Ok(())
    }

    /// The fields that each answer has.
    fn json(&self, with_logprobs: bool) -> Result<Map<String, Value>> {
        let completion = self.completion()?;
        let mut fields = Map::new();
        fields.insert("text".into(), self.answer.text.clone().into());
        fields.insert("tokens".into(), self.tokens.clone().into());
        let reason = completion.finish_reason.to_string();
        fields.insert("finish_reason".into(), reason.into());
        fields.insert("reasoning".into(), json!(self.answer.reasoning));
        let calls = self.answer.tool_calls.iter().map(call_json).collect();
        fields.insert("tool_calls".into(), calls);
        if !self.answer.malformed.is_empty() {
            fields.insert("malformed_tool_calls".into(), json!(self.answer.malformed));
        }
        if with_logprobs {
            let logprobs = self.logprobs.iter().map(logprobs_json).collect();
            fields.insert("logprobs".into(), logprobs);
        }
        Ok(fields)
    }
}

impl Output {
    fn json(&self, with_logprobs: bool, load_s: f64) -> Result<Value> {
        let first = self.choices.first();
        let first = first.context("the generation has ended without a result")?;
        let Completion { usage, timings, .. } = first.completion()?;
        let mut fields = first.json(with_logprobs)?;
        let prompt_tokens = self.prompt_tokens.clone().into();
        fields.shift_insert(2, "prompt_tokens".into(), prompt_tokens);
        if self.choices.len() > 1 {
            let choices = self.choices.iter().map(|choice| choice.json(with_logprobs));
            let choices = choices.collect::<Result<Vec<_>>>()?;
            fields.insert("choices".into(), json!(choices));
        }
        let mut counts = json!({
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
        });
        if usage.cached_tokens > 0 {
            counts["cached_tokens"] = usage.cached_tokens.into();
        }
        fields.insert("usage".into(), counts);
        let drafts = first.completion()?.drafts;
        if drafts.checked > 0 {
            let drafts = json!({"checked": drafts.checked, "accepted": drafts.accepted});
            fields.insert("drafts".into(), drafts);
        }
        fields.insert(
            "timings".into(),
            json!({
                "load_s": load_s,
                "prefill_tps": first.completion()?.prefill_tps(),
                "decode_tps": first.completion()?.decode_tps(),
                "peak_memory_bytes": timings.peak_memory_bytes,
            }),
        );
        Ok(Value::Object(fields))
    }
}

/// The log-probabilities at a token; null for one that was put in.
fn logprobs_json(logprobs: &Option<TokenLogprobs>) -> Value {
    let Some(logprobs) = logprobs else {
        return Value::Null;
    };
    let top = |token: &TokenLogprob| json!({"id": token.id, "logprob": number(token.logprob)});
    let top: Vec<Value> = logprobs.top.iter().map(top).collect();
    json!({"logprob": number(logprobs.logprob), "top": top})
}

/// `, 12.34 tokens/s`; nothing where nothing was measured.
fn rate(tokens_per_second: f64) -> String {
    if tokens_per_second > 0.0 {
        format!(", {tokens_per_second:.2} tokens/s")
    } else {
        String::new()
    }
}
