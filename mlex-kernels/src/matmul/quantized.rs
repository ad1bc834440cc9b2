//! Quantized matrix products, for every layout that MLX writes.

use std::ops::Range;

use super::engine::F32Engine;
#[cfg(target_arch = "x86_64")]
use super::engine::{Bf16Engine, Brain, DotEngine};
use super::{Block, Precision, few, few_columns, is_few, many};
use crate::error::{check, check_len, product};
#[cfg(target_arch = "x86_64")]
use crate::simd::Kind;
use crate::simd::Level;
use crate::simd::rows::{QuantizedRows, Source, Widen};
use crate::simd::scratch::{self, as_bytes};
use crate::simd::weights::{Code, ScaleType, Weights};
use crate::threads::{RowBlock, parallel_blocks};
use crate::{Element, Floats, KernelError, Result};

/// How weights are quantized, by MLX's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// `scale * code + bias`: 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128.
    Affine {
        /// Bits of a code.
        bits: u8,
        /// Values per scale and bias.
        group_size: usize,
    },
    /// FP4 (e2m1) in groups of 32 with a power of two each.
    Mxfp4,
    /// FP8 (e4m3) in groups of 32 with a power of two each.
    Mxfp8,
    /// FP4 (e2m1) in groups of 16 with an FP8 (e4m3) scale each.
    Nvfp4,
}

impl Mode {
    /// Bits of a code.
    pub fn bits(self) -> usize {
        match self {
            Self::Affine { bits, .. } => usize::from(bits),
            Self::Mxfp4 | Self::Nvfp4 => 4,
            Self::Mxfp8 => 8,
        }
    }

    /// Values that share a scale.
    pub fn group_size(self) -> usize {
        match self {
            Self::Affine { group_size, .. } => group_size,
            Self::Mxfp4 | Self::Mxfp8 => 32,
            Self::Nvfp4 => 16,
        }
    }
}

/// Scales and biases of each group, `[experts, n, k / group size]`.
#[derive(Debug, Clone, Copy)]
pub enum Scales<'a> {
    /// Of the affine mode; both of the same type.
    Affine {
        /// Factors of the codes.
        scales: Floats<'a>,
        /// Added to the products.
        biases: Floats<'a>,
    },
    /// One byte each, of the other modes.
    Bytes(&'a [u8]),
}

/// Quantized weights, `[experts, n, k]`, as MLX keeps them: rows of codes without gaps, the
/// first code in the lowest bits. One matrix has one expert.
#[derive(Debug, Clone, Copy)]
pub struct QuantizedWeight<'a> {
    mode: Mode,
    experts: usize,
    n: usize,
    k: usize,
    packed: &'a [u32],
    scales: Scales<'a>,
}

impl<'a> QuantizedWeight<'a> {
    /// A view of one matrix of `n` rows of `k` values; `packed` has `n * k * bits / 32` words.
    ///
    /// # Errors
    /// When the mode has no such bits or group size, `k` is not whole groups, or a slice has
    /// another length or type.
    pub fn new(
        mode: Mode,
        n: usize,
        k: usize,
        packed: &'a [u32],
        scales: Scales<'a>,
    ) -> Result<Self> {
        Self::with_experts(mode, 1, n, k, packed, scales)
    }

