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
const AHEAD: usize = 6144;

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

/// Sizes of the rows of weights, worked out once: a division takes as long as a block.
struct Layout {
    row_bytes: usize,
    groups: usize,
    /// Of the scales, or the biases, of a row.
    factor_bytes: usize,
    /// How many rows further factors are asked for.
    rows_ahead: usize,
}

impl Layout {
    fn new(w: &Weights<'_>) -> Self {
        let (row_bytes, groups) = (w.row_bytes(), w.groups());
        Self {
            row_bytes,
            groups,
            factor_bytes: groups * w.scale_type.size(),
            rows_ahead: AHEAD / row_bytes,
        }
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
    let layout = Layout::new(w);
    let mut n = 0;
    while n < count {
        // SAFETY: the caller's promise for rows below `first + count`.
        let sums = unsafe {
            if n + R <= count {
                group::<R, M, BITS, FP4, DIGITS>(w, &layout, x, first + n)
            } else {
                let mut sums = [[0.0; M]; R];
                sums[0] = group::<1, M, BITS, FP4, DIGITS>(w, &layout, x, first + n)[0];
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
    layout: &Layout,
    x: &Activations<'_>,
    row: usize,
) -> [[f32; M]; R] {
    let block = if BITS == 4 { 128 } else { 64 };
    let (row_bytes, groups) = (layout.row_bytes, layout.groups);
    let shift = _mm_cvtsi32_si128(w.group.trailing_zeros() as i32);
    // Of four blocks, each quarter of a register has the columns of that quarter of each block.
    let lane_k = _mm512_mullo_epi32(
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
        _mm512_set1_epi32(block as i32 / 4),
    );
    // A quarter may have two groups: then each lane has the columns of its own.
    let narrow = FP4 && w.group == 16;
    let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let group_of = |columns: __m512i, inside: usize| {
        let inside = _mm512_set1_epi32(inside as i32);
        _mm512_srl_epi32(_mm512_add_epi32(columns, inside), shift)
    };
    let codes_at = w.packed.as_ptr().wrapping_add(row * row_bytes);
    let mut acc = [[_mm512_setzero_ps(); M]; R];
    let next_codes = codes_at.wrapping_add((R - 1) * row_bytes + AHEAD);
    prefetch_factors::<R>(w, layout, row);
    let in_pairs = BITS == 4 && M == 1 && R.is_multiple_of(2);
    let mut pairs = [_mm512_setzero_ps(); R];
    let mut at = 0;
    let mut first = 0;
    while first < groups {
        let n = (groups - first).min(16);
        // SAFETY: these rows have `groups` scales and biases.
        let (scales, biases) = unsafe { group_factors::<R>(w, groups, row * groups + first, n) };
        for (bias, acc) in biases.into_iter().zip(&mut acc) {
            for (m, acc) in acc.iter_mut().enumerate() {
                // SAFETY: each row of sums is padded to a multiple of 16.
                let sums = unsafe { _mm512_loadu_ps(x.sums.as_ptr().add(m * x.groups + first)) };
                *acc = _mm512_fmadd_ps(bias, sums, *acc);
            }
        }
        let end = w.k.min((first + 16) * w.group);
        while at * block < end {
            let inside = at * block - first * w.group;
            if in_pairs && w.k - at * block <= 64 {
                // The first eight lanes have the columns of one row, the others those of another.
                let columns = _mm512_slli_epi32::<3>(_mm512_and_si512(lanes, _mm512_set1_epi32(7)));
                let index = group_of(columns, inside);
                let index = _mm512_mask_add_epi32(index, 0xff00, index, _mm512_set1_epi32(16));
                // SAFETY: the caller's promise; this block is the last one of the rows.
                unsafe {
                    let from = codes_at.wrapping_add(at * 64);
                    let line = next_codes.wrapping_add(at * R * 64);
                    halves::<R, FP4, DIGITS>(
                        w, layout, x, from, line, at, index, &scales, &mut pairs,
                    );
                }
                at += 1;
                continue;
            }
            let index = group_of(lane_k, inside);
            let mut x_four = [_mm512_setzero_ps(); M];
            let mut four = [[_mm512_setzero_ps(); M]; R];
            for m in 0..M {
                // SAFETY: four blocks of `x` have sixteen scales.
                x_four[m] = unsafe { x.four_scales(m, at) };
                if narrow && at % 4 == 2 {
                    x_four[m] = _mm512_permute_ps::<0xee>(x_four[m]);
                }
                for r in 0..R {
                    four[r][m] = _mm512_mul_ps(_mm512_permutexvar_ps(index, scales[r]), x_four[m]);
                }
            }
            macro_rules! blocks {
                ($whole:literal: $($quarter:literal)*) => {$(
                    if $whole || at * block < end {
                        let mut lane_scales = four;
                        for r in 0..R {
                            for m in 0..M {
                                lane_scales[r][m] = if narrow {
                                    let columns = _mm512_slli_epi32::<3>(lanes);
                                    let index = group_of(columns, inside + $quarter * block);
                                    let x = _mm512_permute_ps::<{ $quarter * 0x55 }>(x_four[m]);
                                    _mm512_mul_ps(_mm512_permutexvar_ps(index, scales[r]), x)
                                } else {
                                    _mm512_permute_ps::<{ $quarter * 0x55 }>(four[r][m])
                                };
                            }
                        }
                        let from = codes_at.wrapping_add(at * block * BITS / 8);
                        let line = next_codes.wrapping_add(at * R * 64);
                        // SAFETY: the caller's promise; the block is inside of the rows.
                        unsafe {
                            products::<R, M, BITS, FP4, DIGITS, $whole>(
                                w,
                                layout,
                                x,
                                from,
                                line,
                                at,
                                &lane_scales,
                                &mut acc,
                            );
                        }
                        at += 1;
                    }
                )*};
            }
            if (at + 4) * block <= end {
                blocks!(true: 0 1 2 3);
            } else {
                blocks!(false: 0 1 2 3);
            }
        }
        first += 16;
    }
    let mut sums = [[0.0; M]; R];
    if R == 4 && M == 1 {
        let halves = [0, 1 % R, 2 % R, 3 % R].map(|r| {
            let pair = pairs[r / 2];
            let tail = if r % 2 == 0 {
                _mm512_castps512_ps256(pair)
            } else {
                _mm512_extractf32x8_ps::<1>(pair)
            };
            _mm256_add_ps(half(acc[r][0]), tail)
        });
        let four = sum4(halves);
        for r in 0..R {
            sums[r][0] = four[r % 4];
        }
        return sums;
    }
    for r in 0..R {
        for m in 0..M {
            sums[r][m] = _mm512_reduce_add_ps(acc[r][m]);
        }
        if in_pairs {
            let lanes = if r.is_multiple_of(2) { 0x00ff } else { 0xff00 };
            sums[r][0] += _mm512_mask_reduce_add_ps(lanes, pairs[r / 2]);
        }
    }
    sums
}

/// The codes of nibbles at even and at odd places.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn nibbles<const FP4: bool>(raw: __m512i) -> (__m512i, __m512i) {
    let low = _mm512_set1_epi8(15);
    let even = _mm512_and_si512(raw, low);
    let odd = _mm512_and_si512(_mm512_srli_epi16::<4>(raw), low);
    if FP4 {
        let table = fp4_table();
        return (
            _mm512_shuffle_epi8(table, even),
            _mm512_shuffle_epi8(table, odd),
        );
    }
    (even, odd)
}

/// Adds the products of block `at` of `R` rows, whose codes begin at `from`, with `M` rows of `x`.
/// Asks for `R` cache lines from `line` on.
///
/// # Safety
/// As [`group`]; the block is inside of the rows.
#[inline]
#[allow(
    clippy::too_many_arguments,
    clippy::needless_range_loop,
    reason = "registers of one loop, several arrays of them by an index"
)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx2,fma,f16c")]
unsafe fn products<
    const R: usize,
    const M: usize,
    const BITS: usize,
    const FP4: bool,
    const DIGITS: usize,
    const WHOLE: bool,
>(
    w: &Weights<'_>,
    layout: &Layout,
    x: &Activations<'_>,
    from: *const u8,
    line: *const u8,
    at: usize,
    lane_scales: &[[__m512; M]; R],
    acc: &mut [[__m512; M]; R],
) {
    let by_nibbles = BITS == 4;
    let block = if by_nibbles { 128 } else { 64 };
    let left = if WHOLE { block } else { w.k - at * block };
    let mask = match left / 2 {
        64.. => u64::MAX,
        bytes => (1u64 << bytes) - 1,
    };
    let zero = _mm512_setzero_si512();
    let mut even = [zero; R];
    let mut odd = [zero; R];
    for r in 0..R {
        let from = from.wrapping_add(r * layout.row_bytes);
        // SAFETY: the loads are masked to the codes that are left of the row.
        unsafe {
            _mm_prefetch::<_MM_HINT_T1>(line.wrapping_add(r * 64).cast());
            if by_nibbles {
                (even[r], odd[r]) = nibbles::<FP4>(_mm512_maskz_loadu_epi8(mask, from.cast()));
            } else {
                even[r] = codes::<BITS>(from, left);
            }
        }
    }
    for m in 0..M {
        let block_at = m * x.blocks + at;
        let mut x_even = [zero; DIGITS];
        let mut x_odd = [zero; DIGITS];
        // SAFETY: `block_at` is a block of `x`, of three or six vectors.
        unsafe {
            let d = x.digits.as_ptr().add(block_at * DIGITS * block);
            for i in 0..DIGITS {
                x_even[i] = _mm512_loadu_si512(d.add(64 * i).cast());
                if by_nibbles {
                    x_odd[i] = _mm512_loadu_si512(d.add(64 * (DIGITS + i)).cast());
                }
            }
        }
        // Three digits of 4 products of 255 do not fit: two, then one.
        let apart = BITS == 8 && DIGITS == 3;
        let together = if apart { 2 } else { DIGITS };
        // Row after row for each digit: products that are added to each other wait for each other,
        // and the CPU looks for others among few.
        let mut sums = [zero; R];
        for i in 0..together {
            for r in 0..R {
                let before = if i > 0 {
                    _mm512_slli_epi32::<8>(sums[r])
                } else {
                    zero
                };
                sums[r] = _mm512_dpbusd_epi32(before, even[r], x_even[i]);
            }
            if by_nibbles {
                for r in 0..R {
                    sums[r] = _mm512_dpbusd_epi32(sums[r], odd[r], x_odd[i]);
                }
            }
        }
        for r in 0..R {
            let mut value = _mm512_cvtepi32_ps(sums[r]);
            if apart {
                let last = _mm512_dpbusd_epi32(zero, even[r], x_even[DIGITS - 1]);
                let last = _mm512_cvtepi32_ps(last);
                value = _mm512_fmadd_ps(value, _mm512_set1_ps(256.0), last);
            }
            acc[r][m] = _mm512_fmadd_ps(value, lane_scales[r][m], acc[r][m]);
        }
    }
}

/// The products of the last block of `R` rows with one row of `x`, of which half is there at most:
/// two rows share a register, and a cache line of those asked for from `line` on. `index` are the
/// groups of the lanes, beyond 16 those of the second row.
///
/// # Safety
/// As [`products`].
#[inline]
#[allow(
    clippy::too_many_arguments,
    clippy::needless_range_loop,
    reason = "registers of one loop, several arrays of them by an index"
)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx2,fma,f16c")]
unsafe fn halves<const R: usize, const FP4: bool, const DIGITS: usize>(
    w: &Weights<'_>,
    layout: &Layout,
    x: &Activations<'_>,
    from: *const u8,
    line: *const u8,
    at: usize,
    index: __m512i,
    scales: &[__m512; R],
    pairs: &mut [__m512; R],
) {
    let bytes = (w.k - at * 128) / 2;
    let mask = ((1u64 << bytes) - 1) as u32;
    // Of the first two quarters, for each row.
    let quarters = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 0, 0, 0, 0, 4, 4, 4, 4);
    let quarters = _mm512_add_epi32(quarters, _mm512_set1_epi32((at % 4) as i32));
    // SAFETY: `at` is a block of `x`.
    let x_scale = _mm512_permutexvar_ps(quarters, unsafe { x.four_scales(0, at) });
    for r in 0..R / 2 {
        // SAFETY: the loads are masked to the codes that are left of the rows; `at` is a block of
        // `x`, of which the first half is read.
        unsafe {
            let row = |r: usize| {
                let from = from.wrapping_add(r * layout.row_bytes);
                _mm256_maskz_loadu_epi8(mask, from.cast())
            };
            _mm_prefetch::<_MM_HINT_T1>(line.wrapping_add(r * 64).cast());
            let raw = _mm512_castsi256_si512(row(2 * r));
            let raw = _mm512_inserti64x4::<1>(raw, row(2 * r + 1));
            let (even, odd) = nibbles::<FP4>(raw);
            let d = x.digits.as_ptr().add(at * DIGITS * 128);
            let digit = |i: usize| _mm512_broadcast_i64x4(_mm256_loadu_si256(d.add(64 * i).cast()));
            let mut sum = _mm512_setzero_si512();
            for i in 0..DIGITS {
                if i > 0 {
                    sum = _mm512_slli_epi32::<8>(sum);
                }
                sum = _mm512_dpbusd_epi32(sum, even, digit(i));
                sum = _mm512_dpbusd_epi32(sum, odd, digit(DIGITS + i));
            }
            let scale = _mm512_permutex2var_ps(scales[2 * r], index, scales[2 * r + 1]);
            let scale = _mm512_mul_ps(scale, x_scale);
            pairs[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, pairs[r]);
        }
    }
}

