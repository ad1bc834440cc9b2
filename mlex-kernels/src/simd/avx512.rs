//! AVX-512 F, BW, VL and DQ.

use std::arch::x86_64::*;

use super::{Kernel, Simd};

/// Proof of AVX-512 F, BW, VL and DQ.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    /// # Safety
    /// The CPU has AVX-512 F, BW, VL and DQ, FMA and F16C.
    #[inline(always)]
    pub(super) unsafe fn new() -> Self {
        Self(())
    }
}

impl Simd for Avx512 {
    type F = __m512;
    const LANES: usize = 16;
    const MR: usize = 14;

    #[inline(always)]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
        fn compiled<K: Kernel>(simd: Avx512, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        // SAFETY: `self` is proof of the instructions.
        unsafe { compiled(self, kernel) }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::F {
        // SAFETY: the caller's promise on the pointer; `self` is proof of the instructions.
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, value: Self::F) {
        // SAFETY: the caller's promise on the pointer; `self` is proof of the instructions.
        unsafe { _mm512_storeu_ps(to, value) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> Self::F {
        // SAFETY: the caller's promise on the pointer; `self` is proof of the instructions.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16, value: Self::F) {
        // SAFETY: the caller's promise on the pointer; `self` is proof of the instructions.
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<0>(value)) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> Self::F {
        // SAFETY: the caller's promise on the pointer; `self` is proof of the instructions.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16, value: Self::F) {
        // SAFETY: the caller's promise on the pointer; `self` is proof of the instructions.
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(round_bf16(value))) }
    }
    #[inline(always)]
    unsafe fn load_u8(self, from: *const u8) -> Self::F {
        // SAFETY: the caller's promise on the pointer; `self` is proof of the instructions.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn transpose(
        self,
        from: *const f32,
        from_stride: usize,
        to: *mut f32,
        to_stride: usize,
    ) {
        // SAFETY: the caller's promise on the pointer; `self` is proof of the instructions.
        unsafe {
            let mut rows = [_mm512_setzero_ps(); 16];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = _mm512_loadu_ps(from.add(i * from_stride));
            }
            let rows = transpose16(rows);
            for (i, row) in rows.into_iter().enumerate() {
                _mm512_storeu_ps(to.add(i * to_stride), row);
            }
        }
    }
    #[inline(always)]
    unsafe fn sum_rows(self, from: *const f32) -> Self::F {
        // SAFETY: the caller's promise on the pointer; `self` is proof of the instructions.
        unsafe {
            let mut rows = [_mm512_setzero_ps(); 16];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = _mm512_loadu_ps(from.add(i * 16));
            }
            sum16(rows)
        }
    }
    #[inline(always)]
    fn splat(self, value: f32) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm512_set1_ps(value) }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm512_abs_ps(a) }
    }
    #[inline(always)]
    fn select_ge(self, a: Self::F, b: Self::F, yes: Self::F, no: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(a, b), no, yes) }
    }
    #[inline(always)]
    fn round(self, a: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm512_roundscale_ps::<0>(a) }
    }
    #[inline(always)]
    fn scale(self, a: Self::F, n: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm512_scalef_ps(a, n) }
    }
    #[inline(always)]
    fn sum(self, a: Self::F) -> f32 {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm512_reduce_add_ps(a) }
    }
    #[inline(always)]
    fn largest(self, a: Self::F) -> f32 {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm512_reduce_max_ps(a) }
    }
}

/// The bfloat16 bits of each lane, ties to even, in the low half.
///
/// # Safety
/// The CPU has AVX-512 F.
#[inline(always)]
unsafe fn round_bf16(value: __m512) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = _mm512_castps_si512(value);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        // Rounding up the bits of a NaN could make it infinite.
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
        let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
        _mm512_srli_epi32::<16>(_mm512_mask_blend_epi32(nan, rounded, quiet))
    }
}

