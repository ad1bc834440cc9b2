//! A panel of 32 rows of weights, unpacked to bytes in the order of the tile's loop.

use std::arch::x86_64::*;

use super::{COLUMNS, Code, Weights, codes, fp4_table, group_factors, transpose16};

/// Unpacks rows `first .. first + count` (at most [`COLUMNS`]) of `w`.
///
/// `bytes` gets, for each four values of `k` (rounded up to 64), 32 rows of 4 codes;
/// `scales` and `biases` get, for each group (rounded up to 16), 32 numbers. Missing rows
/// are zero.
pub(crate) fn fill_panel(
    w: &Weights<'_>,
    first: usize,
    count: usize,
    bytes: &mut [u8],
    scales: &mut [f32],
    biases: &mut [f32],
) {
    let groups = w.groups().next_multiple_of(16);
    assert!(count <= COLUMNS);
    assert!(w.holds(first + count));
    assert!(bytes.len() >= w.k.next_multiple_of(64) * COLUMNS);
    assert!(scales.len() >= groups * COLUMNS && biases.len() >= groups * COLUMNS);
    // SAFETY: the lengths were checked; `Weights` are only made at the level that has the
    // instructions.
    unsafe {
        match (w.bits, w.code == Code::Fp4) {
            (2, _) => fill::<2, false>(w, first, count, bytes),
            (3, _) => fill::<3, false>(w, first, count, bytes),
            (4, false) => fill::<4, false>(w, first, count, bytes),
            (4, true) => fill::<4, true>(w, first, count, bytes),
            (5, _) => fill::<5, false>(w, first, count, bytes),
            (6, _) => fill::<6, false>(w, first, count, bytes),
            (8, _) => fill::<8, false>(w, first, count, bytes),
            _ => unreachable!("{} bits", w.bits),
        }
        factors(w, first, count, scales, biases);
    }
}

/// # Safety
/// The CPU has the instructions; lengths as [`fill_panel`] checks.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx2,fma,f16c")]
unsafe fn fill<const BITS: usize, const FP4: bool>(
    w: &Weights<'_>,
    first: usize,
    count: usize,
    to: &mut [u8],
) {
    let row_bytes = w.row_bytes();
    let table = fp4_table();
    for half in 0..2 {
        let start = first + half * 16;
        for k in (0..w.k).step_by(64) {
            let mut rows = [_mm512_setzero_ps(); 16];
            for (i, row) in rows.iter_mut().enumerate() {
                if half * 16 + i >= count {
                    break;
                }
                // SAFETY: the row is one of `w`, and loads are masked to its codes.
                unsafe {
                    let from = w
                        .packed
                        .as_ptr()
                        .add((start + i) * row_bytes + k * BITS / 8);
                    _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(256).cast());
                    let mut codes = codes::<BITS>(from, w.k - k);
                    if FP4 {
                        codes = _mm512_shuffle_epi8(table, codes);
                    }
                    *row = _mm512_castsi512_ps(codes);
                }
            }
            // SAFETY: the CPU has the instructions; 16 rows of 128 bytes belong to this `k`.
            unsafe {
                for (j, four) in transpose16(rows).into_iter().enumerate() {
                    let to = to.as_mut_ptr().add((k / 4 + j) * 4 * COLUMNS + half * 64);
                    _mm512_storeu_ps(to.cast(), four);
                }
            }
        }
    }
}

/// # Safety
/// As [`fill`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn factors(
    w: &Weights<'_>,
    first: usize,
    count: usize,
    scales: &mut [f32],
    biases: &mut [f32],
) {
    let groups = w.groups();
    for half in 0..2 {
        for g in (0..groups).step_by(16) {
            let n = (groups - g).min(16);
            let mut s = [_mm512_setzero_ps(); 16];
            let mut b = s;
            for i in 0..16.min(count.saturating_sub(half * 16)) {
                let row = first + half * 16 + i;
                // SAFETY: the row has `groups` scales and biases.
                ([s[i]], [b[i]]) = unsafe { group_factors(w, groups, row * groups + g, n) };
            }
            // SAFETY: groups are rounded up to 16 in both slices.
            unsafe {
                for (j, s) in transpose16(s).into_iter().enumerate() {
                    _mm512_storeu_ps(scales.as_mut_ptr().add((g + j) * COLUMNS + half * 16), s);
                }
                for (j, b) in transpose16(b).into_iter().enumerate() {
                    _mm512_storeu_ps(biases.as_mut_ptr().add((g + j) * COLUMNS + half * 16), b);
                }
            }
        }
    }
}
