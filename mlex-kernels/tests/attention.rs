//! Attention against the definition in f64: scores of all keys, softmax, weighted sum.

mod common;

use common::{Random, at_every_level, epsilon};
use half::{bf16, f16};
use mlex_kernels::{
    AttentionOptions, AttentionShape, Element, Floats, Heads, Mask, OutputOrder, attention,
};
use proptest::prelude::*;

/// Owned data of a mask.
enum Kind {
    None,
    Causal(Option<usize>),
    Bool(Vec<bool>, [usize; 4]),
    Additive(Vec<f32>, [usize; 4]),
}

impl Kind {
    fn new(r: &mut Random, shape: &AttentionShape) -> Self {
        let [b, h, q, k] = [shape.batch, shape.q_heads, shape.q_len, shape.kv_len];
        // One mask for all sequences and heads, or one for each.
        let (strides, size) = if r.below(2) == 0 {
            ([0, 0, k, 1], q * k)
        } else {
            ([h * q * k, q * k, k, 1], b * h * q * k)
        };
        match r.below(5) {
            0 => Self::None,
            1 => Self::Causal(None),
            2 => Self::Causal(Some(1 + r.below(k + 1))),
            3 => Self::Bool((0..size).map(|_| r.below(3) > 0).collect(), strides),
            _ => {
                let values = (0..size).map(|_| {
                    if r.below(4) == 0 {
                        f32::NEG_INFINITY
                    } else {
                        r.float()
                    }
                });
                Self::Additive(values.collect(), strides)
            }
        }
    }

    fn view(&self) -> Mask<'_> {
        match self {
            Self::None => Mask::None,
            Self::Causal(window) => Mask::Causal { window: *window },
            Self::Bool(data, strides) => Mask::Bool {
                data,
                strides: *strides,
            },
            Self::Additive(data, strides) => Mask::Additive {
                data: Floats::F32(data),
                strides: *strides,
            },
        }
    }

    fn bias(&self, shape: &AttentionShape, at: [usize; 4]) -> f64 {
        let index = |s: &[usize; 4]| s.iter().zip(at).map(|(s, i)| s * i).sum::<usize>();
        let seen = match self {
            Self::None => true,
            Self::Causal(window) => {
                let position = (shape.kv_len + at[2]) as i64 - shape.q_len as i64;
                let distance = position - at[3] as i64;
                distance >= 0 && window.is_none_or(|w| distance < w as i64)
            }
            Self::Bool(data, strides) => data[index(strides)],
            Self::Additive(data, strides) => return f64::from(data[index(strides)]),
        };
        if seen { 0.0 } else { f64::NEG_INFINITY }
    }
}

/// The order of a random input: `[batch, heads, capacity, dim]` or `[batch, length, heads, dim]`.
fn strided<T: Element>(
    r: &mut Random,
    [batch, heads, length]: [usize; 3],
    dim: usize,
) -> (Vec<T>, [usize; 3]) {
    let capacity = length + r.below(3);
    let data = r.floats(batch * heads * capacity * dim);
    if r.below(2) == 0 {
        (data, [heads * capacity * dim, capacity * dim, dim])
    } else {
        (data, [capacity * heads * dim, dim, heads * dim])
    }
}

