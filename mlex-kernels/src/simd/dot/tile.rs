//! Many rows of `x` against a panel of weights.

use std::arch::x86_64::*;

use super::digits::{LARGEST, group_sums, split_block};
use super::{COLUMNS, Weights};

/// The most rows of a tile. One more would need more registers than there are.
const ROWS: usize = 13;

/// How rows of `x` are cut and written for [`multiply`], for one kind of weights.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    /// 2 or 3.
    digits: usize,
    /// Values that share a scale.
    block: usize,
    /// The last digit is summed apart, because all three would overflow.
    apart: bool,
    limit: f32,
    k: usize,
    group: usize,
}

impl Tile {
    /// The rows of one tile.
    pub(crate) const ROWS: usize = ROWS;

    /// For weights `w`; `digits` is 2 or 3.
    pub(crate) fn new(w: &Weights<'_>, digits: usize) -> Self {
        let code = w.largest_code();
        let block = if digits == 2 {
            w.group
        } else {
            w.group.min(32)
        };
        // An i32 must hold the sum of a block.
        let fits = (i32::MAX as usize / (block * code)) as f32 - 1.0;
        let largest = LARGEST[digits - 2];
        // Less than 2^21 would lose more than f32 does.
        let apart = digits == 3 && fits < 2_097_152.0;
        let limit = if apart { largest } else { largest.min(fits) };
        Self {
            digits,
            block,
            apart,
            limit,
            k: w.k,
            group: w.group,
        }
    }

    /// The bytes of the digits of `rows` rows.
    pub(crate) fn digit_bytes(&self, rows: usize) -> usize {
        rows * self.k * self.digits
    }

    /// The number of scales and sums of `rows` rows.
    pub(crate) fn factors(&self, rows: usize) -> usize {
        rows * (self.k / self.block + self.k / self.group)
    }

    /// Writes one tile of at most [`Tile::ROWS`] rows of `x`, and says whether all are finite.
    /// The CPU has AVX-512.
    pub(crate) fn write(&self, x: &[f32], digits: &mut [u8], factors: &mut [f32]) -> bool {
        let rows = x.len() / self.k;
        assert!(rows * self.k == x.len() && self.block <= 128);
        assert!(digits.len() >= self.digit_bytes(rows) && factors.len() >= self.factors(rows));
        let (blocks, groups) = (self.k / self.block, self.k / self.group);
        let (scales, sums) = factors.split_at_mut(blocks * rows);
        let mut finite = true;
        let mut natural = [0i8; 384];
        let mut row_sums = vec![0.0; groups.next_multiple_of(16)];
        for (i, x) in x.chunks_exact(self.k).enumerate() {
            for (b, x) in x.chunks_exact(self.block).enumerate() {
                // SAFETY: `Tile`s are only made at the level that has the instructions; at
                // most three digits of 128 values fit.
                let scale = unsafe {
                    split_block(x, self.digits, self.limit, natural.as_mut_ptr(), self.block)
                };
                finite &= !scale.is_nan();
                scales[b * rows + i] = scale;
                let to = &mut digits[b * rows * self.block * self.digits..];
                let fours = natural[..self.block * self.digits].chunks_exact(4);
                for (four, to) in fours.zip(to.chunks_exact_mut(4 * rows)) {
                    to[4 * i..4 * i + 4].copy_from_slice(&[
                        four[0] as u8,
                        four[1] as u8,
                        four[2] as u8,
                        four[3] as u8,
                    ]);
                }
            }
            // SAFETY: as above.
            unsafe { group_sums(x, self.group, &mut row_sums) };
            for (g, sum) in row_sums.iter().enumerate().take(groups) {
                sums[g * rows + i] = *sum;
            }
        }
        finite
    }
}

/// The weights' side of a product: what [`super::fill_panel`] writes.
pub(crate) struct Panel<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) scales: &'a [f32],
    pub(crate) biases: &'a [f32],
}

/// `c[i, j] = x[i] . w[j]` for the `rows` rows of one tile and the 32 columns of a panel.
pub(crate) fn multiply(
    tile: &Tile,
    rows: usize,
    digits: &[u8],
    factors: &[f32],
    panel: &Panel<'_>,
    c: &mut [f32],
) {
    let groups = tile.k / tile.group;
    assert!(rows <= ROWS && c.len() >= rows * COLUMNS);
    assert!(digits.len() >= tile.digit_bytes(rows) && factors.len() >= tile.factors(rows));
    assert!(panel.bytes.len() >= tile.k * COLUMNS);
    assert!(panel.scales.len() >= groups * COLUMNS && panel.biases.len() >= groups * COLUMNS);
    macro_rules! rows {
        ($($n:literal)*) => {
            match (rows, tile.digits, tile.apart) {
                (0, ..) => {}
                $(
                    ($n, 2, _) => unsafe {
                        run::<$n, 2, false>(tile, digits, factors, panel, c)
                    },
                    ($n, _, false) => unsafe {
                        run::<$n, 3, false>(tile, digits, factors, panel, c)
                    },
                    ($n, _, true) => unsafe {
                        run::<$n, 3, true>(tile, digits, factors, panel, c)
                    },
                )*
                _ => unreachable!("{rows} rows"),
            }
        };
    }
    // SAFETY: the lengths were checked; `Tile`s are only made at the level that has the
    // instructions.
    rows!(1 2 3 4 5 6 7 8 9 10 11 12 13);
}

