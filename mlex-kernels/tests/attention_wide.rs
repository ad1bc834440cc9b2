//! Attention with the wide heads and windows of Gemma 4 (heads of 256 in windowed layers, of 512
//! in full ones, unscaled scores) against the definition in f64.

mod common;

use common::{Random, at_every_level, epsilon};
use half::{bf16, f16};
use mlex_kernels::{
    AttentionOptions, AttentionShape, Element, Heads, Mask, OutputOrder, attention,
};

/// How the window is told to the kernel.
#[derive(Clone, Copy, Debug)]
enum Form {
    Causal,
    /// One array for all heads, as a cache makes it.
    Bool,
}

/// Whether the query of a position sees a key.
fn sees(position: usize, key: usize, window: Option<usize>) -> bool {
    key <= position && window.is_none_or(|window| position - key < window)
}

fn check<T: Element>(shape: AttentionShape, window: Option<usize>, form: Form, seed: u64) {
    let mut r = Random::new(seed);
    let AttentionShape {
        batch,
        q_heads,
        kv_heads,
        q_len,
        kv_len,
        head_dim: dim,
        ..
    } = shape;
    // Keys and values as a cache has them, with room at the end; queries as a projection does.
    let capacity = kv_len + 5;
    let queries: Vec<T> = r.floats(batch * q_len * q_heads * dim);
    let keys: Vec<T> = r.floats(batch * kv_heads * capacity * dim);
    let values: Vec<T> = r.floats(batch * kv_heads * capacity * dim);
    let first = kv_len - q_len;
    let visible: Vec<bool> = (0..q_len * kv_len)
        .map(|i| sees(first + i / kv_len, i % kv_len, window))
        .collect();
    let number = |x: &T| f64::from(x.to_f32());

    let mut expected = Vec::new();
    for b in 0..batch {
        for query in 0..q_len {
            for head in 0..q_heads {
                let q = &queries[((b * q_len + query) * q_heads + head) * dim..][..dim];
                let row = |data: &[T], key: usize| -> Vec<f64> {
                    let head = b * kv_heads + head / (q_heads / kv_heads);
                    let start = (head * capacity + key) * dim;
                    data[start..start + dim].iter().map(number).collect()
                };
                let mut sum = vec![0.0; dim];
                let mut total = 0.0;
                for key in (0..kv_len).filter(|key| visible[query * kv_len + key]) {
                    let score: f64 = row(&keys, key)
                        .iter()
                        .zip(q)
                        .map(|(k, q)| k * number(q))
                        .sum();
                    total += score.exp();
                    for (sum, value) in sum.iter_mut().zip(row(&values, key)) {
                        *sum += score.exp() * value;
                    }
                }
                expected.extend(sum.iter().map(|sum| sum / total));
            }
        }
    }
    let mask = match form {
        Form::Causal => Mask::Causal { window },
        Form::Bool => Mask::Bool {
            data: &visible,
            strides: [0, 0, kv_len, 1],
        },
    };
    let options = AttentionOptions {
        scale: 1.0,
        mask,
        sinks: None,
        output: OutputOrder::LengthFirst,
    };
    let cached = [kv_heads * capacity * dim, capacity * dim, dim];
    let projected = [q_len * q_heads * dim, dim, q_heads * dim];
    at_every_level(|level| {
        let mut out = vec![T::from_f32(f32::NAN); expected.len()];
        let heads = |data, strides| Heads { data, strides };
        attention(
            &mut out,
            heads(&queries, projected),
            heads(&keys, cached),
            heads(&values, cached),
            shape,
            options,
        )
        .expect("valid arguments");
        for (i, (found, expected)) in out.iter().zip(&expected).enumerate() {
            let error = (number(found) - expected).abs();
            // Scores of some tens, in f32, are off by some 1e-6 of that, and so are the weights.
            let allowed = 2e-5 + epsilon::<T>() * expected.abs();
            assert!(
                error <= allowed,
                "{level:?} {shape:?} {window:?} {form:?} {i}: {} != {expected}",
                found.to_f32()
            );
        }
    });
}

fn every_type(shape: AttentionShape, window: Option<usize>, form: Form, seed: u64) {
    check::<f32>(shape, window, form, seed);
    check::<f16>(shape, window, form, seed + 1);
    check::<bf16>(shape, window, form, seed + 2);
}

fn shape(heads: [usize; 2], q_len: usize, kv_len: usize, dim: usize) -> AttentionShape {
    AttentionShape {
        batch: 1,
        q_heads: heads[0],
        kv_heads: heads[1],
        q_len,
        kv_len,
        head_dim: dim,
        value_dim: dim,
    }
}

#[test]
fn full_layers() {
    for (q_len, kv_len) in [(1, 1), (1, 300), (2, 129), (5, 70), (33, 33), (40, 161)] {
        every_type(shape([4, 1], q_len, kv_len, 512), None, Form::Causal, 1);
        every_type(shape([4, 2], q_len, kv_len, 512), None, Form::Bool, 7);
    }
}

#[test]
fn windowed_layers_on_both_sides_of_the_window() {
    let window = 64;
    for (q_len, kv_len) in [
        (1, 63),
        (1, 64),
        (1, 65),
        (3, 64),
        (3, 66),
        (20, 83),
        (64, 64),
        (65, 65),
        (70, 133),
        (100, 163),
    ] {
        for form in [Form::Causal, Form::Bool] {
            every_type(shape([4, 1], q_len, kv_len, 256), Some(window), form, 3);
        }
    }
}

#[test]
fn windows_of_one_and_of_more_than_there_is() {
    for window in [1, 2, 1000] {
        for q_len in [1, 2, 50] {
            let shape = shape([2, 2], q_len, 50, 256);
            every_type(shape, Some(window), Form::Causal, 5);
            every_type(shape, Some(window), Form::Bool, 5);
        }
    }
}

#[test]
fn a_batch_with_many_heads() {
    let shape = AttentionShape {
        batch: 2,
        ..shape([16, 8], 9, 90, 256)
    };
    every_type(shape, Some(32), Form::Causal, 11);
    let shape = AttentionShape {
        batch: 2,
        ..self::shape([16, 1], 9, 90, 512)
    };
    every_type(shape, None, Form::Causal, 12);
}
