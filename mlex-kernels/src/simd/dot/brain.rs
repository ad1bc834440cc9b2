//! A panel of quantized weights rounded to bfloat16, for [`super::super::pairs`].

use std::arch::x86_64::*;

use super::super::pairs::{COLUMNS, packed_bytes};
use super::{Code, Weights, codes, fp4_table, group_factors, transpose16};

/// Unpacks rows `first .. first + count` (at most 32) of `w` in the order of
/// [`super::super::pairs::fill_panel`]; missing rows are zero.
pub(crate) fn fill_brain_panel(w: &Weights<'_>, first: usize, count: usize, to: &mut [u8]) {
    assert!(count <= COLUMNS && w.holds(first + count));
    assert!(to.len() >= packed_bytes(w.k, COLUMNS) && w.k.is_multiple_of(16));
    // SAFETY: the lengths were checked; `Weights` are only made at the level that has the
    // instructions.
    unsafe {
        match (w.bits, w.code) {
            (2, _) => fill::<2>(w, first, count, to),
            (3, _) => fill::<3>(w, first, count, to),
            (4, _) => fill::<4>(w, first, count, to),
            (5, _) => fill::<5>(w, first, count, to),
            (6, _) => fill::<6>(w, first, count, to),
            _ => fill::<8>(w, first, count, to),
        }
    }
}

/// # Safety
/// The CPU has the instructions; lengths as [`fill_brain_panel`] checks.
#[target_feature(
    enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx512bf16,avx2,fma,f16c"
)]
unsafe fn fill<const BITS: usize>(w: &Weights<'_>, first: usize, count: usize, to: &mut [u8]) {
    let (row_bytes, groups) = (w.row_bytes(), w.groups());
    let table = fp4_table();
    // Which group each 16 values of a step of 64 are in, counted from the step's first.
    let parts = [0, 1, 2, 3].map(|i| i * 16 / w.group);
    for half in 0..2 {
        for k in (0..w.k).step_by(64) {
            // Low and high 32 values of each row, as pairs.
            let mut low = [_mm512_setzero_ps(); 16];
            let mut high = low;
            for i in 0..16.min(count.saturating_sub(half * 16)) {
                let row = first + half * 16 + i;
                let group = k / w.group;
                let mut scales = [0.0f32; 16];
                let mut biases = [0.0f32; 16];
                // SAFETY: the row and its groups are in `w`, and loads are masked to them; the
                // bf16 vectors have the bits of the others.
                unsafe {
                    let from = w.packed.as_ptr().add(row * row_bytes + k * BITS / 8);
                    _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(256).cast());
                    let mut codes = codes::<BITS>(from, w.k - k);
                    if w.code == Code::Fp4 {
                        codes = _mm512_shuffle_epi8(table, codes);
                    }
                    let n = (groups - group).min(parts[3] + 1);
                    let ([s], [b]) = group_factors(w, groups, row * groups + group, n);
                    _mm512_storeu_ps(scales.as_mut_ptr(), s);
                    _mm512_storeu_ps(biases.as_mut_ptr(), b);
                    let values = [
                        _mm512_castsi512_si128(codes),
                        _mm512_extracti32x4_epi32::<1>(codes),
                        _mm512_extracti32x4_epi32::<2>(codes),
                        _mm512_extracti32x4_epi32::<3>(codes),
                    ];
                    let mut wide = [_mm512_setzero_ps(); 4];
                    for j in 0..4 {
                        let value = if w.code == Code::Fp8 {
                            fp8(values[j])
                        } else {
                            _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(values[j]))
                        };
                        let (s, b) = (scales[parts[j]], biases[parts[j]]);
                        wide[j] = _mm512_fmadd_ps(value, _mm512_set1_ps(s), _mm512_set1_ps(b));
                    }
                    low[i] = std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(
                        wide[1], wide[0],
                    ));
                    high[i] = std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(
                        wide[3], wide[2],
                    ));
                }
            }
            for (part, rows) in [low, high].into_iter().enumerate() {
                let at = k + 32 * part;
                if at >= w.k {
                    break;
                }
                // SAFETY: 16 rows of 128 bytes belong to these 32 values, rounded up.
                unsafe {
                    for (j, pairs) in transpose16(rows).into_iter().enumerate() {
                        let to = to.as_mut_ptr().add((at / 2 + j) * 4 * COLUMNS + half * 64);
                        _mm512_storeu_ps(to.cast(), pairs);
                    }
                }
            }
        }
    }
}

/// Sixteen FP8 codes as numbers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn fp8(codes: __m128i) -> __m512 {
    let wide = _mm256_cvtepu8_epi16(codes);
    let sign = _mm256_slli_epi16::<8>(_mm256_and_si256(wide, _mm256_set1_epi16(128)));
    let rest = _mm256_slli_epi16::<7>(_mm256_and_si256(wide, _mm256_set1_epi16(127)));
    _mm512_mul_ps(
        _mm512_cvtph_ps(_mm256_or_si256(sign, rest)),
        _mm512_set1_ps(256.0),
    )
}
