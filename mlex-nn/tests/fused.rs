//! Chains of element-wise operations that are one host operation on the CPU, against the same in
//! MLX's own operations.
#![allow(clippy::unwrap_used, reason = "a helper fails as its test would")]

use std::collections::BTreeMap;
use std::sync::Mutex;

use mlex_core::{Array, Dtype, random};
use mlex_nn::{
    Activation, LazyTensor, QuantizationConfig, RmsNorm, Rotations, Weights, add_normed, clip,
    dispatch, softcap,
};

/// Kernels are turned on and off for the whole process.
static SWITCH: Mutex<()> = Mutex::new(());

fn normal(seed: u64, shape: &[i32], dtype: Dtype) -> Array {
    let key = random::key(seed).unwrap();
    let values = random::normal(0.0, 1.0, shape, Dtype::Float32, &key).unwrap();
    values.as_type(dtype).unwrap()
}

fn norm(seed: u64, size: i32, dtype: Dtype) -> RmsNorm {
    let weight = LazyTensor::ready(normal(seed, &[size], dtype));
    let tensors = BTreeMap::from([("weight".to_owned(), weight)]);
    RmsNorm::load(
        &Weights::new(tensors, QuantizationConfig::default()),
        size,
        1e-6,
    )
    .unwrap()
}

/// What `compute` gives with the kernels and without.
fn both(compute: impl Fn() -> Vec<Array>) -> [Vec<Array>; 2] {
    let _alone = SWITCH.lock().unwrap();
    [true, false].map(|kernels| {
        dispatch::set_kernels(kernels);
        let outputs = compute();
        mlex_core::eval(&outputs).unwrap();
        dispatch::set_kernels(true);
        outputs
    })
}

#[track_caller]
fn assert_close([found, expected]: [Vec<Array>; 2], dtype: Dtype, tolerance: f32) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(
            (found.shape(), found.dtype()),
            (expected.shape(), expected.dtype())
        );
        assert_eq!(found.dtype(), dtype);
        let f32s = |array: &Array| -> Vec<f32> {
            array.as_type(Dtype::Float32).unwrap().to_vec().unwrap()
        };
        for (a, b) in f32s(found).iter().zip(f32s(expected)) {
            assert!(
                (a - b).abs() <= tolerance * b.abs().max(1.0),
                "{a} where {b} is expected in {dtype}"
            );
        }
    }
}

/// Each type with how far two ways of rounding may be apart.
const TYPES: [(Dtype, f32); 3] = [
    (Dtype::Float32, 2e-6),
    (Dtype::Float16, 3e-3),
    (Dtype::Bfloat16, 2.5e-2),
];

#[test]
fn a_part_is_normalized_and_added_to_the_stream() {
    for (dtype, tolerance) in TYPES {
        for shape in [&[1, 1, 64][..], &[2, 7, 96], &[3, 0, 32], &[5, 48]] {
            let size = *shape.last().unwrap();
            let (x, part) = (normal(1, shape, dtype), normal(2, shape, dtype));
            let (post, next) = (norm(3, size, dtype), norm(4, size, dtype));
            let scale = normal(5, &[1], dtype);
            for scale in [None, Some(&scale)] {
                for next in [None, Some(&next)] {
                    let results = both(|| {
                        let (sum, normed) = add_normed(&x, &part, &post, scale, next).unwrap();
                        assert_eq!(normed.is_some(), next.is_some());
                        [sum].into_iter().chain(normed).collect()
                    });
                    assert_close(results, dtype, tolerance);
                }
            }
        }
    }
}

#[test]
fn shapes_that_only_broadcast_are_added_too() {
    let dtype = Dtype::Float32;
    let (x, part) = (normal(1, &[2, 3, 32], dtype), normal(2, &[1, 3, 32], dtype));
    let (post, next) = (norm(3, 32, dtype), norm(4, 32, dtype));
    let results = both(|| {
        let (sum, normed) = add_normed(&x, &part, &post, None, Some(&next)).unwrap();
        vec![sum, normed.unwrap()]
    });
    assert_close(results, dtype, 2e-6);
}

#[test]
fn logits_are_bounded_softly() {
    for (dtype, tolerance) in TYPES {
        for shape in [&[1, 1, 1000][..], &[2, 3, 17], &[0, 4]] {
            let x = normal(7, shape, dtype).multiply(20.0).unwrap();
            let results = both(|| vec![softcap(&x, 30.0).unwrap()]);
            assert_close(results, dtype, tolerance);
        }
    }
}

#[test]
fn activations_alone() {
    for (dtype, tolerance) in TYPES {
        for shape in [&[1, 1, 1000][..], &[2, 3, 17], &[0, 4], &[5]] {
            let x = normal(8, shape, dtype).multiply(3.0).unwrap();
            for activation in [
                Activation::Silu,
                Activation::Gelu,
                Activation::GeluTanh,
                Activation::Sigmoid,
            ] {
                let results = both(|| vec![activation.apply(&x).unwrap()]);
                assert_close(results, dtype, tolerance);
            }
        }
    }
}

#[test]
fn heads_turn_in_parts() {
    for (dtype, tolerance) in TYPES {
        // Of three parts of ten entries, eight turn in pairs.
        for (parts, part, pairs, length) in [(1, 16, 8, 5), (2, 32, 16, 7), (3, 10, 4, 4)] {
            let angles: Vec<f32> = (0..length * parts * pairs)
                .map(|n| n as f32 * 0.7)
                .collect();
            let rotations =
                Rotations::of_parts(&angles, parts as usize, pairs as usize, 0.5).unwrap();
            // Heads behind positions, as a projection has them.
            let x = normal(9, &[2, length, 3, parts * part], dtype);
            let x = x.transpose(&[0, 2, 1, 3]).unwrap();
            let results = both(|| vec![rotations.apply(&x).unwrap()]);
            assert_close(results, dtype, tolerance);
        }
    }
}

#[test]
fn numbers_are_clipped() {
    for (dtype, _) in TYPES {
        for shape in [&[1, 1, 1000][..], &[2, 3, 17], &[0, 4], &[5], &[]] {
            let x = normal(10, shape, dtype);
            for bounds in [[-0.7, 0.3], [-1e10, 1e10]] {
                let results = both(|| vec![clip(&x, bounds).unwrap()]);
                assert_close(results, dtype, 0.0);
            }
        }
    }
}