/// Asks for the scales and biases of as many rows as there are in use, further on.
#[inline]
fn prefetch_factors<const R: usize>(w: &Weights<'_>, layout: &Layout, row: usize) {
    let at = (row + R + layout.rows_ahead) * layout.factor_bytes;
    let scales = w.scales.as_ptr().wrapping_add(at);
    let biases = w
        .biases
        .map_or(scales, |biases| biases.as_ptr().wrapping_add(at));
    let mut line = 0;
    while line < R * layout.factor_bytes {
        // SAFETY: SSE is part of x86-64, and a prefetch of a bad address does nothing.
        unsafe {
            _mm_prefetch::<_MM_HINT_T1>(scales.wrapping_add(line).cast());
            _mm_prefetch::<_MM_HINT_T1>(biases.wrapping_add(line).cast());
        }
        line += 64;
    }
}

/// The sums of both halves.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
fn half(v: __m512) -> __m256 {
    _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v))
}

/// The sums of four vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
fn sum4(v: [__m256; 4]) -> [f32; 4] {
    let a = _mm256_hadd_ps(v[0], v[1]);
    let b = _mm256_hadd_ps(v[2], v[3]);
    let c = _mm256_hadd_ps(a, b);
    let d = _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps::<1>(c));
    let mut out = [0.0; 4];
    // SAFETY: the array has four values.
    unsafe { _mm_storeu_ps(out.as_mut_ptr(), d) };
    out
}
