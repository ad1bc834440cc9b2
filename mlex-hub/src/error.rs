//! The error of this crate: an opaque [`Error`] with an [`ErrorKind`] that holds the data of
//! the failure, and the repository it concerns.

use std::fmt::{self, Write as _};
use std::io;
use std::path::{Path, PathBuf};

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, and with which repository.
///
/// `Display` is one line, outermost context first:
/// `org/name: model.safetensors: expected 12 bytes, found 11`.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    repo: Option<String>,
}

/// What kind of failure an [`Error`] is, with the values that show it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A setting, name or revision is not of the form that it must have.
    #[error("{what}: expected {expected}, found {found:?}")]
    Value {
        /// What holds it.
        what: &'static str,
        /// What is allowed there.
        expected: &'static str,
        /// What it holds.
        found: String,
    },
    /// The environment names no place for the cache.
    #[error("no cache directory: HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME and HOME are all unset")]
    NoCacheDir,
    /// The Hub has no such repository, or does not show it to who asks.
    #[error("no such repository on {host}, or it is private")]
    RepoNotFound {
        /// The Hub that was asked.
        host: String,
        /// Whether a token was sent.
        with_token: bool,
    },
    /// The repository is open only to those who have accepted its conditions.
    #[error("the repository is gated, and {}", if *with_token {
        "the token gives no access to it"
    } else {
        "no token was sent"
    })]
    Gated {
        /// Whether a token was sent.
        with_token: bool,
    },
    /// The Hub does not know the token.
    #[error("{host} refused the token")]
    TokenRefused {
        /// The Hub that was asked.
        host: String,
    },
    /// The repository has no such branch, tag or commit.
    #[error("no revision {revision:?}")]
    RevisionNotFound {
        /// The revision that was asked for.
        revision: String,
    },
    /// The repository lists a file and does not give it.
    #[error("no file {file:?}")]
    FileNotFound {
        /// The file that was asked for.
        file: String,
    },
    /// The server answered with an error.
    #[error("{url}: HTTP status {status}{}", after_colon(message))]
    Status {
        /// What was asked for.
        url: String,
        /// The status code.
        status: u16,
        /// What the server says of it; may be empty.
        message: String,
    },
    /// The server answered with something else than the Hub does.
    #[error("{url}: expected {expected}, found {found}")]
    Response {
        /// What was asked for.
        url: String,
        /// What the Hub would give.
        expected: &'static str,
        /// What came.
        found: String,
    },
    /// No answer could be had.
    #[error("cannot reach {host}: {cause}")]
    Unreachable {
        /// The host that was asked.
        host: String,
        /// What failed.
        cause: String,
    },
    /// A download broke off and could not be taken up again.
    #[error("{file}: the download broke off after {received} of {size} bytes: {cause}")]
    Interrupted {
        /// The file.
        file: String,
        /// How much of it is there.
        received: u64,
        /// How long it is.
        size: u64,
        /// What failed.
        cause: String,
    },
    /// A file is longer than the Hub said.
    #[error("{file}: expected {expected} bytes, found more")]
    TooLong {
        /// The file.
        file: String,
        /// How long it is, as the Hub says.
        expected: u64,
    },
    /// A file is not the one that the Hub names by this digest.
    #[error("{file}: expected {algorithm} {expected}, found {found}")]
    Digest {
        /// The file.
        file: String,
        /// What was computed.
        algorithm: &'static str,
        /// The digest that the Hub gives, in hexadecimal digits.
        expected: String,
        /// The digest of what came.
        found: String,
    },
    /// The disk is full, or the user's share of it.
    #[error("{}: no space left for {file} ({size} bytes)", folder.display())]
    DiskFull {
        /// Where it was to be written.
        folder: PathBuf,
        /// The file.
        file: String,
        /// How long it is.
        size: u64,
    },
    /// Reading or writing in the cache failed.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
    /// Nothing may be fetched, and the cache does not have it.
    #[error("revision {revision:?} is not in the cache {}", cache.display())]
    NotCached {
        /// The revision that was asked for.
        revision: String,
        /// The cache.
        cache: PathBuf,
    },
    /// Nothing may be fetched, and the cache has only a part.
    #[error("{}: incomplete, without {}", snapshot.display(), some(missing))]
    Incomplete {
        /// The folder in the cache.
        snapshot: PathBuf,
        /// What is not there.
        missing: Vec<String>,
    },
    /// The repository holds no model that can be loaded.
    #[error(
        "expected config.json with model.safetensors or its shards, or a .gguf file; found {}",
        some(found)
    )]
    NoModel {
        /// The files that it has.
        found: Vec<String>,
    },
    /// Which GGUF file is meant is not clear.
    #[error("{}; the repository has {}", choice(chosen.as_deref()), some(files))]
    Choice {
        /// What was asked for.
        chosen: Option<String>,
        /// The GGUF files to choose from.
        files: Vec<String>,
    },
    /// The index of a checkpoint is broken, or names a file that the repository does not have.
    #[error("{file}: expected {expected}, found {found}")]
    Index {
        /// The index.
        file: String,
        /// What it should hold.
        expected: &'static str,
        /// What it holds.
        found: String,
    },
}

