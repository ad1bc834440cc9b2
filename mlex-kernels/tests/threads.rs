//! The pool with more threads than cores or tasks, stealing, and panics. The number of threads
//! and the pool are of the whole process, so these tests run one by one.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mlex_kernels::threads::{parallel_for, physical_cores, set_threads, threads};

/// The pool with that many threads, until it is dropped.
struct Pool(#[allow(dead_code, reason = "held")] MutexGuard<'static, ()>);

impl Pool {
    fn new(threads: usize) -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let guard = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        set_threads(threads);
        // All of its threads are there from here on.
        parallel_for(threads, |_| {});
        Self(guard)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        set_threads(0);
    }
}

/// Runs `tasks` tasks with `before` at the start of each, and says how often each ran.
fn counted(tasks: usize, before: impl Fn(usize, &AtomicUsize) + Sync) -> Vec<usize> {
    let counts: Vec<_> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
    let done = AtomicUsize::new(0);
    parallel_for(tasks, |i| {
        before(i, &done);
        counts[i].fetch_add(1, Ordering::Relaxed);
        done.fetch_add(1, Ordering::SeqCst);
    });
    counts.into_iter().map(AtomicUsize::into_inner).collect()
}

#[test]
fn more_threads_than_tasks() {
    let _pool = Pool::new(9);
    for tasks in (0..12).chain([1, 2, 0, 3]) {
        for _ in 0..100 {
            assert_eq!(counted(tasks, |_, _| {}), vec![1; tasks]);
        }
    }
}

#[test]
fn the_number_of_threads_may_change() {
    let _pool = Pool::new(7);
    for round in 0..300 {
        set_threads(1 + round % 8);
        assert_eq!(threads(), 1 + round % 8);
        let tasks = round % 23;
        assert_eq!(counted(tasks, |_, _| {}), vec![1; tasks]);
    }
}

#[test]
fn the_rest_of_a_busy_thread_is_taken_by_others() {
    let _pool = Pool::new(3);
    let tasks = 24;
    // The first, a middle and the last task of each thread's own.
    for busy in [0, 4, 7, 8, 12, 15, 16, 20, 23] {
        let start = Instant::now();
        let counts = counted(tasks, |i, done| {
            // This one ends when all others are done: nobody else may wait for its thread.
            while i == busy && done.load(Ordering::SeqCst) < tasks - 1 {
                assert!(
                    start.elapsed() < Duration::from_secs(60),
                    "task {busy} hangs"
                );
                std::thread::yield_now();
            }
        });
        assert_eq!(counts, vec![1; tasks]);
    }
}

#[test]
fn tasks_of_any_length_run_once() {
    let _pool = Pool::new(4);
    for round in 0..200u64 {
        let tasks = 1 + round as usize * 7 % 60;
        let counts = counted(tasks, |i, _| {
            let mut state = round.wrapping_mul(0x9e37_79b9) + i as u64;
            for _ in 0..state % 7 * 300 {
                state = std::hint::black_box(state.wrapping_mul(6_364_136_223_846_793_005) + 1);
            }
        });
        assert_eq!(counts, vec![1; tasks]);
    }
}

#[test]
fn a_panic_ends_the_job_and_not_the_pool() {
    let _pool = Pool::new(5);
    let tasks = 40;
    for bad in 0..tasks {
        let counts: Vec<_> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
        let result = catch_unwind(AssertUnwindSafe(|| {
            parallel_for(tasks, |i| {
                counts[i].fetch_add(1, Ordering::Relaxed);
                assert!(i != bad, "task {bad}");
            });
        }));
        let payload = result.unwrap_err();
        let message = payload.downcast_ref::<String>().map(String::as_str);
        assert_eq!(message, Some(&*format!("task {bad}")));
        let counts: Vec<_> = counts.into_iter().map(AtomicUsize::into_inner).collect();
        assert!(counts.iter().all(|&count| count <= 1), "{counts:?}");
        assert_eq!(counts[bad], 1);
        // Nothing of that job is left for the next, of fewer tasks or of more.
        for tasks in [3, 50] {
            assert_eq!(counted(tasks, |_, _| {}), vec![1; tasks]);
        }
    }
}

#[test]
fn every_task_may_panic() {
    let _pool = Pool::new(6);
    for _ in 0..50 {
        let ran = AtomicUsize::new(0);
        let result = catch_unwind(AssertUnwindSafe(|| {
            parallel_for(64, |i| {
                ran.fetch_add(1, Ordering::Relaxed);
                panic!("task {i}");
            });
        }));
        assert!(result.is_err());
        // At most one for each thread.
        assert!((1..=6).contains(&ran.into_inner()));
        assert_eq!(counted(8, |_, _| {}), vec![1; 8]);
    }
}

#[test]
fn there_is_a_thread_at_least_and_a_bound() {
    let pool = Pool::new(2);
    assert_eq!(threads(), 2);
    set_threads(usize::MAX);
    assert!((physical_cores().min(256)..=256).contains(&threads()));
    drop(pool);
    let _pool = Pool::new(0);
    assert_eq!(threads(), physical_cores().min(256));
}
