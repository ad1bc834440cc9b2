//! 8-bit floating-point weights with scales beside them, as Qwen, DeepSeek and others export
//! them: a weight is its e4m3 number times a scale.
//!
//! Sources: transformers' `finegrained_fp8` (blocks, `weight_scale_inv`), the compressed-tensors
//! format and NVIDIA's modelopt (one scale, or one per row, `weight_scale`). mlx-lm has the
//! blocks in its `sanitize` functions; there, as here, the product is rounded to bfloat16.

use std::collections::{BTreeMap, BTreeSet};

use half::{bf16, f16};
use mlex_core::io::{Checkpoint, F8_E4M3_VALUES, StoredDtype, TensorInfo, f8_e8m0_to_f32};
use mlex_core::{Array, Error, Result};

/// Rows and columns of a block where the config does not say: what every export has.
pub(crate) const DEFAULT_BLOCK: [usize; 2] = [128, 128];

/// What comes after the weight's name in that of its scales.
const SCALE_SUFFIXES: [&str; 2] = ["_scale_inv", "_scale"];

/// Last parts of names of scales for activations and caches, which are computed unscaled here.
const UNUSED: [&str; 8] = [
    "activation_scale",
    "input_scale",
    "input_scale_ub",
    "k_scale",
    "output_scale",
    "prob_output_scale",
    "q_scale",
    "v_scale",
];

/// The weights of a checkpoint that have scales, and what belongs to them.
#[derive(Debug, Default)]
pub(crate) struct Scaled {
    /// The scales' name by the weight's.
    scales: BTreeMap<String, String>,
    /// Tensors that are not weights of their own.
    consumed: BTreeSet<String>,
}

impl Scaled {
    /// Looks for 8-bit weights with scales.
    pub(crate) fn find(checkpoint: &Checkpoint) -> Self {
        let mut found = Self::default();
        let is_e4m3 = |name: &str| {
            checkpoint
                .info(name)
                .is_some_and(|info| info.dtype == StoredDtype::F8E4M3)
        };
        for name in checkpoint.names().filter(|name| is_e4m3(name)) {
            let scales = SCALE_SUFFIXES
                .iter()
                .map(|suffix| format!("{name}{suffix}"))
                .find(|scales| checkpoint.info(scales).is_some());
            if let Some(scales) = scales {
                found.consumed.insert(scales.clone());
                found.scales.insert(name.to_owned(), scales);
            }
        }
        if !found.scales.is_empty() {
            let unused = checkpoint.names().filter(|name| {
                let last = name.rsplit('.').next().unwrap_or(name);
                UNUSED.contains(&last)
            });
            found.consumed.extend(unused.map(str::to_owned));
        }
        found
    }

    /// The name of the scales of a weight that has some.
    pub(crate) fn scales(&self, weight: &str) -> Option<&str> {
        self.scales.get(weight).map(String::as_str)
    }

    /// Whether the tensor is the scale of another, or of no use.
    pub(crate) fn is_consumed(&self, name: &str) -> bool {
        self.consumed.contains(name)
    }
}

/// A tensor of a file: what the header says and its bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stored<'a> {
    pub(crate) info: &'a TensorInfo,
    pub(crate) bytes: &'a [u8],
}

/// Checks that [`dequantize`] knows the scales' shape and type.
///
/// # Errors
/// When it does not.
pub(crate) fn check(weight: &TensorInfo, scales: &TensorInfo, block: [usize; 2]) -> Result<()> {
    Grid::of(&weight.shape, &scales.shape, block)?;
    numbers(Stored {
        info: scales,
        bytes: &[],
    })
    .map(|_| ())
}

/// The e4m3 weight `[.., N, K]` times its scales, as bfloat16. There is one scale for all, one
/// per row, or one per block of `block` rows and columns, the last block of each being cut.
///
/// # Errors
/// When the scales are of another shape or not floating point.
pub(crate) fn dequantize(
    weight: Stored<'_>,
    scales: Stored<'_>,
    block: [usize; 2],
) -> Result<Array> {
    let grid = Grid::of(&weight.info.shape, &scales.info.shape, block)?;
    let scales = numbers(scales)?;
    let mut values = Vec::with_capacity(weight.bytes.len());
    // A row at a time; a scalar or a vector is one row.
    for (row, bytes) in weight.bytes.chunks_exact(grid.columns.max(1)).enumerate() {
        let scales = &scales[grid.first_scale(row)..];
        for (bytes, scale) in bytes.chunks(grid.block_columns).zip(scales) {
            let scaled = |&byte: &u8| bf16::from_f32(F8_E4M3_VALUES[usize::from(byte)] * scale);
            values.extend(bytes.iter().map(scaled));
        }
    }
    let shape: Vec<i32> = weight.info.shape.iter().map(|&dim| dim as i32).collect();
    Array::from_slice(&values, &shape)
}

