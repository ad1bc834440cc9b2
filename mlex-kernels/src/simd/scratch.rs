//! Buffers on cache lines, kept by each thread between calls.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(target_arch = "x86_64")]
use half::bf16;

use super::{Kind, Vector};

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// A buffer that starts on a cache line. New space is zero; contents are otherwise kept.
#[derive(Default)]
pub(crate) struct Buffer(Vec<Line>);

impl Buffer {
    /// `length` bytes, rounded up to whole cache lines.
    pub(crate) fn bytes(&mut self, length: usize) -> &mut [u8] {
        let lines = length.div_ceil(64);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0; 64]));
        }
        // SAFETY: the lines are initialized bytes without padding.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), lines * 64) }
    }

    /// `length` floats, rounded up to whole cache lines.
    pub(crate) fn floats(&mut self, length: usize) -> &mut [f32] {
        let bytes = self.bytes(length * 4);
        let length = bytes.len() / 4;
        // SAFETY: aligned to 64, `4 * length` bytes long, and any bits are an f32.
        unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), length) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Buffer {
    /// `length` bfloat16, rounded up to whole cache lines.
    pub(crate) fn brains(&mut self, length: usize) -> &mut [bf16] {
        let bytes = self.bytes(length * 2);
        let length = bytes.len() / 2;
        // SAFETY: aligned to 64, `2 * length` bytes long, and any bits are a bfloat16.
        unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), length) }
    }
}

/// A slice of bfloat16 under the name of its element type.
///
/// # Panics
/// When the type is another one.
#[cfg(target_arch = "x86_64")]
pub(crate) fn as_brains<T: Vector>(slice: &[T]) -> &[bf16] {
    assert_eq!(T::KIND, Kind::Bf16);
    // SAFETY: the one type of this kind is bfloat16.
    unsafe { std::slice::from_raw_parts(slice.as_ptr().cast(), slice.len()) }
}

/// A slice of f32 under the name of its element type.
///
/// # Panics
/// When the type is another one.
pub(crate) fn as_floats<T: Vector>(slice: &[T]) -> &[f32] {
    assert_eq!(T::KIND, Kind::F32);
    // SAFETY: the one type of this kind is f32.
    unsafe { std::slice::from_raw_parts(slice.as_ptr().cast(), slice.len()) }
}

/// The buffers of one use.
pub(crate) type Buffers = [Buffer; 4];

/// Buffers larger than this together are freed after use.
const KEEP: usize = 64 << 20;

thread_local! {
    static KEPT: Cell<[Option<Box<Buffers>>; 2]> = const { Cell::new([None, None]) };
    static MADE: Cell<Option<Box<Made>>> = const { Cell::new(None) };
}

/// Runs `body` with buffers of this thread. `depth` 0 is for the caller of a job, 1 for its
/// tasks; a nested use of the same depth gets fresh ones.
pub(crate) fn with<R>(depth: usize, body: impl FnOnce(&mut Buffers) -> R) -> R {
    let mut kept = KEPT.take();
    let mut buffers = kept[depth].take().unwrap_or_default();
    KEPT.set(kept);
    let result = body(&mut buffers);
    if size(&buffers) <= KEEP {
        let mut kept = KEPT.take();
        kept[depth] = Some(buffers);
        KEPT.set(kept);
    }
    result
}

fn size(buffers: &Buffers) -> usize {
    buffers.iter().map(|b| b.0.len() * 64).sum()
}

/// What a thread has made for a job.
#[derive(Default)]
struct Made {
    job: u64,
    whole: bool,
    buffers: Buffers,
}

/// A job whose threads all make something of the same input, each in memory of its own: that
/// takes less time than to fetch from another core what one of them has made.
pub(crate) struct Once(u64);

impl Once {
    /// A new job.
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Runs `fill` with the buffers of this thread for the job, once for each thread (where jobs
    /// do not lie within each other), and `body` with them and with what it said.
    pub(crate) fn with<R>(
        &self,
        fill: impl FnOnce(&mut Buffers) -> bool,
        body: impl FnOnce(&mut Buffers, bool) -> R,
    ) -> R {
        let mut made = MADE.take().unwrap_or_default();
        if made.job != self.0 {
            made.whole = fill(&mut made.buffers);
            made.job = self.0;
        }
        let result = body(&mut made.buffers, made.whole);
        if size(&made.buffers) <= KEEP {
            MADE.set(Some(made));
        }
        result
    }
}

/// The bytes of a slice of plain numbers.
pub(crate) fn as_bytes<T: Plain>(slice: &[T]) -> &[u8] {
    // SAFETY: `Plain` types have no padding, so all bytes are initialized.
    unsafe { std::slice::from_raw_parts(slice.as_ptr().cast(), std::mem::size_of_val(slice)) }
}

/// The bytes of a slice of plain numbers, to write.
#[cfg(target_arch = "x86_64")]
pub(crate) fn as_bytes_mut<T: Plain>(slice: &mut [T]) -> &mut [u8] {
    let length = std::mem::size_of_val(slice);
    // SAFETY: `Plain` types have no padding, and any bits are one of their values.
    unsafe { std::slice::from_raw_parts_mut(slice.as_mut_ptr().cast(), length) }
}

/// Numbers without padding, of which any bits are one.
pub(crate) trait Plain {}
impl Plain for u32 {}
impl Plain for f32 {}
impl Plain for half::f16 {}
impl Plain for half::bf16 {}
