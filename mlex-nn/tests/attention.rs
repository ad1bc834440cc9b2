//! The attention layer and the gated feed-forward layer against plain operations.
#![allow(clippy::unwrap_used, reason = "a helper fails as its test would")]

use std::collections::BTreeMap;

use mlex_core::{Array, Dtype, random};
use mlex_nn::{
    Activation, AttentionConfig, GatedMlp, KvCache, LazyTensor, Offset, QuantizationConfig, Rope,
    RopeConfig, RopeScaling, SelfAttention, Weights,
};

const HIDDEN: i32 = 24;
const HEADS: i32 = 4;
const KV_HEADS: i32 = 2;
const HEAD_DIM: i32 = 8;

/// Arrays by name, in reproducible random values.
struct Tensors(BTreeMap<String, Array>);

impl Tensors {
    fn new(shapes: &[(&str, &[i32])]) -> Self {
        let tensor = |(index, (name, shape)): (usize, &(&str, &[i32]))| {
            let key = random::key(index as u64).unwrap();
            let array = random::normal(0.0, 0.4, shape, Dtype::Float32, &key).unwrap();
            ((*name).to_owned(), array)
        };
        Self(shapes.iter().enumerate().map(tensor).collect())
    }

    fn weights(&self) -> Weights {
        let ready =
            |(name, array): (&String, &Array)| (name.clone(), LazyTensor::ready(array.clone()));
        let tensors = self.0.iter().map(ready).collect();
        Weights::new(tensors, QuantizationConfig::default())
    }

    /// `x W^T`, plus the bias where there is one.
    fn linear(&self, name: &str, x: &Array) -> Array {
        let weight = &self.0[&format!("{name}.weight")];
        let y = x.matmul(&weight.t().unwrap()).unwrap();
        match self.0.get(&format!("{name}.bias")) {
            Some(bias) => y.add(bias).unwrap(),
            None => y,
        }
    }
}

#[track_caller]
fn assert_close(found: &Array, expected: &Array) {
    assert_eq!(found.shape(), expected.shape());
    let pairs = found.to_vec::<f32>().unwrap();
    for (a, b) in pairs.iter().zip(expected.to_vec::<f32>().unwrap()) {
        assert!((a - b).abs() < 2e-5, "{a} where {b} is expected");
    }
}

fn input(len: i32) -> Array {
    let key = random::key(99).unwrap();
    random::normal(0.0, 1.0, &[2, len, HIDDEN], Dtype::Float32, &key).unwrap()
}

fn rope() -> Rope {
    Rope::new(&RopeConfig {
        dims: HEAD_DIM,
        base: 10000.0,
        traditional: false,
        scaling: RopeScaling::None,
    })
    .unwrap()
}

fn tensors() -> Tensors {
    Tensors::new(&[
        ("q_proj.weight", &[HEADS * HEAD_DIM, HIDDEN]),
        ("q_proj.bias", &[HEADS * HEAD_DIM]),
        ("k_proj.weight", &[KV_HEADS * HEAD_DIM, HIDDEN]),
        ("k_proj.bias", &[KV_HEADS * HEAD_DIM]),
        ("v_proj.weight", &[KV_HEADS * HEAD_DIM, HIDDEN]),
        ("v_proj.bias", &[KV_HEADS * HEAD_DIM]),
        ("o_proj.weight", &[HIDDEN, HEADS * HEAD_DIM]),
        ("q_norm.weight", &[HEAD_DIM]),
        ("k_norm.weight", &[HEAD_DIM]),
    ])
}

const CONFIG: AttentionConfig = AttentionConfig {
    hidden_size: HIDDEN,
    num_heads: HEADS,
    num_kv_heads: KV_HEADS,
    head_dim: HEAD_DIM,
    qkv_bias: true,
    o_bias: false,
    qk_norm_eps: Some(1e-6),
};

