//! A few rows of `x` against rows of weights in f32, and panels of weights for the GEMM.

use super::weights::{Code, Weights};
use super::{Kernel, Simd, Vector};

/// The most rows of `x` that are taken at once.
pub(crate) const MAX_ROWS: usize = 4;

/// Codes of a row that are unpacked at once.
const PIECE: usize = 256;

/// `out[m * stride + n] = x[m] . w[first + n]` for quantized `w`.
pub(crate) struct QuantizedRows<'a> {
    pub(crate) w: &'a Weights<'a>,
    /// `rows` rows of `w.k`.
    pub(crate) x: &'a [f32],
    /// For each row of `x` and each group, the sum.
    pub(crate) sums: &'a [f32],
    pub(crate) rows: usize,
    pub(crate) first: usize,
    pub(crate) count: usize,
    pub(crate) out: &'a mut [f32],
    pub(crate) stride: usize,
}

impl Kernel for QuantizedRows<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.rows {
            0 => {}
            1 => quantized_rows::<S, 1>(s, self),
            2 => quantized_rows::<S, 2>(s, self),
            3 => quantized_rows::<S, 3>(s, self),
            _ => quantized_rows::<S, 4>(s, self),
        }
    }
}

#[inline(always)]
fn quantized_rows<S: Simd, const M: usize>(s: S, job: QuantizedRows<'_>) {
    let QuantizedRows {
        w,
        x,
        sums,
        first,
        count,
        out,
        stride,
        ..
    } = job;
    let (row_bytes, groups, k) = (w.row_bytes(), w.groups(), w.k);
    assert!(w.holds(first + count) && x.len() >= M * k && sums.len() >= M * groups);
    assert!(w.group.is_multiple_of(S::LANES));
    let mut codes = [0u8; PIECE];
    let mut halves = [0u16; PIECE];
    let mut scales = [0.0; PIECE / 16];
    let mut shifts = [0.0; PIECE / 16];
    for n in 0..count {
        let row = first + n;
        let packed = &w.packed[row * row_bytes..][..row_bytes];
        let mut acc = [s.splat(0.0); M];
        let mut biases = [0.0; M];
        let mut k0 = 0;
        while k0 < k {
            let size = PIECE.min(k - k0);
            let piece = &packed[k0 * w.bits / 8..(k0 + size) * w.bits / 8];
            if w.code == Code::Fp8 {
                Weights::unpack_fp8(piece, &mut halves[..size]);
            } else {
                w.unpack(piece, &mut codes[..size]);
            }
            let (count, before) = (size / w.group, k0 / w.group);
            let (scales, shifts) = (&mut scales[..count], &mut shifts[..count]);
            w.factors(s, row * groups + before, scales, shifts);
            for g in 0..count {
                let group = before + g;
                let (scale, bias) = (scales[g], shifts[g]);
                let mut part = [s.splat(0.0); M];
                let mut i = g * w.group;
                while i < (g + 1) * w.group {
                    // SAFETY: `i + LANES <= size <= PIECE`, and `x` has `M` rows of `k`.
                    unsafe {
                        let q = if w.code == Code::Fp8 {
                            s.load_f16(halves.as_ptr().add(i))
                        } else {
                            s.load_u8(codes.as_ptr().add(i))
                        };
                        for (m, part) in part.iter_mut().enumerate() {
                            let x = s.load(x.as_ptr().add(m * k + k0 + i));
                            *part = s.fma(x, q, *part);
                        }
                    }
                    i += S::LANES;
                }
                for m in 0..M {
                    acc[m] = s.fma(part[m], s.splat(scale), acc[m]);
                    biases[m] += bias * sums[m * groups + group];
                }
            }
            k0 += size;
        }
        for m in 0..M {
            out[m * stride + n] = s.sum(acc[m]) + biases[m];
        }
    }
}

/// `out[m * stride + n] = x[m] . w[first + n]` for dense `w` of `k` columns.
pub(crate) struct DenseRows<'a, T> {
    pub(crate) w: &'a [T],
    /// `rows` rows of `k`.
    pub(crate) x: &'a [f32],
    pub(crate) k: usize,
    pub(crate) rows: usize,
    pub(crate) first: usize,
    pub(crate) count: usize,
    pub(crate) out: &'a mut [f32],
    pub(crate) stride: usize,
}

impl<T: Vector> Kernel for DenseRows<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.rows {
            0 => {}
            1 => dense_rows::<S, T, 1, 4>(s, self),
            2 => dense_rows::<S, T, 2, 2>(s, self),
            3 => dense_rows::<S, T, 3, 2>(s, self),
            _ => dense_rows::<S, T, 4, 2>(s, self),
        }
    }
}

