//! One pool of threads for all kernels: a caller hands out numbered tasks and works with
//! the pool until they are done.
//!
//! Workers spin for a short while after a job and then park, because a decode step is a row
//! of jobs of a few microseconds and waking a parked thread costs tens of them. A worker
//! joins a job only while it is open, so that a caller never waits for a thread that is
//! still waking up.
#![allow(unsafe_code)]

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, TryLockError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// How long a worker without a job spins, and then yields, before it parks.
const SPIN: Duration = Duration::from_micros(50);
const YIELD: Duration = Duration::from_micros(150);

/// Bit of `Pool::state` that says that no worker may join any more.
const CLOSED: u64 = 1 << 31;
/// Bits of `Pool::state` that count the workers that joined.
const JOINED: u64 = CLOSED - 1;

type Task<'a> = dyn Fn(usize) + Sync + 'a;

/// The job that is open, or the last one. Only read by a worker that joined.
struct Job {
    task: *const Task<'static>,
    tasks: usize,
}

/// Own cache line: these are written by all threads.
#[repr(align(128))]
struct Line<T>(T);

struct Pool {
    /// Job number in the high half, then [`CLOSED`] and [`JOINED`].
    state: Line<AtomicU64>,
    /// The next task to hand out.
    next: Line<AtomicUsize>,
    /// How many of the workers that joined are done.
    finished: Line<AtomicUsize>,
    job: UnsafeCell<Job>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// Threads to use, the caller included.
    limit: AtomicUsize,
    /// The workers; held by the caller whose job is open.
    workers: Mutex<Vec<Worker>>,
}

struct Worker {
    thread: Thread,
    asleep: Arc<AtomicBool>,
}

// SAFETY: `job` is the only field that is not `Sync` by itself. It is written by the holder
// of `workers` while the state is closed and every worker that joined has finished, and read
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
        state: Line(AtomicU64::new(CLOSED)),
        next: Line(AtomicUsize::new(0)),
        finished: Line(AtomicUsize::new(0)),
        job: UnsafeCell::new(Job {
            task: &nothing as &Task<'static>,
            tasks: 0,
        }),
        panic: Mutex::new(None),
        limit: AtomicUsize::new(physical_cores()),
        workers: Mutex::new(Vec::new()),
    })
}

/// Sets how many threads kernels use, the calling one included; 0 means every physical core.
pub fn set_threads(threads: usize) {
    let threads = if threads == 0 {
        physical_cores()
    } else {
        threads.min(1024)
    };
    pool().limit.store(threads, Ordering::Relaxed);
}

/// How many threads kernels use, the calling one included.
pub fn threads() -> usize {
    pool().limit.load(Ordering::Relaxed)
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
    let threads = threads().min(tasks);
    if threads <= 1 || IN_TASK.get() {
        return (0..tasks).for_each(task);
    }
    let mut workers = match pool.workers.try_lock() {
        Ok(workers) => workers,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return (0..tasks).for_each(task),
    };
    while workers.len() + 1 < threads {
        match spawn(workers.len() + 1) {
            Some(worker) => workers.push(worker),
            None => break,
        }
    }
    pool.run(&workers[..workers.len().min(threads - 1)], tasks, &task);
}

impl Pool {
    /// Runs one job. The caller holds `workers`, so there is no other.
    fn run(&self, workers: &[Worker], tasks: usize, task: &Task<'_>) {
        // SAFETY: only the lifetime is changed. The pointer is used by workers that joined
        // this job, and this function does not return before all of them have finished.
        let task: *const Task<'static> = unsafe {
            std::mem::transmute::<*const Task<'_>, *const Task<'static>>(std::ptr::from_ref(task))
        };
        // SAFETY: the last job is closed and its workers have finished (see `Sync`).
        unsafe { *self.job.get() = Job { task, tasks } };
        self.next.0.store(0, Ordering::Relaxed);
        self.finished.0.store(0, Ordering::Relaxed);
        let number = (self.state.0.load(Ordering::Relaxed) >> 32).wrapping_add(1) & 0xffff_ffff;
        self.state.0.store(number << 32, Ordering::SeqCst);
        for worker in workers {
            if worker.asleep.load(Ordering::SeqCst) && worker.asleep.swap(false, Ordering::SeqCst) {
                worker.thread.unpark();
            }
        }

        self.work();

