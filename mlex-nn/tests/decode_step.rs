//! Layers of a decode step with the kernels, which on a GPU do several of its operations in one
//! node, and with MLX's own operations.
#![allow(clippy::unwrap_used, reason = "a helper fails as its test would")]

use std::collections::BTreeMap;
use std::sync::Mutex;

use mlex_core::{Array, Dtype, QuantizationMode, Quantized, QuantizedWeight, random};
use mlex_nn::{
    Activation, AttentionConfig, GatedMlp, KvCache, LazyTensor, Mask, QuantizationConfig, RmsNorm,
    Rope, RopeConfig, RopeScaling, SelfAttention, Weights, dispatch,
};

/// Kernels are turned on and off for the whole process.
static SWITCH: Mutex<()> = Mutex::new(());

const HIDDEN: i32 = 1024;
const LAYOUT: Quantized = Quantized {
    bits: 4,
    group_size: 64,
    mode: QuantizationMode::Affine,
};
/// Half types, which the kernels are for, with how far two ways of rounding may be apart, relative to
/// the largest.
const TYPES: [(Dtype, f32); 2] = [(Dtype::Float16, 4e-3), (Dtype::Bfloat16, 3e-2)];

fn normal(seed: u64, shape: &[i32], scale: f32) -> Array {
    let key = random::key(seed).unwrap();
    let values = random::normal(0.0, 1.0, shape, Dtype::Float32, &key).unwrap();
    values.multiply(scale).unwrap()
}

/// Matrices, packed, and norms.
fn weights(matrices: &[(&str, i32, i32)], norms: &[(&str, i32)], dtype: Dtype) -> Weights {
    let mut tensors = BTreeMap::new();
    let mut add = |name: String, array: Array| tensors.insert(name, LazyTensor::ready(array));
    for (seed, &(name, outputs, columns)) in matrices.iter().enumerate() {
        let scale = (columns as f32).sqrt().recip();
        let weight = normal(seed as u64, &[outputs, columns], scale);
        let packed = QuantizedWeight::quantize(&weight.as_type(dtype).unwrap(), LAYOUT).unwrap();
        add(format!("{name}.weight"), packed.weight);
        add(format!("{name}.scales"), packed.scales);
        add(format!("{name}.biases"), packed.biases.unwrap());
    }
    for (seed, &(name, size)) in norms.iter().enumerate() {
        let weight = normal(100 + seed as u64, &[size], 0.2).add(1.0).unwrap();
        add(format!("{name}.weight"), weight.as_type(dtype).unwrap());
    }
    Weights::new(tensors, QuantizationConfig::uniform(LAYOUT))
}

/// What `compute` gives with the kernels and without, compared.
#[track_caller]
fn check(what: &str, tolerance: f32, compute: impl Fn() -> Vec<Array>) {
    let _alone = SWITCH.lock().unwrap_or_else(|lock| lock.into_inner());
    let [found, expected] = [true, false].map(|kernels| {
        dispatch::set_kernels(kernels);
        let outputs = compute();
        mlex_core::eval(&outputs).unwrap();
        dispatch::set_kernels(true);
        outputs
    });
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(
            (found.shape(), found.dtype()),
            (expected.shape(), expected.dtype()),
            "{what}"
        );
        let f32s = |array: &Array| -> Vec<f32> {
            array.as_type(Dtype::Float32).unwrap().to_vec().unwrap()
        };
        let (found, expected) = (f32s(found), f32s(expected));
        let largest = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let pairs = found.iter().zip(&expected);
        let error = pairs.fold(0.0f32, |most, (a, b)| most.max((a - b).abs())) / largest;
        assert!(error <= tolerance, "{what}: off by {error}");
    }
}

