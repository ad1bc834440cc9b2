//! How much is read.

/// How much is read of files that may be hostile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// The most samples per channel that are decoded: 2^28, 93 minutes at 48 kHz.
    pub samples: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { samples: 1 << 28 }
    }
}