    /// As [`QuantizedWeight::new`], for `experts` matrices one after another.
    ///
    /// # Errors
    /// As [`QuantizedWeight::new`].
    pub fn with_experts(
        mode: Mode,
        experts: usize,
        n: usize,
        k: usize,
        packed: &'a [u32],
        scales: Scales<'a>,
    ) -> Result<Self> {
        if let Mode::Affine { bits, group_size } = mode {
            let known = matches!(bits, 2 | 3 | 4 | 5 | 6 | 8);
            check(known, "quantized weight: bits", "2, 3, 4, 5, 6 or 8", bits)?;
            let known = matches!(group_size, 32 | 64 | 128);
            check(
                known,
                "quantized weight: group size",
                "32, 64 or 128",
                group_size,
            )?;
        }
        let group = mode.group_size();
        check(
            k.is_multiple_of(group),
            "quantized weight: k",
            "whole groups",
            k,
        )?;
        let bits = product("quantized weight", &[experts, n, k, mode.bits()])?;
        check_len("quantized weight: packed", bits / 32, packed.len())?;
        let groups = product("quantized weight", &[experts, n, k / group])?;
        match (mode, scales) {
            (Mode::Affine { .. }, Scales::Affine { scales, biases }) => {
                check_len("quantized weight: scales", groups, scales.len())?;
                check_len("quantized weight: biases", groups, biases.len())?;
                let same = std::mem::discriminant(&scales) == std::mem::discriminant(&biases);
                check(
                    same,
                    "quantized weight: biases",
                    "the type of the scales",
                    "another",
                )?;
            }
            (Mode::Mxfp4 | Mode::Mxfp8 | Mode::Nvfp4, Scales::Bytes(scales)) => {
                check_len("quantized weight: scales", groups, scales.len())?;
            }
            (mode, _) => {
                return Err(KernelError::Argument {
                    what: "quantized weight: scales",
                    expected: "floats for affine, bytes for the other modes",
                    found: format!("the other kind for {mode:?}"),
                });
            }
        }
        Ok(Self {
            mode,
            experts,
            n,
            k,
            packed,
            scales,
        })
    }

    /// How it is quantized.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Number of matrices.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Rows of each: the outputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Columns of each: the inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Bytes of the codes, scales and biases: what a product of one row reads.
    pub fn size_in_bytes(&self) -> usize {
        let floats = |floats: &Floats<'_>| match floats {
            Floats::F32(s) => size_of_val(*s),
            Floats::F16(s) => size_of_val(*s),
            Floats::Bf16(s) => size_of_val(*s),
        };
        size_of_val(self.packed)
            + match &self.scales {
                Scales::Affine { scales, biases } => floats(scales) + floats(biases),
                Scales::Bytes(scales) => scales.len(),
            }
    }

    /// The rows of one expert.
    fn weights(&self, expert: usize) -> Weights<'a> {
        let rows = expert * self.n..(expert + 1) * self.n;
        let groups = self.k / self.mode.group_size();
        let row_bytes = self.k * self.mode.bits() / 8;
        let slice = |floats: &Floats<'a>| -> (&'a [u8], ScaleType) {
            match floats.slice(rows.start * groups..rows.end * groups) {
                Floats::F32(s) => (as_bytes(s), ScaleType::F32),
                Floats::F16(s) => (as_bytes(s), ScaleType::F16),
                Floats::Bf16(s) => (as_bytes(s), ScaleType::Bf16),
            }
        };
        let (scales, scale_type, biases) = match &self.scales {
            Scales::Affine { scales, biases } => {
                let (scales, kind) = slice(scales);
                (scales, kind, Some(slice(biases).0))
            }
            Scales::Bytes(scales) => {
                let kind = if self.mode == Mode::Nvfp4 {
                    ScaleType::E4m3
                } else {
                    ScaleType::E8m0
                };
                (&scales[rows.start * groups..rows.end * groups], kind, None)
            }
        };
        Weights {
            packed: &as_bytes(self.packed)[rows.start * row_bytes..rows.end * row_bytes],
            bits: self.mode.bits(),
            code: match self.mode {
                Mode::Affine { .. } => Code::Integer,
                Mode::Mxfp4 | Mode::Nvfp4 => Code::Fp4,
                Mode::Mxfp8 => Code::Fp8,
            },
            group: self.mode.group_size(),
            k: self.k,
            scales,
            scale_type,
            biases,
        }
    }
}

/// `y[m, n] = sum_k x[m, k] * w[n, k]`: MLX's `quantized_matmul` with transposed weights.
///
/// `x` holds rows of `w.k()`, `y` as many rows of `w.n()`. The dequantized weights are
/// never rounded, and sums are in f32; see [`Precision`] for what may happen to `x`.
///
/// # Errors
/// When `w` has more than one expert, or `x` or `y` is not whole rows.
pub fn quantized_matmul<T: Element>(
    y: &mut [T],
    x: &[T],
    w: &QuantizedWeight<'_>,
    precision: Precision,
) -> Result<()> {
    check(
        w.experts == 1,
        "quantized_matmul: w",
        "one expert",
        w.experts,
    )?;
    let rows = rows_of("quantized_matmul: x", x.len(), w.k, y.len(), w.n)?;
    let blocks = if rows == 0 {
        vec![]
    } else {
        vec![Block {
            rows: 0..rows,
            expert: 0,
        }]
    };
    run(y, x, w, precision, &blocks);
    Ok(())
}

