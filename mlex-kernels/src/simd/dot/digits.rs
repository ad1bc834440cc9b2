//! Activations as integers of two or three signed bytes.

use std::arch::x86_64::*;

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
    /// Per row and block: the scale of the integers in each 32-bit lane.
    pub(super) lanes: &'a [f32],
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
    /// Some of the rows.
    pub(crate) fn rows(&self, rows: std::ops::Range<usize>) -> Activations<'_> {
        let count = rows.len();
        let per_row = |length: usize| length / self.rows.max(1) * rows.start;
        Activations {
            digits: &self.digits[per_row(self.digits.len())..],
            lanes: &self.lanes[per_row(self.lanes.len())..],
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
    /// Whether all values can be converted.
    pub(crate) fn finite(x: &[f32]) -> bool {
        // Without a branch, so that it is done in vectors.
        x.iter().fold(true, |all, x| all & x.is_finite())
    }

    /// Converts rows of `w.k` finite values to `count` digits, 2 or 3.
    pub(crate) fn new(
        x: &[f32],
        w: &Weights<'_>,
        count: usize,
        digits: &'a mut Buffer,
        lanes: &'a mut Buffer,
        sums: &'a mut Buffer,
    ) -> Self {
        let rows = x.len() / w.k;
        assert!((2..=3).contains(&count));
        let block = block(w);
        let bytes = block * count;
        let blocks = w.k.div_ceil(block);
        let groups = w.groups().next_multiple_of(16);
        let digits = &mut digits.bytes(rows * blocks * bytes)[..rows * blocks * bytes];
        let lanes = &mut lanes.floats(rows * blocks * 16)[..rows * blocks * 16];
        let sums = &mut sums.floats(rows * groups)[..rows * groups];
        for (row, x) in x.chunks_exact(w.k).enumerate() {
            let digits = &mut digits[row * blocks * bytes..][..blocks * bytes];
            let lanes = &mut lanes[row * blocks * 16..][..blocks * 16];
            let sums = &mut sums[row * groups..][..groups];
            // SAFETY: `Weights` are only used at the level that has the instructions.
            unsafe { convert(x, w, count, digits, lanes, sums) };
        }
        Self {
            digits,
            lanes,
            sums,
            blocks,
            groups,
            rows,
            count,
        }
    }
}

/// Sums of each group of `x`, and zeros after them.
///
/// # Safety
/// The CPU has the instructions.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) unsafe fn group_sums(x: &[f32], group: usize, sums: &mut [f32]) {
    let mut groups = x.chunks_exact(group);
    for sum in sums {
        let mut total = _mm512_setzero_ps();
        for x in groups.next().unwrap_or(&[]).chunks_exact(16) {
            // SAFETY: a chunk is 16 values.
            total = _mm512_add_ps(total, unsafe { _mm512_loadu_ps(x.as_ptr()) });
        }
        *sum = _mm512_reduce_add_ps(total);
    }
}

/// # Safety
/// The CPU has the instructions; the slices are as long as [`Activations::new`] makes them.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn convert(
    x: &[f32],
    w: &Weights<'_>,
    count: usize,
    digits: &mut [u8],
    lanes: &mut [f32],
    sums: &mut [f32],
) {
    let nibbles = nibbles(w);
    let block = block(w);
    let bytes = block * count;
    // In 8 products of a nibble, or 4 of up to 6 bits, three digits stay below 2^31.
    let limit = LARGEST[count - 2];
    digits[(w.k / block) * bytes..].fill(0);
    lanes[(w.k / block) * 16..].fill(0.0);
    let mut natural = [0i8; 96];
    for (i, x) in x.chunks(32).enumerate() {
        let (at, inside) = (i * 32 / block, i * 32 % block);
        let to = &mut digits[at * bytes..][..bytes];
        // SAFETY: 32 values, three digits at most: 96 bytes; the pointers below stay in `to`.
        let scale = unsafe {
            if nibbles {
                if x.len() < 32 {
                    natural.fill(0);
                }
                let scale = split_block(x, count, limit, natural.as_mut_ptr(), 32);
                for d in 0..count {
                    let pairs = _mm256_loadu_si256(natural.as_ptr().add(32 * d).cast());
                    let even = _mm256_cvtepi16_epi8(pairs);
                    let odd = _mm256_cvtepi16_epi8(_mm256_srli_epi16::<8>(pairs));
                    let to = to.as_mut_ptr().add(64 * d + inside / 2);
                    _mm_storeu_si128(to.cast(), even);
                    _mm_storeu_si128(to.add(64 * count).cast(), odd);
                }
                scale
            } else {
                split_block(x, count, limit, to.as_mut_ptr().add(inside).cast(), 64)
            }
        };
        let lane = inside * 16 / block;
        lanes[at * 16 + lane..][..512 / block].fill(scale);
    }
    // SAFETY: as the caller's.
    unsafe { group_sums(x, w.group, sums) };
}
