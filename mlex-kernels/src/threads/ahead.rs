//! Memory that idle threads ask for before the job that reads it begins.
//!
//! A decode step is bound by reading weights, and between its products the memory would have
//! nothing to do: one thread adds and normalizes a few values while the others wait. Told which
//! weights come next, they bring what will be their own part of them into their caches.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use smallvec::SmallVec;

/// Tasks of a job that read the same arrays; they follow those of the part before.
#[derive(Debug, Clone, Default)]
pub(crate) struct Upcoming {
    /// Number of tasks.
    pub(crate) tasks: usize,
    /// Where each array begins, and the bytes of it that a task reads.
    pub(crate) arrays: SmallVec<[(usize, usize); ARRAYS]>,
}

/// Parts that are noted; further ones are left out.
const PARTS: usize = 8;
/// Arrays of a part.
const ARRAYS: usize = 6;

/// The memory that a job will read. It is only asked for: no address is ever read or written
/// through this, so that it may outlive what it names.
#[derive(Debug, Clone, Default)]
pub struct Expectation(pub(crate) SmallVec<[Upcoming; 3]>);

impl Expectation {
    /// Notes that the job after the next one of the pool reads this: threads that have nothing
    /// to do until then bring their part of it into their caches.
    ///
    /// This changes nothing but time, and may be wrong.
    pub fn announce(&self) {
        super::expect(&self.0);
    }
}

/// What one thread asks for at most: half of a usual L2 cache.
const BUDGET: usize = 448 << 10;

const LINE: usize = 64;

/// Lines that are asked for before a thread looks for a job again.
const STRIDE: usize = 8;

#[derive(Default)]
struct Array {
    start: AtomicUsize,
    task_bytes: AtomicUsize,
}

#[derive(Default)]
struct Part {
    tasks: AtomicUsize,
    /// How many arrays there are.
    count: AtomicUsize,
    arrays: [Array; ARRAYS],
}

/// What comes next, as the caller of jobs notes it and idle threads read it.
///
/// The fields are read while they may be written: a mixture of two notes asks for memory that
/// nobody needs, or that is not there, and the CPU ignores that.
#[derive(Default)]
pub(super) struct Notes {
    /// Another one for each note.
    version: AtomicU64,
    /// How many parts there are.
    count: AtomicUsize,
    parts: [Part; PARTS],
}

/// How far a thread is with a note.
#[derive(Default)]
pub(super) struct Progress {
    version: u64,
    asked: usize,
    part: usize,
    /// Task of the part, array and byte of the task.
    task: usize,
    array: usize,
    byte: usize,
    done: bool,
}

impl Notes {
    /// Replaces what is noted; `version` was not used before, and is not 0.
    pub(super) fn set(&self, upcoming: &[Upcoming], version: u64) {
        // What is not written costs nothing: each line is fetched from the thread that read it.
        for (part, from) in self.parts.iter().zip(upcoming) {
            for (array, &(start, size)) in part.arrays.iter().zip(&from.arrays) {
                array.start.store(start, Ordering::Relaxed);
                array.task_bytes.store(size, Ordering::Relaxed);
            }
            part.tasks.store(from.tasks, Ordering::Relaxed);
            part.count.store(from.arrays.len(), Ordering::Relaxed);
        }
        self.count.store(upcoming.len(), Ordering::Relaxed);
        self.version.store(version, Ordering::Release);
    }

    /// Asks for some more of what thread `thread` of `threads` will read first. Returns at once;
    /// `false` when there is nothing to be asked for.
    pub(super) fn ask(&self, progress: &mut Progress, thread: usize, threads: usize) -> bool {
        let version = self.version.load(Ordering::Acquire);
        if progress.version != version {
            *progress = self.first(version, thread, threads);
        }
        if progress.done {
            return false;
        }
        for _ in 0..STRIDE {
            if !self.ask_line(progress) {
                progress.done = true;
                return false;
            }
        }
        true
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        self.parts.iter().take(self.count.load(Ordering::Relaxed))
    }