/// Transposes a 16 by 16 square of 32-bit values.
///
/// # Safety
/// The CPU has AVX-512 F.
#[inline(always)]
pub(super) unsafe fn transpose16(r: [__m512; 16]) -> [__m512; 16] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut t = r;
        // 4 by 4 inside of each 128-bit lane, for each group of four rows.
        for g in 0..4 {
            let a = _mm512_unpacklo_ps(r[4 * g], r[4 * g + 1]);
            let b = _mm512_unpackhi_ps(r[4 * g], r[4 * g + 1]);
            let c = _mm512_unpacklo_ps(r[4 * g + 2], r[4 * g + 3]);
            let d = _mm512_unpackhi_ps(r[4 * g + 2], r[4 * g + 3]);
            t[4 * g] = _mm512_shuffle_ps::<0x44>(a, c);
            t[4 * g + 1] = _mm512_shuffle_ps::<0xee>(a, c);
            t[4 * g + 2] = _mm512_shuffle_ps::<0x44>(b, d);
            t[4 * g + 3] = _mm512_shuffle_ps::<0xee>(b, d);
        }
        // Then 4 by 4 of the 128-bit lanes.
        let mut out = t;
        for j in 0..4 {
            let a = _mm512_shuffle_f32x4::<0x88>(t[j], t[4 + j]);
            let b = _mm512_shuffle_f32x4::<0xdd>(t[j], t[4 + j]);
            let c = _mm512_shuffle_f32x4::<0x88>(t[8 + j], t[12 + j]);
            let d = _mm512_shuffle_f32x4::<0xdd>(t[8 + j], t[12 + j]);
            out[j] = _mm512_shuffle_f32x4::<0x88>(a, c);
            out[4 + j] = _mm512_shuffle_f32x4::<0x88>(b, d);
            out[8 + j] = _mm512_shuffle_f32x4::<0xdd>(a, c);
            out[12 + j] = _mm512_shuffle_f32x4::<0xdd>(b, d);
        }
        out
    }
}

/// Folds each of 16 vectors to one number, by an operation on two vectors at a time.
macro_rules! fold16 {
    ($(#[$doc:meta])* $name:ident, $op:ident) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// The CPU has AVX-512 F.
        #[inline(always)]
        pub(super) unsafe fn $name(r: [__m512; 16]) -> __m512 {
            // SAFETY: the caller's promise.
            unsafe {
                // The halves of each 128-bit lane, of two vectors at a time ..
                let mut two = [_mm512_setzero_ps(); 8];
                for (i, two) in two.iter_mut().enumerate() {
                    let (a, b) = (r[2 * i], r[2 * i + 1]);
                    *two = $op(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
                }
                // .. what is left of each lane, of four ..
                let mut four = [_mm512_setzero_ps(); 4];
                for (i, four) in four.iter_mut().enumerate() {
                    let (a, b) = (two[2 * i], two[2 * i + 1]);
                    let even = _mm512_shuffle_ps::<0x44>(a, b);
                    *four = $op(even, _mm512_shuffle_ps::<0xee>(a, b));
                }
                // .. and the lanes.
                let mut eight = [_mm512_setzero_ps(); 2];
                for (i, eight) in eight.iter_mut().enumerate() {
                    let (a, b) = (four[2 * i], four[2 * i + 1]);
                    let even = _mm512_shuffle_f32x4::<0x88>(a, b);
                    *eight = $op(even, _mm512_shuffle_f32x4::<0xdd>(a, b));
                }
                let even = _mm512_shuffle_f32x4::<0x88>(eight[0], eight[1]);
                $op(even, _mm512_shuffle_f32x4::<0xdd>(eight[0], eight[1]))
            }
        }
    };
}

fold16!(
    /// The sum of each of 16 vectors.
    sum16,
    _mm512_add_ps
);
fold16!(
    /// The largest of each of 16 vectors.
    max16,
    _mm512_max_ps
);
