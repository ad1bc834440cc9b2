//! The error of this crate: an opaque [`Error`] with an [`ErrorKind`] that holds the data of
//! the failure, and the file it was met in.

use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, where: a kind, and the file it concerns where there is one.
///
/// `Display` is one line, outermost context first:
/// `m/config.json: rope_theta: expected a number, found "high"`.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    path: Option<PathBuf>,
}

/// What kind of failure an [`Error`] is, with the values that show it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An array operation, or the reading of a weights file, failed.
    #[error("{0}")]
    Core(mlex_core::Error),
    /// A layer could not be built or run, or the tensors do not fit the architecture.
    #[error("{0}")]
    Nn(mlex_nn::Error),
    /// An image or a video cannot be read or used.
    #[error("{0}")]
    Vision(mlex_vision::Error),
    /// A sound cannot be read or used.
    #[error("{0}")]
    Audio(mlex_audio::Error),
    /// The caller stopped it.
    #[error("cancelled")]
    Cancelled,
    /// The thread that owns the model has ended; a panic on it was reported there.
    #[error("the model's thread has ended")]
    EngineGone,
    /// Reading or writing a file failed.
    #[error("{0}")]
    Io(std::io::Error),
    /// A file is not valid JSON.
    #[error("not valid JSON: {message}")]
    Json {
        /// What the parser said, with the line and column.
        message: String,
    },
    /// A field of a config or tokenizer file holds what it must not.
    #[error("{field}: expected {expected}, found {found}")]
    Field {
        /// The field, as a dotted path (`rope_scaling.factor`).
        field: String,
        /// What is allowed there.
        expected: String,
        /// What the file has.
        found: String,
    },
    /// A file, field or value that is needed is not there.
    #[error("missing {what}")]
    Missing {
        /// What is missing.
        what: String,
    },
    /// A chat template does not parse, or fails on the messages it was given.
    #[error("chat template: {message}")]
    Template {
        /// What failed, with the template's name and line.
        message: String,
    },
    /// A tokenizer cannot be built, or cannot encode or decode.
    #[error("tokenizer: {message}")]
    Tokenizer {
        /// What failed.
        message: String,
    },
    /// The form of a structured answer is wrong, or cannot be kept to.
    #[error("{what}: {message}")]
    Grammar {
        /// What kind of form it is.
        what: &'static str,
        /// What is wrong, in at most 300 characters.
        message: String,
    },
    /// No architecture of the registry has this name.
    #[error("model_type: expected one of {}, found {found:?}", known.join(", "))]
    UnknownModelType {
        /// The name that the config gives.
        found: String,
        /// The names that are known.
        known: Vec<&'static str>,
    },
    /// Something that is valid and that this version cannot do.
    #[error("{what}: {found} is not supported")]
    Unsupported {
        /// The feature or field.
        what: String,
        /// The value that is not supported.
        found: String,
    },
}

impl Error {
    /// An error of the given kind, without context.
    pub fn new(kind: ErrorKind) -> Self {
        Self(Box::new(Inner { kind, path: None }))
    }

    /// A [`ErrorKind::Field`]: `field` holds `found` where `expected` is needed.
    pub fn field(
        field: impl Into<String>,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> Self {
        Self::new(ErrorKind::Field {
            field: field.into(),
            expected: expected.into(),
            found: found.into(),
        })
    }

    /// A [`ErrorKind::Missing`]: `what` is needed and not there.
    pub fn missing(what: impl Into<String>) -> Self {
        Self::new(ErrorKind::Missing { what: what.into() })
    }

    /// A [`ErrorKind::Unsupported`]: the value `found` of `what` is valid but not supported.
    pub fn unsupported(what: impl Into<String>, found: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unsupported {
            what: what.into(),
            found: found.into(),
        })
    }

    /// A [`ErrorKind::Tokenizer`] with what failed; line breaks become spaces.
    pub fn tokenizer(message: impl fmt::Display) -> Self {
        Self::new(ErrorKind::Tokenizer {
            message: one_line(&message.to_string()),
        })
    }

    /// A [`ErrorKind::Template`] with what failed; line breaks become spaces.
    pub fn template(message: impl fmt::Display) -> Self {
        Self::new(ErrorKind::Template {
            message: one_line(&message.to_string()),
        })
    }

    /// A [`ErrorKind::Grammar`] with what is wrong; line breaks become spaces, and what is too
    /// long ends in dots.
    pub(crate) fn grammar(what: &'static str, message: impl fmt::Display) -> Self {
        const LONGEST: usize = 300;
        let message = message.to_string();
        // llguidance adds where it was to a panic of its own.
        let message = message.split("<backtrace>").next().unwrap_or_default();
        let mut message = one_line(message);
        if let Some((end, _)) = message.char_indices().nth(LONGEST) {
            message.truncate(end - message[..end].chars().next_back().map_or(0, char::len_utf8));
            message.push('…');
        }
        Self::new(ErrorKind::Grammar { what, message })
    }

    /// Names the file that the error was met in, unless one is named already.
    #[must_use]
    pub fn with_path(mut self, path: impl AsRef<Path>) -> Self {
        if self.path().is_none() {
            self.0
                .path
                .get_or_insert_with(|| path.as_ref().to_path_buf());
        }
        self
    }

