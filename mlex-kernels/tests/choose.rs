//! Rows of a table, and the place of the largest element, against plain loops.

mod common;

use common::weights::{Fixture, modes};
use common::{Random, Values, at_every_level, epsilon};
use half::{bf16, f16};
use mlex_kernels::{Element, Linear, Mode, Projection, argmax, take_rows};
use proptest::prelude::*;

/// The elements of a task of `argmax`.
const TASK: usize = 8192;

fn plain_argmax<T: Element>(x: &[T]) -> usize {
    let mut best: Option<usize> = None;
    for (i, value) in x.iter().enumerate() {
        let larger = best.is_none_or(|best| value.to_f32() > x[best].to_f32());
        if larger && !value.to_f32().is_nan() {
            best = Some(i);
        }
    }
    best.unwrap_or(0)
}

fn check_argmax<T: Element>(x: &[f32]) {
    let x: Vec<T> = x.iter().map(|&x| T::from_f32(x)).collect();
    at_every_level(|level| {
        assert_eq!(argmax(&x), plain_argmax(&x), "{level:?}, {} long", x.len());
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_largest_is_found(length in 0usize..300, distinct in 1usize..40, seed: u64) {
        let mut r = Random::new(seed);
        let special = [f32::NAN, f32::NEG_INFINITY, f32::INFINITY, -0.0, f32::MIN];
        // Few distinct values give ties.
        let values: Vec<f32> = (0..distinct)
            .map(|_| match r.below(12) {
                i if i < special.len() && seed % 2 == 0 => special[i],
                _ => r.float(),
            })
            .collect();
        let x: Vec<f32> = (0..length).map(|_| values[r.below(distinct)]).collect();
        check_argmax::<f32>(&x);
        check_argmax::<f16>(&x);
        check_argmax::<bf16>(&x);
    }

    #[test]
    fn rows_of_dense_tables(
        n in 1usize..30,
        k in 0usize..150,
        count in 0usize..20,
        kind in 0usize..3,
        seed: u64,
    ) {
        let mut r = Random::new(seed);
        let table = Values::new(kind, &r.floats::<f32>(n * k));
        // The bias is not used.
        let bias = Values::new(kind, &r.floats::<f32>(n));
        let w = Linear::new(n, k, table.view(), Some(bias.view())).expect("valid");
        let ids: Vec<usize> = (0..count).map(|_| r.below(n)).collect();
        let get = |id: usize, i: usize| table.view().get(id * k + i);
        match seed % 3 {
            0 => check_dense::<f32>(&w, &ids, get),
            1 => check_dense::<f16>(&w, &ids, get),
            _ => check_dense::<bf16>(&w, &ids, get),
        }
    }

    #[test]
    fn rows_of_quantized_tables(
        mode in prop::sample::select(modes()),
        n in 1usize..30,
        groups in 0usize..7,
        count in 0usize..20,
        kind in 0usize..3,
        seed: u64,
    ) {
        let mut r = Random::new(seed);
        let table = Fixture::new(mode, 1, n, groups * mode.group_size(), kind, &mut r);
        let ids: Vec<usize> = (0..count).map(|_| r.below(n)).collect();
        match seed % 3 {
            0 => check_quantized::<f32>(&table, &ids),
            1 => check_quantized::<f16>(&table, &ids),
            _ => check_quantized::<bf16>(&table, &ids),
        }
    }
}

/// A value that a table has is rounded to the type of the output, once.
fn check_dense<T: Element>(w: &Linear<'_>, ids: &[usize], get: impl Fn(usize, usize) -> f32) {
    at_every_level(|level| {
        let mut out = vec![T::from_f32(f32::NAN); ids.len() * w.k()];
        take_rows(&mut out, ids, &Projection::Dense(*w)).expect("valid");
        for (i, found) in out.iter().enumerate() {
            let expected = T::from_f32(get(ids[i / w.k()], i % w.k())).to_f32();
            assert_eq!(
                found.to_f32().to_bits(),
                expected.to_bits(),
                "{level:?} {i}"
            );
        }
    });
}

fn check_quantized<T: Element>(table: &Fixture, ids: &[usize]) {
    let (mode, k) = (table.mode, table.k);
    at_every_level(|level| {
        let mut out = vec![T::from_f32(f32::NAN); ids.len() * k];
        take_rows(&mut out, ids, &Projection::Quantized(table.view(), None)).expect("valid");
        for (i, found) in out.iter().enumerate() {
            let expected = table.values[ids[i / k] * k + i % k];
            // A code times its scale, and the bias, may cancel.
            let size = match mode {
                Mode::Affine { .. } => {
                    let group = (ids[i / k] * k + i % k) / mode.group_size();
                    2.0 * f64::from(table.biases.view().get(group)).abs() + expected.abs()
                }
                _ => 0.0,
            };
            let allowed = epsilon::<T>() * expected.abs() + 1.3e-7 * size + 3e-8;
            let error = (f64::from(found.to_f32()) - expected).abs();
            assert!(
                error <= allowed,
                "{level:?} {mode:?} {i}: {} where {expected} is expected",
                found.to_f32()
            );
        }
    });
}

#[test]
fn the_largest_of_many_is_the_first_of_its_value() {
    let mut r = Random::new(3);
    for length in [TASK - 1, TASK, TASK + 1, 3 * TASK + 17] {
        let mut x: Vec<f32> = r.floats(length);
        for round in 0..8 {
            check_argmax::<f32>(&x);
            check_argmax::<bf16>(&x);
            for _ in 0..2 {
                let place = r.below(length);
                x[place] = [2.0, f32::NAN, 2.0, 3.0][round % 4];
            }
        }
    }
}

#[test]
fn what_is_no_number_is_never_the_largest() {
    let mut x = vec![f32::NAN; 2 * TASK];
    check_argmax::<f32>(&x);
    // The first that is one lies in another task.
    x[TASK + 3..].fill(f32::NEG_INFINITY);
    assert_eq!(argmax(&x), TASK + 3);
    check_argmax::<f16>(&x);
    x[2 * TASK - 1] = -5.0;
    assert_eq!(argmax(&x), 2 * TASK - 1);
    check_argmax::<bf16>(&x);
}

#[test]
fn more_rows_than_a_task() {
    let mut r = Random::new(9);
    let mode = Mode::Affine {
        bits: 8,
        group_size: 32,
    };
    let table = Fixture::new(mode, 1, 50, 576, 1, &mut r);
    let ids: Vec<usize> = (0..70).map(|_| r.below(50)).collect();
    check_quantized::<f32>(&table, &ids);
    check_quantized::<bf16>(&table, &ids);
}

#[test]
fn wrong_rows_are_refused() {
    let values = [0f32; 12];
    let w = Projection::Dense(Linear::new(3, 4, &values[..], None).expect("valid"));
    let take = |out: usize, ids: &[usize]| {
        let mut out = vec![0f32; out];
        take_rows(&mut out, ids, &w).map_err(|error| error.to_string())
    };
    assert_eq!(take(8, &[2, 0]), Ok(()));
    assert_eq!(take(0, &[]), Ok(()));
    assert_eq!(
        take(7, &[2, 0]),
        Err("take_rows: out: expected 8 elements, found 7".to_owned())
    );
    assert_eq!(
        take(8, &[2, 3]),
        Err("take_rows: ids: expected a row of the table, found 3".to_owned())
    );
    let experts = Fixture::new(Mode::Mxfp4, 2, 3, 32, 0, &mut Random::new(1));
    let table = Projection::Quantized(experts.view(), None);
    let error = take_rows(&mut [0f32; 32], &[0], &table).unwrap_err();
    assert_eq!(
        error.to_string(),
        "take_rows: table: expected one expert, found 2"
    );
}
