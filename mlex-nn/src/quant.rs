//! Which layers of a checkpoint are quantized, and how.

use std::collections::BTreeMap;

use mlex_core::{QuantizationMode, Quantized};

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

/// Checks that MLX has a layout.
///
/// # Errors
/// A [`Setting`](crate::ErrorKind::Setting) that names what is wrong with it.
pub fn check_layout(layout: Quantized) -> Result<()> {
    let Quantized {
        bits,
        group_size,
        mode,
    } = layout;
    let (all_bits, all_groups): (&[i32], &[i32]) = match mode {
        QuantizationMode::Affine => (&[2, 3, 4, 5, 6, 8], &[32, 64, 128]),
        QuantizationMode::Mxfp4 => (&[4], &[32]),
        QuantizationMode::Mxfp8 => (&[8], &[32]),
        QuantizationMode::Nvfp4 => (&[4], &[16]),
        mode => return Err(Error::setting("quantization mode", "a known one", mode)),
    };
    if !all_bits.contains(&bits) {
        return Err(Error::setting(
            "bits",
            format!("one of {all_bits:?} for {mode}"),
            bits,
        ));
    }
    if !all_groups.contains(&group_size) {
        let expected = format!("one of {all_groups:?} for {mode}");
        return Err(Error::setting("group_size", expected, group_size));
    }
    Ok(())
}

/// The packed columns and the groups of a row of `columns` weights.
///
/// # Errors
/// When the columns do not divide into groups.
pub fn packed_columns(layout: Quantized, columns: i32) -> Result<(i32, i32)> {
    check_layout(layout)?;
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
    use super::*;

    #[test]
    fn layouts_that_mlx_does_not_have_are_named() {
        let layout = |bits, group_size, mode| Quantized {
            bits,
            group_size,
            mode,
        };
        let affine = QuantizationMode::Affine;
        assert!(check_layout(layout(4, 64, affine)).is_ok());
        assert_eq!(
            check_layout(layout(7, 64, affine)).unwrap_err().to_string(),
            "bits: expected one of [2, 3, 4, 5, 6, 8] for affine, found 7"
        );
        assert_eq!(
            check_layout(layout(4, 64, QuantizationMode::Mxfp4))
                .unwrap_err()
                .to_string(),
            "group_size: expected one of [32] for mxfp4, found 64"
        );
        assert_eq!(
            packed_columns(layout(4, 64, affine), 96)
                .unwrap_err()
                .to_string(),
            "group_size: expected a divisor of the 96 columns, found 64"
        );
        assert_eq!(packed_columns(layout(3, 32, affine), 64).unwrap(), (6, 2));
    }
}