/// `y[i] = x[i] . w[experts[i]]`: each row of `x` with the weights of an expert of its own,
/// as in a mixture of experts.
///
/// Rows of the same expert are multiplied together. When `experts` ascends nothing is
/// copied; otherwise rows are sorted first and put back after.
///
/// # Errors
/// When an expert is not one of `w`'s, or `x` or `y` is not a row for each of `experts`.
pub fn gather_quantized_matmul<T: Element>(
    y: &mut [T],
    x: &[T],
    experts: &[u32],
    w: &QuantizedWeight<'_>,
    precision: Precision,
) -> Result<()> {
    const WHAT: &str = "gather_quantized_matmul";
    let rows = experts.len();
    check_len(
        "gather_quantized_matmul: x",
        product(WHAT, &[rows, w.k])?,
        x.len(),
    )?;
    check_len(
        "gather_quantized_matmul: y",
        product(WHAT, &[rows, w.n])?,
        y.len(),
    )?;
    if let Some(&expert) = experts.iter().find(|&&expert| expert as usize >= w.experts) {
        check(
            false,
            "gather_quantized_matmul: experts",
            "an expert of w",
            expert,
        )?;
    }
    if experts.is_sorted() {
        run(y, x, w, precision, &blocks_of(experts.iter().copied()));
        return Ok(());
    }
    let mut order: Vec<usize> = (0..rows).collect();
    order.sort_by_key(|&row| experts[row]);
    let blocks = blocks_of(order.iter().map(|&row| experts[row]));
    let sorted: Vec<T> = order
        .iter()
        .flat_map(|&row| &x[row * w.k..][..w.k])
        .copied()
        .collect();
    let mut out = vec![T::from_f32(0.0); y.len()];
    run(&mut out, &sorted, w, precision, &blocks);
    for (i, &row) in order.iter().enumerate() {
        y[row * w.n..][..w.n].copy_from_slice(&out[i * w.n..][..w.n]);
    }
    Ok(())
}

/// Runs of equal experts.
fn blocks_of(experts: impl Iterator<Item = u32>) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    for (row, expert) in experts.enumerate() {
        let expert = expert as usize;
        match blocks.last_mut() {
            Some(last) if last.expert == expert => last.rows.end = row + 1,
            _ => blocks.push(Block {
                rows: row..row + 1,
                expert,
            }),
        }
    }
    blocks
}

/// The number of rows of `x`, when `y` has as many.
pub(super) fn rows_of(what: &'static str, x: usize, k: usize, y: usize, n: usize) -> Result<usize> {
    // With no columns on one side the other tells the number of rows.
    let rows = match (x.checked_div(k), y.checked_div(n)) {
        (Some(rows), _) => rows,
        (None, Some(rows)) => rows,
        (None, None) => 0,
    };
    check_len(what, product(what, &[rows, k])?, x)?;
    check_len("matmul: y", product("matmul: y", &[rows, n])?, y)?;
    Ok(rows)
}

fn run<T: Element>(
    y: &mut [T],
    x: &[T],
    w: &QuantizedWeight<'_>,
    precision: Precision,
    blocks: &[Block],
) {
    if y.is_empty() {
        return;
    }
    if w.k == 0 {
        y.fill(T::from_f32(0.0));
        return;
    }
    let level = Level::current();
    let (few, many): (Vec<_>, Vec<_>) = blocks.iter().cloned().partition(is_few);
    if !few.is_empty() {
        run_few(level, y, x, w, &few);
    }
    if !many.is_empty() {
        run_many(level, y, x, w, precision, &many);
    }
}

/// Whether the integer kernels take these weights.
#[cfg(target_arch = "x86_64")]
fn uses_dot(level: Level, w: &QuantizedWeight<'_>) -> bool {
    level == Level::Avx512Dot && w.mode != Mode::Mxfp8
}

/// Whether bfloat16 is faster than two digits, which are more exact and quicker to unpack, but
/// need work at the end of each group.
#[cfg(target_arch = "x86_64")]
fn brain_wins(w: &QuantizedWeight<'_>, blocks: &[Block]) -> bool {
    let rows = blocks
        .iter()
        .map(|block| block.rows.len())
        .max()
        .unwrap_or(0);
    w.mode == Mode::Mxfp8 || (w.mode.group_size() < 64 && rows >= 96)
}

