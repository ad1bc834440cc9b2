//! The vector instructions: a small trait that each instruction set implements, the choice
//! of one at run time, and the inner loops that are written over it.
//!
//! All raw-pointer code of the kernels is in here; the modules above check lengths first.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::sync::OnceLock;

use half::{bf16, f16};

pub(crate) mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

pub(crate) mod conv;
pub(crate) mod decode;
#[cfg(target_arch = "x86_64")]
pub(crate) mod dot;
pub(crate) mod elementwise;
pub(crate) mod gated_delta;
pub(crate) mod gemm;
pub(crate) mod mamba2;
pub(crate) mod math;
#[cfg(target_arch = "x86_64")]
pub(crate) mod pairs;
pub(crate) mod rows;
pub(crate) mod scratch;
pub(crate) mod softcap;
pub(crate) mod weights;

/// The vector operations of one instruction set. A value of the type is proof that this CPU
/// has it, so methods without pointers are safe.
///
/// Everything is `inline(always)`: the code that uses it becomes part of the one function in
/// [`Simd::vectorize`] that is compiled for the instruction set.
pub trait Simd: Copy + Send + Sync + 'static {
    /// A vector of f32.
    type F: Copy;
    /// The number of f32 in it; at most 16.
    const LANES: usize;
    /// Rows of the GEMM micro-tile, which is two vectors wide; at most 14.
    const MR: usize;

    /// Runs `kernel` compiled for this instruction set.
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output;

    /// `value` in every lane.
    fn splat(self, value: f32) -> Self::F;
    /// Loads from any alignment.
    ///
    /// # Safety
    /// `LANES` values can be read at `from`.
    unsafe fn load(self, from: *const f32) -> Self::F;
    /// Stores to any alignment.
    ///
    /// # Safety
    /// `LANES` values can be written at `to`.
    unsafe fn store(self, to: *mut f32, value: Self::F);
    /// Loads and widens half precision.
    ///
    /// # Safety
    /// `LANES` values can be read at `from`.
    unsafe fn load_f16(self, from: *const u16) -> Self::F;
    /// Rounds to half precision (ties to even) and stores.
    ///
    /// # Safety
    /// `LANES` values can be written at `to`.
    unsafe fn store_f16(self, to: *mut u16, value: Self::F);
    /// Loads and widens bfloat16.
    ///
    /// # Safety
    /// `LANES` values can be read at `from`.
    unsafe fn load_bf16(self, from: *const u16) -> Self::F;
    /// Rounds to bfloat16 (ties to even) and stores.
    ///
    /// # Safety
    /// `LANES` values can be written at `to`.
    unsafe fn store_bf16(self, to: *mut u16, value: Self::F);
    /// Loads bytes as numbers 0 to 255.
    ///
    /// # Safety
    /// `LANES` bytes can be read at `from`.
    unsafe fn load_u8(self, from: *const u8) -> Self::F;
    /// Transposes a square of `LANES` by `LANES`: row `i` is at `from + i * from_stride`.
    ///
    /// # Safety
    /// The rows of both squares can be read and written; they do not overlap.
    #[inline(always)]
    unsafe fn transpose(
        self,
        from: *const f32,
        from_stride: usize,
        to: *mut f32,
        to_stride: usize,
    ) {
        for i in 0..Self::LANES {
            for j in 0..Self::LANES {
                // SAFETY: inside of the two squares.
                unsafe { *to.add(j * to_stride + i) = *from.add(i * from_stride + j) };
            }
        }
    }

    /// The sums of `LANES` rows of `LANES`, one after another.
    ///
    /// # Safety
    /// The rows can be read at `from`.
    #[inline(always)]
    unsafe fn sum_rows(self, from: *const f32) -> Self::F {
        let mut sums = [0.0; MAX_LANES];
        for (i, sum) in sums.iter_mut().enumerate().take(Self::LANES) {
            // SAFETY: row `i`.
            *sum = self.sum(unsafe { self.load(from.add(i * Self::LANES)) });
        }
        // SAFETY: the array has `LANES` values.
        unsafe { self.load(sums.as_ptr()) }
    }

    /// `a + b`
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a - b`
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once where the CPU can.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger of each lane; `b` where one is not a number.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// The smaller of each lane; `b` where one is not a number.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// The sign cleared.
    fn abs(self, a: Self::F) -> Self::F;
    /// `yes` where `a >= b`, else `no`.
    fn select_ge(self, a: Self::F, b: Self::F, yes: Self::F, no: Self::F) -> Self::F;
    /// The nearest integer, ties to even; `|a| < 2^22`.
    fn round(self, a: Self::F) -> Self::F;
    /// `a * 2^n` for integral `n` in -126 to 127.
    fn scale(self, a: Self::F, n: Self::F) -> Self::F;
    /// The sum of the lanes.
    fn sum(self, a: Self::F) -> f32;
    /// The largest lane.
    fn largest(self, a: Self::F) -> f32;
}

/// The widest vector, in f32.
pub(crate) const MAX_LANES: usize = 16;
/// The tallest GEMM micro-tile.
pub(crate) const MAX_MR: usize = 14;

/// A function over any instruction set; see [`Level::dispatch`].
pub trait Kernel {
    /// What it returns.
    type Output;
    /// Runs it; `inline(always)` in every implementation.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Loads and stores of an element type; the sealed half of [`crate::Element`].
pub trait Vector: Copy + Send + Sync + 'static {
    /// Which type it is, for code that has a path of its own for one.
    const KIND: Kind;
    /// Loads and widens.
    ///
    /// # Safety
    /// `S::LANES` values can be read at `from`.
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F;
    /// Rounds and stores.
    ///
    /// # Safety
    /// `S::LANES` values can be written at `to`.
    unsafe fn store<S: Simd>(simd: S, to: *mut Self, value: S::F);
}

/// An element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl Vector for f32 {
    const KIND: Kind = Kind::F32;
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { simd.load(from) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(simd: S, to: *mut Self, value: S::F) {
        // SAFETY: the caller's promise.
        unsafe { simd.store(to, value) }
    }
}

impl Vector for f16 {
    const KIND: Kind = Kind::F16;
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F {
        // SAFETY: the caller's promise; f16 is a u16 in memory.
        unsafe { simd.load_f16(from.cast()) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(simd: S, to: *mut Self, value: S::F) {
        // SAFETY: as above.
        unsafe { simd.store_f16(to.cast(), value) }
    }
}

impl Vector for bf16 {
    const KIND: Kind = Kind::Bf16;
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F {
        // SAFETY: the caller's promise; bf16 is a u16 in memory.
        unsafe { simd.load_bf16(from.cast()) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(simd: S, to: *mut Self, value: S::F) {
        // SAFETY: as above.
        unsafe { simd.store_bf16(to.cast(), value) }
    }
}

/// Loads `n < LANES` values, with zeros in the other lanes.
///
/// # Safety
/// `n` values can be read at `from`.
#[inline(always)]
pub(crate) unsafe fn load_part<S: Simd, T: Vector>(simd: S, from: *const T, n: usize) -> S::F {
    let mut lanes = [std::mem::MaybeUninit::<T>::zeroed(); MAX_LANES];
    // SAFETY: `n` values are readable and fit; zeroed lanes are valid floats.
    unsafe {
        std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr().cast(), n);
        T::load(simd, lanes.as_ptr().cast())
    }
}

/// Stores the first `n < LANES` lanes.
///
/// # Safety
/// `n` values can be written at `to`.
#[inline(always)]
pub(crate) unsafe fn store_part<S: Simd, T: Vector>(simd: S, to: *mut T, n: usize, value: S::F) {
    let mut lanes = [std::mem::MaybeUninit::<T>::zeroed(); MAX_LANES];
    // SAFETY: `n` values are writable; the store filled `LANES >= n` of them.
    unsafe {
        T::store(simd, lanes.as_mut_ptr().cast(), value);
        std::ptr::copy_nonoverlapping(lanes.as_ptr().cast(), to, n);
    }
}

/// A level of vector instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Level {
    /// What the compiler makes of plain loops.
    Portable,
    /// 64-bit Arm.
    Neon,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL and DQ.
    Avx512,
    /// AVX-512 with VNNI, VBMI and BF16 as well: Zen 4, Sapphire Rapids and later.
    Avx512Dot,
}

impl Level {
    /// The levels that this CPU has, the best last.
    pub fn available() -> &'static [Level] {
        static LEVELS: OnceLock<Vec<Level>> = OnceLock::new();
        LEVELS.get_or_init(|| {
            let mut levels = vec![Level::Portable];
            #[cfg(target_arch = "aarch64")]
            levels.push(Level::Neon);
            #[cfg(target_arch = "x86_64")]
            {
                use std::arch::is_x86_feature_detected as has;
                if has!("avx2") && has!("fma") && has!("f16c") {
                    levels.push(Level::Avx2);
                    if has!("avx512f") && has!("avx512bw") && has!("avx512vl") && has!("avx512dq") {
                        levels.push(Level::Avx512);
                        if has!("avx512vnni") && has!("avx512vbmi") && has!("avx512bf16") {
                            levels.push(Level::Avx512Dot);
                        }
                    }
                }
            }
            levels
        })
    }

    /// The level that kernels called on this thread use: the best, unless inside of
    /// [`Level::with`].
    pub fn current() -> Level {
        FORCED
            .get()
            .unwrap_or_else(|| Self::available()[Self::available().len() - 1])
    }

    /// Runs `body` with this level in place of the best on this thread; for tests and
    /// comparisons. A level that the CPU does not have changes nothing.
    pub fn with<R>(self, body: impl FnOnce() -> R) -> R {
        struct Reset(Option<Level>);
        impl Drop for Reset {
            fn drop(&mut self) {
                FORCED.set(self.0);
            }
        }
        let _reset = Reset(FORCED.get());
        if Self::available().contains(&self) {
            FORCED.set(Some(self));
        }
        body()
    }

    /// Runs `kernel` compiled for this level.
    #[inline]
    pub(crate) fn dispatch<K: Kernel>(self, kernel: K) -> K::Output {
        debug_assert!(Self::available().contains(&self));
        match self {
            // SAFETY: a `Level` other than `Portable` only comes from `available` (`with`
            // and `current` give no other to kernels), which looked for the instructions.
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Avx512Dot => unsafe { avx512::Avx512::new() }.vectorize(kernel),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Level::Avx2 => unsafe { avx2::Avx2::new() }.vectorize(kernel),
            #[cfg(target_arch = "aarch64")]
            // SAFETY: every 64-bit Arm CPU has NEON.
            Level::Neon => unsafe { neon::Neon::new() }.vectorize(kernel),
            _ => portable::Portable.vectorize(kernel),
        }
    }
}

thread_local! {
    static FORCED: Cell<Option<Level>> = const { Cell::new(None) };
}

#[cfg(test)]
mod tests;
