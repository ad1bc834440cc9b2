//! The error of this crate: an opaque [`Error`] with a [`ErrorKind`], and the layer it was
//! met in.

use std::fmt;

use mlex_core::Dtype;

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong and in which layer. `Display` is one line.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    layer: Option<String>,
}

/// What kind of failure an [`Error`] is.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An array operation failed.
    #[error("{0}")]
    Core(mlex_core::Error),
    /// A setting of a layer is outside of what it can be.
    #[error("{name}: expected {expected}, found {found}")]
    Setting {
        /// The setting's name.
        name: &'static str,
        /// What it can be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// Weights and model do not fit together.
    #[error("{0}")]
    Weights(WeightErrors),
}

/// Everything about a set of weights that does not fit the model.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct WeightErrors {
    /// Tensors that the model needs and the checkpoint does not have.
    pub missing: Vec<String>,
    /// Tensors that the checkpoint has and the model does not know.
    pub unexpected: Vec<String>,
    /// Tensors of another shape than the model needs.
    pub misshapen: Vec<Misshapen>,
    /// Tensors of another dtype than the model needs.
    pub mistyped: Vec<Mistyped>,
}

/// A tensor of another shape than the model needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Misshapen {
    /// The tensor.
    pub name: String,
    /// The shape that the model needs.
    pub expected: Vec<i32>,
    /// The shape that the checkpoint has.
    pub found: Vec<i32>,
}

/// A tensor of another dtype than the model needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Mistyped {
    /// The tensor.
    pub name: String,
    /// The dtype that the model needs, in words.
    pub expected: String,
    /// The dtype that the checkpoint has.
    pub found: Dtype,
}

impl WeightErrors {
    /// Whether everything fits.
    pub fn is_empty(&self) -> bool {
        let Self {
            missing,
            unexpected,
            misshapen,
            mistyped,
        } = self;
        missing.is_empty() && unexpected.is_empty() && misshapen.is_empty() && mistyped.is_empty()
    }
}

/// How many names of each list a message shows.
const SHOWN: usize = 4;

/// How long a tensor's name is shown; one that is longer was made to be.
const MAX_NAME: usize = 120;

/// A name from a file, which may hold anything, on one line.
fn shown(name: &str) -> String {
    let mut text: String = name.escape_debug().take(MAX_NAME + 1).collect();
    if text.chars().count() > MAX_NAME {
        text.pop();
        text.push_str("...");
    }
    text
}

/// `2 missing (a, b)`, the first few names.
fn list(f: &mut fmt::Formatter<'_>, first: &mut bool, what: &str, names: &[String]) -> fmt::Result {
    if names.is_empty() {
        return Ok(());
    }
    let separator = if std::mem::take(first) { "" } else { "; " };
    let more = if names.len() > SHOWN { ", ..." } else { "" };
    let first = names[..names.len().min(SHOWN)].join(", ");
    write!(f, "{separator}{} {what} ({first}{more})", names.len())
}

impl fmt::Display for WeightErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let misshapen: Vec<String> = self
            .misshapen
            .iter()
            .map(
                |Misshapen {
                     name,
                     expected,
                     found,
                 }| {
                    let name = shown(name);
                    format!("{name}: expected shape {expected:?}, found {found:?}")
                },
            )
            .collect();
        let mistyped: Vec<String> = self
            .mistyped
            .iter()
            .map(
                |Mistyped {
                     name,
                     expected,
                     found,
                 }| {
                    format!("{}: expected {expected}, found {found}", shown(name))
                },
            )
            .collect();
        let names = |names: &[String]| names.iter().map(|name| shown(name)).collect::<Vec<_>>();
        let mut first = true;
        f.write_str("the tensors do not fit the model: ")?;
        list(f, &mut first, "missing", &names(&self.missing))?;
        list(f, &mut first, "unexpected", &names(&self.unexpected))?;
        list(f, &mut first, "of another shape", &misshapen)?;
        list(f, &mut first, "of another dtype", &mistyped)
    }
}

impl Error {
    /// An error of the given kind, without context.
    pub fn new(kind: ErrorKind) -> Self {
        Self(Box::new(Inner { kind, layer: None }))
    }

    /// A [`ErrorKind::Setting`].
    pub fn setting(
        name: &'static str,
        expected: impl Into<String>,
        found: impl fmt::Display,
    ) -> Self {
        Self::new(ErrorKind::Setting {
            name,
            expected: expected.into(),
            found: found.to_string(),
        })
    }

    /// Names the layer by its path in the checkpoint, unless one is named already.
    #[must_use]
    pub fn with_layer(mut self, path: impl Into<String>) -> Self {
        self.0.layer.get_or_insert_with(|| path.into());
        self
    }

    /// What went wrong.
    pub fn kind(&self) -> &ErrorKind {
        &self.0.kind
    }

    /// The layer it went wrong in.
    pub fn layer(&self) -> Option<&str> {
        self.0.layer.as_deref()
    }
}

impl From<mlex_core::Error> for Error {
    fn from(error: mlex_core::Error) -> Self {
        Self::new(ErrorKind::Core(error))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(layer) = &self.0.layer {
            write!(f, "{}: ", shown(layer))?;
        }
        write!(f, "{}", self.0.kind)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("kind", &self.0.kind)
            .field("layer", &self.0.layer)
            .finish()
    }
}

// No `source`: every kind's `Display` already says what its cause says.
impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_lists_all_that_does_not_fit() {
        let errors = WeightErrors {
            missing: vec!["a.weight".into()],
            unexpected: (0..6).map(|index| format!("x{index}")).collect(),
            misshapen: vec![Misshapen {
                name: "b.weight".into(),
                expected: vec![2, 3],
                found: vec![3, 2],
            }],
            mistyped: vec![Mistyped {
                name: "c\n.weight".into(),
                expected: "a floating-point type".into(),
                found: Dtype::Int32,
            }],
        };
        assert_eq!(
            Error::new(ErrorKind::Weights(errors)).to_string(),
            "the tensors do not fit the model: 1 missing (a.weight); \
             6 unexpected (x0, x1, x2, x3, ...); \
             1 of another shape (b.weight: expected shape [2, 3], found [3, 2]); \
             1 of another dtype (c\\n.weight: expected a floating-point type, found int32)"
        );
    }
}
