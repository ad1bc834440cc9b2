//! Quantized products in integers, for AVX-512 with VNNI and VBMI.
//!
//! Each block of 16 to 128 values of `x` becomes integers on a scale of its own, which are
//! written as two or three signed bytes ("digits"). The codes of the weights are unsigned
//! bytes, so `vpdpbusd` gives their products with one digit, 64 at a time, and the sum over a
//! block is exact. With three digits an `x` is off by less than 2^-22 of the largest in its
//! block, which is what rounding does to an f32 sum of the block; with two by 2^-15. This
//! takes a third of the instructions of f32 arithmetic, and the weights need no other order
//! than MLX's.

use std::arch::x86_64::*;

use super::avx512::transpose16;
use super::weights::{Code, FP4_CODES, ScaleType, Weights};

mod brain;
mod digits;
mod panel;
mod rows;
mod tile;

pub(crate) use brain::fill_brain_panel;
pub(crate) use digits::Activations;
pub(crate) use panel::fill_panel;
pub(crate) use rows::matvec;
pub(crate) use tile::{Panel, Tile, multiply};

/// Columns of a panel of weights.
pub(crate) const COLUMNS: usize = 32;

/// Scales and biases of up to 16 groups of `R` rows that follow each other, of `groups` each, in
/// terms of the codes as the kernels read them.
///
/// # Safety
/// The CPU has the instructions; from group `first` on, `n` scales of each row (and biases, if there
/// are any) can be read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn group_factors<const R: usize>(
    w: &Weights<'_>,
    groups: usize,
    first: usize,
    n: usize,
) -> ([__m512; R], [__m512; R]) {
    let size = w.scale_type.size();
    let (at, row) = (first * size, groups * size);
    // SAFETY: the caller's promise.
    let scales = unsafe { load_scales::<R>(w.scale_type, w.scales.as_ptr().add(at), row, n) };
    if w.code == Code::Fp4 {
        let times = |factor: f32| scales.map(|scale| _mm512_mul_ps(scale, _mm512_set1_ps(factor)));
        return (times(0.5), times(-6.0));
    }
    let biases = match w.biases {
        // SAFETY: the caller's promise.
        Some(biases) => unsafe { load_scales(w.scale_type, biases.as_ptr().add(at), row, n) },
        None => [_mm512_setzero_ps(); R],
    };
    (scales, biases)
}

/// `n` scales each from `from` on and from every `row` bytes further. The type is looked at once:
/// to jump by it takes longer than to load some.
///
/// # Safety
/// `n <= 16` scales can be read at each of `R` places.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn load_scales<const R: usize>(
    kind: ScaleType,
    from: *const u8,
    row: usize,
    n: usize,
) -> [__m512; R] {
    let mask = (((1u32 << n) - 1) & 0xffff) as __mmask16;
    let mut scales = [_mm512_setzero_ps(); R];
    macro_rules! each {
        ($from:ident => $load:expr) => {
            for (r, scale) in scales.iter_mut().enumerate() {
                // SAFETY: a row that can be read; masked loads read `n` values only.
                *scale = unsafe {
                    let $from = from.add(r * row);
                    $load
                };
            }
        };
    }
    match kind {
        ScaleType::F32 => each!(from => _mm512_maskz_loadu_ps(mask, from.cast())),
        ScaleType::F16 => {
            each!(from => _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from.cast())));
        }
        ScaleType::Bf16 => each!(from => {
            let wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }),
        ScaleType::E8m0 => each!(from => {
            let wide = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, from.cast()));
            let zero = _mm512_testn_epi32_mask(wide, wide);
            let power = _mm512_slli_epi32::<23>(wide);
            // 0 stands for 2^-127, which is a subnormal.
            let power = _mm512_mask_blend_epi32(zero, power, _mm512_set1_epi32(0x0040_0000));
            _mm512_maskz_mov_ps(mask, _mm512_castsi512_ps(power))
        }),
        ScaleType::E4m3 => each!(from => brain::fp8(_mm_maskz_loadu_epi8(mask, from.cast()))),
    }
    scales
}

/// For each of 8 quads of `bits` bytes: which byte goes where, and the shift of each code.
struct Spread {
    bytes: [u8; 64],
    shifts: [u8; 64],
}

const fn spread(bits: usize) -> Spread {
    let mut spread = Spread {
        bytes: [0; 64],
        shifts: [0; 64],
    };
    let mut i = 0;
    while i < 64 {
        spread.bytes[i] = (i / 8 * bits + i % 8) as u8;
        spread.shifts[i] = (i % 8 * bits) as u8;
        i += 1;
    }
    spread
}

static SPREADS: [Spread; 7] = [
    spread(0),
    spread(1),
    spread(2),
    spread(3),
    spread(4),
    spread(5),
    spread(6),
];

/// The next 64 codes of a row in their order, of which `left` are there; zero after them.
///
/// # Safety
/// The bytes of `left` codes (at most 64, a multiple of 8) can be read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi")]
unsafe fn codes<const BITS: usize>(from: *const u8, left: usize) -> __m512i {
    let bytes = left.min(64) * BITS / 8;
    let mask = if bytes >= 64 {
        u64::MAX
    } else {
        (1u64 << bytes) - 1
    };
    // SAFETY: the masked load reads `bytes` bytes; the tables are 64 bytes long.
    unsafe {
        let raw = _mm512_maskz_loadu_epi8(mask, from.cast());
        if BITS == 8 {
            return raw;
        }
        let spread = &SPREADS[BITS];
        let raw = _mm512_permutexvar_epi8(_mm512_loadu_si512(spread.bytes.as_ptr().cast()), raw);
        let shifts = _mm512_loadu_si512(spread.shifts.as_ptr().cast());
        let mask = _mm512_set1_epi8(((1u32 << BITS) - 1) as i8);
        _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, raw), mask)
    }
}

/// The table of [`FP4_CODES`] in each 128-bit lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn fp4_table() -> __m512i {
    // SAFETY: the table is 16 bytes long.
    unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(FP4_CODES.as_ptr().cast())) }
}