#[inline(always)]
fn dense_rows<S: Simd, T: Vector, const M: usize, const R: usize>(s: S, job: DenseRows<'_, T>) {
    let DenseRows {
        w,
        x,
        k,
        first,
        count,
        out,
        stride,
        ..
    } = job;
    assert!(w.len() >= (first + count) * k && x.len() >= M * k);
    let mut n = 0;
    while n < count {
        let left = (count - n).min(R);
        let mut acc = [[s.splat(0.0); M]; R];
        let row = |r: usize| (first + n + r.min(left - 1)) * k;
        let whole = k - k % S::LANES;
        let mut i = 0;
        while i < whole {
            // SAFETY: `i + LANES <= k`, and `w` and `x` have these rows of `k`.
            unsafe {
                let mut xs = [s.splat(0.0); M];
                for (m, xs) in xs.iter_mut().enumerate() {
                    *xs = s.load(x.as_ptr().add(m * k + i));
                }
                for (r, acc) in acc.iter_mut().enumerate() {
                    let from = w.as_ptr().add(row(r) + i);
                    // Rows follow each other in memory.
                    prefetch(from.wrapping_byte_add(3072));
                    let w = T::load(s, from);
                    for (acc, &x) in acc.iter_mut().zip(&xs) {
                        *acc = s.fma(x, w, *acc);
                    }
                }
            }
            i += S::LANES;
        }
        if i < k {
            // SAFETY: `k - i` values are left of each row.
            unsafe {
                for (r, acc) in acc.iter_mut().enumerate() {
                    let w = super::load_part(s, w.as_ptr().add(row(r) + i), k - i);
                    for (m, acc) in acc.iter_mut().enumerate() {
                        let x = super::load_part(s, x.as_ptr().add(m * k + i), k - i);
                        *acc = s.fma(x, w, *acc);
                    }
                }
            }
        }
        for (r, acc) in acc.iter().enumerate().take(left) {
            for (m, &acc) in acc.iter().enumerate() {
                out[m * stride + n + r] = s.sum(acc);
            }
        }
        n += left;
    }
}

/// Asks for the cache line of `at`, which need not be a valid address.
#[inline(always)]
pub(super) fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64, and a prefetch of a bad address does nothing.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Where a panel's rows come from.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a, T> {
    Dense(&'a [T]),
    Quantized(&'a Weights<'a>),
}

/// Columns `k0 .. k0 + size` of rows `first .. first + count` as a GEMM panel: for each `k`,
/// `2 * LANES` rows, the missing ones zero.
pub(crate) struct FillPanel<'a, T> {
    pub(crate) source: Source<'a, T>,
    /// Columns of a row of the source.
    pub(crate) k: usize,
    pub(crate) first: usize,
    pub(crate) count: usize,
    pub(crate) k0: usize,
    pub(crate) size: usize,
    pub(crate) panel: &'a mut [f32],
}

impl<T: Vector> Kernel for FillPanel<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let FillPanel {
            source,
            k,
            first,
            count,
            k0,
            size,
            panel,
        } = self;
        let width = 2 * S::LANES;
        assert!(count <= width && panel.len() >= size * width && k0 + size <= k);
        let mut rows = [[0.0f32; PIECE]; super::MAX_LANES];
        for half in 0..2 {
            let used = count.saturating_sub(half * S::LANES).min(S::LANES);
            for piece in (0..size).step_by(PIECE) {
                let n = PIECE.min(size - piece);
                for (i, to) in rows.iter_mut().enumerate().take(S::LANES) {
                    if i >= used {
                        to.fill(0.0);
                        continue;
                    }
                    let row = first + half * S::LANES + i;
                    match source {
                        Source::Dense(w) => {
                            widen(s, &w[row * k + k0 + piece..][..n], &mut to[..n]);
                        }
                        Source::Quantized(w) => {
                            dequantize(s, w, row, k0 + piece, &mut to[..n]);
                        }
                    }
                }
                let mut i = 0;
                while i < n {
                    let left = (n - i).min(S::LANES);
                    // SAFETY: `i + LANES <= PIECE`; whole squares lie inside of `panel`, and
                    // the last one goes through a buffer.
                    unsafe {
                        let from = rows.as_ptr().cast::<f32>().add(i);
                        let to = (piece + i) * width + half * S::LANES;
                        if left == S::LANES {
                            s.transpose(from, PIECE, panel.as_mut_ptr().add(to), width);
                        } else {
                            for j in 0..left {
                                for l in 0..S::LANES {
                                    panel[to + j * width + l] = rows[l][i + j];
                                }
                            }
                        }
                    }
                    i += S::LANES;
                }
            }
        }
    }
}

