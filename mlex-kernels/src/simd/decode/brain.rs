//! Scores of bfloat16 queries and keys by `vdpbf16ps`, for AVX-512 with BF16: products are
//! exact, sums in f32.

use std::arch::x86_64::*;

use half::bf16;

use super::super::avx512::sum16;
use super::{DECODE_KEYS, prefetch_row};

/// As [`Scores`](super::Scores), of queries in bfloat16.
pub(crate) fn brain_scores(
    queries: &[bf16],
    [rows, d, count]: [usize; 3],
    scale: f32,
    keys: &[bf16],
    stride: usize,
    scores: &mut [f32],
) {
    assert!(d.is_multiple_of(16) && (1..=DECODE_KEYS).contains(&count));
    assert!(keys.len() >= (count - 1) * stride + d);
    assert!(queries.len() >= rows * d && scores.len() >= rows * DECODE_KEYS);
    let mut row = 0;
    while row < rows {
        let queries = &queries[row * d..];
        let scores = &mut scores[row * DECODE_KEYS..];
        // SAFETY: the lengths were checked; this is only used at the level that has the
        // instructions.
        unsafe {
            match rows - row {
                1 => four::<1>(queries, [d, count], scale, keys, stride, scores),
                2 => four::<2>(queries, [d, count], scale, keys, stride, scores),
                3 => four::<3>(queries, [d, count], scale, keys, stride, scores),
                _ => four::<4>(queries, [d, count], scale, keys, stride, scores),
            }
        }
        row += 4;
    }
}

/// # Safety
/// The CPU has the instructions; the slices hold `R` rows and `count` keys.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn four<const R: usize>(
    queries: &[bf16],
    [d, count]: [usize; 2],
    scale: f32,
    keys: &[bf16],
    stride: usize,
    scores: &mut [f32],
) {
    let scale = _mm512_set1_ps(scale);
    // Per row a product of each key, lane by lane.
    let mut parts = [[_mm512_setzero_ps(); 16]; R];
    for first in (0..count).step_by(16) {
        let n = (count - first).min(16);
        let mut c = 0;
        while c < d {
            // SAFETY: the columns are inside of every query and key; loads are masked to them.
            unsafe {
                let from = Columns {
                    queries: queries.as_ptr().add(c),
                    keys: keys.as_ptr().add(first * stride + c),
                    strides: [d, stride],
                    n,
                    mask: if d - c >= 32 { u32::MAX } else { 0xffff },
                    begin: c == 0,
                };
                if c + 64 <= d {
                    from.multiply::<R, 2>(&mut parts);
                    c += 64;
                } else {
                    from.multiply::<R, 1>(&mut parts);
                    c += 32;
                }
            }
        }
        for (r, &parts) in parts.iter().enumerate() {
            // SAFETY: `first` is a multiple of 16 below `DECODE_KEYS`.
            unsafe {
                let to = scores[r * DECODE_KEYS..].as_mut_ptr().add(first);
                let sums = _mm512_fmadd_ps(sum16(parts), scale, _mm512_loadu_ps(to));
                _mm512_storeu_ps(to, sums);
            }
        }
    }
}

/// Some columns of queries and of `n <= 16` keys.
struct Columns {
    queries: *const bf16,
    keys: *const bf16,
    /// From one query, and from one key, to the next.
    strides: [usize; 2],
    n: usize,
    /// Which of 32 columns are there.
    mask: u32,
    /// They are the first.
    begin: bool,
}

impl Columns {
    /// The products of `C` times 32 columns, added to `parts` or in its place.
    ///
    /// # Safety
    /// The CPU has the instructions; from the pointers on, `R` queries and `n` keys have these
    /// columns.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn multiply<const R: usize, const C: usize>(&self, parts: &mut [[__m512; 16]; R]) {
        let zero = _mm512_setzero_ps();
        // SAFETY: the caller's promise; vectors of 32 bfloat16 have the bits of others.
        unsafe {
            let load = |from: *const bf16| -> __m512bh {
                std::mem::transmute(_mm512_maskz_loadu_epi16(self.mask, from.cast()))
            };
            let mut q = [[load(self.queries); C]; R];
            for (r, q) in q.iter_mut().enumerate() {
                for (j, q) in q.iter_mut().enumerate() {
                    *q = load(self.queries.add(r * self.strides[0] + 32 * j));
                }
            }
            for i in 0..self.n {
                let key = self.keys.add(i * self.strides[1]);
                prefetch_row(key, 32 * C);
                let mut acc = [zero; R];
                if !self.begin {
                    for (acc, parts) in acc.iter_mut().zip(&*parts) {
                        *acc = parts[i];
                    }
                }
                for j in 0..C {
                    let key = load(key.add(32 * j));
                    for (acc, q) in acc.iter_mut().zip(&q) {
                        *acc = _mm512_dpbf16_ps(*acc, q[j], key);
                    }
                }
                for (acc, parts) in acc.into_iter().zip(&mut *parts) {
                    parts[i] = acc;
                }
            }
        }
    }
}