/// The whole layer in plain operations, without a cache.
fn plain(tensors: &Tensors, x: &Array) -> mlex_core::Result<Array> {
    let len = x.dim(1)?;
    let heads = |name: &str, count| -> mlex_core::Result<Array> {
        tensors
            .linear(name, x)
            .reshape(&[2, len, count, HEAD_DIM])?
            .transpose(&[0, 2, 1, 3])
    };
    let normed = |name: &str, norm: &str, count| -> mlex_core::Result<Array> {
        let x = heads(name, count)?;
        let mean = x.square()?.mean(&[-1], true)?.add(1e-6)?;
        let x = x
            .multiply(&mean.rsqrt()?)?
            .multiply(&tensors.0[&format!("{norm}.weight")])?;
        Ok(rope().forward(&x, &Offset::Same(0)).unwrap())
    };
    let q = normed("q_proj", "q_norm", HEADS)?;
    // Each key and value head serves neighbouring query heads.
    let groups = HEADS / KV_HEADS;
    let k = normed("k_proj", "k_norm", KV_HEADS)?.repeat(groups, 1)?;
    let v = heads("v_proj", KV_HEADS)?.repeat(groups, 1)?;
    let scores = q
        .matmul(&k.swap_axes(-1, -2)?)?
        .multiply((HEAD_DIM as f32).powf(-0.5))?;
    let hidden = Array::full(&[len, len], f32::NEG_INFINITY, Dtype::Float32)?.triu(1)?;
    let mixed = scores.add(&hidden)?.softmax(&[-1], true)?.matmul(&v)?;
    let merged = mixed
        .transpose(&[0, 2, 1, 3])?
        .reshape(&[2, len, HEADS * HEAD_DIM])?;
    Ok(tensors.linear("o_proj", &merged))
}

#[test]
fn self_attention_is_what_plain_operations_give() {
    let tensors = tensors();
    let weights = tensors.weights();
    let layer = SelfAttention::load(&weights, &CONFIG, Some(rope())).unwrap();
    weights.finish().unwrap();
    let x = input(9);
    let expected = plain(&tensors, &x).unwrap();
    for chunks in [&[9][..], &[4, 5], &[1, 1, 1, 1, 1, 1, 1, 1, 1], &[7, 1, 1]] {
        let mut cache = KvCache::default();
        let mut outputs = Vec::new();
        for &len in chunks {
            let start = cache.len();
            let part = x.slice_axis(1, start, start + len).unwrap();
            let mask = cache.mask(len).unwrap();
            outputs.push(layer.forward(&part, &mask, &mut cache).unwrap());
        }
        assert_close(&Array::concatenate(&outputs, 1).unwrap(), &expected);
    }
}

#[test]
fn key_value_heads_divide_the_query_heads() {
    for num_kv_heads in [0, 3, -1] {
        let config = AttentionConfig {
            num_kv_heads,
            ..CONFIG
        };
        let error = SelfAttention::load(&tensors().weights(), &config, None).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "num_key_value_heads: expected a divisor of the 4 query heads, found {num_kv_heads}"
            )
        );
    }
}

#[test]
fn the_gated_layer_is_what_plain_operations_give() {
    let tensors = Tensors::new(&[
        ("gate_proj.weight", &[40, HIDDEN]),
        ("up_proj.weight", &[40, HIDDEN]),
        ("down_proj.weight", &[HIDDEN, 40]),
    ]);
    let weights = tensors.weights();
    let layer = GatedMlp::load(&weights, HIDDEN, 40, false, Activation::Silu).unwrap();
    weights.finish().unwrap();
    let x = input(3);
    let gate = tensors.linear("gate_proj", &x);
    let gated = gate.multiply(&gate.sigmoid().unwrap()).unwrap();
    let up = gated.multiply(&tensors.linear("up_proj", &x)).unwrap();
    assert_close(
        &layer.forward(&x).unwrap(),
        &tensors.linear("down_proj", &up),
    );
}

#[test]
fn rope_settings_are_checked() {
    let refused = |dims, base, scaling| {
        let config = RopeConfig {
            dims,
            base,
            traditional: false,
            scaling,
        };
        Rope::new(&config).unwrap_err().to_string()
    };
    let none = || RopeScaling::None;
    for dims in [0, -2, 7] {
        assert!(refused(dims, 1e4, none()).starts_with("rope dims: expected"));
    }
    for base in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(refused(8, base, none()).starts_with("rope_theta: expected"));
    }
    let linear = RopeScaling::Linear { factor: 0.0 };
    assert_eq!(
        refused(8, 1e4, linear),
        "factor: expected a positive number, found 0"
    );
    let long = RopeScaling::Long {
        long_factor: vec![1.0; 3],
        max_position_embeddings: 8192.0,
        original_max_position_embeddings: 4096.0,
    };
    assert_eq!(
        refused(8, 1e4, long),
        "long_factor: expected 4 numbers, found 3"
    );
    let proportional = RopeScaling::Proportional {
        factor: 1.0,
        partial_rotary_factor: 1.5,
    };
    assert_eq!(
        refused(8, 1e4, proportional),
        "partial_rotary_factor: expected a number from 0 to 1, found 1.5"
    );
}