/// How scales lie over a weight of `columns` columns.
#[derive(Debug, PartialEq)]
struct Grid {
    rows: usize,
    columns: usize,
    block_rows: usize,
    block_columns: usize,
}

impl Grid {
    fn of(weight: &[usize], scales: &[usize], block: [usize; 2]) -> Result<Self> {
        let (rows, columns) = match weight {
            [.., rows, columns] => (*rows, *columns),
            [columns] => (1, *columns),
            [] => (1, 1),
        };
        let outer = &weight[..weight.len().saturating_sub(2)];
        let grid = |block_rows: usize, block_columns: usize| Self {
            rows,
            columns,
            block_rows: block_rows.max(1),
            block_columns: block_columns.max(1),
        };
        if scales.iter().all(|&dim| dim == 1) {
            // One scale for all, the rows of outer dimensions too.
            return Ok(grid(usize::MAX, usize::MAX));
        }
        let blocks = [
            rows.div_ceil(block[0].max(1)),
            columns.div_ceil(block[1].max(1)),
        ];
        let with = |tail: &[usize]| [outer, tail].concat();
        if scales == with(&[rows, 1]) || scales == with(&[rows]) {
            Ok(grid(1, columns))
        } else if !outer.is_empty() && (scales == outer || scales == with(&[1, 1])) {
            Ok(grid(rows, columns))
        } else if scales == with(&blocks) {
            Ok(grid(block[0], block[1]))
        } else {
            let expected = format!(
                "one scale, {:?} or {:?} for a weight of shape {weight:?}",
                with(&[rows, 1]),
                with(&blocks)
            );
            Err(Error::format("shape", expected, format!("{scales:?}")))
        }
    }

    /// Where the scales of a row begin; `row` counts over the outer dimensions too.
    fn first_scale(&self, row: usize) -> usize {
        if self.block_rows == usize::MAX {
            return 0;
        }
        let rows = self.rows.max(1);
        let per_matrix = rows.div_ceil(self.block_rows);
        let block = row / rows * per_matrix + row % rows / self.block_rows;
        block * self.columns.div_ceil(self.block_columns)
    }
}

/// The numbers of a stored tensor of floats.
fn numbers(stored: Stored<'_>) -> Result<Vec<f32>> {
    let Stored { info, bytes } = stored;
    let pairs = || bytes.chunks_exact(2).map(|pair| [pair[0], pair[1]]);
    Ok(match info.dtype {
        StoredDtype::F32 => bytes
            .chunks_exact(4)
            .map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]]))
            .collect(),
        StoredDtype::F16 => pairs()
            .map(|pair| f16::from_le_bytes(pair).into())
            .collect(),
        StoredDtype::BF16 => pairs()
            .map(|pair| bf16::from_le_bytes(pair).into())
            .collect(),
        StoredDtype::F8E8M0 => bytes.iter().map(|&byte| f8_e8m0_to_f32(byte)).collect(),
        other => {
            let expected = "F32, F16, BF16 or F8_E8M0";
            return Err(Error::format("dtype", expected, other.name()));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(weight: &[usize], scales: &[usize]) -> Option<Vec<usize>> {
        let grid = Grid::of(weight, scales, [2, 4]).ok()?;
        let rows = weight[..weight.len() - 1].iter().product();
        Some((0..rows).map(|row| grid.first_scale(row)).collect())
    }

    #[test]
    fn each_row_finds_its_scales() {
        // 3 rows and 6 columns in blocks of 2 x 4: two by two scales.
        assert_eq!(grid(&[3, 6], &[2, 2]), Some(vec![0, 0, 2]));
        assert_eq!(grid(&[3, 6], &[3, 1]), Some(vec![0, 1, 2]));
        assert_eq!(grid(&[3, 6], &[3]), Some(vec![0, 1, 2]));
        for one in [&[][..], &[1], &[1, 1]] {
            assert_eq!(grid(&[3, 6], one), Some(vec![0, 0, 0]));
        }
        // Two matrices.
        assert_eq!(grid(&[2, 3, 6], &[2, 2, 2]), Some(vec![0, 0, 2, 4, 4, 6]));
        assert_eq!(grid(&[2, 3, 6], &[2]), Some(vec![0, 0, 0, 1, 1, 1]));
        assert_eq!(grid(&[2, 3, 6], &[2, 3, 1]), Some(vec![0, 1, 2, 3, 4, 5]));
        for wrong in [&[2][..], &[2, 3], &[6, 1], &[3, 6], &[1, 2]] {
            assert_eq!(grid(&[3, 6], wrong), None, "{wrong:?}");
        }
    }
}
