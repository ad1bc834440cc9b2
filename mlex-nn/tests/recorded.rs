//! Layers recorded one after another in one sequence against the same layers one by one, whose
//! own tests compare them with plain arithmetic.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use mlex_core::Array;
use mlex_nn::{
    Activation, AttentionConfig, Experts, GatedAttention, GatedDeltaConfig, GatedDeltaNet, KvCache,
    LayerCache, LazyTensor, Mask, MoeConfig, MoeMlp, QuantizationConfig, RecurrentCache, RmsNorm,
    Rope, RopeConfig, RopeScaling, SelfAttention, Sequence, Weights,
};

const HIDDEN: i32 = 32;

/// A repeatable source of numbers from -1 to 1 (Knuth's MMIX constants).
fn random(seed: usize, shape: &[i32]) -> Array {
    let mut state = seed as u64;
    let count: i32 = shape.iter().product();
    let values: Vec<f32> = (0..count)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            0.4 * ((state >> 40) as f32 / (1u32 << 23) as f32 - 1.0)
        })
        .collect();
    Array::from_slice(&values, shape).unwrap()
}

fn weights(shapes: &[(&str, &[i32])]) -> Weights {
    let tensors = shapes.iter().enumerate().map(|(seed, (name, shape))| {
        let array = LazyTensor::ready(random(seed, shape));
        ((*name).to_owned(), array)
    });
    Weights::new(
        tensors.collect::<BTreeMap<_, _>>(),
        QuantizationConfig::default(),
    )
}

fn close(found: &Array, expected: &Array) {
    assert_eq!(found.shape(), expected.shape());
    let found: Vec<f32> = found.to_vec().unwrap();
    let expected: Vec<f32> = expected.to_vec().unwrap();
    for (found, expected) in found.iter().zip(expected) {
        assert!(
            (found - expected).abs() <= 1e-5 * expected.abs().max(1.0),
            "{found} != {expected}"
        );
    }
}

fn delta_net() -> GatedDeltaNet {
    let config = GatedDeltaConfig {
        hidden_size: HIDDEN,
        num_key_heads: 1,
        num_value_heads: 2,
        key_head_dim: 16,
        value_head_dim: 16,
        conv_kernel: 4,
        norm_eps: 1e-6,
    };
    let weights = weights(&[
        ("in_proj_qkvz.weight", &[96, HIDDEN]),
        ("in_proj_ba.weight", &[4, HIDDEN]),
        ("conv1d.weight", &[64, 4, 1]),
        ("A_log", &[2]),
        ("dt_bias", &[2]),
        ("norm.weight", &[16]),
        ("out_proj.weight", &[HIDDEN, 32]),
    ]);
    GatedDeltaNet::load(&weights, &config).unwrap()
}

const ATTENTION: AttentionConfig = AttentionConfig {
    hidden_size: HIDDEN,
    num_heads: 2,
    num_kv_heads: 1,
    head_dim: 16,
    qkv_bias: false,
    o_bias: false,
    qk_norm_eps: Some(1e-6),
};

fn rope() -> Rope {
    Rope::new(&RopeConfig {
        dims: 8,
        base: 10_000.0,
        traditional: false,
        scaling: RopeScaling::None,
    })
    .unwrap()
}

fn attention_weights(queries: i32) -> Weights {
    weights(&[
        ("q_proj.weight", &[queries, HIDDEN]),
        ("k_proj.weight", &[16, HIDDEN]),
        ("v_proj.weight", &[16, HIDDEN]),
        ("o_proj.weight", &[HIDDEN, 32]),
        ("q_norm.weight", &[16]),
        ("k_norm.weight", &[16]),
    ])
}

fn moe_config() -> MoeConfig {
    MoeConfig {
        hidden_size: HIDDEN,
        intermediate_size: 24,
        num_experts: 3,
        experts_per_token: 2,
        normalize: true,
        shared_intermediate_size: Some(16),
        gate: Some(Activation::Silu),
    }
}

fn experts() -> Vec<(&'static str, &'static [i32])> {
    vec![
        ("switch_mlp.gate_proj.weight", &[3, 24, HIDDEN]),
        ("switch_mlp.up_proj.weight", &[3, 24, HIDDEN]),
        ("switch_mlp.down_proj.weight", &[3, HIDDEN, 24]),
    ]
}

fn mixture() -> MoeMlp {
    let mut shapes = experts();
    shapes.extend([
        ("gate.weight", &[3, HIDDEN][..]),
        ("shared_expert.gate_proj.weight", &[16, HIDDEN]),
        ("shared_expert.up_proj.weight", &[16, HIDDEN]),
        ("shared_expert.down_proj.weight", &[HIDDEN, 16]),
        ("shared_expert_gate.weight", &[1, HIDDEN]),
    ]);
    MoeMlp::load(&weights(&shapes), &moe_config()).unwrap()
}