fn check<T: Element>(shape: AttentionShape, seed: u64) {
    let mut r = Random::new(seed);
    let AttentionShape {
        batch,
        q_heads,
        kv_heads,
        q_len,
        kv_len,
        head_dim,
        value_dim,
    } = shape;
    let (q, qs) = strided::<T>(&mut r, [batch, q_heads, q_len], head_dim);
    let (k, ks) = strided::<T>(&mut r, [batch, kv_heads, kv_len], head_dim);
    let (v, vs) = strided::<T>(&mut r, [batch, kv_heads, kv_len], value_dim);
    let mask = Kind::new(&mut r, &shape);
    let sinks: Vec<f32> = r.floats(q_heads);
    let sinks = (r.below(3) == 0).then_some(&sinks[..]);
    let output = if r.below(2) == 0 {
        OutputOrder::HeadsFirst
    } else {
        OutputOrder::LengthFirst
    };
    let scale = 0.3;
    let options = AttentionOptions {
        scale,
        mask: mask.view(),
        sinks,
        output,
    };

    let get = |data: &[T], s: [usize; 3], at: [usize; 3], i: usize| {
        f64::from(data[at[0] * s[0] + at[1] * s[1] + at[2] * s[2] + i].to_f32())
    };
    let mut expected = vec![0.0; batch * q_heads * q_len * value_dim];
    for b in 0..batch {
        for h in 0..q_heads {
            let kv = h / (q_heads / kv_heads);
            for i in 0..q_len {
                let scores: Vec<f64> = (0..kv_len)
                    .map(|j| {
                        let dot: f64 = (0..head_dim)
                            .map(|c| get(&q, qs, [b, h, i], c) * get(&k, ks, [b, kv, j], c))
                            .sum();
                        dot * f64::from(scale) + mask.bias(&shape, [b, h, i, j])
                    })
                    .collect();
                let mut total: f64 = scores.iter().map(|s| s.exp()).sum();
                total += sinks.map_or(0.0, |sinks| f64::from(sinks[h]).exp());
                let row = match output {
                    OutputOrder::HeadsFirst => (b * q_heads + h) * q_len + i,
                    OutputOrder::LengthFirst => (b * q_len + i) * q_heads + h,
                };
                for c in 0..value_dim {
                    let sum: f64 = (0..kv_len)
                        .map(|j| scores[j].exp() * get(&v, vs, [b, kv, j], c))
                        .sum();
                    expected[row * value_dim + c] = if total > 0.0 { sum / total } else { 0.0 };
                }
            }
        }
    }
    at_every_level(|level| {
        let mut out = vec![T::from_f32(f32::NAN); expected.len()];
        let heads = |data, strides| Heads { data, strides };
        attention(
            &mut out,
            heads(&q, qs),
            heads(&k, ks),
            heads(&v, vs),
            shape,
            options,
        )
        .expect("valid arguments");
        for (i, (found, expected)) in out.iter().zip(&expected).enumerate() {
            let error = (f64::from(found.to_f32()) - expected).abs();
            // Weights sum to one and values are below one.
            let allowed = 2e-6 + epsilon::<T>() * expected.abs();
            assert!(
                error <= allowed,
                "{level:?} {shape:?} {i}: {found:?} != {expected}",
                found = found.to_f32()
            );
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_shape_mask_and_order(
        batch in 1usize..3,
        kv_heads in 1usize..3,
        group in 1usize..5,
        q_len in 0usize..40,
        kv_len in 0usize..260,
        head in 1usize..6,
        value in 1usize..6,
        seed: u64,
    ) {
        let shape = AttentionShape {
            batch,
            kv_heads,
            q_heads: kv_heads * group,
            // Half of the cases are decode steps.
            q_len: if seed & 8 == 0 { q_len % 5 } else { q_len },
            kv_len,
            head_dim: head * 16,
            value_dim: value * 16,
        };
        match seed % 3 {
            0 => check::<f32>(shape, seed),
            1 => check::<f16>(shape, seed),
            _ => check::<bf16>(shape, seed),
        }
    }
}

#[test]
fn long_prefill_and_decode() {
    let shape = AttentionShape {
        batch: 1,
        kv_heads: 2,
        q_heads: 6,
        q_len: 150,
        kv_len: 300,
        head_dim: 64,
        value_dim: 64,
    };
    for seed in 0..6 {
        check::<f32>(shape, seed);
        check::<f32>(
            AttentionShape {
                q_len: 1,
                kv_len: 1000,
                ..shape
            },
            seed,
        );
    }
    check::<bf16>(
        AttentionShape {
            head_dim: 256,
            value_dim: 256,
            ..shape
        },
        1,
    );
}

#[test]
fn wrong_arguments_are_refused() {
    let shape = AttentionShape {
        batch: 1,
        kv_heads: 2,
        q_heads: 4,
        q_len: 1,
        kv_len: 3,
        head_dim: 16,
        value_dim: 16,
    };
    let options = AttentionOptions {
        scale: 1.0,
        mask: Mask::None,
        sinks: None,
        output: OutputOrder::HeadsFirst,
    };
    let run =
        |shape: AttentionShape, options: AttentionOptions<'_>, out: usize, q: usize, k: usize| {
            let (q, k) = (vec![0f32; q], vec![0f32; k]);
            let heads = Heads::contiguous(&k, 2, 3, 16);
            attention(
                &mut vec![0f32; out],
                Heads::contiguous(&q, 4, 1, 16),
                heads,
                heads,
                shape,
                options,
            )
        };
    assert!(run(shape, options, 64, 64, 96).is_ok());
    assert!(run(shape, options, 63, 64, 96).is_err());
    assert!(run(shape, options, 64, 63, 96).is_err());
    assert!(run(shape, options, 64, 64, 95).is_err());
    assert!(
        run(
            AttentionShape {
                kv_heads: 3,
                ..shape
            },
            options,
            64,
            64,
            96
        )
        .is_err()
    );
    assert!(
        run(
            AttentionShape {
                kv_heads: 0,
                ..shape
            },
            options,
            64,
            64,
            96
        )
        .is_err()
    );
    assert!(
        run(
            AttentionShape {
                head_dim: 17,
                ..shape
            },
            options,
            64,
            64,
            96
        )
        .is_err()
    );
    assert!(
        run(
            AttentionShape {
                batch: usize::MAX,
                ..shape
            },
            options,
            64,
            64,
            96
        )
        .is_err()
    );
    let sinks = [0.0; 3];
    let options = AttentionOptions {
        sinks: Some(&sinks),
        ..options
    };
    assert!(run(shape, options, 64, 64, 96).is_err());
    let mask = Mask::Bool {
        data: &[true; 2],
        strides: [0, 0, 3, 1],
    };
    assert!(
        run(
            shape,
            AttentionOptions {
                mask,
                sinks: None,
                ..options
            },
            64,
            64,
            96
        )
        .is_err()
    );
}
