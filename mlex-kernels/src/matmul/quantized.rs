//! Quantized matrix products, for every layout that MLX writes.

use super::engine::F32Engine;
#[cfg(target_arch = "x86_64")]
use super::engine::{Bf16Engine, Brain, DotEngine};
use super::few::{self, Operand, Part, Side};
use super::{Block, Finish, Precision, is_few, many};
use crate::error::{check, check_len, product};
#[cfg(target_arch = "x86_64")]
use crate::simd::Kind;
use crate::simd::Level;
use crate::simd::elementwise::Gate;
use crate::simd::rows::Source;
use crate::simd::scratch::as_bytes;
use crate::simd::weights::{Code, ScaleType, Weights};
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

    /// The rows of each expert.
    fn all_weights(&self) -> Vec<Weights<'a>> {
        (0..self.experts).map(|i| self.weights(i)).collect()
    }

    /// The rows of one expert.
    pub(crate) fn weights(&self, expert: usize) -> Weights<'a> {
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
    run(y, x, w, precision, &blocks, Then::default());
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
        run(
            y,
            x,
            w,
            precision,
            &blocks_of(experts.iter().copied()),
            Then::default(),
        );
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
    run(&mut out, &sorted, w, precision, &blocks, Then::default());
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

/// What becomes of the products of many rows.
#[derive(Clone, Copy, Default)]
pub(super) struct Then<'a> {
    /// Added, if not empty.
    pub(super) bias: &'a [f32],
    /// A matrix of the same mode and size, its bias, and the function in
    /// `function(first) * second`.
    pub(super) gates: Option<(&'a QuantizedWeight<'a>, &'a [f32], Gate)>,
}

impl<'a> Then<'a> {
    fn up(&self) -> Option<&'a QuantizedWeight<'a>> {
        self.gates.map(|(up, _, _)| up)
    }

    fn finish<E>(&self, engine: Option<&'a E>) -> Finish<'a, E> {
        let gates = engine.zip(self.gates);
        Finish {
            bias: self.bias,
            second: gates.map(|(engine, (_, bias, gate))| (engine, bias, gate)),
        }
    }
}

/// The products of blocks of rows, and for those of many rows what comes then.
pub(super) fn run<T: Element>(
    y: &mut [T],
    x: &[T],
    w: &QuantizedWeight<'_>,
    precision: Precision,
    blocks: &[Block],
    then: Then<'_>,
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
        run_many(level, y, x, w, precision, &many, then);
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

/// Blocks of few rows, each of an expert of its own.
fn run_few<T: Element>(
    level: Level,
    y: &mut [T],
    x: &[T],
    w: &QuantizedWeight<'_>,
    blocks: &[Block],
) {
    let mut outputs = Vec::with_capacity(blocks.len());
    let mut xs = Vec::with_capacity(blocks.len());
    let mut parts = Vec::with_capacity(blocks.len());
    let mut rest = y;
    let mut start = 0;
    for (i, Block { rows, expert }) in blocks.iter().enumerate() {
        let (_, after) = std::mem::take(&mut rest).split_at_mut((rows.start - start) * w.n);
        let (output, after) = after.split_at_mut(rows.len() * w.n);
        (rest, start) = (after, rows.end);
        outputs.push(output);
        xs.push(&x[rows.start * w.k..rows.end * w.k]);
        let operand = Operand::Quantized(w.weights(*expert));
        let first = Side { operand, bias: &[] };
        parts.push(Part {
            first,
            second: None,
            x: i,
            columns: w.n,
        });
    }
    few::run(level, &mut outputs, &xs, w.k, &parts);
}

#[cfg(target_arch = "x86_64")]
fn brain_engine<'a>(
    w: &'a QuantizedWeight<'a>,
) -> Bf16Engine<impl Fn(usize) -> Brain<'a> + Sync + use<'a>> {
    Bf16Engine::new(w.k, |expert| Brain::Quantized(w.weights(expert)))
}

#[cfg(target_arch = "x86_64")]
fn dot_engine<'a>(
    w: &'a QuantizedWeight<'a>,
    digits: usize,
) -> DotEngine<impl Fn(usize) -> Weights<'a> + Sync + use<'a>> {
    DotEngine::new(&w.weights(0), digits, |expert| w.weights(expert))
}

fn f32_engine<'a>(
    level: Level,
    k: usize,
    experts: &'a [Weights<'a>],
) -> F32Engine<impl Fn(usize) -> Source<'a, f32> + Sync + use<'a>> {
    F32Engine::new(level, k, |expert| Source::Quantized(&experts[expert]))
}

fn run_many<T: Element>(
    level: Level,
    y: &mut [T],
    x: &[T],
    w: &QuantizedWeight<'_>,
    precision: Precision,
    blocks: &[Block],
    then: Then<'_>,
) {
    #[cfg(target_arch = "x86_64")]
    if level == Level::Avx512Dot && precision == Precision::Bf16 && brain_wins(w, blocks) {
        let second = then.up().map(brain_engine);
        let finish = then.finish(second.as_ref());
        many(level, &brain_engine(w), x, y, w.k, w.n, &finish, blocks);
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if uses_dot(level, w) {
        // Two digits hold a bfloat16 with 7 bits to spare for smaller neighbours.
        let coarse = precision == Precision::Bf16 || T::KIND == Kind::Bf16;
        let digits = if coarse { 2 } else { 3 };
        let second = then.up().map(|w| dot_engine(w, digits));
        let finish = then.finish(second.as_ref());
        if many(
            level,
            &dot_engine(w, digits),
            x,
            y,
            w.k,
            w.n,
            &finish,
            blocks,
        ) {
            return;
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = precision;
    let first = w.all_weights();
    let second = then
        .up()
        .map_or_else(Vec::new, QuantizedWeight::all_weights);
    let engine = f32_engine(level, w.k, &first);
    let second = then.up().map(|w| f32_engine(level, w.k, &second));
    let finish = then.finish(second.as_ref());
    many(level, &engine, x, y, w.k, w.n, &finish, blocks);
}
