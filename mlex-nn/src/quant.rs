//! Which layers of a checkpoint are quantized, and how.

use std::collections::BTreeMap;

use mlex_core::Quantized;

use crate::{Error, Result};

/// The `quantization` section of a config: a layout for all layers, and other ones by path.
///
/// A layer is quantized when the checkpoint has its `.scales`; this says how to read them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QuantizationConfig {
    /// The layout of a layer that is not named.
    pub default: Option<Quantized>,
    /// Layouts by module path (`model.embed_tokens`); `None` for a layer that stays dense.
    pub layers: BTreeMap<String, Option<Quantized>>,
}

impl QuantizationConfig {
    /// One layout for every quantized layer.
    pub fn uniform(layout: Quantized) -> Self {
        Self {
            default: Some(layout),
            layers: BTreeMap::new(),
        }
    }

    /// The layout of the layer at `path`.
    pub fn layout(&self, path: &str) -> Option<Quantized> {
        match self.layers.get(path) {
            Some(layout) => *layout,
            None => self.default,
        }
    }
}

/// The packed columns and the groups of a row of `columns` weights.
///
/// # Errors
/// When MLX does not have the layout, or the columns do not divide into groups.
pub fn packed_columns(layout: Quantized, columns: i32) -> Result<(i32, i32)> {
    layout.check()?;
    if columns % layout.group_size != 0 {
        let expected = format!("a divisor of the {columns} columns");
        return Err(Error::setting("group_size", expected, layout.group_size));
    }
    // Groups are multiples of 16, so a group's bits are whole 32-bit words for 2, 4, 6, 8
    // bits, and for 3 and 5 since those have groups of 32 at least.
    let words = i64::from(columns) * i64::from(layout.bits) / 32;
    let words = i32::try_from(words)
        .map_err(|_| Error::setting("columns", "a count of words below 2^31", words))?;
    Ok((words, columns / layout.group_size))
}

#[cfg(test)]
mod tests {
    use mlex_core::QuantizationMode;

    use super::*;

    #[test]
    fn rows_are_whole_groups_and_words() {
        let packed = |bits, group_size, columns| {
            let layout = Quantized {
                bits,
                group_size,
                mode: QuantizationMode::Affine,
            };
            packed_columns(layout, columns).map_err(|error| error.to_string())
        };
        assert_eq!(packed(3, 32, 64), Ok((6, 2)));
        assert_eq!(
            packed(4, 64, 96),
            Err("group_size: expected a divisor of the 96 columns, found 64".to_owned())
        );
        assert_eq!(
            packed(7, 64, 64),
            Err("bits: expected 2, 3, 4, 5, 6 or 8 for affine, found 7".to_owned())
        );
    }
}