#[test]
fn layers_in_one_sequence_are_the_layers_one_by_one() {
    let delta = delta_net();
    let gated = GatedAttention::load(&attention_weights(64), &ATTENTION, 1e-6, rope()).unwrap();
    let plain = SelfAttention::load(&attention_weights(32), &ATTENTION, Some(rope())).unwrap();
    let moe = mixture();
    let norm = RmsNorm::new(random(5, &[HIDDEN]), 1e-6);
    let mut caches = [
        LayerCache::Recurrent(RecurrentCache::default()),
        LayerCache::Attention(KvCache::default()),
        LayerCache::Attention(KvCache::with_window(4).unwrap()),
    ];
    let mut others = caches.clone();
    // A prompt that is longer than the window, single tokens, and several at once.
    for (seed, length) in [7, 1, 1, 3].into_iter().enumerate() {
        let x = random(30 + seed, &[2, length, HIDDEN]);
        let masks: Vec<Mask> = caches[1..]
            .iter_mut()
            .map(|cache| cache.attention().unwrap().mask(length).unwrap())
            .collect();

        let (mut sequence, value) = Sequence::start(&x).unwrap().unwrap();
        let s = &mut sequence;
        let mut updates = Vec::new();
        let cache = caches[0].recurrent().unwrap();
        let (y, update) = delta.record(s, value, cache).unwrap().unwrap();
        updates.push(update);
        let (h, y) = norm.record_sum(s, value, y, 1.0).unwrap().unwrap();
        let cache = caches[1].attention().unwrap();
        let (y, update) = gated.record(s, y, &masks[0], cache).unwrap().unwrap();
        updates.push(update);
        let h = s.add(h, y, 0.5).unwrap();
        let y = moe.record(s, h).unwrap().unwrap();
        let h = s.add(h, y, 1.0).unwrap();
        let cache = caches[2].attention().unwrap();
        let (y, update) = plain.record(s, h, &masks[1], cache).unwrap().unwrap();
        updates.push(update);
        let found = sequence.finish_updating(y, &updates, &mut caches).unwrap();

        let y = delta.forward(&x, others[0].recurrent().unwrap()).unwrap();
        let (h, y) = norm.forward_sum(&x, &y).unwrap();
        let cache = others[1].attention().unwrap();
        let y = gated.forward(&y, &masks[0], cache).unwrap();
        let h = h.add(&y).unwrap().multiply(0.5).unwrap();
        let h = h.add(&moe.forward(&h).unwrap()).unwrap();
        let cache = others[2].attention().unwrap();
        let expected = plain.forward(&h, &masks[1], cache).unwrap();
        close(&found, &expected);
        for (cache, other) in caches.iter().zip(&others) {
            assert_eq!(cache.len(), other.len());
        }
    }
}

#[test]
fn an_update_wants_a_cache_of_its_kind() {
    let delta = delta_net();
    let x = random(1, &[1, 2, HIDDEN]);
    let (mut sequence, value) = Sequence::start(&x).unwrap().unwrap();
    let recorded = delta.record(&mut sequence, value, &RecurrentCache::default());
    let (y, update) = recorded.unwrap().unwrap();
    let mut caches = [LayerCache::Attention(KvCache::default())];
    let error = sequence.finish_updating(y, &[update], &mut caches);
    assert!(error.is_err());
    assert!(caches[0].is_empty());
}

#[test]
fn factors_multiply_what_an_expert_gives() {
    let config = MoeConfig {
        experts_per_token: 1,
        shared_intermediate_size: None,
        ..moe_config()
    };
    let load = || Experts::load(&weights(&experts()), "switch_mlp", &config).unwrap();
    let x = random(3, &[1, 3, HIDDEN]);
    // Token i goes to expert i.
    let logits = [5.0f32, 0.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 5.0];
    let logits = Array::from_slice(&logits, &[1, 3, 3]).unwrap();
    let factors = Array::from_slice(&[2.0f32, -1.0, 0.5], &[3]).unwrap();
    let found = load().with_factors(factors.clone()).forward(&x, &logits);
    let by_token = factors.reshape(&[1, 3, 1]).unwrap();
    let expected = load().forward(&x, &logits).unwrap().multiply(&by_token);
    close(&found.unwrap(), &expected.unwrap());
}

#[test]
fn values_that_do_not_fit_have_no_step() {
    let x = random(3, &[1, 3, 8]);
    let (mut sequence, value) = Sequence::start(&x).unwrap().unwrap();
    let other = sequence.input(&random(4, &[1, 8, 3]));
    let ids = sequence.input(&Array::from_slice(&[1i32, 2], &[1, 2]).unwrap());
    assert!(sequence.add(value, other, 1.0).is_none());
    assert!(sequence.gate(Activation::Sigmoid, value, other).is_none());
    assert!(sequence.scale(ids, 2.0).is_none());
    for (period, first, width) in [(3, 0, 1), (4, 3, 2), (4, -1, 2), (4, 0, 0), (0, 0, 1)] {
        assert!(sequence.columns(value, period, first, width).is_none());
    }
    let columns = sequence.columns(value, 4, 1, 2).unwrap();
    let found = sequence.finish(&[columns]).unwrap().remove(0);
    let rows = x.reshape(&[6, 4]).unwrap();
    let expected = rows.slice_axis(1, 1, 3).unwrap();
    close(&found, &expected.reshape(&[1, 3, 4]).unwrap());
}
