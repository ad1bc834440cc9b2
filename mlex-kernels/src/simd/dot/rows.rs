//! A few rows of `x` against rows of weights, straight from their packed form.

use std::arch::x86_64::*;

use super::digits::Activations;
use super::{Code, Weights, codes, fp4_table, group_factors};

/// How far behind the rows in use codes are asked for, in bytes.
///
/// One core waits for too few cache lines at a time to keep the memory busy; the rest is up to
/// the CPU's own prefetcher, which follows lines that are asked for one after the other, evenly.
/// So lines are asked for in the order of memory, one in each step, although several rows are in
/// use at a time.
const AHEAD: usize = 4096;

/// The most bytes of rows that are in use at a time; more would not stay in the L1 cache.
const MAX_WINDOW: usize = 12 << 10;

/// `out[m * stride + n] = x[m] . w[first + n]` for `n < count`; at most 4 rows `m`.
///
/// The slices of `w` hold `first + count` rows; the CPU has AVX-512 with VNNI and VBMI.
pub(crate) fn matvec(
    w: &Weights<'_>,
    x: &Activations<'_>,
    first: usize,
    count: usize,
    out: &mut [f32],
    stride: usize,
) {
    assert!(w.holds(first + count));
    assert!(x.rows == 0 || out.len() >= (x.rows - 1) * stride + count);
    macro_rules! widths {
        ($m:literal, $r:literal) => {
            if x.count == 2 {
                widths!($m, $r, 2)
            } else {
                widths!($m, $r, 3)
            }
        };
        ($m:literal, $r:literal, $d:literal) => {
            // SAFETY: the lengths were checked; `Weights` are only made at the level that
            // has the instructions.
            unsafe {
                match (w.bits, w.code == Code::Fp4) {
                    (2, _) => all::<$r, $m, 2, false, $d>(w, x, first, count, out, stride),
                    (3, _) => all::<$r, $m, 3, false, $d>(w, x, first, count, out, stride),
                    (4, false) => all::<$r, $m, 4, false, $d>(w, x, first, count, out, stride),
                    (4, true) => all::<$r, $m, 4, true, $d>(w, x, first, count, out, stride),
                    (5, _) => all::<$r, $m, 5, false, $d>(w, x, first, count, out, stride),
                    (6, _) => all::<$r, $m, 6, false, $d>(w, x, first, count, out, stride),
                    (8, _) => all::<$r, $m, 8, false, $d>(w, x, first, count, out, stride),
                    _ => unreachable!("{} bits", w.bits),
                }
            }
        };
    }
    let window = |rows: usize| rows * w.row_bytes() <= MAX_WINDOW;
    match x.rows {
        0 => {}
        1 if window(4) => widths!(1, 4),
        1 if window(2) => widths!(1, 2),
        1 => widths!(1, 1),
        2 if window(2) => widths!(2, 2),
        2 => widths!(2, 1),
        3 if window(2) => widths!(3, 2),
        3 => widths!(3, 1),
        4 if window(2) => widths!(4, 2),
        4 => widths!(4, 1),
        rows => unreachable!("{rows} rows of x"),
    }
}

/// # Safety
/// As [`group`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx2,fma,f16c")]
unsafe fn all<
    const R: usize,
    const M: usize,
    const BITS: usize,
    const FP4: bool,
    const DIGITS: usize,
>(
    w: &Weights<'_>,
    x: &Activations<'_>,
    first: usize,
    count: usize,
    out: &mut [f32],
    stride: usize,
) {
    let mut n = 0;
    while n < count {
        // SAFETY: the caller's promise for rows below `first + count`.
        let sums = unsafe {
            if n + R <= count {
                group::<R, M, BITS, FP4, DIGITS>(w, x, first + n)
            } else {
                let mut sums = [[0.0; M]; R];
                sums[0] = group::<1, M, BITS, FP4, DIGITS>(w, x, first + n)[0];
                sums
            }
        };
        let done = if n + R <= count { R } else { 1 };
        for (r, sums) in sums.iter().enumerate().take(done) {
            for (m, &sum) in sums.iter().enumerate() {
                out[m * stride + n + r] = sum;
            }
        }
        n += done;
    }
}

/// The products of `R` rows of weights with `M` rows of `x`.
///
/// # Safety
/// The CPU has the instructions; the rows are inside of the slices of `w`, and `x` was made
/// for `w` and has `M` rows.
#[inline]
#[allow(
    clippy::needless_range_loop,
    reason = "indices of several arrays of registers"
)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx2,fma,f16c")]
unsafe fn group<
    const R: usize,
    const M: usize,
    const BITS: usize,
    const FP4: bool,
    const DIGITS: usize,
