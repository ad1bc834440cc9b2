//! NEON, which every 64-bit Arm CPU has.
// Whether intrinsics of the baseline are unsafe to call differs between compilers.
#![allow(unused_unsafe)]

use std::arch::aarch64::*;

use half::f16;

use super::{Kernel, Simd};

/// Proof of NEON.
#[derive(Clone, Copy)]
pub(super) struct Neon(());

impl Neon {
    /// # Safety
    /// The CPU has NEON.
    #[inline(always)]
    pub(super) unsafe fn new() -> Self {
        Self(())
    }
}

impl Simd for Neon {
    type F = float32x4_t;
    const LANES: usize = 4;
    const MR: usize = 12;

    #[inline(always)]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "neon")]
        fn compiled<K: Kernel>(simd: Neon, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        // SAFETY: `self` is proof of the instructions.
        unsafe { compiled(self, kernel) }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::F {
        // SAFETY: the caller's promise on the pointer; `self` is proof of the instructions.
        unsafe { vld1q_f32(from) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, value: Self::F) {
        // SAFETY: the caller's promise on the pointer; `self` is proof of the instructions.
        unsafe { vst1q_f32(to, value) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> Self::F {
        // SAFETY: the caller's promise on the pointer; `self` is proof of the instructions.
        unsafe {
            let wide = from
                .cast::<[u16; 4]>()
                .read_unaligned()
                .map(|bits| f16::from_bits(bits).to_f32());
            vld1q_f32(wide.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16, value: Self::F) {
        // SAFETY: the caller's promise on the pointer; `self` is proof of the instructions.
        unsafe {
            let mut wide = [0.0f32; 4];
            vst1q_f32(wide.as_mut_ptr(), value);
            to.cast::<[u16; 4]>()
                .write_unaligned(wide.map(|v| f16::from_f32(v).to_bits()));
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> Self::F {
        // SAFETY: the caller's promise on the pointer; `self` is proof of the instructions.
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from))) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16, value: Self::F) {
        // SAFETY: the caller's promise on the pointer; `self` is proof of the instructions.
        unsafe { vst1_u16(to, vmovn_u32(round_bf16(value))) }
    }
    #[inline(always)]
    unsafe fn load_u8(self, from: *const u8) -> Self::F {
        // SAFETY: the caller's promise on the pointer; `self` is proof of the instructions.
        unsafe {
            let bytes = from.cast::<u32>().read_unaligned();
            let pairs = vget_low_u16(vmovl_u8(vcreate_u8(u64::from(bytes))));
            vcvtq_f32_u32(vmovl_u16(pairs))
        }
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
            let row = |i: usize| vld1q_f32(from.add(i * from_stride));
            let (a, b, c, d) = (row(0), row(1), row(2), row(3));
            let wide = |v: float32x4_t| vreinterpretq_f64_f32(v);
            let (e, f) = (wide(vtrn1q_f32(a, b)), wide(vtrn2q_f32(a, b)));
            let (g, h) = (wide(vtrn1q_f32(c, d)), wide(vtrn2q_f32(c, d)));
            let columns = [
                vtrn1q_f64(e, g),
                vtrn1q_f64(f, h),
                vtrn2q_f64(e, g),
                vtrn2q_f64(f, h),
            ];
            for (i, column) in columns.into_iter().enumerate() {
                vst1q_f32(to.add(i * to_stride), vreinterpretq_f32_f64(column));
            }
        }
    }
    #[inline(always)]
    fn splat(self, value: f32) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { vdupq_n_f32(value) }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { vaddq_f32(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { vsubq_f32(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { vdivq_f32(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { vfmaq_f32(c, a, b) }
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { vbslq_f32(vcgtq_f32(b, a), a, b) }
    }
    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { vabsq_f32(a) }
    }
    #[inline(always)]
    fn select_ge(self, a: Self::F, b: Self::F, yes: Self::F, no: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { vbslq_f32(vcgeq_f32(a, b), yes, no) }
    }
    #[inline(always)]
    fn round(self, a: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe { vrndnq_f32(a) }
    }
    #[inline(always)]
    fn scale(self, a: Self::F, n: Self::F) -> Self::F {
        // SAFETY: `self` is proof of the instructions.
        unsafe {
            let power = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
            vmulq_f32(a, vreinterpretq_f32_s32(vshlq_n_s32::<23>(power)))
        }
    }
    #[inline(always)]
    fn sum(self, a: Self::F) -> f32 {
        // SAFETY: `self` is proof of the instructions.
        unsafe { vaddvq_f32(a) }
    }
    #[inline(always)]
    fn largest(self, a: Self::F) -> f32 {
        // SAFETY: `self` is proof of the instructions.
        unsafe { vmaxvq_f32(a) }
    }
}

/// The bfloat16 bits of each lane, ties to even, in the low half.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn round_bf16(value: float32x4_t) -> uint32x4_t {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = vreinterpretq_u32_f32(value);
        let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        // Rounding up the bits of a NaN could make it infinite.
        let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
        vshrq_n_u32::<16>(vbslq_u32(vceqq_f32(value, value), rounded, quiet))
    }
}
