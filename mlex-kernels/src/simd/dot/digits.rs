//! Activations as integers of two or three signed bytes.

use std::arch::x86_64::*;

use super::super::avx512::{max16, sum16};
use super::super::scratch::Buffer;
use super::Weights;

/// The largest integers of two and of three digits, which go up to 127 each, less what the
/// rounding of a product can add.
pub(crate) const LARGEST: [f32; 2] = [32_638.0, 8_355_700.0];

/// Writes `x` (a multiple of 16 values) as `digits` arrays of `x.len()` bytes, the most
/// significant first, `stride` bytes apart, and returns the scale: `x` is about the integer
/// times the scale, and no integer is larger than `limit`. NaN if an `x` is not finite.
///
/// # Safety
/// The CPU has the instructions, and `to` has room for the arrays.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(crate) unsafe fn split_block(
    x: &[f32],
    digits: usize,
    limit: f32,
    to: *mut i8,
    stride: usize,
) -> f32 {
    let mut largest = _mm512_setzero_ps();
    let mut finite = 0xffff;
    for x in x.chunks_exact(16) {
        // SAFETY: a chunk is 16 values.
        let x = _mm512_abs_ps(unsafe { _mm512_loadu_ps(x.as_ptr()) });
        finite &= _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, _mm512_set1_ps(f32::INFINITY));
        largest = _mm512_max_ps(largest, x);
    }
    let largest = _mm512_reduce_max_ps(largest);
    if finite != 0xffff {
        return f32::NAN;
    }
    // Below 2^-100 the factor could overflow; what is lost there is below any f32 sum.
    let (factor, scale) = if largest < 7.9e-31 {
        (0.0, 0.0)
    } else {
        (limit / largest, largest / limit)
    };
    let half = _mm512_set1_epi32(128);
    for (i, x) in x.chunks_exact(16).enumerate() {
        // SAFETY: a chunk is 16 values, and array `d` has 16 bytes at `16 * i`.
        unsafe {
            let x = _mm512_mul_ps(_mm512_loadu_ps(x.as_ptr()), _mm512_set1_ps(factor));
            let mut v = _mm512_cvtps_epi32(x);
            for d in (0..digits).rev() {
                let to = to.add(d * stride + 16 * i);
                _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(v));
                // The low byte is a signed digit; what it was rounded by is carried on.
                v = _mm512_srai_epi32::<8>(_mm512_add_epi32(v, half));
            }
        }
    }
    scale
}

/// Rows of `x` as two or three digits each, in the order in which [`super::matvec`] reads codes.
pub(crate) struct Activations<'a> {
    /// Per row and block: the digits.
    pub(super) digits: &'a [u8],
    /// Per row and four blocks: the scales of the integers. At `4 * j + b` is that of quarter `j` of
    /// a register with block `b`, so that each quarter has its scales of all four.
    pub(super) scales: &'a [f32],
    /// Per row: the sum of `x` in each group, and zeros up to a multiple of 16.
    pub(super) sums: &'a [f32],
    /// Blocks of a row.
    pub(super) blocks: usize,
    /// Groups of a row, rounded up to a multiple of 16.
    pub(super) groups: usize,
    /// Number of rows.
    pub(super) rows: usize,
    /// 2 or 3.
    pub(super) count: usize,
}

impl Activations<'_> {
    /// The scales of the four blocks of row `m` of which block `at` is one.
    ///
    /// # Safety
    /// The CPU has the instructions, and there is such a block.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn four_scales(&self, m: usize, at: usize) -> __m512 {
        let quads = self.blocks.div_ceil(4);
        let from = (m * quads + at / 4) * 16;
        debug_assert!(from + 16 <= self.scales.len());
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_ps(self.scales.as_ptr().add(from)) }
    }

    /// Some of the rows.
    pub(crate) fn rows(&self, rows: std::ops::Range<usize>) -> Activations<'_> {
        let count = rows.len();
        let per_row = |length: usize| length / self.rows.max(1) * rows.start;
        Activations {
            digits: &self.digits[per_row(self.digits.len())..],
            scales: &self.scales[per_row(self.scales.len())..],
            sums: &self.sums[per_row(self.sums.len())..],
            rows: count,
            ..*self
        }
    }
}

/// Whether codes are taken as the low and the high nibbles of bytes.
pub(super) fn nibbles(w: &Weights<'_>) -> bool {
    w.bits == 4
}

/// Codes that are taken at once.
fn block(w: &Weights<'_>) -> usize {
    if nibbles(w) { 128 } else { 64 }
}

impl<'a> Activations<'a> {
    /// Whether all values (a multiple of 16) can be converted.
    pub(crate) fn finite(x: &[f32]) -> bool {
        // SAFETY: this is only asked at the level that has the instructions.
        unsafe { finite(x) }
    }

