//! The error of this crate: an opaque [`Error`] with an [`ErrorKind`] that holds the data of
//! the failure, and the file it concerns.

use std::fmt::{self, Write as _};
use std::io;
use std::path::{Path, PathBuf};

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, and with which file.
///
/// `Display` is one line, outermost context first:
/// `a.wav: the file is cut off: expected 16000 samples, found 800`.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    path: Option<PathBuf>,
}

/// What kind of failure an [`Error`] is, with the values that show it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Reading failed.
    #[error("{0}")]
    Io(io::Error),
    /// The bytes are of no sound format that is read here.
    #[error("expected a WAV, MP3, FLAC, Ogg Vorbis, AAC or M4A file: {cause}")]
    Format {
        /// What the reader says.
        cause: String,
    },
    /// The bytes of a sound are broken.
    #[error("broken sound: {cause}")]
    Decode {
        /// What the decoder says.
        cause: String,
    },
    /// A file ends before the sound that its header announces.
    #[error("the file is cut off: expected {expected} samples, found {found}")]
    CutOff {
        /// What the header says, per channel.
        expected: u64,
        /// What is there.
        found: u64,
    },
    /// A sound has too many samples.
    #[error("expected at most {limit} samples, found more")]
    TooLong {
        /// The most samples per channel that are decoded.
        limit: u64,
    },
    /// A sound has too few samples.
    #[error("expected at least {least} samples, found {found}")]
    TooShort {
        /// The fewest that make a feature.
        least: usize,
        /// How many there are.
        found: usize,
    },
    /// A sampling rate that is not handled, or not the one that is wanted.
    #[error("sampling rate: expected {expected} Hz, found {found}")]
    Rate {
        /// What is handled.
        expected: String,
        /// What was given.
        found: u32,
    },
    /// A sample that is no finite number.
    #[error("sample {index}: expected a finite number, found {found}")]
    Sample {
        /// The sample, from zero.
        index: usize,
        /// What it is.
        found: f32,
    },
    /// A field of a configuration is not of the form that it must have.
    #[error("feature_extractor: {field}: expected {expected}, found {found}")]
    Config {
        /// The name of the field.
        field: String,
        /// What is allowed there.
        expected: String,
        /// What it holds.
        found: String,
    },
    /// A configuration cannot be read.
    #[error("feature_extractor: {field}: {cause}")]
    Json {
        /// The name of the field.
        field: String,
        /// What the parser says.
        cause: String,
    },
    /// Changing the sampling rate failed.
    #[error("resampling from {from} to {to} Hz: {cause}")]
    Resample {
        /// The rate of the sound.
        from: u32,
        /// The rate that was wanted.
        to: u32,
        /// What the resampler says.
        cause: String,
    },
}

impl Error {
    /// An error of the given kind, without context.
    pub fn new(kind: ErrorKind) -> Self {
        Self(Box::new(Inner { kind, path: None }))
    }

    /// Names the file, unless one is named already.
    #[must_use]
    pub fn with_path(mut self, path: impl AsRef<Path>) -> Self {
        self.0.path.get_or_insert_with(|| path.as_ref().to_owned());
        self
    }

    /// What went wrong.
    pub fn kind(&self) -> &ErrorKind {
        &self.0.kind
    }

    /// The file it went wrong with.
    pub fn path(&self) -> Option<&Path> {
        self.0.path.as_deref()
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Self {
        Self::new(kind)
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self::new(ErrorKind::Io(error))
    }
}

/// Writes what files hold without control characters, so that a message stays on its line.
struct OneLine<'a, 'b>(&'a mut fmt::Formatter<'b>);

impl fmt::Write for OneLine<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.chars().try_for_each(|character| {
            if character.is_control() {
                write!(self.0, "{}", character.escape_default())
            } else {
                self.0.write_char(character)
            }
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
