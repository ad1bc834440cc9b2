//! Keys and values in few bits: how a vector is packed, and where vectors of attention come from.
//!
//! A packed vector is a row of 32-bit words: its codes, a scale for each group and a bias for each
//! group, so that it is written, moved and read as one piece. Codes, scales and biases are those
//! of MLX's affine quantization.

use super::Heads;
use crate::error::{check, check_len};
use crate::simd::rows::{DequantizeRow, Widen};
use crate::simd::scratch::{self, Buffer};
use crate::simd::weights::{Code, ScaleType, Weights};
use crate::simd::{Level, Vector};
use crate::threads::parallel_chunks;
use crate::{Element, Result};

/// The type of the scales and biases of packed vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FloatType {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl FloatType {
    fn scale_type(self) -> ScaleType {
        match self {
            Self::F32 => ScaleType::F32,
            Self::F16 => ScaleType::F16,
            Self::Bf16 => ScaleType::Bf16,
        }
    }
}

/// The form of packed vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedRow {
    dim: usize,
    bits: usize,
    group: usize,
    scales: FloatType,
}

impl PackedRow {
    /// Vectors of `dim` numbers in `bits` (2, 3, 4, 5, 6 or 8), with a scale and a bias for each
    /// `group` (32, 64 or 128) of them.
    ///
    /// # Errors
    /// When there is no such form, or `dim` is not whole groups.
    pub fn new(dim: usize, bits: usize, group: usize, scales: FloatType) -> Result<Self> {
        let widths = [2, 3, 4, 5, 6, 8];
        let known = widths.contains(&bits);
        check(known, "packed vectors: bits", "2, 3, 4, 5, 6 or 8", bits)?;
        let known = [32, 64, 128].contains(&group);
        check(known, "packed vectors: group", "32, 64 or 128", group)?;
        let fits = dim > 0 && dim.is_multiple_of(group) && dim <= 1024;
        check(fits, "packed vectors: size", "whole groups up to 1024", dim)?;
        Ok(Self {
            dim,
            bits,
            group,
            scales,
        })
    }

    /// Numbers of a vector.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Words of a packed vector.
    pub fn words(&self) -> usize {
        (self.codes() + 2 * self.factors()) / 4
    }

    /// Bytes of the codes: a multiple of 4, since `dim` is one of 32.
    fn codes(&self) -> usize {
        self.dim * self.bits / 8
    }

    /// Bytes of the scales. Those of scales and biases together are a multiple of 4.
    fn factors(&self) -> usize {
        self.dim / self.group * self.scales.scale_type().size()
    }

    /// The parts of a packed vector.
    fn weights<'a>(&self, row: &'a [u32]) -> Weights<'a> {
        let bytes = scratch::as_bytes(&row[..self.words()]);
        let (packed, factors) = bytes.split_at(self.codes());
        let (scales, biases) = factors.split_at(self.factors());
        Weights {
            packed,
            bits: self.bits,
            code: Code::Integer,
            group: self.group,
            k: self.dim,
            scales,
            scale_type: self.scales.scale_type(),
            biases: Some(biases),
        }
    }

    /// Packs a vector.
    fn pack<T: Element>(&self, from: &[T], to: &mut [u32]) {
        let groups = self.dim / self.group;
        let (codes, factors) = to.split_at_mut(self.codes() / 4);
        let mut bits = Bits::new(codes);
        let mut values = [0.0; 128];
        for (g, from) in from.chunks_exact(self.group).enumerate() {
            let values = &mut values[..self.group];
            for (to, from) in values.iter_mut().zip(from) {
                *to = from.to_f32();
            }
            let (scale, bias) = self.group_codes(values, &mut bits);
            self.store(factors, g, scale);
            self.store(factors, groups + g, bias);
        }
    }

    /// Writes the codes of a group. Returns its scale and bias: the larger end of its range is
    /// exact, and zero is where it was rounded to, as MLX has it.
    fn group_codes(&self, values: &[f32], bits: &mut Bits<'_>) -> (f32, f32) {
        let fold = |start, f: fn(f32, f32) -> f32| values.iter().copied().fold(start, f);
        let max = fold(f32::NEG_INFINITY, f32::max);
        let min = fold(f32::INFINITY, f32::min);
        let largest = ((1u32 << self.bits) - 1) as f32;
        let low = min.abs() > max.abs();
        let scale = ((max - min) / largest).max(1e-7);
        let mut scale = if low { scale } else { -scale };
        let edge = if low { min } else { max };
        let zero = (edge / scale).round_ties_even();
        let mut bias = 0.0;
        if zero != 0.0 {
            scale = edge / zero;
            bias = edge;
        }
        for value in values {
            let code = nearest((value - bias) / scale).clamp(0.0, largest);
            bits.push(code as u32, self.bits);
        }
        (scale, bias)
    }

    /// Writes the factor `index`.
    fn store(&self, factors: &mut [u32], index: usize, value: f32) {
        let half = match self.scales {
            FloatType::F32 => {
                factors[index] = value.to_bits();
                return;
            }
            FloatType::F16 => half::f16::from_f32(value).to_bits(),
            FloatType::Bf16 => half::bf16::from_f32(value).to_bits(),
        };
        let word = &mut factors[index / 2];
        let shift = 16 * (index % 2);
        *word = *word & !(0xffff << shift) | u32::from(half) << shift;
    }
}