    /// Converts rows of `w.k` values to `count` digits, 2 or 3; `false` if one is not finite.
    pub(crate) fn fill(
        x: &[f32],
        w: &Weights<'_>,
        count: usize,
        [digits, scales, sums]: [&mut Buffer; 3],
    ) -> bool {
        assert!((2..=3).contains(&count));
        if !Self::finite(x) {
            return false;
        }
        let rows = x.len() / w.k;
        let Lengths {
            digits: bytes,
            scales: floats,
            groups,
            ..
        } = Lengths::of(w, count);
        let digits = digits.bytes(rows * bytes).chunks_exact_mut(bytes);
        let scales = scales.floats(rows * floats).chunks_exact_mut(floats);
        let sums = sums.floats(rows * groups).chunks_exact_mut(groups);
        for (x, ((digits, scales), sums)) in x.chunks_exact(w.k).zip(digits.zip(scales).zip(sums)) {
            // SAFETY: `Weights` are only used at the level that has the instructions; `k` is a
            // multiple of 16, as all groups are.
            unsafe {
                group_sums(x, w.group, sums);
                if nibbles(w) {
                    convert::<true>(x, count, digits, scales);
                } else {
                    convert::<false>(x, count, digits, scales);
                }
            }
        }
        true
    }

    /// What [`fill`](Self::fill) has made of this many rows.
    pub(crate) fn filled(
        rows: usize,
        w: &Weights<'_>,
        count: usize,
        [digits, scales, sums]: [&'a mut Buffer; 3],
    ) -> Self {
        let Lengths {
            digits: bytes,
            scales: floats,
            blocks,
            groups,
        } = Lengths::of(w, count);
        Self {
            digits: &digits.bytes(rows * bytes)[..rows * bytes],
            scales: &scales.floats(rows * floats)[..rows * floats],
            sums: &sums.floats(rows * groups)[..rows * groups],
            blocks,
            groups,
            rows,
            count,
        }
    }
}

/// What a row becomes.
struct Lengths {
    /// Bytes of digits.
    digits: usize,
    blocks: usize,
    /// Sixteen scales of four blocks.
    scales: usize,
    /// Sums of groups, and zeros up to a multiple of 16.
    groups: usize,
}

impl Lengths {
    fn of(w: &Weights<'_>, count: usize) -> Self {
        let blocks = w.k.div_ceil(block(w));
        Self {
            digits: blocks * block(w) * count,
            blocks,
            scales: blocks.div_ceil(4) * 16,
            groups: w.groups().next_multiple_of(16),
        }
    }
}

/// # Safety
/// The CPU has the instructions.
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn finite(x: &[f32]) -> bool {
    // Without the sign, bits in the order of the numbers: infinity and NaN are the largest.
    let mut largest = _mm512_setzero_si512();
    for x in x.chunks_exact(16) {
        // SAFETY: a chunk is 16 values.
        let x = _mm512_abs_ps(unsafe { _mm512_loadu_ps(x.as_ptr()) });
        largest = _mm512_max_epu32(largest, _mm512_castps_si512(x));
    }
    let infinity = _mm512_castps_si512(_mm512_set1_ps(f32::INFINITY));
    _mm512_cmplt_epu32_mask(largest, infinity) == 0xffff
}

/// Writes the digits of a row of `x`, and the scale of each 32 values, in the order of
/// [`Activations::scales`].
///
/// # Safety
/// The CPU has the instructions; the slices are as long as [`Activations::fill`] makes them, and
/// `x` is a multiple of 16 values.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn convert<const NIBBLES: bool>(
    x: &[f32],
    count: usize,
    digits: &mut [u8],
    scales: &mut [f32],
) {
    let block = if NIBBLES { 128 } else { 64 };
    let (bytes, last) = (block * count, x.len() / block);
    // In 8 products of a nibble, or 4 of up to 6 bits, three digits stay below 2^31.
    let limit = _mm512_set1_ps(LARGEST[count - 2]);
    digits[last * bytes..].fill(0);
    // Sixteen times 32 values at a time, so that their largest are one vector.
    for (first, x) in x.chunks(512).enumerate() {
        // SAFETY: loads are inside of the chunk, or masked; stores are 16 bytes in the 32
        // columns of a block, of each digit.
        unsafe {
            let mut largest = [_mm512_setzero_ps(); 16];
            for (largest, x) in largest.iter_mut().zip(x.chunks(32)) {
                let [a, b] = load_32(x);
                *largest = _mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b));
            }
            let largest = max16(largest);
            // Below 2^-100 the factor could overflow; what is lost there is below any f32 sum.
            let some = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(largest, _mm512_set1_ps(7.9e-31));
            let mut factors = [0.0; 16];
            _mm512_storeu_ps(
                factors.as_mut_ptr(),
                _mm512_maskz_div_ps(some, limit, largest),
            );
            let of_values = _mm512_maskz_div_ps(some, largest, limit);
            let to = &mut scales[first * (512 / block * 4)..];
            if NIBBLES {
                _mm512_storeu_ps(
                    to.as_mut_ptr(),
                    _mm512_permutexvar_ps(QUADS.vector(), of_values),
                );
            } else {
                // Two quarters share a scale; the second half of the chunk may not be there.
                let quads = [
                    HALF_QUADS.vector(),
                    _mm512_add_epi32(HALF_QUADS.vector(), _mm512_set1_epi32(8)),
                ];
                for (to, index) in to.chunks_exact_mut(16).zip(quads) {
                    _mm512_storeu_ps(to.as_mut_ptr(), _mm512_permutexvar_ps(index, of_values));
                }
            }
            for (i, x) in x.chunks(32).enumerate() {
                let k = first * 512 + i * 32;
                let (at, inside) = (k / block, k % block);
                let [a, b] = load_32(x);
                let factor = _mm512_set1_ps(factors[i]);
                let to = digits[at * bytes..][..bytes].as_mut_ptr();
                if NIBBLES {
                    // Low nibbles are even columns, high nibbles odd ones.
                    let even = _mm512_permutex2var_ps(a, EVEN.vector(), b);
                    let odd = _mm512_permutex2var_ps(a, ODD.vector(), b);
                    write_digits(even, factor, count, to.add(inside / 2));
                    write_digits(odd, factor, count, to.add(64 * count + inside / 2));
                } else {
                    write_digits(a, factor, count, to.add(inside));
                    write_digits(b, factor, count, to.add(inside + 16));
                }
            }
        }
    }
}