fn attention(
    heads: i32,
    kv_heads: i32,
    dim: i32,
    dims: i32,
    normed: bool,
    dtype: Dtype,
) -> SelfAttention {
    let matrices = [
        ("q_proj", heads * dim, HIDDEN),
        ("k_proj", kv_heads * dim, HIDDEN),
        ("v_proj", kv_heads * dim, HIDDEN),
        ("o_proj", HIDDEN, heads * dim),
    ];
    let norms = [("q_norm", dim), ("k_norm", dim)];
    let norms = if normed { &norms[..] } else { &[] };
    let config = AttentionConfig {
        hidden_size: HIDDEN,
        num_heads: heads,
        num_kv_heads: kv_heads,
        head_dim: dim,
        qkv_bias: false,
        o_bias: false,
        qk_norm_eps: normed.then_some(1e-6),
    };
    let rope = Rope::new(&RopeConfig {
        dims,
        base: 1e6,
        traditional: false,
        scaling: RopeScaling::Linear { factor: 2.0 },
    });
    SelfAttention::load(
        &weights(&matrices, norms, dtype),
        &config,
        Some(rope.unwrap()),
    )
    .unwrap()
}

#[test]
fn attention_after_a_prompt() {
    for (dtype, tolerance) in TYPES {
        // Heads of 96 are normalized and rotated by MLX; of 64, which half of is rotated, too.
        for (heads, kv_heads, dim, dims) in [
            (16, 8, 128, 128),
            (9, 3, 64, 64),
            (8, 2, 256, 64),
            (4, 4, 96, 96),
            (8, 8, 64, 32),
        ] {
            for normed in [true, false] {
                let layer = attention(heads, kv_heads, dim, dims, normed, dtype);
                for (batch, prompt) in [(1, 12), (2, 5)] {
                    let what = format!("{heads} heads of {dim}, {batch} rows, {normed}, {dtype}");
                    check(&what, tolerance, || {
                        let mut cache = KvCache::default();
                        let lengths = [prompt, 1, 1, 3];
                        let step = |(seed, &length): (usize, &i32)| {
                            let x = normal(7 + seed as u64, &[batch, length, HIDDEN], 1.0);
                            let mask = if length > 1 { Mask::Causal } else { Mask::None };
                            layer
                                .forward(&x.as_type(dtype).unwrap(), &mask, &mut cache)
                                .unwrap()
                        };
                        lengths.iter().enumerate().map(step).collect()
                    });
                }
            }
        }
    }
}

#[test]
fn feed_forward_of_few_rows() {
    for (dtype, tolerance) in TYPES {
        for inner in [3072, 1088] {
            let matrices = [
                ("gate_proj", inner, HIDDEN),
                ("up_proj", inner, HIDDEN),
                ("down_proj", HIDDEN, inner),
            ];
            let weights = weights(&matrices, &[], dtype);
            let mlp = GatedMlp::load(&weights, HIDDEN, inner, false, Activation::Silu).unwrap();
            for shape in [[1, 1], [1, 3], [2, 4], [3, 3]] {
                let x = normal(9, &[shape[0], shape[1], HIDDEN], 1.0);
                let x = x.as_type(dtype).unwrap();
                let what = format!("{shape:?}, {inner}, {dtype}");
                check(&what, tolerance, || vec![mlp.forward(&x).unwrap()]);
            }
        }
    }
}

#[test]
fn a_residual_sum_is_normalized() {
    for (dtype, tolerance) in TYPES {
        for width in [40, 576, 2048, 5120] {
            let weights = weights(&[], &[("norm", width)], dtype);
            let norm = RmsNorm::load(&weights.pp("norm"), width, 1e-5).unwrap();
            for shape in [[1, 1, width], [2, 9, width]] {
                let x = normal(1, &shape, 3.0).as_type(dtype).unwrap();
                let added = normal(2, &shape, 1.0).as_type(dtype).unwrap();
                let what = format!("{shape:?}, {dtype}");
                check(&what, tolerance, || {
                    let (sum, normed) = norm.forward_sum(&x, &added).unwrap();
                    vec![sum, normed]
                });
            }
        }
    }
}
