//! One pool of threads for all kernels: a caller hands out numbered tasks and works with
//! the pool until they are done.
//!
//! Workers spin for a short while after a job and then park, because a decode step is a row
//! of jobs of a few microseconds and waking a parked thread costs tens of them. A worker
//! joins a job only while it is open, so that a caller never waits for a thread that is
//! still waking up.
#![allow(unsafe_code)]

mod ahead;
mod tiles;

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, TryLockError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

pub use ahead::Expectation;
pub(crate) use ahead::Upcoming;
use ahead::{Notes, Progress};
pub(crate) use tiles::{
    Columns, RowBlock, Rows, Tile, Tiling, parallel_blocks, parallel_chunks, parallel_columns,
    parallel_tiles,
};

/// How long a worker without a job spins, and then yields, before it parks.
const SPIN: Duration = Duration::from_micros(50);
const YIELD: Duration = Duration::from_millis(2);

/// How often a worker looks for a job before it asks what time it is.
const LOOKS: u32 = 16;

/// The most threads.
const MAX_THREADS: usize = 256;

/// Bit of `Pool::state` that says that no worker may join any more.
const CLOSED: u64 = 1 << 31;
/// Bits of `Pool::state` that count the workers that joined.
const JOINED: u64 = CLOSED - 1;

type Task<'a> = dyn Fn(usize) + Sync + 'a;

/// The job that is open, or the last one. Only read by a worker that joined.
#[derive(Clone, Copy)]
struct Job {
    task: *const Task<'static>,
    /// How many threads the tasks are cut for.
    threads: usize,
}

/// Own cache line: these are written by all threads.
#[derive(Default)]
#[repr(align(128))]
struct Line<T>(T);

/// What waiting workers look at. One line of the cache, so that a job is seen at once.
struct Open {
    /// Job number in the high half, then [`CLOSED`] and [`JOINED`].
    state: AtomicU64,
    /// The first bit says which of the notes is of the job after the open one (or the last);
    /// the other is that of the job after that.
    turn: AtomicUsize,
    job: UnsafeCell<Job>,
}

struct Pool {
    open: Line<Open>,
    /// For each thread, the tasks that are its own: the next in the low half, the end in the
    /// high half. Its own tasks follow each other, so that what they read is one stretch of
    /// memory; who has none left takes the last of another.
    ranges: Box<[Line<AtomicU64>]>,
    /// How many workers are done with a job that they joined, over all jobs.
    finished: Line<AtomicUsize>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// What jobs read.
    notes: [Line<Notes>; 2],
    /// Whether something was noted since the last job was opened.
    noted: Line<AtomicBool>,
    /// Threads to use, the caller included.
    limit: Line<AtomicUsize>,
    /// Held by the caller whose job is open.
    callers: Mutex<Callers>,
}

#[derive(Default)]
struct Callers {
    workers: Vec<Worker>,
    /// How many workers have joined a job, over all jobs.
    joined: usize,
    /// What callers have asked for while they waited.
    progress: Progress,
}

struct Worker {
    thread: Thread,
    asleep: Arc<AtomicBool>,
}

// SAFETY: `job` is the only field that is not `Sync` by itself. It is written by the holder
// of `callers` while the state is closed and every worker that joined has finished, and read
// by workers between joining (an acquire of the state that was released after the write) and
// finishing (a release that the writer acquires). So no write meets a read.
unsafe impl Sync for Pool {}
// SAFETY: as above; the pointer in `job` is not used outside of that protocol.
unsafe impl Send for Pool {}

thread_local! {
    /// Set while this thread runs tasks: jobs from inside run on this thread alone.
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

fn pool() -> &'static Pool {
    static POOL: OnceLock<Pool> = OnceLock::new();
    fn nothing(_: usize) {}
    POOL.get_or_init(|| Pool {
        open: Line(Open {
            state: AtomicU64::new(CLOSED),
            turn: AtomicUsize::new(0),
            job: UnsafeCell::new(Job {
                task: &nothing as &Task<'static>,
                threads: 0,
            }),
        }),
        ranges: (0..MAX_THREADS).map(|_| Line(AtomicU64::new(0))).collect(),
        finished: Line::default(),
        panic: Mutex::new(None),
        notes: Default::default(),
        noted: Line::default(),
        limit: Line(AtomicUsize::new(physical_cores().min(MAX_THREADS))),
        callers: Mutex::default(),
    })
}

/// Sets how many threads kernels use, the calling one included; 0 means every physical core.
pub fn set_threads(threads: usize) {
    let threads = if threads == 0 {
        physical_cores()
    } else {
        threads
    };
    let threads = threads.min(MAX_THREADS);
    pool().limit.0.store(threads, Ordering::Relaxed);
}

/// How many threads kernels use, the calling one included.
pub fn threads() -> usize {
    pool().limit.0.load(Ordering::Relaxed)
}

