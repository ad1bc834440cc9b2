//! `mlex generate`.

mod prompt;

use std::mem::ManuallyDrop;
use std::num::NonZeroUsize;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use mlex_models::ModelFiles;
use mlex_models::generate::{Completion, Event, FinishReason, LoadOptions, Request, Session};
use serde_json::{Value, json};

use crate::args::{ModelArgs, SamplerArgs};
use crate::failure::{self, INTERRUPTED};
use crate::interrupt::cancel_on_interrupt;
use crate::output::{note, print, print_json, size};
use crate::progress::{ByteBar, PrefillBar};
use prompt::PromptArgs;

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
    /// How many prompt tokens are computed at once
    #[arg(long, default_value = "512", value_name = "N")]
    prefill_step: NonZeroUsize,
    /// Print one JSON document in place of the text and statistics
    #[arg(long)]
    json: bool,
    // Their help headings hold for what follows, so they come last.
    #[command(flatten)]
    prompt: PromptArgs,
    #[command(flatten)]
    sampler: SamplerArgs,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    // What can be wrong without the model is looked at before the long load.
    let sampler = args.sampler.config("generate")?;
    if args.stop.iter().any(String::is_empty) {
        return Err(failure::usage(
            "generate",
            "--stop: expected a text, found an empty one",
        ));
    }
    let input = args.prompt.read()?;
    let path = args.model.source.locate("generate")?;
    let files = ModelFiles::open(&path).map_err(failure::no_model)?;
    let has_template = files.chat_template()?.is_some();
    let mut request: Request = input.request(has_template)?;
    request.max_tokens = args.max_tokens;
    request.prefill_step = args.prefill_step.get();
    request.stop.clone_from(&args.stop);
    request.ignore_eos = args.ignore_eos;
    request.sampler = sampler;

    // Never dropped: its thread waits, idle, until the program has ended. Taking the model
    // apart would only delay the end.
    let session = ManuallyDrop::new(load(&path, &args.model)?);
    let output = generate(&session, request, !args.json)?;
    if args.json {
        print_json(&output.json(session.info().load_time.as_secs_f64()))?;
    } else {
        output.print_statistics();
    }
    let cancelled = output.completion.finish_reason == FinishReason::Cancelled;
    Ok(if cancelled {
        ExitCode::from(INTERRUPTED)
    } else {
        ExitCode::SUCCESS
    })
}

fn load(path: &Path, args: &ModelArgs) -> Result<Session> {
    let bar = ByteBar::new("loading");
    let mut options = LoadOptions::default();
    options.dtype = args.dtype;
    options.device = Some(args.set_up()?);
    let moved = bar.clone();
    options.on_progress = Some(Box::new(move |progress| moved.set(progress)));
    let session = Session::load(path, options);
    bar.finish();
    Ok(session?)
}

/// All that a generation has given.
struct Output {
    text: String,
    tokens: Vec<u32>,
    prompt_tokens: Vec<u32>,
    completion: Completion,
}

/// Runs `request`, printing the text as it comes if `stream`.
fn generate(session: &Session, request: Request, stream: bool) -> Result<Output> {
    let events = session.generate(request);
    let handle = events.cancel_handle();
    let cancel = handle.clone();
    cancel_on_interrupt(move || cancel.cancel())?;
    let (mut text, mut tokens, mut prompt_tokens) = (String::new(), Vec::new(), Vec::new());
    let mut completion = None;
    let mut printed = Ok(());
    let mut bar = PrefillBar::new();
    let mut add = |piece: &str| {
        text.push_str(piece);
        if stream && printed.is_ok() && !piece.is_empty() {
            printed = print(piece);
            if printed.is_err() {
                // Not left at once: the program must not end while the model computes.
                handle.cancel();
            }
        }
    };
    for event in events {
        match event? {
            Event::Prompt(ids) => {
                bar.start(ids.len());
                prompt_tokens = ids;
            }
            Event::Prefill(progress) => bar.set(progress),
            Event::Token { id, text } => {
                bar.finish();
                tokens.push(id);
                add(&text);
            }
            Event::Text(text) => add(&text),
            Event::Done(done) => completion = Some(done),
            _ => {}
        }
    }
    bar.finish();
    printed?;
    if stream && !text.is_empty() && !text.ends_with('\n') {
        print("\n")?;
    }
    let completion = completion.context("the generation has ended without a result")?;
    Ok(Output {
        text,
        tokens,
        prompt_tokens,
        completion,
    })
}

impl Output {
    fn print_statistics(&self) {
        let Completion {
            usage,
            timings,
            finish_reason,
            ..
        } = &self.completion;
        let prefill = rate(self.completion.prefill_tps());
        let decode = rate(self.completion.decode_tps());
        note(&format!(
            "prompt:     {} tokens{prefill}",
            usage.prompt_tokens
        ));
        note(&format!(
            "generated:  {} tokens{decode} ({finish_reason})",
            usage.completion_tokens
        ));
        note(&format!(
            "peak memory: {}",
            size(timings.peak_memory_bytes as u64)
        ));
    }

    fn json(&self, load_s: f64) -> Value {
        let Completion {
            usage,
            timings,
            finish_reason,
            ..
        } = &self.completion;
        json!({
            "text": self.text,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "finish_reason": finish_reason.to_string(),
            "reasoning": null,
            "tool_calls": [],
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
            },
            "timings": {
                "load_s": load_s,
                "prefill_tps": self.completion.prefill_tps(),
                "decode_tps": self.completion.decode_tps(),
                "peak_memory_bytes": timings.peak_memory_bytes,
            },
        })
    }
}

/// `, 12.34 tokens/s`; nothing where nothing was measured.
fn rate(tokens_per_second: f64) -> String {
    if tokens_per_second > 0.0 {
        format!(", {tokens_per_second:.2} tokens/s")
    } else {
        String::new()
    }
}
