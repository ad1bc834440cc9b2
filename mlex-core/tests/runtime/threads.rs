//! Arrays on several threads: the argument for `Send` in ffi, put to use.

use std::sync::{Arc, Barrier, mpsc};
use std::thread;

use mlex_core::{Array, Stream, async_eval, mlx_version};

use crate::{floats, ramp};

fn is_send<T: Send>() {}

#[test]
fn arrays_are_send() {
    is_send::<Array>();
    is_send::<mlex_core::Error>();
    is_send::<mlex_core::QuantizedWeight>();
}

#[test]
fn a_moved_array_is_used_and_dropped_elsewhere() {
    let evaluated = ramp(&[100]);
    evaluated.eval().unwrap();
    let computed = ramp(&[100]).multiply(2.0).unwrap();
    computed.eval().unwrap();
    let sum = thread::spawn(move || {
        let both = evaluated.add(&computed).unwrap();
        both.sum_all().unwrap().item::<f32>().unwrap()
    });
    assert_eq!(sum.join().unwrap(), 3.0 * 4950.0);
}

/// Whether the linked MLX evaluates an array on the thread that built it alone: seen with the
/// Python packages of 0.32.0 to 0.32.4, and not with the one of 0.31.2.
fn graphs_belong_to_their_thread() -> bool {
    !mlx_version().unwrap().starts_with("0.31.")
}

#[test]
fn an_array_that_is_not_evaluated_belongs_to_its_thread() {
    let lazy = ramp(&[3]).add(1.0).unwrap();
    let clone = lazy.clone();
    let elsewhere = thread::spawn(move || clone.to_vec::<f32>()).join().unwrap();
    if graphs_belong_to_their_thread() {
        let error = elsewhere.unwrap_err().to_string();
        assert!(error.contains("Stream(cpu, "), "{error}");
        assert!(!error.contains('\n'), "{error}");
    } else {
        assert_eq!(elsewhere.unwrap(), [1.0, 2.0, 3.0]);
    }
    // A refusal leaves it as it was, and the other threads can go on.
    let clone = lazy.clone();
    let more = thread::spawn(move || {
        let refused = async_eval([&clone]).is_err();
        let own = floats(&ramp(&[2]).add(1.0).unwrap());
        (refused, own)
    });
    assert_eq!(
        more.join().unwrap(),
        (graphs_belong_to_their_thread(), vec![1.0, 2.0])
    );
    assert_eq!(floats(&lazy), [1.0, 2.0, 3.0]);

    // Its thread may be gone; what was never computed is dropped without harm.
    let orphan = thread::spawn(|| ramp(&[3]).multiply(2.0).unwrap());
    let orphan = orphan.join().unwrap();
    let sum = orphan.add(&lazy).unwrap();
    assert_eq!(sum.eval().is_err(), graphs_belong_to_their_thread());
    drop((orphan, sum));
    assert_eq!(floats(&lazy.square().unwrap()), [1.0, 4.0, 9.0]);
}

#[test]
fn a_result_outlives_the_thread_that_computed_it() {
    let built = thread::spawn(|| {
        let stream = Stream::current().unwrap();
        let array = stream.scope(|| ramp(&[4]).add(1.0).unwrap().square().unwrap());
        array.eval().unwrap();
        array
    });
    let array = built.join().unwrap();
    assert_eq!(floats(&array), [1.0, 4.0, 9.0, 16.0]);

    let started = thread::spawn(|| {
        let array = ramp(&[4]).exp().unwrap().log().unwrap();
        async_eval([&array]).unwrap();
        array
    });
    let array = started.join().unwrap();
    assert!((floats(&array)[3] - 3.0).abs() < 1e-6);
}

/// A computation with a known result: a sum of products of small whole numbers.
fn work(seed: i32) -> (Array, f32) {
    let n = 8 + seed % 5;
    let x = ramp(&[n, n]).add(seed as f32).unwrap();
    let product = x.matmul(&x.t().unwrap()).unwrap();
    let expected: f32 = (0..n)
        .flat_map(|i| (0..n).map(move |j| (i, j)))
        .map(|(i, j)| {
            let value = |row: i32, k: i32| (row * n + k + seed) as f32;
            (0..n).map(|k| value(i, k) * value(j, k)).sum::<f32>()
        })
        .sum();
    (product.sum_all().unwrap(), expected)
}

#[test]
fn many_threads_build_and_evaluate_at_once() {
    let threads = 8;
    let barrier = Arc::new(Barrier::new(threads));
    let handles: Vec<_> = (0..threads as i32)
        .map(|thread| {
            let barrier = Arc::clone(&barrier);
            thread::spawn(move || {
                barrier.wait();
                for round in 0..40 {
                    let (sum, expected) = work(thread + round);
                    if round % 3 == 0 {
                        async_eval([&sum]).unwrap();
                    }
                    let found = sum.item::<f32>().unwrap();
                    assert!(
                        (found - expected).abs() <= 1e-5 * expected,
                        "{found} {expected}"
                    );
                }
            })
        })
        .collect();
    for handle in handles {
        handle.join().unwrap();
    }
}

#[test]
fn clones_are_read_on_many_threads_at_once() {
    for _ in 0..20 {
        let shared = ramp(&[1000]).multiply(3.0).unwrap().add(1.0).unwrap();
        // Waited for by whoever comes first, read by all.
        async_eval([&shared]).unwrap();
        let handles: Vec<_> = (0..6)
            .map(|thread| {
                let clone = shared.clone();
                thread::spawn(move || {
                    let values = clone.as_slice::<f32>().unwrap();
                    assert_eq!(values[thread], 3.0 * thread as f32 + 1.0);
                    let own = clone.add(thread as f32).unwrap();
                    assert_eq!(floats(&own)[0], 1.0 + thread as f32);
                })
            })
            .collect();
        drop(shared);
        for handle in handles {
            handle.join().unwrap();
        }
    }
}

#[test]
fn arrays_are_passed_along_while_others_work() {
    let (sender, receiver) = mpsc::channel::<Array>();
    let consumer = thread::spawn(move || {
        receiver
            .iter()
            .map(|array| array.sum_all().unwrap().item::<f32>().unwrap())
            .sum::<f32>()
    });
    for index in 0..100 {
        let array = Array::full(&[10], index as f32, mlex_core::Dtype::Float32).unwrap();
        if index % 2 == 0 {
            async_eval([&array]).unwrap();
        } else {
            array.eval().unwrap();
        }
        sender.send(array).unwrap();
    }
    drop(sender);
    assert_eq!(consumer.join().unwrap(), 10.0 * 4950.0);
}

#[test]
fn a_panic_on_one_thread_does_not_stop_the_others() {
    let array = ramp(&[3]);
    let clone = array.clone();
    let panicked = thread::spawn(move || {
        let _held = clone.add(1.0).unwrap();
        panic!("on purpose");
    });
    assert!(panicked.join().is_err());
    assert_eq!(floats(&array.add(1.0).unwrap()), [1.0, 2.0, 3.0]);
}
