//! Sums and gates of a residual stream against their definitions in f64.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Random, at_every_level, epsilon};
use half::{bf16, f16};
use mlex_kernels::{Activation, Element, add, add_gated, gated, scale, take_columns};
use proptest::prelude::*;

fn wide<T: Element>(x: T) -> f64 {
    f64::from(x.to_f32())
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Within three roundings of numbers as large as `size`, and 2e-6 for elementary functions.
fn close<T: Element>(found: T, expected: f64, size: f64, what: &str) {
    let allowed = (3.0 * epsilon::<T>() + 2e-6) * size.max(1e-3);
    let error = (wide(found) - expected).abs();
    assert!(error <= allowed, "{what}: {} != {expected}", wide(found));
}

fn check<T: Element>(rows: usize, size: usize, seed: u64) {
    let mut r = Random::new(seed);
    let mut random = |count: usize| -> Vec<T> {
        let values = (0..count).map(|_| T::from_f32(8.0 * r.float()));
        values.collect()
    };
    let (x, y, gates) = (random(rows * size), random(rows * size), random(rows));
    let factor = wide(T::from_f32(2.0 * r.float()));
    at_every_level(|level| {
        let mut out = vec![T::from_f32(f32::NAN); rows * size];
        let each = |out: &[T], name: &str, expected: &dyn Fn(usize) -> (f64, f64)| {
            for (i, &found) in out.iter().enumerate() {
                let (expected, size) = expected(i);
                close(found, expected, size, &format!("{level:?} {name} [{i}]"));
            }
        };
        scale(&mut out, &x, factor as f32).unwrap();
        each(&out, "scale", &|i| {
            let y = factor * wide(x[i]);
            (y, y.abs())
        });
        add(&mut out, &x, &y, factor as f32).unwrap();
        each(&out, "add", &|i| {
            let sum = factor * (wide(x[i]) + wide(y[i]));
            (sum, sum.abs())
        });
        add_gated(&mut out, &x, &y, &gates, size).unwrap();
        each(&out, "add_gated", &|i| {
            let product = sigmoid(wide(gates[i / size])) * wide(y[i]);
            (wide(x[i]) + product, wide(x[i]).abs() + product.abs())
        });
        gated(&mut out, &x, &y, Activation::Sigmoid).unwrap();
        each(&out, "sigmoid", &|i| {
            let product = sigmoid(wide(x[i])) * wide(y[i]);
            (product, product.abs())
        });
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn sums_and_gates(rows in 0usize..5, size in 1usize..200, seed: u64) {
        match seed % 3 {
            0 => check::<f32>(rows, size, seed),
            1 => check::<f16>(rows, size, seed),
            _ => check::<bf16>(rows, size, seed),
        }
    }

    #[test]
    fn columns(rows in 0usize..5, first in 0usize..9, width in 1usize..9, after in 0usize..9) {
        let period = first + width + after;
        let x: Vec<f32> = (0..rows * period).map(|i| i as f32).collect();
        let mut out = vec![f32::NAN; rows * width];
        take_columns(&mut out, &x, period, first, width).unwrap();
        for (i, found) in out.iter().enumerate() {
            prop_assert_eq!(*found, (i / width * period + first + i % width) as f32);
        }
    }
}

#[test]
fn more_rows_than_a_task() {
    check::<f32>(40, 576, 3);
    check::<bf16>(40, 576, 4);
}

#[test]
fn wrong_arguments_are_refused() {
    let x = [1f32; 12];
    let mut out = [0f32; 12];
    assert!(scale(&mut out, &x[1..], 2.0).is_err());
    assert!(add(&mut out, &x, &x[1..], 1.0).is_err());
    assert!(add_gated(&mut out, &x, &x[1..], &x[..3], 4).is_err());
    assert!(add_gated(&mut out, &x, &x, &x[..2], 4).is_err());
    assert!(add_gated(&mut out, &x, &x, &[], 0).is_err());
    assert!(take_columns(&mut out[..6], &x, 4, 1, 2).is_ok());
    assert!(take_columns(&mut out[..6], &x, 4, 3, 2).is_err());
    assert!(take_columns(&mut out[..6], &x, 5, 1, 2).is_err());
    assert!(take_columns(&mut out[..5], &x, 4, 1, 2).is_err());
    assert!(take_columns(&mut out, &x, 0, 0, 0).is_err());
    assert!(take_columns(&mut out, &x, 4, usize::MAX, 2).is_err());
}
