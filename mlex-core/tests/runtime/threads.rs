//! Arrays on several threads: the argument for `Send` in ffi, put to use.

use std::sync::{Arc, Barrier, mpsc};
use std::thread;

use mlex_core::{Array, Stream, async_eval};

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
    let lazy = ramp(&[100]).multiply(2.0).unwrap();
    let sum = thread::spawn(move || {
        let both = evaluated.add(&lazy).unwrap();
        both.sum_all().unwrap().item::<f32>().unwrap()
    });
    assert_eq!(sum.join().unwrap(), 3.0 * 4950.0);
}

#[test]
fn a_graph_outlives_the_thread_that_built_it() {
    let built = thread::spawn(|| {
        let stream = Stream::current().unwrap();
        stream.scope(|| ramp(&[4]).add(1.0).unwrap().square().unwrap())
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
    // The same lazy node, evaluated by whoever comes first, read by all.
    for _ in 0..20 {
        let shared = ramp(&[1000]).multiply(3.0).unwrap().add(1.0).unwrap();
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
