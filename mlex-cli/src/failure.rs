//! What the user is told when something fails, and the exit codes.

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
        None => match error.downcast_ref::<mlex_hub::Error>() {
            Some(error) => hub_hint(error),
            None => error.downcast_ref::<Error>().and_then(library_hint),
        },
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

/// What to do about an error of the Hub or its cache.
fn hub_hint(error: &mlex_hub::Error) -> Option<String> {
    use mlex_hub::ErrorKind as Kind;
    let repo = error.repo().unwrap_or_default();
    let hint = match error.kind() {
        Kind::RepoNotFound {
            with_token: false, ..
        } => {
            "check the name (there is no such path here either); for a private repository, set \
             HF_TOKEN"
        }
        Kind::RepoNotFound { .. } => {
            "check the name (there is no such path here either), and whether the token may read it"
        }
        Kind::Gated { with_token } => {
            let then = if *with_token {
                "with the token's account"
            } else {
                "and set HF_TOKEN"
            };
            return Some(format!(
                "accept the conditions at https://huggingface.co/{repo} {then}"
            ));
        }
        Kind::TokenRefused { .. } => {
            "set HF_TOKEN to a valid token, or unset it and remove the token file"
        }
        Kind::Unreachable { .. } => {
            "check the network, and HTTPS_PROXY and HF_ENDPOINT where they are set"
        }
        Kind::Interrupted { .. } => "what has come is kept: the same command goes on from there",
        Kind::TooLong { .. } | Kind::Digest { .. } => {
            "what has come was thrown away: the same command fetches it again"
        }
        Kind::DiskFull { .. } => {
            "make space, or set HF_HUB_CACHE to another folder; what has come is kept"
        }
        Kind::NotCached { .. } | Kind::Incomplete { .. } => {
            return Some(format!(
                "`mlex pull {repo}` brings it, without HF_HUB_OFFLINE"
            ));
        }
        Kind::Choice { .. } => {
            return Some(format!("choose one: {repo}:FILE, or {repo}:Q4_K_M"));
        }
        _ => return None,
    };
    Some(hint.to_owned())
}

/// The error of a model path that cannot be opened, with what a model is.
pub(crate) fn no_model(error: Error) -> anyhow::Error {
    match error.kind() {
        ErrorKind::Io(io) if io.kind() == std::io::ErrorKind::NotFound => Hinted::new(
            error,
            "a model is a directory with config.json, tokenizer.json and *.safetensors, a .gguf \
             file, or a repository on the Hugging Face Hub (organization/name)",
        )
        .into(),
        _ => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_breaks_become_spaces() {
        assert_eq!(one_line("a:\r\n  b\n"), "a: b");
    }
}
