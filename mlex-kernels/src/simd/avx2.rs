//! AVX2 with FMA and F16C.

use std::arch::x86_64::*;

use super::{Kernel, Simd};

/// Proof of AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    /// # Safety
    /// The CPU has AVX2, FMA and F16C.
    #[inline(always)]
    pub(super) unsafe fn new() -> Self {
        Self(())
    }
}

impl Simd for Avx2 {
    type F = __m256;
    const LANES: usize = 8;
    const MR: usize = 6;

    #[inline(always)]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn compiled<K: Kernel>(simd: Avx2, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        // SAFETY: `self` is proof of the instructions.
        unsafe { compiled(self, kernel) }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::F {
        // SAFETY: the caller's promise on the pointer; `self` is proof of the instructions.
        unsafe { _mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, value: Self::F) {
        // SAFETY: the caller's promise on the pointer; `self` is proof of the instructions.
        unsafe { _mm256_storeu_ps(to, value) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> Self::F {
        // SAFETY: the caller's promise on the pointer; `self` is proof of the instructions.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16, value: Self::F) {
        // SAFETY: the caller's promise on the pointer; `self` is proof of the instructions.
        unsafe { _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<0>(value)) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> Self::F {
        // SAFETY: the caller's promise on the pointer; `self` is proof of the instructions.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16, value: Self::F) {
        // SAFETY: the caller's promise on the pointer; `self` is proof of the instructions.
        unsafe {
            let bits = round_bf16(value);
            let packed = _mm256_permute4x64_epi64::<0x08>(_mm256_packus_epi32(bits, bits));
            _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(packed))
        }
    }
    #[inline(always)]
    unsafe fn load_u8(self, from: *const u8) -> Self::F {
        // SAFETY: the caller's promise on the pointer; `self` is proof of the instructions.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()))) }
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
            let mut rows = [_mm256_setzero_ps(); 8];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = _mm256_loadu_ps(from.add(i * from_stride));
            }
            let rows = transpose8(rows);
            for (i, row) in rows.into_iter().enumerate() {
                _mm256_storeu_ps(to.add(i * to_stride), row);
            }
        }
    }
    #[inline(always)]
    fn splat(self, value: f32) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm256_set1_ps(value) }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm256_min_ps(a, b) }
    }
    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), a) }
    }
    #[inline(always)]
    fn select_ge(self, a: Self::F, b: Self::F, yes: Self::F, no: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_GE_OQ>(a, b)) }
    }
    #[inline(always)]
    fn round(self, a: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    fn scale(self, a: Self::F, n: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe {
            let power = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(power)))
        }
    }
    #[inline(always)]
    fn sum(self, a: Self::F) -> f32 {
        // SAFETY: `self` is proof of the instructions.
        unsafe {
            let half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)))
        }
    }
    #[inline(always)]
    fn largest(self, a: Self::F) -> f32 {
        // SAFETY: `self` is proof of the instructions.
        unsafe {
            let half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)))
        }
    }
}

/// The bfloat16 bits of each lane, ties to even, in the low half.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn round_bf16(value: __m256) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = _mm256_castps_si256(value);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        // Rounding up the bits of a NaN could make it infinite.
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(value, value));
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
        _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan))
    }
}

/// Transposes an 8 by 8 square.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn transpose8(r: [__m256; 8]) -> [__m256; 8] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut t = r;
        for g in 0..2 {
            let a = _mm256_unpacklo_ps(r[4 * g], r[4 * g + 1]);
            let b = _mm256_unpackhi_ps(r[4 * g], r[4 * g + 1]);
            let c = _mm256_unpacklo_ps(r[4 * g + 2], r[4 * g + 3]);
            let d = _mm256_unpackhi_ps(r[4 * g + 2], r[4 * g + 3]);
            t[4 * g] = _mm256_shuffle_ps::<0x44>(a, c);
            t[4 * g + 1] = _mm256_shuffle_ps::<0xee>(a, c);
            t[4 * g + 2] = _mm256_shuffle_ps::<0x44>(b, d);
            t[4 * g + 3] = _mm256_shuffle_ps::<0xee>(b, d);
        }
        let mut out = t;
        for j in 0..4 {
            out[j] = _mm256_permute2f128_ps::<0x20>(t[j], t[4 + j]);
            out[4 + j] = _mm256_permute2f128_ps::<0x31>(t[j], t[4 + j]);
        }
        out
    }
}
