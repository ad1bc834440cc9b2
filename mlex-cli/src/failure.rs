//! What the user is told when something fails, and the exit codes.

use std::path::Path;
use std::process::ExitCode;

use clap::CommandFactory;
use clap::error::ErrorKind as UsageKind;
use mlex_models::{Error, ErrorKind};

use crate::output::{StdoutClosed, note};

/// The exit code of a generation that Ctrl-C has ended: 128 + SIGINT, as shells have it.
pub(crate) const INTERRUPTED: u8 = 130;

/// A mistake in the arguments of `command`, which ends the program with exit code 2.
pub(crate) fn usage(command: &str, message: impl std::fmt::Display) -> anyhow::Error {
    let mut cli = crate::Cli::command();
    cli.build();
    let command = match cli.find_subcommand_mut(command) {
        Some(command) => command,
        None => &mut cli,
    };
    command.error(UsageKind::ValueValidation, message).into()
}

/// An error with a line that says what to do about it.
#[derive(Debug)]
pub(crate) struct Hinted {
    error: anyhow::Error,
    hint: String,
}

impl Hinted {
    /// `error`, and `hint` below it.
    pub(crate) fn new(error: impl Into<anyhow::Error>, hint: impl Into<String>) -> Self {
        Self {
            error: error.into(),
            hint: hint.into(),
        }
    }
}

impl std::fmt::Display for Hinted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#}", self.error)
    }
}

// No `source`: `Display` already has the whole chain.
impl std::error::Error for Hinted {}

/// Tells the user what has failed, on one line and with a hint where there is one.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    if error.is::<StdoutClosed>() {
        // The reader has what it wanted, as `head` does.
        return ExitCode::SUCCESS;
    }
    if let Some(usage) = error.downcast_ref::<clap::Error>() {
        // Where stderr is closed nobody is there to be told.
        let _ = usage.print();
        return ExitCode::from(2);
    }
    note(&format!("error: {}", one_line(&format!("{error:#}"))));
    let hint = match error.downcast_ref::<Hinted>() {
        Some(hinted) => Some(hinted.hint.clone()),
        None => error.downcast_ref::<Error>().and_then(library_hint),
    };
    if let Some(hint) = hint {
        note(&format!("hint: {hint}"));
    }
    ExitCode::FAILURE
}

/// Names of files may hold line breaks.
fn one_line(text: &str) -> String {
    text.split(['\n', '\r'])
        .map(str::trim)
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}

/// What to do about an error of the libraries.
fn library_hint(error: &Error) -> Option<String> {
    match error.kind() {
        ErrorKind::Missing { what } if what == "tokenizer.json" => Some(
            "copy tokenizer.json from the model's repository; token ids work without one \
             (`mlex score --tokens`)"
                .to_owned(),
        ),
        ErrorKind::Nn(nn) if matches!(nn.kind(), mlex_nn::ErrorKind::Weights(_)) => Some(
            "the weights are not those that config.json describes; an incomplete download?"
                .to_owned(),
        ),
        _ => None,
    }
}

/// The error of a model path that cannot be opened, with a way to get a model.
pub(crate) fn no_model(path: &Path, error: Error) -> anyhow::Error {
    let not_found = match error.kind() {
        ErrorKind::Io(io) => io.kind() == std::io::ErrorKind::NotFound,
        _ => false,
    };
    if !not_found {
        return error.into();
    }
    let text = path.display().to_string();
    let hint = if is_hub_id(&text) {
        format!(
            "mlex does not fetch from the Hugging Face Hub yet: download the repository (`hf \
             download {text} --local-dir DIR`) and give --model DIR"
        )
    } else {
        "a model is a directory with config.json, tokenizer.json and *.safetensors, or a .gguf file"
            .to_owned()
    };
    Hinted::new(error, hint).into()
}

/// Whether it reads like `organization/name`.
fn is_hub_id(text: &str) -> bool {
    let is_name = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    let is_file = text.ends_with(".gguf") || text.ends_with(".safetensors");
    text.split_once('/')
        .is_some_and(|(org, name)| is_name(org) && is_name(name))
        && !is_file
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_ids() {
        assert!(is_hub_id("mlx-community/Qwen3-0.6B-4bit"));
        for path in [
            "model",
            "./model",
            "/a/b",
            "a/b/c",
            "../x",
            "models/x.gguf",
            "a/",
        ] {
            assert!(!is_hub_id(path), "{path}");
        }
    }

    #[test]
    fn line_breaks_become_spaces() {
        assert_eq!(one_line("a:\r\n  b\n"), "a: b");
    }
}
