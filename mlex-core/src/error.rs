//! The error of this crate: an opaque [`Error`] with a [`ErrorKind`] that holds
//! the data of the failure, and the path and tensor it was met at.

use std::fmt;
use std::panic::Location;
use std::path::{Path, PathBuf};

use crate::Dtype;

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, where: a kind, and the file and tensor it concerns where there are any.
///
/// `Display` is one line, outermost context first:
/// `model.safetensors: tensor "a.weight": expected shape [2, 3], found [3, 2]`.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    path: Option<PathBuf>,
    tensor: Option<String>,
}

/// What kind of failure an [`Error`] is, with the values that show it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// MLX refused an operation.
    #[error("{op}: {message} (called at {location})")]
    Mlx {
        /// The operation, by its name in MLX.
        op: &'static str,
        /// What MLX said.
        message: String,
        /// The caller of the operation.
        location: &'static Location<'static>,
    },
    /// Data were asked for as another type than they have.
    #[error("expected dtype {expected}, found {found}")]
    Dtype {
        /// The dtype that was asked for.
        expected: Dtype,
        /// The dtype that the array has.
        found: Dtype,
    },
    /// A shape is not the one that is needed.
    #[error("expected shape {expected:?}, found {found:?}")]
    Shape {
        /// The shape that was needed.
        expected: Vec<usize>,
        /// The shape that was found.
        found: Vec<usize>,
    },
    /// A number of elements or bytes is not the one that the shape asks for.
    #[error("{what}: expected {expected}, found {found}")]
    Length {
        /// What was counted.
        what: &'static str,
        /// The count that was needed.
        expected: u64,
        /// The count that was found.
        found: u64,
    },
    /// The elements do not lie in row-major order without gaps, so no slice can be given out.
    #[error("the array is not contiguous in row-major order; call `contiguous` first")]
    NotContiguous,
    /// An argument is outside of what the operation takes.
    #[error("{argument}: expected {expected}, found {found}")]
    Argument {
        /// The argument's name.
        argument: &'static str,
        /// What is allowed, in words.
        expected: &'static str,
        /// What was given.
        found: String,
    },
    /// Reading or writing failed.
    #[error("{0}")]
    Io(std::io::Error),
    /// A file does not follow its format.
    #[error("{field}: expected {expected}, found {found}")]
    Format {
        /// The part of the file that is wrong.
        field: String,
        /// What the format asks for.
        expected: String,
        /// What the file has.
        found: String,
    },
    /// A tensor that was asked for is not in the file.
    #[error("no such tensor")]
    MissingTensor,
    /// A host operation could not compute, or panicked.
    #[error("host operation {op}: {message}")]
    HostOp {
        /// The operation's name.
        op: String,
        /// What it met.
        message: String,
    },
}

impl Error {
    /// An error of the given kind, without context.
    pub fn new(kind: ErrorKind) -> Self {
        Self(Box::new(Inner {
            kind,
            path: None,
            tensor: None,
        }))
    }

    /// A [`ErrorKind::Format`]: `field` holds `found` where the format asks for `expected`.
    pub fn format(
        field: impl Into<String>,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> Self {
        Self::new(ErrorKind::Format {
            field: field.into(),
            expected: expected.into(),
            found: found.into(),
        })
    }

    /// A [`ErrorKind::Argument`]: `argument` is `found` where `expected` is needed.
    pub fn argument(
        argument: &'static str,
        expected: &'static str,
        found: impl fmt::Display,
    ) -> Self {
        Self::new(ErrorKind::Argument {
            argument,
            expected,
            found: found.to_string(),
        })
    }

    /// Names the file that the error was met in, unless one is named already.
    #[must_use]
    pub fn with_path(mut self, path: impl AsRef<Path>) -> Self {
        self.0
            .path
            .get_or_insert_with(|| path.as_ref().to_path_buf());
        self
    }

    /// Names the tensor that the error was met at, unless one is named already.
    #[must_use]
    pub fn with_tensor(mut self, name: impl Into<String>) -> Self {
        self.0.tensor.get_or_insert_with(|| name.into());
        self
    }

    /// What went wrong.
    pub fn kind(&self) -> &ErrorKind {
        &self.0.kind
    }

    /// The file it went wrong in.
    pub fn path(&self) -> Option<&Path> {
        self.0.path.as_deref()
    }

    /// The tensor it went wrong at.
    pub fn tensor(&self) -> Option<&str> {
        self.0.tensor.as_deref()
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Self::new(ErrorKind::Io(error))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(path) = &self.0.path {
            write!(f, "{}: ", path.display())?;
        }
        if let Some(tensor) = &self.0.tensor {
            write!(f, "tensor {tensor:?}: ")?;
        }
        write!(f, "{}", self.0.kind)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("kind", &self.0.kind)
            .field("path", &self.0.path)
            .field("tensor", &self.0.tensor)
            .finish()
    }
}

// No `source`: every kind's `Display` already says what its cause says.
impl std::error::Error for Error {}

/// Adds context to the error of a `Result`.
pub trait ResultExt<T> {
    /// Names the file, as [`Error::with_path`].
    fn with_path(self, path: impl AsRef<Path>) -> Result<T>;
    /// Names the tensor, as [`Error::with_tensor`].
    fn with_tensor(self, name: impl Into<String>) -> Result<T>;
}

impl<T, E: Into<Error>> ResultExt<T> for Result<T, E> {
    fn with_path(self, path: impl AsRef<Path>) -> Result<T> {
        self.map_err(|error| error.into().with_path(path))
    }

    fn with_tensor(self, name: impl Into<String>) -> Result<T> {
        self.map_err(|error| error.into().with_tensor(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_is_one_line_outermost_context_first() {
        let error = Error::new(ErrorKind::Shape {
            expected: vec![2, 3],
            found: vec![3, 2],
        })
        .with_tensor("a.weight")
        .with_path("model.safetensors");
        assert_eq!(
            error.to_string(),
            "model.safetensors: tensor \"a.weight\": expected shape [2, 3], found [3, 2]"
        );
    }

    #[test]
    fn the_innermost_context_is_kept() {
        let error = Error::new(ErrorKind::MissingTensor)
            .with_path("inner")
            .with_path("outer");
        assert_eq!(error.path(), Some(Path::new("inner")));
    }
}