impl Error {
    /// An error of the given kind, without context.
    pub fn new(kind: ErrorKind) -> Self {
        Self(Box::new(Inner { kind, repo: None }))
    }

    /// A failure of the system at `path`.
    pub(crate) fn io(path: impl AsRef<Path>, error: io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        Self::new(ErrorKind::Io { path, error })
    }

    /// Names the repository, unless one is named already.
    #[must_use]
    pub(crate) fn with_repo(mut self, repo: &str) -> Self {
        self.0.repo.get_or_insert_with(|| repo.to_owned());
        self
    }

    /// What went wrong.
    pub fn kind(&self) -> &ErrorKind {
        &self.0.kind
    }

    /// The repository it went wrong with.
    pub fn repo(&self) -> Option<&str> {
        self.0.repo.as_deref()
    }

    /// Whether the same request may succeed a little later.
    pub(crate) fn is_transient(&self) -> bool {
        match self.kind() {
            ErrorKind::Unreachable { .. } => true,
            ErrorKind::Status { status, .. } => matches!(status, 408 | 429 | 500..=599),
            _ => false,
        }
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Self {
        Self::new(kind)
    }
}

/// Writes what servers and file names hold without control characters, so that a message stays
/// on its line.
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
        if let Some(repo) = &self.0.repo {
            write!(line, "{repo}: ")?;
        }
        write!(line, "{}", self.0.kind)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("kind", &self.0.kind)
            .field("repo", &self.0.repo)
            .finish()
    }
}

// No `source`: every kind's `Display` already says what its cause says.
impl std::error::Error for Error {}

/// Names, and how many more there are.
fn some(names: &[String]) -> String {
    const SHOWN: usize = 12;
    match names.len() {
        0 => "nothing".to_owned(),
        n if n <= SHOWN => names.join(", "),
        n => format!("{} and {} more", names[..SHOWN].join(", "), n - SHOWN),
    }
}

fn choice(chosen: Option<&str>) -> String {
    match chosen {
        Some(chosen) => format!("{chosen:?} is not one GGUF file"),
        None => "several GGUF files".to_owned(),
    }
}

fn after_colon(message: &str) -> String {
    if message.is_empty() {
        String::new()
    } else {
        format!(": {message}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_is_one_line_with_the_repository_first() {
        let error = Error::new(ErrorKind::Status {
            url: "http://h/x".to_owned(),
            status: 500,
            message: "a\r\nb".to_owned(),
        });
        assert_eq!(
            error.with_repo("o/n").with_repo("outer").to_string(),
            "o/n: http://h/x: HTTP status 500: a\\r\\nb"
        );
    }

    #[test]
    fn long_lists_are_cut() {
        let names: Vec<String> = (0..14).map(|n| n.to_string()).collect();
        assert_eq!(some(&names[..2]), "0, 1");
        assert!(some(&names).ends_with("11 and 2 more"));
    }
}
