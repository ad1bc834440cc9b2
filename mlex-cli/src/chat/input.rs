//! What the user says, line by line.

use std::env;
use std::fs;
use std::io::{self, IsTerminal};
use std::path::PathBuf;

use anyhow::{Context, Result};
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Config, Editor, Helper};

/// What several lines stand between.
const BLOCK: &str = "\"\"\"";

/// Lines of a terminal, with a history, or of a file.
pub(super) struct Input {
    editor: Editor<Lines, FileHistory>,
    /// Where the history is kept; only that of a terminal is.
    history: Option<PathBuf>,
}

impl Input {
    /// # Errors
    /// When the terminal cannot be used.
    pub(super) fn new() -> Result<Self> {
        let config = Config::builder().auto_add_history(true).build();
        let mut editor = Editor::with_config(config).context("terminal")?;
        editor.set_helper(Some(Lines));
        let history = io::stdin().is_terminal().then(history_file).flatten();
        if let Some(path) = &history {
            // The first time there is none.
            let _ = editor.load_history(path);
        }
        Ok(Self { editor, history })
    }

    pub(super) fn is_terminal(&self) -> bool {
        io::stdin().is_terminal()
    }

    /// What is said next; none at the end. Empty lines are passed over.
    ///
    /// # Errors
    /// When the terminal fails.
    pub(super) fn read(&mut self) -> Result<Option<String>> {
        loop {
            let prompt = if self.is_terminal() { "> " } else { "" };
            match self.editor.readline(prompt) {
                Ok(line) => {
                    self.save();
                    let text = joined(&line);
                    if !text.trim().is_empty() {
                        return Ok(Some(text));
                    }
                }
                // Ctrl-C clears the line.
                Err(ReadlineError::Interrupted) => {}
                Err(ReadlineError::Eof) => return Ok(None),
                Err(error) => return Err(error).context("terminal"),
            }
        }
    }

    /// A history that cannot be kept is no reason to stop.
    fn save(&mut self) {
        if let Some(path) = &self.history {
            let _ = path.parent().map(fs::create_dir_all);
            let _ = self.editor.save_history(path);
        }
    }
}

/// `$XDG_STATE_HOME/mlex/chat_history`, by default under `~/.local/state`.
fn history_file() -> Option<PathBuf> {
    let state = env::var_os("XDG_STATE_HOME").filter(|path| !path.is_empty());
    let state = state.map(PathBuf::from).or_else(|| {
        let home = env::home_dir()?;
        Some(home.join(".local/state"))
    });
    Some(state?.join("mlex/chat_history"))
}

/// Knows whether more lines come.
struct Lines;

impl Validator for Lines {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(if is_whole(context.input()) {
            ValidationResult::Valid(None)
        } else {
            ValidationResult::Incomplete
        })
    }
}

impl Completer for Lines {
    type Candidate = String;
}

impl Hinter for Lines {
    type Hint = String;
}

impl Highlighter for Lines {}

impl Helper for Lines {}

fn is_whole(text: &str) -> bool {
    match text.trim_start().strip_prefix(BLOCK) {
        Some(block) => block.trim_end().ends_with(BLOCK),
        None => !text.ends_with('\\'),
    }
}

/// The text of lines that go on, without what says so.
fn joined(text: &str) -> String {
    let block = text.trim().strip_prefix(BLOCK);
    match block.and_then(|block| block.strip_suffix(BLOCK)) {
        Some(block) => block.trim_matches('\n').to_owned(),
        None => text.replace("\\\n", "\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_go_on() {
        for (text, whole) in [
            ("a", true),
            ("", true),
            ("a\\", false),
            ("a\\\nb", true),
            ("\"\"\"", false),
            ("\"\"\"\na\n", false),
            ("\"\"\"\na\n\"\"\"", true),
            ("a \"\"\"", true),
        ] {
            assert_eq!(is_whole(text), whole, "{text:?}");
        }
        assert_eq!(joined("a\\\nb"), "a\nb");
        assert_eq!(joined("\"\"\"\na\n\nb\n\"\"\""), "a\n\nb");
        assert_eq!(joined("plain"), "plain");
    }
}
