//! Rotary embedding of tokens with several positions: time, height and width. Each pair of a head
//! turns by one of them ("Qwen2-VL: Enhancing Vision-Language Model's Perception of the World at
//! Any Resolution").

use serde::Deserialize;

use crate::{Error, Result};

const FIELD: &str = "rope_scaling.mrope_section";

/// Where the config says how many pairs turn by each direction.
#[derive(Debug, Default, Deserialize)]
pub(super) struct MropeFields {
    rope_scaling: Option<Section>,
    rope_parameters: Option<Section>,
}

#[derive(Debug, Deserialize)]
struct Section {
    mrope_section: Option<[i32; 3]>,
}

impl MropeFields {
    /// How many pairs turn by time, height and width.
    pub(super) fn section(&self) -> Option<[i32; 3]> {
        let of = |section: &Option<Section>| section.as_ref()?.mrope_section;
        of(&self.rope_scaling).or(of(&self.rope_parameters))
    }
}

/// By which direction each of so many pairs turns: in turns by time, height and width while the
/// two latter have pairs left, then by time (Qwen3-VL, Qwen3.5).
pub(super) fn interleaved(pairs: i32, section: [i32; 3]) -> Vec<usize> {
    let direction = |pair: i32| {
        let direction = (pair % 3) as usize;
        if direction > 0 && pair < section[direction].saturating_mul(3) {
            direction
        } else {
            0
        }
    };
    (0..pairs).map(direction).collect()
}

/// By which direction each of so many pairs turns: those of time first, then those of height, then
/// those of width (Qwen2.5-VL).
pub(super) fn sectioned(pairs: i32, section: [i32; 3]) -> Result<Vec<usize>> {
    let sum = section.iter().map(|&count| i64::from(count)).sum::<i64>();
    if section.iter().any(|&count| count < 0) || sum != i64::from(pairs) {
        let expected = format!("three counts that add up to the {pairs} pairs of a head");
        return Err(Error::field(FIELD, expected, format!("{section:?}")));
    }
    let direction = |(direction, &count)| std::iter::repeat_n(direction, count as usize);
    Ok(section.iter().enumerate().flat_map(direction).collect())
}