        let joined = (self.state.0.fetch_or(CLOSED, Ordering::SeqCst) & JOINED) as usize;
        let mut spins = 0u32;
        while self.finished.0.load(Ordering::Acquire) != joined {
            spins += 1;
            // A worker that has lost its core needs ours.
            if spins.is_multiple_of(4096) {
                thread::yield_now()
            } else {
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
    fn work(&self) {
        // SAFETY: called by the job's owner, and by workers that joined it.
        let (task, tasks) = unsafe {
            let job = &*self.job.get();
            (&*job.task, job.tasks)
        };
        IN_TASK.set(true);
        let result = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let index = self.next.0.fetch_add(1, Ordering::Relaxed);
                if index >= tasks {
                    break;
                }
                task(index);
            }
        }));
        IN_TASK.set(false);
        if let Err(payload) = result {
            self.next.0.store(tasks, Ordering::Relaxed);
            let mut slot = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
            slot.get_or_insert(payload);
        }
    }

    /// Joins the open job if there is one that this worker has not seen.
    fn join(&self, seen: &mut u64, index: usize) -> bool {
        let state = self.state.0.load(Ordering::SeqCst);
        if state >> 32 == *seen || state & CLOSED != 0 || index >= threads() {
            return false;
        }
        let joined =
            self.state
                .0
                .compare_exchange(state, state + 1, Ordering::SeqCst, Ordering::Relaxed);
        if joined.is_ok() {
            *seen = state >> 32;
        }
        joined.is_ok()
    }

    fn worker(&self, index: usize, asleep: &AtomicBool) {
        let mut seen = 0;
        let mut idle = Instant::now();
        loop {
            if self.join(&mut seen, index) {
                self.work();
                self.finished.0.fetch_add(1, Ordering::Release);
                idle = Instant::now();
                continue;
            }
            let waited = idle.elapsed();
            if waited < SPIN {
                for _ in 0..16 {
                    std::hint::spin_loop();
                }
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
        let state = self.state.0.load(Ordering::SeqCst);
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

/// How an array of `[planes, rows, columns]` is cut into tiles, one task each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tiling {
    /// Number of planes.
    pub(crate) planes: usize,
    /// Rows of a plane.
    pub(crate) rows: usize,
    /// Columns of a plane.
    pub(crate) columns: usize,
    /// Rows of a tile; the last may have fewer.
    pub(crate) tile_rows: usize,
    /// Columns of a tile; the last may have fewer.
    pub(crate) tile_columns: usize,
}

/// One tile of an array that is being written by several threads.
pub(crate) struct Tile<'a, T> {
    /// The plane it lies in.
    pub(crate) plane: usize,
    /// Its first row in the plane.
    pub(crate) row: usize,
    /// Its first column in the plane.
    pub(crate) column: usize,
    /// Its number of rows.
    pub(crate) rows: usize,
    /// Its number of columns.
    pub(crate) columns: usize,
    start: *mut T,
    stride: usize,
    data: PhantomData<&'a mut [T]>,
}

impl<T> Tile<'_, T> {
    /// Row `row` of the tile.
    pub(crate) fn row_mut(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows);
        // SAFETY: the row lies inside of the array (`parallel_tiles` checked its length and
        // `row < rows`), and inside of this tile, which no other task has.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.stride), self.columns) }
    }
}

struct SendPtr<T>(*mut T);

// SAFETY: the pointer is only used to make tiles that do not overlap, of a `T: Send`.
unsafe impl<T: Send> Sync for SendPtr<T> {}

impl<T> SendPtr<T> {
    fn get(&self) -> *mut T {
        self.0
    }
}