/// The number of physical cores that this process may use, at least 1.
pub fn physical_cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| {
        let logical = thread::available_parallelism().map_or(1, usize::from);
        // Linux names each core by the list of its hardware threads; elsewhere (and where
        // that is hidden) every logical CPU counts as a core.
        let siblings: std::collections::HashSet<_> = (0..1024)
            .map_while(|cpu| {
                let path =
                    format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
                std::fs::read_to_string(path).ok()
            })
            .collect();
        if siblings.is_empty() {
            logical
        } else {
            logical.min(siblings.len())
        }
    })
}

/// Runs `task(0) .. task(tasks - 1)`, in any order, on the calling thread and the pool, and
/// returns when all are done.
///
/// A job started inside of a task, or while another thread's job is running, runs on its
/// own thread alone.
///
/// # Panics
/// With the first panic of a task; tasks that have not begun by then are not run, and the
/// pool stays usable.
pub fn parallel_for(tasks: usize, task: impl Fn(usize) + Sync) {
    let pool = pool();
    // More would not fit the halves of a range; nobody has so many.
    assert!(u32::try_from(tasks).is_ok());
    let threads = threads().min(tasks);
    if threads <= 1 || IN_TASK.get() {
        return (0..tasks).for_each(task);
    }
    let mut callers = match pool.callers.try_lock() {
        Ok(callers) => callers,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return (0..tasks).for_each(task),
    };
    while callers.workers.len() + 1 < threads {
        match spawn(callers.workers.len() + 1) {
            Some(worker) => callers.workers.push(worker),
            None => break,
        }
    }
    pool.run(&mut callers, threads, tasks, &task);
}

/// Notes what will be read by the job after the next one, so that threads that have nothing to
/// do in between bring their part of it into their caches.
fn expect(upcoming: &[Upcoming]) {
    let pool = pool();
    let turn = pool.open.0.turn.load(Ordering::Relaxed);
    static VERSION: AtomicU64 = AtomicU64::new(1);
    let version = VERSION.fetch_add(1, Ordering::Relaxed);
    pool.notes[(turn + 1) % 2].0.set(upcoming, version);
    pool.noted.0.store(true, Ordering::Release);
}

impl Pool {
    /// Runs one job. The caller holds `callers`, so there is no other.
    fn run(&self, callers: &mut Callers, threads: usize, tasks: usize, task: &Task<'_>) {
        let Open { state, turn, job } = &self.open.0;
        let workers = &callers.workers[..callers.workers.len().min(threads - 1)];
        let threads = workers.len() + 1;
        // SAFETY: only the lifetime is changed. The pointer is used by workers that joined
        // this job, and this function does not return before all of them have finished.
        let task: *const Task<'static> = unsafe {
            std::mem::transmute::<*const Task<'_>, *const Task<'static>>(std::ptr::from_ref(task))
        };
        for (thread, range) in self.ranges.iter().enumerate().take(threads) {
            let start = tasks * thread / threads;
            let end = tasks * (thread + 1) / threads;
            let range_of = (end as u64) << 32 | start as u64;
            range.0.store(range_of, Ordering::Relaxed);
        }
        // SAFETY: the last job is closed and its workers have finished (see `Sync`).
        unsafe { *job.get() = Job { task, threads } };
        let number = (state.load(Ordering::Relaxed) >> 32).wrapping_add(1) & 0xffff_ffff;
        state.store(number << 32, Ordering::SeqCst);
        for worker in workers {
            if worker.asleep.load(Ordering::SeqCst) && worker.asleep.swap(false, Ordering::SeqCst) {
                worker.thread.unpark();
            }
        }
        // Only the holder of `callers` writes these two.
        if self.noted.0.load(Ordering::Acquire) {
            self.noted.0.store(false, Ordering::Relaxed);
            let next = turn.load(Ordering::Relaxed).wrapping_add(1);
            turn.store(next, Ordering::Release);
        }

        self.work(0);

        let joined = (state.fetch_or(CLOSED, Ordering::SeqCst) & JOINED) as usize;
        callers.joined = callers.joined.wrapping_add(joined);
        let mut spins = 0u32;
        while self.finished.0.load(Ordering::Acquire) != callers.joined {
            spins += 1;
            // A worker that has lost its core needs ours.
            if spins.is_multiple_of(4096) {
                thread::yield_now()
            } else if !self.ask(&mut callers.progress, 0) {
                std::hint::spin_loop()
            }
        }
        let panic = self
            .panic
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Runs tasks of the open job until none is left. Never unwinds.
    fn work(&self, thread: usize) {
        // SAFETY: called by the job's owner, and by workers that joined it.
        let (task, threads) = unsafe {
            let Job { task, threads } = *self.open.0.job.get();
            (&*task, threads)
        };
        IN_TASK.set(true);
        let result = catch_unwind(AssertUnwindSafe(|| {
            while let Some(index) = self.take(thread, threads) {
                task(index);
            }
        }));
        IN_TASK.set(false);
        if let Err(payload) = result {
            for range in self.ranges.iter().take(threads) {
                range.0.store(0, Ordering::Relaxed);
            }
            let mut slot = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
            slot.get_or_insert(payload);
        }
    }

