//! Plain loops over arrays, for CPUs without a backend of their own. The compiler turns them
//! into whatever vectors the target's baseline has.

use half::{bf16, f16};

use super::{Kernel, Simd};

const N: usize = 8;

#[derive(Clone, Copy)]
pub(super) struct Portable;

#[inline(always)]
fn map2(a: [f32; N], b: [f32; N], f: impl Fn(f32, f32) -> f32) -> [f32; N] {
    let mut out = [0.0; N];
    for i in 0..N {
        out[i] = f(a[i], b[i]);
    }
    out
}

impl Simd for Portable {
    type F = [f32; N];
    const LANES: usize = N;
    const MR: usize = 4;

    #[inline(always)]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }
    #[inline(always)]
    fn splat(self, value: f32) -> Self::F {
        [value; N]
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::F {
        // SAFETY: the caller's promise; no alignment is asked for.
        unsafe { from.cast::<[f32; N]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, value: Self::F) {
        // SAFETY: as above.
        unsafe { to.cast::<[f32; N]>().write_unaligned(value) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> Self::F {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<[u16; N]>().read_unaligned() }.map(|b| f16::from_bits(b).to_f32())
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16, value: Self::F) {
        // SAFETY: the caller's promise.
        unsafe {
            to.cast::<[u16; N]>()
                .write_unaligned(value.map(|v| f16::from_f32(v).to_bits()));
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> Self::F {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<[u16; N]>().read_unaligned() }
            .map(|b| f32::from_bits(u32::from(b) << 16))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16, value: Self::F) {
        // SAFETY: the caller's promise.
        unsafe {
            to.cast::<[u16; N]>()
                .write_unaligned(value.map(|v| bf16::from_f32(v).to_bits()));
        }
    }
    #[inline(always)]
    unsafe fn load_u8(self, from: *const u8) -> Self::F {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<[u8; N]>().read_unaligned() }.map(f32::from)
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // Not `mul_add`: without the instruction that is a call into libm.
        map2(map2(a, b, |a, b| a * b), c, |ab, c| ab + c)
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        a.map(f32::abs)
    }
    #[inline(always)]
    fn select_ge(self, a: Self::F, b: Self::F, yes: Self::F, no: Self::F) -> Self::F {
        let mut out = no;
        for i in 0..N {
            if a[i] >= b[i] {
                out[i] = yes[i];
            }
        }
        out
    }
    #[inline(always)]
    fn round(self, a: Self::F) -> Self::F {
        // 1.5 * 2^23: the sum has no fraction bits left.
        const MAGIC: f32 = 12_582_912.0;
        a.map(|v| (v + MAGIC) - MAGIC)
    }
    #[inline(always)]
    fn scale(self, a: Self::F, n: Self::F) -> Self::F {
        map2(a, n, |a, n| {
            a * f32::from_bits(((n as i32 + 127) as u32) << 23)
        })
    }
    #[inline(always)]
    fn sum(self, a: Self::F) -> f32 {
        ((a[0] + a[4]) + (a[1] + a[5])) + ((a[2] + a[6]) + (a[3] + a[7]))
    }
    #[inline(always)]
    fn largest(self, a: Self::F) -> f32 {
        a.iter()
            .fold(f32::NEG_INFINITY, |m, &v| if v > m { v } else { m })
    }
}
