//! Text to stdout, notes to stderr.

use std::fmt;
use std::io::{self, ErrorKind, Write};

use anyhow::{Context, Result};
use indicatif::DecimalBytes;
use serde_json::Value;

/// The reader of stdout has gone, which is its right: the program ends quietly.
#[derive(Debug)]
pub(crate) struct StdoutClosed;

impl fmt::Display for StdoutClosed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("stdout is closed")
    }
}

impl std::error::Error for StdoutClosed {}

/// Writes `text` to stdout at once.
///
/// # Errors
/// [`StdoutClosed`] when nobody reads it, or what the system says.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(StdoutClosed.into()),
        Err(error) => Err(error).context("stdout"),
    }
}

/// Writes a JSON document to stdout.
///
/// # Errors
/// As [`print()`].
pub(crate) fn print_json(value: &Value) -> Result<()> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    print(&text)
}

/// Writes a line to stderr. That nobody reads it is no reason to stop.
pub(crate) fn note(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// A count of bytes as people read it: `98.36 MB`.
pub(crate) fn size(bytes: u64) -> String {
    DecimalBytes(bytes).to_string()
}

/// An f32 as JSON prints it shortest: -0.1, not the digits of its double. None for what JSON
/// has no number for.
pub(crate) fn number(value: f32) -> Option<f64> {
    value
        .to_string()
        .parse()
        .ok()
        .filter(|value: &f64| value.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_their_digits() {
        assert_eq!(number(-0.1), Some(-0.1));
        assert_eq!(number(f32::NEG_INFINITY), None);
        assert_eq!(size(98_362_432), "98.36 MB");
    }
}