/// Sixteen numbers of lanes.
#[repr(align(64))]
struct Lanes([i32; 16]);

impl Lanes {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn vector(&self) -> __m512i {
        // SAFETY: sixteen numbers.
        unsafe { _mm512_load_si512(self.0.as_ptr().cast()) }
    }
}

/// Which of the scales of 32 values each is those of four blocks of 128 or of 64.
static QUADS: Lanes = Lanes([0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15]);
static HALF_QUADS: Lanes = Lanes([0, 2, 4, 6, 0, 2, 4, 6, 1, 3, 5, 7, 1, 3, 5, 7]);

static EVEN: Lanes = Lanes([0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30]);
static ODD: Lanes = Lanes([1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31]);

/// The 32 values of `x`, or 16 and zeros.
///
/// # Safety
/// The CPU has the instructions; `x` has 16 values at least.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_32(x: &[f32]) -> [__m512; 2] {
    // SAFETY: the first 16 are there, and the others where it is said.
    unsafe {
        let first = _mm512_loadu_ps(x.as_ptr());
        match x.len() {
            32.. => [first, _mm512_loadu_ps(x.as_ptr().add(16))],
            _ => [first, _mm512_setzero_ps()],
        }
    }
}

/// Writes `x * factor` as `count` digits, the most significant first, 64 bytes apart.
///
/// # Safety
/// The CPU has the instructions, and there is room for 16 bytes of each digit.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn write_digits(x: __m512, factor: __m512, count: usize, to: *mut u8) {
    let half = _mm512_set1_epi32(128);
    let mut v = _mm512_cvtps_epi32(_mm512_mul_ps(x, factor));
    for d in (0..count).rev() {
        // SAFETY: the caller's promise.
        unsafe { _mm_storeu_si128(to.add(64 * d).cast(), _mm512_cvtepi32_epi8(v)) };
        // The low byte is a signed digit; what it was rounded by is carried on.
        v = _mm512_srai_epi32::<8>(_mm512_add_epi32(v, half));
    }
}

/// Sums of each group of `x`, and zeros after them; `sums` is a multiple of 16.
///
/// # Safety
/// The CPU has the instructions, and `x` is a multiple of 16 values.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) unsafe fn group_sums(x: &[f32], group: usize, sums: &mut [f32]) {
    let mut groups = x.chunks_exact(group);
    for sums in sums.chunks_exact_mut(16) {
        let mut totals = [_mm512_setzero_ps(); 16];
        for (total, x) in totals.iter_mut().zip(&mut groups) {
            for x in x.chunks_exact(16) {
                // SAFETY: a chunk is 16 values.
                *total = _mm512_add_ps(*total, unsafe { _mm512_loadu_ps(x.as_ptr()) });
            }
        }
        // SAFETY: a chunk of the sums is 16 values.
        unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), sum16(totals)) };
    }
}