    /// The first of the tasks that are the thread's own.
    fn first(&self, version: u64, thread: usize, threads: usize) -> Progress {
        let counts = || self.parts().map(|part| part.tasks.load(Ordering::Relaxed));
        let mut task = counts().sum::<usize>() * thread / threads.max(1);
        let mut progress = Progress {
            version,
            ..Progress::default()
        };
        for count in counts() {
            if task < count {
                break;
            }
            task -= count;
            progress.part += 1;
        }
        progress.task = task;
        progress
    }

    fn ask_line(&self, progress: &mut Progress) -> bool {
        while progress.asked < BUDGET {
            let Some(part) = self.parts().nth(progress.part) else {
                return false;
            };
            if progress.task >= part.tasks.load(Ordering::Relaxed) {
                progress.part += 1;
                progress.task = 0;
                continue;
            }
            let count = part.count.load(Ordering::Relaxed);
            let mut arrays = part.arrays.iter().take(count);
            let Some(array) = arrays.nth(progress.array) else {
                progress.array = 0;
                progress.task += 1;
                continue;
            };
            let size = array.task_bytes.load(Ordering::Relaxed);
            if progress.byte >= size {
                progress.byte = 0;
                progress.array += 1;
                continue;
            }
            let at = progress.task.wrapping_mul(size) + progress.byte;
            prefetch(array.start.load(Ordering::Relaxed).wrapping_add(at) as *const u8);
            progress.byte += LINE;
            progress.asked += LINE;
            return true;
        }
        false
    }
}

/// Asks for a line of memory to be brought to the L2 cache. Any address will do.
#[inline(always)]
fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64, and a prefetch of a bad address does nothing.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(at.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a prefetch of a bad address does nothing.
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{at}]", at = in(reg) at, options(nostack, readonly, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = at;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(tasks: usize, of: &[(&[u8], usize)]) -> Upcoming {
        let arrays = of
            .iter()
            .map(|&(bytes, size)| (bytes.as_ptr().addr(), size));
        let arrays = arrays.collect();
        Upcoming { tasks, arrays }
    }

    /// The byte that a thread asks for next.
    fn next(notes: &Notes, progress: &Progress) -> usize {
        let array = &notes.parts[progress.part].arrays[progress.array];
        let at = progress.task * array.task_bytes.load(Ordering::Relaxed) + progress.byte;
        array.start.load(Ordering::Relaxed).wrapping_add(at)
    }

    #[test]
    fn threads_begin_with_their_own_tasks() {
        let (a, b, c) = (vec![0u8; 4096], vec![0u8; 512], vec![0u8; 6400]);
        let parts = [part(4, &[(&a, 1024), (&b, 128)]), part(10, &[(&c, 640)])];
        let notes = Notes::default();
        notes.set(&parts, 1);
        // Tasks 0, 7 of 14: the fourth of the second part.
        assert_eq!(next(&notes, &notes.first(1, 0, 2)), a.as_ptr().addr());
        assert_eq!(
            next(&notes, &notes.first(1, 1, 2)),
            c[3 * 640..].as_ptr().addr()
        );
        assert_eq!(
            next(&notes, &notes.first(1, 1, 7)),
            a[2048..].as_ptr().addr()
        );
        // All of it: 4 * (1024 + 128) + 6400 bytes, in lines.
        let mut progress = Progress::default();
        let mut asked = 0;
        while notes.ask(&mut progress, 0, 1) {
            asked += STRIDE;
        }
        assert!(progress.done && asked * LINE <= progress.asked);
        assert_eq!(progress.asked, 4 * (1024 + 128) + 6400);
        assert!(!notes.ask(&mut progress, 0, 1));
        // Another note starts anew.
        notes.set(&[], 2);
        assert!(!notes.ask(&mut progress, 0, 1));
        assert_eq!(progress.asked, 0);
    }

    #[test]
    fn no_more_than_the_budget_is_asked_for() {
        let large = vec![0u8; 2 * BUDGET];
        let notes = Notes::default();
        notes.set(&[part(2, &[(&large, BUDGET)])], 1);
        let mut progress = Progress::default();
        while notes.ask(&mut progress, 0, 1) {}
        assert_eq!(progress.asked, BUDGET);
    }
}
