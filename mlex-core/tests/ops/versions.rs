//! Cases in which a later MLX gives other values.

use std::path::Path;

use mlex_core::mlx_version;

use crate::cases::{Case, load};

/// Major, minor, patch.
type Version = [u32; 3];

fn version(text: &str) -> Version {
    let mut numbers = text.split('.').map(|part| part.parse().unwrap());
    let mut next = || numbers.next().unwrap();
    [next(), next(), next()]
}

/// Puts the cases of `stem` whose `since` the linked MLX has reached in the place of those of
/// `cases` with their names.
pub(crate) fn replace_changed(cases: &mut [Case], stem: &Path) {
    let linked = version(&mlx_version().unwrap());
    for later in load(stem) {
        let former = cases.iter_mut().find(|case| case.name == later.name);
        let former = former.unwrap_or_else(|| panic!("no case {}", later.name));
        if version(later.params.text("since")) <= linked {
            *former = later;
        }
    }
}