/// Runs `task` once for every tile of `data`, on the pool.
///
/// # Panics
/// When `data` is not as long as the tiling says, or a task panics.
pub(crate) fn parallel_tiles<T: Send>(
    data: &mut [T],
    tiling: Tiling,
    task: impl Fn(Tile<'_, T>) + Sync,
) {
    let Tiling {
        planes,
        rows,
        columns,
        tile_rows,
        tile_columns,
    } = tiling;
    assert!(tile_rows > 0 && tile_columns > 0);
    let length = planes
        .checked_mul(rows)
        .and_then(|n| n.checked_mul(columns));
    assert_eq!(length, Some(data.len()));
    if data.is_empty() {
        return;
    }
    let down = rows.div_ceil(tile_rows);
    let across = columns.div_ceil(tile_columns);
    let start = SendPtr(data.as_mut_ptr());
    parallel_for(planes * down * across, |index| {
        // Columns vary slowest inside a plane: neighbours in time share a panel of weights.
        let (plane, rest) = (index / (down * across), index % (down * across));
        let (row, column) = (rest % down * tile_rows, rest / down * tile_columns);
        let offset = (plane * rows + row) * columns + column;
        task(Tile {
            plane,
            row,
            column,
            rows: tile_rows.min(rows - row),
            columns: tile_columns.min(columns - column),
            // SAFETY: `row < rows` and `column < columns`, so the offset is inside of `data`.
            start: unsafe { start.get().add(offset) },
            stride: columns,
            data: PhantomData,
        });
    });
}

/// Rows of a two-dimensional array that are cut into tiles of some columns.
#[derive(Debug, Clone)]
pub(crate) struct RowBlock {
    /// The rows, none of them in another block.
    pub(crate) rows: std::ops::Range<usize>,
    /// Columns of a tile; the last may have fewer.
    pub(crate) tile_columns: usize,
}

/// Runs `task(block, tile)` once for every tile of the blocks of `data`, on the pool. The
/// tile's `plane` is the block's number, and its `row` counts from the array's first.
///
/// # Panics
/// When the blocks do not ascend or leave `data`, or a task panics.
pub(crate) fn parallel_blocks<T: Send>(
    data: &mut [T],
    columns: usize,
    blocks: &[RowBlock],
    task: impl Fn(Tile<'_, T>) + Sync,
) {
    let mut end = 0;
    let mut firsts = Vec::with_capacity(blocks.len());
    let mut tasks = 0;
    for block in blocks {
        assert!(block.rows.start >= end && block.rows.end >= block.rows.start);
        assert!(block.tile_columns > 0);
        end = block.rows.end;
        firsts.push(tasks);
        tasks += if block.rows.is_empty() {
            0
        } else {
            columns.div_ceil(block.tile_columns)
        };
    }
    assert!(
        end.checked_mul(columns)
            .is_some_and(|length| length <= data.len())
    );
    let start = SendPtr(data.as_mut_ptr());
    parallel_for(tasks, |index| {
        let number = firsts.partition_point(|&first| first <= index) - 1;
        let block = &blocks[number];
        let column = (index - firsts[number]) * block.tile_columns;
        task(Tile {
            plane: number,
            row: block.rows.start,
            column,
            rows: block.rows.len(),
            columns: block.tile_columns.min(columns - column),
            // SAFETY: the row and the column are inside of `data`, and no other tile has them.
            start: unsafe { start.get().add(block.rows.start * columns + column) },
            stride: columns,
            data: PhantomData,
        });
    });
}

/// The rows of an array that tasks write, each taken by one task.
pub(crate) struct Rows<'a, T> {
    start: SendPtr<T>,
    length: usize,
    taken: Vec<AtomicBool>,
    data: PhantomData<&'a mut [T]>,
}

// SAFETY: rows are handed out once each, as slices of a `T: Send`.
unsafe impl<T: Send> Sync for Rows<'_, T> {}

impl<'a, T> Rows<'a, T> {
    /// Cuts `data` into rows of `length`.
    pub(crate) fn new(data: &'a mut [T], length: usize) -> Self {
        let count = data.len().checked_div(length).unwrap_or(0);
        Self {
            start: SendPtr(data.as_mut_ptr()),
            length,
            taken: (0..count).map(|_| AtomicBool::new(false)).collect(),
            data: PhantomData,
        }
    }

    /// Row `index`.
    ///
    /// # Panics
    /// When there is no such row, or it was taken before.
    #[allow(clippy::mut_from_ref, reason = "each row is handed out once")]
    pub(crate) fn take(&self, index: usize) -> &'a mut [T] {
        assert!(
            !self.taken[index].swap(true, Ordering::Relaxed),
            "row {index} was taken"
        );
        // SAFETY: the row is inside of the array, and nobody else has it.
        unsafe {
            std::slice::from_raw_parts_mut(self.start.get().add(index * self.length), self.length)
        }
    }
}

/// Cuts `data` into chunks of `chunk` elements (the last may be shorter) and runs
/// `task(first element, chunk)` for each on the pool.
pub(crate) fn parallel_chunks<T: Send>(
    data: &mut [T],
    chunk: usize,
    task: impl Fn(usize, &mut [T]) + Sync,
) {
    let tiling = Tiling {
        planes: 1,
        rows: 1,
        columns: data.len(),
        tile_rows: 1,
        tile_columns: chunk.max(1),
    };
    parallel_tiles(data, tiling, |mut tile| task(tile.column, tile.row_mut(0)));
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

    #[test]
    fn tiles_cover_the_array_without_overlap() {
        let tiling = Tiling {
            planes: 3,
            rows: 5,
            columns: 7,
            tile_rows: 2,
            tile_columns: 3,
        };
        let mut data = vec![0u32; 3 * 5 * 7];
        parallel_tiles(&mut data, tiling, |mut tile| {
            for row in 0..tile.rows {
                let first = (tile.plane * 5 + tile.row + row) * 7 + tile.column;
                for (i, value) in tile.row_mut(row).iter_mut().enumerate() {
                    *value += (first + i) as u32 + 1;
                }
            }
        });
        assert!(data.iter().enumerate().all(|(i, &v)| v == i as u32 + 1));
    }

    #[test]
    fn chunks_cover_the_slice() {
        let mut data = vec![0usize; 1001];
        parallel_chunks(&mut data, 10, |first, chunk| {
            for (i, value) in chunk.iter_mut().enumerate() {
                *value += first + i;
            }
        });
        assert!(data.iter().enumerate().all(|(i, &v)| v == i));
        parallel_chunks(&mut [0u8; 0], 10, |_, _| unreachable!());
    }
}