/// # Safety
/// The CPU has the instructions; lengths as [`multiply`] checks, for `R` rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx2,fma,f16c")]
unsafe fn run<const R: usize, const DIGITS: usize, const APART: bool>(
    tile: &Tile,
    digits: &[u8],
    factors: &[f32],
    panel: &Panel<'_>,
    c: &mut [f32],
) {
    let blocks = tile.k / tile.block;
    let steps = tile.block / 4;
    let per_group = tile.group / tile.block;
    let mut x = digits.as_ptr().cast::<i32>();
    let mut w = panel.bytes.as_ptr();
    let mut scale_at = factors.as_ptr();
    let mut sum_at = factors[blocks * R..].as_ptr();
    let c = c.as_mut_ptr();
    let zero = _mm512_setzero_si512();
    // SAFETY: pointers stay inside of what `multiply` checked: `blocks * DIGITS * steps` rows
    // of `R` words of `x`, `blocks * steps` rows of 128 bytes of `w`, `R` rows of `c`.
    unsafe {
        for i in 0..2 * R {
            _mm512_storeu_ps(c.add(16 * i), _mm512_setzero_ps());
        }
        for block in 0..blocks {
            let group = block / per_group;
            let mut acc = [[zero; 2]; R];
            for digit in 0..DIGITS {
                if APART && digit == DIGITS - 1 {
                    // What there is so far, with the weight of the digits that follow.
                    let s = panel.scales.as_ptr().add(group * COLUMNS);
                    let s = [_mm512_loadu_ps(s), _mm512_loadu_ps(s.add(16))];
                    for (i, acc) in acc.iter_mut().enumerate() {
                        let xs = _mm512_set1_ps(*scale_at.add(i) * 256.0);
                        for j in 0..2 {
                            let to = c.add(i * COLUMNS + 16 * j);
                            let v = _mm512_mul_ps(_mm512_cvtepi32_ps(acc[j]), xs);
                            _mm512_storeu_ps(to, _mm512_fmadd_ps(v, s[j], _mm512_loadu_ps(to)));
                            acc[j] = zero;
                        }
                    }
                } else if digit > 0 {
                    for acc in &mut acc {
                        acc[0] = _mm512_slli_epi32::<8>(acc[0]);
                        acc[1] = _mm512_slli_epi32::<8>(acc[1]);
                    }
                }
                let mut w = w;
                for _ in 0..steps {
                    let w0 = _mm512_loadu_si512(w.cast());
                    let w1 = _mm512_loadu_si512(w.add(64).cast());
                    for (i, acc) in acc.iter_mut().enumerate() {
                        let x = _mm512_set1_epi32(x.add(i).read_unaligned());
                        acc[0] = _mm512_dpbusd_epi32(acc[0], w0, x);
                        acc[1] = _mm512_dpbusd_epi32(acc[1], w1, x);
                    }
                    x = x.add(R);
                    w = w.add(4 * COLUMNS);
                }
            }
            w = w.add(steps * 4 * COLUMNS);
            let s = panel.scales.as_ptr().add(group * COLUMNS);
            let s = [_mm512_loadu_ps(s), _mm512_loadu_ps(s.add(16))];
            let last = (block + 1) % per_group == 0;
            let b = panel.biases.as_ptr().add(group * COLUMNS);
            let b = [_mm512_loadu_ps(b), _mm512_loadu_ps(b.add(16))];
            for (i, acc) in acc.iter().enumerate() {
                let xs = _mm512_set1_ps(*scale_at.add(i));
                for j in 0..2 {
                    let to = c.add(i * COLUMNS + 16 * j);
                    let v = _mm512_mul_ps(_mm512_cvtepi32_ps(acc[j]), xs);
                    let mut sum = _mm512_fmadd_ps(v, s[j], _mm512_loadu_ps(to));
                    if last {
                        sum = _mm512_fmadd_ps(b[j], _mm512_set1_ps(*sum_at.add(i)), sum);
                    }
                    _mm512_storeu_ps(to, sum);
                }
            }
            scale_at = scale_at.add(R);
            if last {
                sum_at = sum_at.add(R);
            }
        }
    }
}