fn run_few<T: Element>(
    level: Level,
    y: &mut [T],
    x: &[T],
    w: &QuantizedWeight<'_>,
    blocks: &[Block],
) {
    let like = w.weights(0);
    let bytes = like.row_bytes() + like.groups() * like.scale_type.size() * 2;
    let tile_columns = few_columns(bytes, w.n);
    let row_blocks: Vec<_> = blocks
        .iter()
        .map(|b| RowBlock {
            rows: b.rows.clone(),
            tile_columns,
        })
        .collect();
    // The rows of all blocks, one after another, in f32.
    let starts: Vec<usize> = blocks
        .iter()
        .scan(0, |next, b| {
            let start = *next;
            *next += b.rows.len();
            Some(start)
        })
        .collect();
    let rows: usize = blocks.iter().map(|b| b.rows.len()).sum();
    scratch::with(0, |[wide, first, second, third]| {
        let x = {
            let wide = &mut wide.floats(rows * w.k)[..rows * w.k];
            for (b, start) in blocks.iter().zip(&starts) {
                let to = &mut wide[start * w.k..][..b.rows.len() * w.k];
                level.dispatch(Widen {
                    from: &x[b.rows.start * w.k..b.rows.end * w.k],
                    to,
                });
            }
            &*wide
        };
        let local = |tile_rows: Range<usize>, block: usize| {
            let start = starts[block];
            start..start + tile_rows.len()
        };
        #[cfg(target_arch = "x86_64")]
        if uses_dot(level, w) {
            use crate::simd::dot::{Activations, matvec};
            if let Some(digits) = Activations::new(x, &like, first, second, third) {
                parallel_blocks(y, w.n, &row_blocks, |tile| {
                    let block = tile.plane;
                    few(level, tile, &[], |rows, column, count, out, stride| {
                        let digits = digits.rows(local(rows, block));
                        let w = w.weights(blocks[block].expert);
                        matvec(&w, &digits, column, count, out, stride);
                    });
                });
                return;
            }
        }
        let _ = (&second, &third);
        let groups = like.groups();
        let sums = &mut first.floats(rows * groups)[..rows * groups];
        for (sum, x) in sums.iter_mut().zip(x.chunks_exact(like.group)) {
            *sum = x.iter().sum();
        }
        let sums = &*sums;
        parallel_blocks(y, w.n, &row_blocks, |tile| {
            let block = tile.plane;
            few(level, tile, &[], |rows, column, count, out, stride| {
                let rows = local(rows, block);
                level.dispatch(QuantizedRows {
                    w: &w.weights(blocks[block].expert),
                    x: &x[rows.start * w.k..],
                    sums: &sums[rows.start * groups..],
                    rows: rows.len(),
                    first: column,
                    count,
                    out,
                    stride,
                });
            });
        });
    });
}

fn run_many<T: Element>(
    level: Level,
    y: &mut [T],
    x: &[T],
    w: &QuantizedWeight<'_>,
    precision: Precision,
    blocks: &[Block],
) {
    #[cfg(target_arch = "x86_64")]
    if level == Level::Avx512Dot && precision == Precision::Bf16 && brain_wins(w, blocks) {
        let engine = Bf16Engine::new(w.k, |expert| Brain::Quantized(w.weights(expert)));
        many(level, &engine, x, y, w.k, w.n, &[], blocks);
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if uses_dot(level, w) {
        // Two digits hold a bfloat16 with 7 bits to spare for smaller neighbours.
        let coarse = precision == Precision::Bf16 || T::KIND == Kind::Bf16;
        let digits = if coarse { 2 } else { 3 };
        let engine = DotEngine::new(&w.weights(0), digits, |expert| w.weights(expert));
        if many(level, &engine, x, y, w.k, w.n, &[], blocks) {
            return;
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = precision;
    let experts: Vec<_> = (0..w.experts).map(|expert| w.weights(expert)).collect();
    let engine = F32Engine::new(level, w.k, |expert: usize| {
        Source::<f32>::Quantized(&experts[expert])
    });
    many(level, &engine, x, y, w.k, w.n, &[], blocks);
}
