//! The GEMM on bfloat16 pairs (`vdpbf16ps`), for AVX-512 with BF16.

use std::arch::x86_64::*;

use half::bf16;

use super::avx512::transpose16;

/// The most rows of a tile, and the columns of a panel.
pub(crate) const ROWS: usize = 14;
/// Columns of a panel.
pub(crate) const COLUMNS: usize = 32;

/// Bytes of a tile of `rows` rows, or with `rows` = 32 of a panel.
pub(crate) fn packed_bytes(k: usize, rows: usize) -> usize {
    k.next_multiple_of(32) * 2 * rows
}

/// Writes rows of `k` values as pairs: for each two of `k`, a pair of each row.
pub(crate) fn write_tile(x: &[f32], k: usize, to: &mut [u8]) {
    let rows = x.len() / k;
    assert!(rows * k == x.len() && to.len() >= packed_bytes(k, rows));
    let mut pairs = [0u8; 64];
    for (i, x) in x.chunks_exact(k).enumerate() {
        for (at, x) in x.chunks(32).enumerate() {
            let mut piece = [0.0; 32];
            piece[..x.len()].copy_from_slice(x);
            // SAFETY: this is only used at the level that has the instructions; 32 values in,
            // 64 bytes out.
            unsafe { round_32(&piece, &mut pairs) };
            let to = &mut to[at * 64 * rows..][..64 * rows];
            for (pair, to) in pairs.chunks_exact(4).zip(to.chunks_exact_mut(4 * rows)) {
                to[4 * i..4 * i + 4].copy_from_slice(pair);
            }
        }
    }
}

/// # Safety
/// The CPU has AVX-512 BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn round_32(x: &[f32; 32], to: &mut [u8; 64]) {
    // SAFETY: both arrays are two, or one, vectors long; the types have the same bits.
    unsafe {
        let low = _mm512_loadu_ps(x.as_ptr());
        let high = _mm512_loadu_ps(x.as_ptr().add(16));
        let pairs: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
        _mm512_storeu_si512(to.as_mut_ptr().cast(), pairs);
    }
}

/// Writes rows `first .. first + count` (at most 32) of `w` as pairs: for each two of `k`
/// (rounded up to 32), a pair of each of 32 rows, missing ones zero.
pub(crate) fn fill_panel(w: &[bf16], k: usize, first: usize, count: usize, to: &mut [u8]) {
    assert!(count <= COLUMNS && w.len() >= (first + count) * k);
    assert!(to.len() >= packed_bytes(k, COLUMNS));
    // SAFETY: the lengths were checked; only used at the level that has the instructions.
    unsafe { fill(w, k, first, count, to) }
}

/// # Safety
/// The CPU has AVX-512 BW; lengths as [`fill_panel`] checks.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn fill(w: &[bf16], k: usize, first: usize, count: usize, to: &mut [u8]) {
    for half in 0..2 {
        for at in (0..k).step_by(32) {
            let left = (k - at).min(32);
            let mask = if left == 32 {
                u32::MAX
            } else {
                (1 << left) - 1
            };
            let mut rows = [_mm512_setzero_ps(); 16];
            for (i, row) in rows.iter_mut().enumerate() {
                if half * 16 + i >= count {
                    break;
                }
                // SAFETY: the row is one of `w`; the load is masked to its values.
                unsafe {
                    let from = w.as_ptr().add((first + half * 16 + i) * k + at);
                    *row = _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, from.cast()));
                }
            }
            // SAFETY: the CPU has AVX-512; 16 rows of 128 bytes belong to this `at`.
            unsafe {
                for (j, pairs) in transpose16(rows).into_iter().enumerate() {
                    let to = to.as_mut_ptr().add((at / 2 + j) * 4 * COLUMNS + half * 64);
                    _mm512_storeu_ps(to.cast(), pairs);
                }
            }
        }
    }
}

/// `c[i, j] = x[i] . w[j]` for a tile of `rows` rows and a panel of 32 columns.
pub(crate) fn multiply(k: usize, rows: usize, tile: &[u8], panel: &[u8], c: &mut [f32]) {
    assert!(rows <= ROWS && c.len() >= rows * COLUMNS);
    assert!(tile.len() >= packed_bytes(k, rows) && panel.len() >= packed_bytes(k, COLUMNS));
    // SAFETY: the lengths were checked.
    unsafe { run_rows::<true>(rows, k.div_ceil(2), tile.as_ptr(), 4, panel, c) }
}

/// The same for rows of an even number of values as they are in memory, `stride` values apart.
pub(crate) fn multiply_rows(
    k: usize,
    rows: usize,
    x: &[bf16],
    stride: usize,
    panel: &[u8],
    c: &mut [f32],
) {
    assert!(rows <= ROWS && k.is_multiple_of(2) && c.len() >= rows * COLUMNS);
    assert!(rows == 0 || x.len() >= (rows - 1) * stride + k);
    assert!(panel.len() >= packed_bytes(k, COLUMNS));
    // SAFETY: the lengths were checked.
    unsafe { run_rows::<false>(rows, k / 2, x.as_ptr().cast(), 2 * stride, panel, c) }
}

/// # Safety
/// As [`run`], of `rows` rows. This is only used at the level that has the instructions.
unsafe fn run_rows<const PACKED: bool>(
    rows: usize,
    pairs: usize,
    x: *const u8,
    row_bytes: usize,
    panel: &[u8],
    c: &mut [f32],
) {
    macro_rules! rows {
        ($($n:literal)*) => {
            match rows {
                0 => {}
                // SAFETY: the caller's promise.
                $($n => unsafe { run::<$n, PACKED>(pairs, x, row_bytes, panel, c) },)*
                _ => unreachable!("{rows} rows"),
            }
        };
    }
    rows!(1 2 3 4 5 6 7 8 9 10 11 12 13 14);
}

/// `R` rows at `x`, the pairs of which are `row_bytes` apart, and follow each other if they are not
/// `PACKED`.
///
/// # Safety
/// The CPU has AVX-512 BF16; `x` and `panel` hold `pairs` pairs of each row, `c` the results.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma")]
unsafe fn run<const R: usize, const PACKED: bool>(
    pairs: usize,
    mut x: *const u8,
    row_bytes: usize,
    panel: &[u8],
    c: &mut [f32],
) {
    let (row_bytes, next) = if PACKED { (4, 4 * R) } else { (row_bytes, 4) };
    let mut w = panel.as_ptr();
    let mut acc = [[_mm512_setzero_ps(); 2]; R];
    // SAFETY: the caller's promise; vectors of bf16 and of integers have the same bits.
    unsafe {
        for _ in 0..pairs {
            let w0: __m512bh = std::mem::transmute(_mm512_loadu_si512(w.cast()));
            let w1: __m512bh = std::mem::transmute(_mm512_loadu_si512(w.add(64).cast()));
            for (i, acc) in acc.iter_mut().enumerate() {
                let pair = x.add(i * row_bytes).cast::<i32>().read_unaligned();
                let x: __m512bh = std::mem::transmute(_mm512_set1_epi32(pair));
                acc[0] = _mm512_dpbf16_ps(acc[0], w0, x);
                acc[1] = _mm512_dpbf16_ps(acc[1], w1, x);
            }
            x = x.add(next);
            w = w.add(4 * COLUMNS);
        }
        for (i, acc) in acc.iter().enumerate() {
            for (j, &acc) in acc.iter().enumerate() {
                _mm512_storeu_ps(c.as_mut_ptr().add(i * COLUMNS + 16 * j), acc);
            }
        }
    }
}