/// Writes a piece of a row in f32.
#[inline(always)]
fn widen<S: Simd, T: Vector>(s: S, from: &[T], to: &mut [f32]) {
    let n = from.len().min(to.len());
    let mut i = 0;
    // SAFETY: `i + LANES <= n`, then the rest.
    unsafe {
        while i + S::LANES <= n {
            s.store(to.as_mut_ptr().add(i), T::load(s, from.as_ptr().add(i)));
            i += S::LANES;
        }
        let rest = super::load_part(s, from.as_ptr().add(i), n - i);
        super::store_part(s, to.as_mut_ptr().add(i), n - i, rest);
    }
}

/// Writes values `k0 ..` of a row, at most [`PIECE`] and whole groups.
#[inline(always)]
fn dequantize<S: Simd>(s: S, w: &Weights<'_>, row: usize, k0: usize, to: &mut [f32]) {
    let start = row * w.row_bytes() + k0 * w.bits / 8;
    let packed = &w.packed[start..][..to.len() * w.bits / 8];
    let mut codes = [0u8; PIECE];
    let mut halves = [0u16; PIECE];
    if w.code == Code::Fp8 {
        Weights::unpack_fp8(packed, &mut halves[..to.len()]);
    } else {
        w.unpack(packed, &mut codes[..to.len()]);
    }
    let groups = to.len() / w.group;
    let mut scales = [0.0; PIECE / 16];
    let mut biases = [0.0; PIECE / 16];
    let first = row * w.groups() + k0 / w.group;
    w.factors(s, first, &mut scales[..groups], &mut biases[..groups]);
    for (g, to) in to.chunks_exact_mut(w.group).enumerate() {
        let (scale, bias) = (s.splat(scales[g]), s.splat(biases[g]));
        for i in (0..w.group).step_by(S::LANES) {
            // SAFETY: groups are a multiple of `LANES`, and inside of the buffers.
            unsafe {
                let at = g * w.group + i;
                let q = if w.code == Code::Fp8 {
                    s.load_f16(halves.as_ptr().add(at))
                } else {
                    s.load_u8(codes.as_ptr().add(at))
                };
                s.store(to.as_mut_ptr().add(i), s.fma(q, scale, bias));
            }
        }
    }
}

/// A row of quantized weights in f32.
pub(crate) struct DequantizeRow<'a> {
    pub(crate) w: &'a Weights<'a>,
    pub(crate) row: usize,
    pub(crate) to: &'a mut [f32],
}

impl Kernel for DequantizeRow<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let DequantizeRow { w, row, to } = self;
        assert!(w.holds(row + 1) && to.len() == w.k);
        for (i, to) in to.chunks_mut(PIECE).enumerate() {
            dequantize(s, w, row, i * PIECE, to);
        }
    }
}

/// Rows of any element type in f32.
pub(crate) struct Widen<'a, T> {
    pub(crate) from: &'a [T],
    pub(crate) to: &'a mut [f32],
}

impl<T: Vector> Kernel for Widen<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        widen(s, self.from, self.to);
    }
}

/// A row of f32 in any element type.
pub(crate) struct Narrow<'a, T> {
    pub(crate) from: &'a [f32],
    /// Added first, if not empty.
    pub(crate) bias: &'a [f32],
    pub(crate) to: &'a mut [T],
}

impl<T: Vector> Kernel for Narrow<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n = self.to.len();
        let biased = !self.bias.is_empty();
        assert!(self.from.len() >= n && (!biased || self.bias.len() >= n));
        let mut i = 0;
        while i < n {
            let left = (n - i).min(S::LANES);
            // SAFETY: `left` values of each are left.
            unsafe {
                if left == S::LANES {
                    let mut v = s.load(self.from.as_ptr().add(i));
                    if biased {
                        v = s.add(v, s.load(self.bias.as_ptr().add(i)));
                    }
                    T::store(s, self.to.as_mut_ptr().add(i), v);
                } else {
                    let mut v = super::load_part(s, self.from.as_ptr().add(i), left);
                    if biased {
                        v = s.add(v, super::load_part(s, self.bias.as_ptr().add(i), left));
                    }
                    super::store_part(s, self.to.as_mut_ptr().add(i), left, v);
                }
            }
            i += S::LANES;
        }
    }
}
