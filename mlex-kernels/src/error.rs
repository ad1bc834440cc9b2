//! The error of this crate: a bad length, size or argument, named with what was
//! expected and what was found.

use std::fmt;

/// The result of every fallible call of this crate.
pub type Result<T, E = KernelError> = std::result::Result<T, E>;

/// Why a kernel refused its arguments. Nothing has been written when one is returned.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum KernelError {
    /// A slice is not as long as the shape asks for.
    Length {
        /// The kernel and the argument, as `rms_norm: weight`.
        what: &'static str,
        /// The number of elements that was needed.
        expected: usize,
        /// The number of elements that was found.
        found: usize,
    },
    /// A number is outside of what the kernel takes.
    Argument {
        /// The kernel and the argument, as `rope: dims`.
        what: &'static str,
        /// What is allowed, in words.
        expected: &'static str,
        /// What was given.
        found: String,
    },
    /// The number of elements of a shape does not fit the address space.
    Overflow {
        /// The kernel and the argument.
        what: &'static str,
    },
}

impl fmt::Display for KernelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length {
                what,
                expected,
                found,
            } => {
                write!(f, "{what}: expected {expected} elements, found {found}")
            }
            Self::Argument {
                what,
                expected,
                found,
            } => {
                write!(f, "{what}: expected {expected}, found {found}")
            }
            Self::Overflow { what } => write!(f, "{what}: the shape is too large"),
        }
    }
}

impl std::error::Error for KernelError {}

/// Refuses a slice of another length than `expected`.
pub(crate) fn check_len(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if expected == found {
        Ok(())
    } else {
        Err(KernelError::Length {
            what,
            expected,
            found,
        })
    }
}

/// The product of a shape's sizes.
pub(crate) fn product(what: &'static str, sizes: &[usize]) -> Result<usize> {
    sizes
        .iter()
        .try_fold(1usize, |total, &size| total.checked_mul(size))
        .ok_or(KernelError::Overflow { what })
}

/// Refuses an argument unless `ok`.
pub(crate) fn check(
    ok: bool,
    what: &'static str,
    expected: &'static str,
    found: impl fmt::Display,
) -> Result<()> {
    if ok {
        Ok(())
    } else {
        Err(KernelError::Argument {
            what,
            expected,
            found: found.to_string(),
        })
    }
}