>(
    w: &Weights<'_>,
    x: &Activations<'_>,
    row: usize,
) -> [[f32; M]; R] {
    let nibbles = BITS == 4;
    let block = if nibbles { 128 } else { 64 };
    let digits_bytes = DIGITS * block;
    let (row_bytes, groups) = (w.row_bytes(), w.groups());
    let shift = _mm_cvtsi32_si128(w.group.trailing_zeros() as i32);
    let lane_k = _mm512_mullo_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
        _mm512_set1_epi32(block as i32 / 16),
    );
    let low = _mm512_set1_epi8(15);
    let table = fp4_table();
    let codes_at = w.packed.as_ptr().wrapping_add(row * row_bytes);
    let mut acc = [[_mm512_setzero_ps(); M]; R];
    let next_codes = codes_at.wrapping_add((R - 1) * row_bytes + AHEAD);
    prefetch_factors(w, row, R, R + AHEAD / row_bytes);
    let mut at = 0;
    let mut first = 0;
    while first < groups {
        let n = (groups - first).min(16);
        let mut scales = [_mm512_setzero_ps(); R];
        for r in 0..R {
            // SAFETY: row `row + r` has `groups` scales and biases.
            let (scale, bias) = unsafe { group_factors(w, (row + r) * groups + first, n) };
            scales[r] = scale;
            for (m, acc) in acc[r].iter_mut().enumerate() {
                // SAFETY: each row of sums is padded to a multiple of 16.
                let sums = unsafe { _mm512_loadu_ps(x.sums.as_ptr().add(m * x.groups + first)) };
                *acc = _mm512_fmadd_ps(bias, sums, *acc);
            }
        }
        let end = w.k.min((first + 16) * w.group);
        while at * block < end {
            let left = w.k - at * block;
            let inside = _mm512_set1_epi32((at * block - first * w.group) as i32);
            let index = _mm512_srl_epi32(_mm512_add_epi32(lane_k, inside), shift);
            let mut even = [_mm512_setzero_si512(); R];
            let mut odd = [_mm512_setzero_si512(); R];
            let mut lane_scales = [_mm512_setzero_ps(); R];
            for r in 0..R {
                let from = codes_at.wrapping_add(r * row_bytes + at * block * BITS / 8);
                let line = next_codes.wrapping_add((at * R + r) * 64);
                _mm_prefetch::<_MM_HINT_T1>(line.cast());
                // SAFETY: the loads are masked to the codes that are left of the row.
                unsafe {
                    if nibbles {
                        let mask = if left >= 128 {
                            u64::MAX
                        } else {
                            (1u64 << (left / 2)) - 1
                        };
                        let raw = _mm512_maskz_loadu_epi8(mask, from.cast());
                        even[r] = _mm512_and_si512(raw, low);
                        odd[r] = _mm512_and_si512(_mm512_srli_epi16::<4>(raw), low);
                        if FP4 {
                            even[r] = _mm512_shuffle_epi8(table, even[r]);
                            odd[r] = _mm512_shuffle_epi8(table, odd[r]);
                        }
                    } else {
                        even[r] = codes::<BITS>(from, left);
                    }
                }
                lane_scales[r] = _mm512_permutexvar_ps(index, scales[r]);
            }
            for m in 0..M {
                let block_at = m * x.blocks + at;
                // SAFETY: `block_at` is a block of `x`, of three or six vectors and one of
                // scales.
                unsafe {
                    let d = x.digits.as_ptr().add(block_at * digits_bytes);
                    let digit = |i: usize| _mm512_loadu_si512(d.add(64 * i).cast());
                    let x_scale = _mm512_loadu_ps(x.lanes.as_ptr().add(block_at * 16));
                    let mut x_even = [_mm512_setzero_si512(); DIGITS];
                    let mut x_odd = x_even;
                    for i in 0..DIGITS {
                        x_even[i] = digit(i);
                        if nibbles {
                            x_odd[i] = digit(DIGITS + i);
                        }
                    }
                    for r in 0..R {
                        let zero = _mm512_setzero_si512();
                        // Three digits of 4 products of 255 do not fit: two, then one.
                        let apart = BITS == 8 && DIGITS == 3;
                        let together = if apart { 2 } else { DIGITS };
                        let mut sum = zero;
                        for i in 0..together {
                            if i > 0 {
                                sum = _mm512_slli_epi32::<8>(sum);
                            }
                            sum = _mm512_dpbusd_epi32(sum, even[r], x_even[i]);
                            if nibbles {
                                sum = _mm512_dpbusd_epi32(sum, odd[r], x_odd[i]);
                            }
                        }
                        let mut value = _mm512_cvtepi32_ps(sum);
                        if apart {
                            let last = _mm512_dpbusd_epi32(zero, even[r], x_even[DIGITS - 1]);
                            let last = _mm512_cvtepi32_ps(last);
                            value = _mm512_fmadd_ps(value, _mm512_set1_ps(256.0), last);
                        }
                        let scale = _mm512_mul_ps(lane_scales[r], x_scale);
                        acc[r][m] = _mm512_fmadd_ps(value, scale, acc[r][m]);
                    }
                }
            }
            at += 1;
        }
        first += 16;
    }
    let mut sums = [[0.0; M]; R];
    if R == 4 && M == 1 {
        let four = sum4([acc[0][0], acc[1 % R][0], acc[2 % R][0], acc[3 % R][0]]);
        for r in 0..R {
            sums[r][0] = four[r % 4];
        }
        return sums;
    }
    for r in 0..R {
        for m in 0..M {
            sums[r][m] = _mm512_reduce_add_ps(acc[r][m]);
        }
    }
    sums
}

/// Asks for the scales and biases of as many rows as there are in use, `ahead` rows further.
#[inline]
fn prefetch_factors(w: &Weights<'_>, row: usize, rows: usize, ahead: usize) {
    let bytes = w.groups() * w.scale_type.size();
    for factors in [Some(w.scales), w.biases].into_iter().flatten() {
        let from = factors.as_ptr().wrapping_add((row + ahead) * bytes);
        for line in 0..(rows * bytes).div_ceil(64) {
            // SAFETY: SSE is part of x86-64, and a prefetch of a bad address does nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(line * 64).cast()) };
        }
    }
}

/// The sums of four vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
fn sum4(v: [__m512; 4]) -> [f32; 4] {
    let half = |v: __m512| _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
    let a = _mm256_hadd_ps(half(v[0]), half(v[1]));
    let b = _mm256_hadd_ps(half(v[2]), half(v[3]));
    let c = _mm256_hadd_ps(a, b);
    let d = _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps::<1>(c));
    let mut out = [0.0; 4];
    // SAFETY: the array has four values.
    unsafe { _mm_storeu_ps(out.as_mut_ptr(), d) };
    out
}
