//! `mlex chat`.

mod commands;
mod input;
mod settings;

use std::mem::ManuallyDrop;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use mlex_models::ModelFiles;
use mlex_models::generate::{Event, FinishReason, Prompt, Request, Session};
use mlex_models::media::Media;
use mlex_models::text::Answer;
use serde_json::{Value, json};

use crate::args::{KvArgs, ModelArgs, SamplerArgs, key_json};
use crate::decode::DecodeArgs;
use crate::failure::{self, Hinted};
use crate::generate::{load, load_prompt};
use crate::interrupt::Interrupts;
use crate::media::{content, named_in};
use crate::output::{StdoutClosed, note};
use crate::progress::PrefillBar;
use crate::show::Show;
use commands::Command;
use input::Input;
use settings::Settings;

/// Talk with a model
///
/// A line ends what you say; end it with a backslash to go on in the next one, or put several
/// between lines of \"\"\". /help lists the commands. Ctrl-C ends an answer and keeps what there
/// is; Ctrl-D leaves.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// A system message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// The most tokens of an answer
    #[arg(long, default_value_t = 2048, value_name = "N")]
    max_tokens: usize,
    /// Do not show the reasoning
    #[arg(long)]
    hide_reasoning: bool,
    /// End the reasoning after this many tokens, and go on with the answer
    #[arg(long, value_name = "N")]
    reasoning_budget: Option<usize>,
    /// Set a variable of the chat template, such as enable_thinking=false (repeatable)
    #[arg(long, value_name = "KEY=JSON", value_parser = key_json)]
    template_arg: Vec<(String, Value)>,
    /// Begin with the state of a prompt from `mlex cache save`; how keys and values are held is
    /// then as it was saved
    #[arg(long, value_name = "FILE", conflicts_with_all = ["max_kv_size", "kv_bits"])]
    prompt_cache: Option<PathBuf>,
    // Their help headings hold for what follows, so they come last.
    #[command(flatten)]
    kv: KvArgs,
    #[command(flatten)]
    decode: DecodeArgs,
    #[command(flatten)]
    sampler: SamplerArgs,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let sampler = args.sampler.config("chat")?;
    let decode = args.decode.decode("chat")?;
    let path = args.model.source.locate("chat")?;
    let files = ModelFiles::open(&path).map_err(failure::no_model)?;
    if files.chat_template()?.is_none() {
        let error = anyhow::anyhow!("the model has no chat template for a conversation");
        return Err(Hinted::new(error, "`mlex generate --raw` continues a text").into());
    }
    // The request that each answer is asked for with.
    let mut request = Request::new(Prompt::Messages(Vec::new())).with_max_tokens(args.max_tokens);
    request.reasoning_budget = args.reasoning_budget;
    request.template_variables = args.template_arg.iter().cloned().collect();
    request.kv = args.kv.settings();
    request.decode = decode;
    args.sampler.apply(sampler, &mut request);

    // Never dropped, as in `mlex generate`.
    let session = ManuallyDrop::new(load(&path, false, None, &args.model)?);
    args.sampler.follow(session.info(), &mut request);
    if let Some(file) = &args.prompt_cache {
        request.kv = load_prompt(&session, file)?;
    }
    let mut chat = Chat {
        session: &session,
        interrupts: Interrupts::install()?,
        settings: Settings {
            request,
            show_reasoning: !args.hide_reasoning,
        },
        system: args.system.clone(),
        messages: Vec::new(),
        shown: Vec::new(),
        calls: 0,
    };
    let mut input = Input::new()?;
    if input.is_terminal() {
        note("/help lists the commands, Ctrl-D leaves");
    }
    while let Some(text) = input.read()? {
        match Command::parse(&text) {
            None => chat.say(&text)?,
            Some(Ok(Command::Exit)) => break,
            Some(Ok(command)) => {
                if let Err(error) = chat.obey(command) {
                    note(&format!("error: {error:#}"));
                }
            }
            Some(Err(error)) => note(&format!("error: {error:#}")),
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A conversation with a model.
struct Chat<'a> {
    session: &'a Session,
    interrupts: Interrupts,
    settings: Settings,
    system: Option<String>,
    /// All but the system message.
    messages: Vec<Value>,
    /// Media that the next message will have.
    shown: Vec<Media>,
    /// Tool calls so far, which are numbered.
    calls: usize,
}

impl Chat<'_> {
    /// The messages as the model is given them.
    fn transcript(&self) -> Vec<Value> {
        let system = self.system.as_ref();
        let system = system.map(|text| json!({"role": "system", "content": text}));
        system.into_iter().chain(self.messages.clone()).collect()
    }

    /// Says `text` and prints the answer. What fails is told, and not said.
    ///
    /// # Errors
    /// When stdout is closed.
    fn say(&mut self, text: &str) -> Result<()> {
        let content = content(&self.shown, text);
        self.messages
            .push(json!({"role": "user", "content": content}));
        match self.answer() {
            Ok(message) => {
                self.shown.clear();
                self.messages.push(message);
                Ok(())
            }
            Err(error) => {
                self.messages.pop();
                if error.is::<StdoutClosed>() {
                    return Err(error);
                }
                note(&format!("error: {error:#}"));
                Ok(())
            }
        }
    }

    /// The model's next message, printed as it comes.
    fn answer(&mut self) -> Result<Value> {
        let mut request = self.settings.request.clone();
        let messages = self.transcript();
        request.media = named_in(&messages);
        request.prompt = Prompt::Messages(messages);
        let events = self.session.generate(request);
        let handle = events.cancel_handle();
        self.interrupts.set(Some(handle.clone()));
        let mut show = Show::new(self.settings.show_reasoning);
        let mut bar = PrefillBar::new();
        let mut answer = Answer::default();
        let mut printed = Ok(());
        let mut failed = None;
        for event in events {
            let event = match event {
                Ok(event) => event,
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            };
            event.add_to(&mut answer);
            match &event {
                Event::Prompt(ids) => bar.start(ids.len()),
                Event::Prefill(progress) => bar.set(*progress),
                _ => bar.finish(),
            }
            for part in event.parts() {
                if printed.is_ok() {
                    printed = show.part(part);
                }
            }
            if printed.is_err() {
                handle.cancel();
            }
            if let Event::Done(done) = &event {
                if printed.is_ok() {
                    printed = show.finish();
                }
                match done.finish_reason {
                    FinishReason::Length => note("note: the answer has reached max_tokens"),
                    FinishReason::Cancelled if printed.is_ok() => note("note: stopped"),
                    _ => {}
                }
            }
        }
        bar.finish();
        self.interrupts.set(None);
        if let Some(error) = failed {
            return Err(error.into());
        }
        printed?;
        Ok(answer.message(|_| {
            self.calls += 1;
            format!("call_{}", self.calls)
        }))
    }
}
