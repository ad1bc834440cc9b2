//! `mlex cache`.

use std::mem::ManuallyDrop;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Subcommand;
use mlex_models::ModelFiles;
use mlex_models::generate::{KvSettings, PromptFileInfo};
use serde_json::{Value, json};

use crate::args::{KvArgs, ModelArgs};
use crate::failure;
use crate::generate::{PromptArgs, load};
use crate::output::{note, print, print_json, size};

/// Keep the state of a prompt in a file, to begin with it later
///
/// What is saved is what the model makes of a long beginning: a system message, a document. `mlex
/// generate --prompt-cache FILE` and `mlex chat --prompt-cache FILE` begin with it where their
/// prompt begins alike, token by token.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Save(Box<Save>),
    List(List),
}

/// Compute a prompt and write its state to a file
#[derive(Debug, clap::Args)]
struct Save {
    #[command(flatten)]
    model: ModelArgs,
    /// Where it is written
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
    /// How many prompt tokens are computed at once; by default 512 on a CPU and 2048 on a GPU,
    /// where less in long contexts
    #[arg(long, value_name = "N")]
    prefill_step: Option<NonZeroUsize>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    // Their help headings hold for what follows, so they come last.
    #[command(flatten)]
    prompt: PromptArgs,
    #[command(flatten)]
    kv: KvArgs,
}

/// Show what files of `mlex cache save` hold
#[derive(Debug, clap::Args)]
struct List {
    /// Files, and folders with such files
    #[arg(value_name = "PATH", default_value = ".")]
    paths: Vec<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    match &args.command {
        Command::Save(args) => save(args)?,
        Command::List(args) => list(args)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn save(args: &Save) -> Result<()> {
    let input = args.prompt.read()?;
    let path = args.model.source.locate("cache")?;
    let files = ModelFiles::open(&path).map_err(failure::no_model)?;
    let mut request = input.request(files.chat_template()?.is_some())?;
    if let Some(step) = args.prefill_step {
        request.prefill_step = step.get().into();
    }
    request.kv = args.kv.settings();
    // Never dropped, as in `mlex generate`.
    let session = ManuallyDrop::new(load(&path, false, None, &args.model)?);
    let info = session.save_prompt(request, &args.output)?;
    if args.json {
        return print_json(&json(&args.output, &info));
    }
    note(&format!(
        "saved {} tokens, {}, to {}",
        info.tokens,
        size(info.bytes),
        args.output.display()
    ));
    Ok(())
}

fn list(args: &List) -> Result<()> {
    let mut found = Vec::new();
    for path in &args.paths {
        if path.is_dir() {
            found.extend(in_folder(path)?);
        } else {
            found.push((path.clone(), PromptFileInfo::open(path)?));
        }
    }
    if args.json {
        let all: Vec<Value> = found.iter().map(|(path, info)| json(path, info)).collect();
        return print_json(&Value::Array(all));
    }
    for (path, info) in &found {
        print(&format!(
            "{}: {} tokens, {}, {}{}\n",
            path.display(),
            info.tokens,
            size(info.bytes),
            info.model_type,
            held(&info.settings),
        ))?;
    }
    if found.is_empty() {
        note("no states of prompts");
    }
    Ok(())
}

/// The states in a folder, whatever else is in it.
fn in_folder(folder: &Path) -> Result<Vec<(PathBuf, PromptFileInfo)>> {
    let name = || folder.display().to_string();
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(name)? {
        let path = entry.with_context(name)?.path();
        let named = path.extension().is_some_and(|end| end == "safetensors");
        if named && let Ok(info) = PromptFileInfo::open(&path) {
            found.push((path, info));
        }
    }
    found.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(found)
}

/// How keys and values are held, where that is not as they are.
fn held(settings: &KvSettings) -> String {
    match settings {
        KvSettings {
            bits: Some(bits), ..
        } => format!(", {bits}-bit keys and values"),
        KvSettings {
            max_kv_size: Some(size),
            ..
        } => format!(", at most {size} keys"),
        _ => String::new(),
    }
}

fn json(path: &Path, info: &PromptFileInfo) -> Value {
    json!({
        "file": path.display().to_string(),
        "tokens": info.tokens,
        "bytes": info.bytes,
        "model_type": info.model_type,
        "model": info.fingerprint,
        "max_kv_size": info.settings.max_kv_size,
        "kv_bits": info.settings.bits,
    })
}