    /// The next task of a thread's own, or the last of another's.
    fn take(&self, thread: usize, threads: usize) -> Option<usize> {
        let split = |range: u64| (range & 0xffff_ffff, range >> 32);
        let taken =
            self.ranges[thread]
                .0
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |range| {
                    let (next, end) = split(range);
                    (next < end).then_some(range + 1)
                });
        if let Ok(range) = taken {
            return Some(split(range).0 as usize);
        }
        (1..threads).find_map(|i| {
            let taken = self.ranges[(thread + i) % threads].0.fetch_update(
                Ordering::Relaxed,
                Ordering::Relaxed,
                |range| {
                    let (next, end) = split(range);
                    (next < end).then(|| range - (1 << 32))
                },
            );
            taken.ok().map(|range| split(range).1 as usize - 1)
        })
    }

    /// Joins the open job if there is one that this worker has not seen.
    fn join(&self, seen: &mut u64, index: usize) -> bool {
        let open = &self.open.0.state;
        let state = open.load(Ordering::SeqCst);
        if state >> 32 == *seen || state & CLOSED != 0 || index >= threads() {
            return false;
        }
        let joined = open.compare_exchange(state, state + 1, Ordering::SeqCst, Ordering::Relaxed);
        if joined.is_ok() {
            *seen = state >> 32;
        }
        joined.is_ok()
    }

    /// Asks for some of what the next job reads; `false` when there is nothing more.
    fn ask(&self, progress: &mut Progress, thread: usize) -> bool {
        let turn = self.open.0.turn.load(Ordering::Acquire);
        self.notes[turn % 2].0.ask(progress, thread, threads())
    }

    fn worker(&self, index: usize, asleep: &AtomicBool) {
        let mut seen = 0;
        let mut progress = Progress::default();
        let mut idle = Instant::now();
        let mut looked = 0u32;
        loop {
            if self.join(&mut seen, index) {
                self.work(index);
                self.finished.0.fetch_add(1, Ordering::Release);
                idle = Instant::now();
                continue;
            }
            if self.ask(&mut progress, index) {
                continue;
            }
            looked = looked.wrapping_add(1);
            if !looked.is_multiple_of(LOOKS) {
                std::hint::spin_loop();
                continue;
            }
            let waited = idle.elapsed();
            if waited < SPIN {
                std::hint::spin_loop();
            } else if waited < YIELD {
                thread::yield_now();
            } else {
                asleep.store(true, Ordering::SeqCst);
                // A job published before the store is seen here; one published after it
                // finds the flag and wakes this thread.
                if !self.join_pending(seen, index) {
                    thread::park();
                }
                asleep.store(false, Ordering::SeqCst);
                idle = Instant::now();
            }
        }
    }

    fn join_pending(&self, seen: u64, index: usize) -> bool {
        let state = self.open.0.state.load(Ordering::SeqCst);
        state >> 32 != seen && state & CLOSED == 0 && index < threads()
    }
}

fn spawn(index: usize) -> Option<Worker> {
    let asleep = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&asleep);
    let handle = thread::Builder::new()
        .name(format!("mlex-kernels-{index}"))
        .spawn(move || pool().worker(index, &flag))
        .ok()?;
    Some(Worker {
        thread: handle.thread().clone(),
        asleep,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for tasks in [0, 1, 2, 7, 1000] {
            let counts: Vec<_> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
            for _ in 0..50 {
                parallel_for(tasks, |i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
            }
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 50));
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        for round in 0..20 {
            let caught = catch_unwind(|| {
                parallel_for(64, |i| assert!(i != round * 3, "task {i}"));
            });
            let payload = caught.expect_err("a task panicked");
            let message = payload.downcast_ref::<String>().expect("a message");
            assert!(message.contains(&format!("task {}", round * 3)));
            let sum = AtomicUsize::new(0);
            parallel_for(64, |i| {
                sum.fetch_add(i, Ordering::Relaxed);
            });
            assert_eq!(sum.load(Ordering::Relaxed), 63 * 64 / 2);
        }
    }

    #[test]
    fn nested_and_concurrent_jobs_run() {
        let sum = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    parallel_for(8, |_| {
                        parallel_for(8, |i| {
                            sum.fetch_add(i, Ordering::Relaxed);
                        });
                    });
                });
            }
        });
        assert_eq!(sum.load(Ordering::Relaxed), 4 * 8 * 28);
    }

    #[test]
    fn jobs_after_the_workers_parked_run() {
        for _ in 0..5 {
            let sum = AtomicUsize::new(0);
            parallel_for(16, |i| {
                sum.fetch_add(i, Ordering::Relaxed);
            });
            assert_eq!(sum.load(Ordering::Relaxed), 120);
            thread::sleep(Duration::from_millis(2));
        }
    }
}
