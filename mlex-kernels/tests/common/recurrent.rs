//! What the tests of recurrent layers share.

use super::Random;

/// What decays are like.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Decay {
    /// From almost none to all.
    Any,
    None,
    /// Of everything, in f32 too.
    All,
}

impl Decay {
    /// The logarithms of the rates of some heads.
    pub(crate) fn rates(self, heads: usize, r: &mut Random) -> Vec<f32> {
        let rates = (0..heads).map(|_| match self {
            Self::Any => 4.0 * r.float() - 2.0,
            Self::None => -40.0,
            Self::All => 6.0,
        });
        rates.collect()
    }
}

/// Compares numbers, up to `tolerance` of the largest one and the rounding of each.
#[track_caller]
pub(crate) fn close(
    what: &str,
    found: impl ExactSizeIterator<Item = f64>,
    expected: &[f64],
    tolerance: f64,
    rounding: f64,
) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1e-3f64, |max, x| max.max(x.abs()));
    for (i, (found, expected)) in found.zip(expected).enumerate() {
        let allowed = tolerance * largest + rounding * expected.abs();
        assert!(
            (found - expected).abs() <= allowed,
            "{what} [{i}]: {found} for {expected}, the largest is {largest}"
        );
    }
}