    /// Names the section of a config that its field is in: `rope_theta` of `text_config` is
    /// `text_config.rope_theta`.
    #[must_use]
    pub(crate) fn in_section(mut self, section: &str) -> Self {
        match &mut self.0.kind {
            ErrorKind::Field { field, .. } => *field = format!("{section}.{field}"),
            ErrorKind::Unsupported { what, .. } => *what = format!("{section}.{what}"),
            ErrorKind::Missing { what } => {
                if let Some(field) = what.strip_prefix("field ") {
                    *what = format!("field {section}.{field}");
                }
            }
            _ => {}
        }
        self
    }

    /// Whether it is about a value that a configuration gave, not about a file of weights.
    pub(crate) fn is_about_config(&self) -> bool {
        match &self.0.kind {
            ErrorKind::Field { .. }
            | ErrorKind::Missing { .. }
            | ErrorKind::Unsupported { .. }
            | ErrorKind::UnknownModelType { .. } => true,
            ErrorKind::Nn(error) => matches!(error.kind(), mlex_nn::ErrorKind::Setting { .. }),
            _ => false,
        }
    }

    /// What went wrong.
    pub fn kind(&self) -> &ErrorKind {
        &self.0.kind
    }

    /// The file it went wrong in.
    pub fn path(&self) -> Option<&Path> {
        let core = match &self.0.kind {
            ErrorKind::Core(core) => Some(core),
            ErrorKind::Nn(nn) => match nn.kind() {
                mlex_nn::ErrorKind::Core(core) => Some(core),
                _ => None,
            },
            _ => None,
        };
        core.and_then(mlex_core::Error::path)
            .or(self.0.path.as_deref())
    }
}

/// Writes what names and values of files hold without their control characters, so that a
/// message stays on its line.
struct OneLine<'a, 'b>(&'a mut fmt::Formatter<'b>);

impl fmt::Write for OneLine<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut rest = text;
        while let Some(at) = rest.find(char::is_control) {
            let (plain, control) = rest.split_at(at);
            self.0.write_str(plain)?;
            let mut chars = control.chars();
            for character in chars.by_ref().take(1) {
                write!(self.0, "{}", character.escape_default())?;
            }
            rest = chars.as_str();
        }
        self.0.write_str(rest)
    }
}

/// The text on one line: runs of white space that hold a line break become one space.
fn one_line(text: &str) -> String {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join(" ")
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Self::new(ErrorKind::Io(error))
    }
}

impl From<mlex_core::Error> for Error {
    fn from(error: mlex_core::Error) -> Self {
        Self::new(ErrorKind::Core(error))
    }
}

impl From<mlex_nn::Error> for Error {
    fn from(error: mlex_nn::Error) -> Self {
        Self::new(ErrorKind::Nn(error))
    }
}

impl From<mlex_vision::Error> for Error {
    fn from(error: mlex_vision::Error) -> Self {
        Self::new(ErrorKind::Vision(error))
    }
}

impl From<mlex_audio::Error> for Error {
    fn from(error: mlex_audio::Error) -> Self {
        Self::new(ErrorKind::Audio(error))
    }
}

impl From<serde_json::Error> for Error {
    fn from(error: serde_json::Error) -> Self {
        Self::new(ErrorKind::Json {
            message: one_line(&error.to_string()),
        })
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = OneLine(f);
        if let Some(path) = &self.0.path {
            write!(line, "{}: ", path.display())?;
        }
        write!(line, "{}", self.0.kind)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("kind", &self.0.kind)
            .field("path", &self.0.path)
            .finish()
    }
}

// No `source`: every kind's `Display` already says what its cause says.
impl std::error::Error for Error {}

/// Adds context to the error of a `Result`.
pub trait ResultExt<T> {
    /// Names the file, as [`Error::with_path`].
    fn with_path(self, path: impl AsRef<Path>) -> Result<T>;
}

impl<T, E: Into<Error>> ResultExt<T> for Result<T, E> {
    fn with_path(self, path: impl AsRef<Path>) -> Result<T> {
        self.map_err(|error| error.into().with_path(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_is_one_line_with_the_path_first() {
        let error = Error::field("rope_theta", "a number", "\"high\"").with_path("m/config.json");
        assert_eq!(
            error.to_string(),
            "m/config.json: rope_theta: expected a number, found \"high\""
        );
        assert_eq!(Error::tokenizer("a\n  b\r\n").to_string(), "tokenizer: a b");
        let error = Error::missing("x\ny").with_path("a\rb");
        assert_eq!(error.to_string(), "a\\rb: missing x\\ny");
    }

    #[test]
    fn the_innermost_path_is_kept() {
        let error = Error::missing("x").with_path("inner").with_path("outer");
        assert_eq!(error.path(), Some(Path::new("inner")));
        let core = mlex_core::Error::new(mlex_core::ErrorKind::MissingTensor).with_path("a.gguf");
        let error = Error::from(core).with_path("outer");
        assert_eq!(error.to_string(), "a.gguf: no such tensor");
        assert_eq!(error.path(), Some(Path::new("a.gguf")));
    }
}