/// The nearest whole number, ties to even; of a number below 2^22.
fn nearest(value: f32) -> f32 {
    const LARGE: f32 = 12_582_912.0;
    value.clamp(-LARGE, LARGE) + LARGE - LARGE
}

/// Codes one after the other, the lowest bits first.
struct Bits<'a> {
    words: std::slice::IterMut<'a, u32>,
    held: u64,
    count: usize,
}

impl<'a> Bits<'a> {
    fn new(words: &'a mut [u32]) -> Self {
        Self {
            words: words.iter_mut(),
            held: 0,
            count: 0,
        }
    }

    fn push(&mut self, code: u32, bits: usize) {
        self.held |= u64::from(code) << self.count;
        self.count += bits;
        if self.count >= 32 {
            if let Some(word) = self.words.next() {
                *word = self.held as u32;
            }
            self.held >>= 32;
            self.count -= 32;
        }
    }
}

/// Packs vectors that follow each other, `[.., dim]`, to `[.., words]`.
///
/// # Errors
/// When the lengths do not fit.
pub fn pack_rows<T: Element>(to: &mut [u32], from: &[T], row: PackedRow) -> Result<()> {
    let count = from.len() / row.dim;
    check_len("pack_rows: from", count * row.dim, from.len())?;
    check_len("pack_rows: to", count * row.words(), to.len())?;
    // A task is some thousand numbers.
    let per_task = 4096usize.div_ceil(row.dim);
    let words = row.words();
    parallel_chunks(to, per_task * words, |first, to| {
        let from = &from[first / words * row.dim..];
        for (from, to) in from.chunks_exact(row.dim).zip(to.chunks_exact_mut(words)) {
            row.pack(from, to);
        }
    });
    Ok(())
}

/// Heads of packed vectors in memory, as [`Heads`] of words.
#[derive(Debug, Clone, Copy)]
pub struct PackedHeads<'a> {
    /// The words, and how far apart vectors are.
    pub words: Heads<'a, u32>,
    /// Their form.
    pub row: PackedRow,
}

/// Where the loops of attention have keys or values from.
pub(super) trait Vectors: Copy + Sync {
    /// What [`block`](Self::block) gives.
    type Element: Vector;

    /// Writes a vector in f32.
    fn widen(&self, level: Level, at: [usize; 3], to: &mut [f32]);

    /// `count` vectors from a position on and how far apart they are, in `memory` where they are
    /// not that in themselves.
    fn block<'b>(
        &'b self,
        level: Level,
        at: [usize; 3],
        count: usize,
        dim: usize,
        memory: &'b mut Buffer,
    ) -> (&'b [Self::Element], usize);
}

impl<T: Element> Vectors for Heads<'_, T> {
    type Element = T;

    fn widen(&self, level: Level, [batch, head, position]: [usize; 3], to: &mut [f32]) {
        let from = &self.at(batch, head, position)[..to.len()];
        level.dispatch(Widen { from, to });
    }

    fn block<'b>(
        &'b self,
        _: Level,
        [batch, head, position]: [usize; 3],
        _: usize,
        _: usize,
        _: &'b mut Buffer,
    ) -> (&'b [T], usize) {
        (self.at(batch, head, position), self.strides[2])
    }
}

impl Vectors for PackedHeads<'_> {
    type Element = f32;

    fn widen(&self, level: Level, [batch, head, position]: [usize; 3], to: &mut [f32]) {
        let words = self.words.at(batch, head, position);
        level.dispatch(DequantizeRow {
            w: &self.row.weights(words),
            row: 0,
            to,
        });
    }

    fn block<'b>(
        &'b self,
        level: Level,
        [batch, head, position]: [usize; 3],
        count: usize,
        dim: usize,
        memory: &'b mut Buffer,
    ) -> (&'b [f32], usize) {
        let floats = &mut memory.floats(count * dim)[..count * dim];
        for (i, to) in floats.chunks_exact_mut(dim).enumerate() {
            self.widen(level, [batch, head, position + i], to);
        }
        (floats, dim)
    }
}
