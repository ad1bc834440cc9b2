//! Keys and values that are packed or limited: kernels as MLX's operations, snapshots, states.

use mlex_core::{Array, Dtype};
use mlex_nn::{
    AttentionConfig, Cache, KvPacking, KvQuantization, LayerState, Rope, RopeConfig, RopeScaling,
    SelfAttention,
};

use crate::{DTYPES, Tensors, assert_same, floats, normal, on_cpu, plain};

const HIDDEN: i32 = 64;
const HEADS: i32 = 4;
const KV_HEADS: i32 = 2;
const DIM: i32 = 64;

fn layer(dtype: Dtype) -> SelfAttention {
    let tensors = Tensors::new(dtype, None)
        .matrix("q_proj", HEADS * DIM, HIDDEN, false)
        .matrix("k_proj", KV_HEADS * DIM, HIDDEN, false)
        .matrix("v_proj", KV_HEADS * DIM, HIDDEN, false)
        .matrix("o_proj", HIDDEN, HEADS * DIM, false);
    let config = AttentionConfig {
        hidden_size: HIDDEN,
        num_heads: HEADS,
        num_kv_heads: KV_HEADS,
        head_dim: DIM,
        qkv_bias: false,
        o_bias: false,
        qk_norm_eps: None,
    };
    let rope = Rope::new(&RopeConfig {
        dims: DIM,
        base: 10000.0,
        traditional: false,
        scaling: RopeScaling::None,
    });
    tensors.load(|w| SelfAttention::load(w, &config, Some(rope.unwrap())))
}

/// Inputs of `length` positions from `start` on, the same whatever steps they are given in.
fn inputs(start: i32, length: i32, dtype: Dtype) -> Array {
    normal(9, &[1, 600, HIDDEN], dtype)
        .slice_axis(1, start, start + length)
        .unwrap()
}

fn forward(layer: &SelfAttention, length: i32, dtype: Dtype, cache: &mut Cache) -> Array {
    let x = inputs(cache.len(), length, dtype);
    let state = cache.layers_mut()[0].attention().unwrap();
    let mask = state.mask(length).unwrap();
    let output = layer.forward(&x, &mask, state).unwrap();
    cache.settle().unwrap();
    output
}

/// The last positions of both.
#[track_caller]
fn assert_near(found: &Array, expected: &Array, tolerance: f32) {
    let count = found.dim(1).unwrap().min(expected.dim(1).unwrap());
    let last = |x: &Array| {
        let length = x.dim(1).unwrap();
        floats(&x.slice_axis(1, length - count, length).unwrap())
    };
    let (found, expected) = (last(found), last(expected));
    let largest = expected.iter().fold(1e-3f32, |max, x| max.max(x.abs()));
    for (a, b) in found.iter().zip(&expected) {
        assert!(
            (a - b).abs() <= tolerance * largest,
            "{a} where {b} is expected, the largest is {largest}"
        );
    }
}

fn packed(bits: i32, group_size: i32, start: i32) -> Cache {
    let mut cache = Cache::attention(1);
    let quantization = KvQuantization {
        bits,
        group_size,
        start,
    };
    cache.set_quantization(quantization).unwrap();
    cache
}

fn limited(size: i32) -> Cache {
    let mut cache = Cache::attention(1);
    cache.limit(size, 4).unwrap();
    cache
}

/// Keys and values as they are held, and their form.
fn held(cache: &Cache) -> ([Array; 2], Option<KvPacking>) {
    match cache.to_states().unwrap().remove(0) {
        LayerState::Attention(state) => (state.arrays.unwrap(), state.packing),
        other => panic!("{other:?}"),
    }
}

#[test]
fn kernels_attend_over_packed_keys_as_mlx_s_operations_do() {
    on_cpu(|| {
        for dtype in DTYPES {
            let layer = layer(dtype);
            // A rounding error before may become another code.
            let tolerance = match dtype {
                Dtype::Float32 => 5e-3,
                Dtype::Float16 => 5e-2,
                _ => 1e-1,
            };
            for (bits, group_size) in [(8, 64), (8, 32), (4, 64), (6, 64)] {
                let mut caches = [packed(bits, group_size, 6), packed(bits, group_size, 6)];
                for length in [5, 1, 1, 3, 300, 1, 1] {
                    let found = forward(&layer, length, dtype, &mut caches[0]);
                    let other = &mut caches[1];
                    let expected = plain(|| forward(&layer, length, dtype, other));
                    assert_near(&found, &expected, tolerance);
                }
                let form = held(&caches[0]).1.unwrap();
                assert_eq!((form.bits, form.dims, form.dtype), (bits, [DIM; 2], dtype));
                let mut whole = Cache::attention(1);
                forward(&layer, 312, dtype, &mut whole);
                assert!(caches[0].nbytes() * 6 < whole.nbytes() * 5 || bits == 8);
            }
        }
    });
}

#[test]
fn kernels_pack_what_mlx_packs() {
    on_cpu(|| {
        for dtype in DTYPES {
            let layer = layer(dtype);
            for (bits, group_size) in [(2, 64), (3, 32), (4, 64), (5, 32), (6, 64), (8, 32)] {
                let mut cache = packed(bits, group_size, 1000);
                forward(&layer, 70, dtype, &mut cache);
                // The same keys and values in arrays, which MLX packs.
                let mut arrays = packed(bits, group_size, 0);
                arrays.restore(cache.to_states().unwrap()).unwrap();
                arrays.settle().unwrap();
                let due = KvQuantization {
                    bits,
                    group_size,
                    start: 0,
                };
                cache.set_quantization(due).unwrap();
                cache.settle().unwrap();
                let (found, expected) = (held(&cache), held(&arrays));
                assert_eq!(found.1, expected.1);
                for (found, expected) in found.0.iter().zip(&expected.0) {
                    assert_same(found, expected);
                }
                // Those that follow are packed by the step.
                let found = forward(&layer, 3, dtype, &mut cache);
                let expected = forward(&layer, 3, dtype, &mut arrays);
                assert_same(&found, &expected);
                for (found, expected) in held(&cache).0.iter().zip(&held(&arrays).0) {
                    assert_same(found, expected);
                }
            }
        }
    });
}

#[test]
fn kernels_see_what_mlx_s_operations_see_of_a_limited_cache() {
    on_cpu(|| {
        let dtype = Dtype::Float32;
        let layer = layer(dtype);
        for size in [5, 8, 16, 100] {
            let mut caches = [limited(size), limited(size)];
            for length in [3, 1, 1, 30, 1, 1, 40, 1, 1, 1, 1, 1, 1, 5, 1, 120, 1] {
                let found = forward(&layer, length, dtype, &mut caches[0]);
                let other = &mut caches[1];
                let expected = plain(|| forward(&layer, length, dtype, other));
                assert_near(&found, &expected, 2e-5);
            }
            // Token by token past any number of moves.
            for _ in 0..150 {
                let found = forward(&layer, 1, dtype, &mut caches[0]);
                let other = &mut caches[1];
                let expected = plain(|| forward(&layer, 1, dtype, other));
                assert_near(&found, &expected, 2e-5);
            }
            assert!(!caches[0].keeps_all() && !caches[0].can_trim(200));
        }
    });
}

#[test]
fn a_single_query_sees_the_first_positions_and_the_last_ones() {
    on_cpu(|| {
        let dtype = Dtype::Float32;
        let layer = layer(dtype);
        let size = 12;
        let mut cache = limited(size);
        for position in 0..60 {
            let x = inputs(position, 1, dtype);
            let found = forward(&layer, 1, dtype, &mut cache);
            // All keys, and a mask that hides those that should be gone.
            let mut whole = Cache::attention(1);
            if position > 0 {
                forward(&layer, position, dtype, &mut whole);
            }
            let seen: Vec<bool> = (0..=position)
                .map(|key| key < 4 || key > position - (size - 4))
                .collect();
            let mask = Array::from_slice(&seen, &[1, position + 1]).unwrap();
            let state = whole.layers_mut()[0].attention().unwrap();
            let expected = layer.forward(&x, &mlex_nn::Mask::Array(mask), state);
            assert_near(&found, &expected.unwrap(), 2e-5);
        }
    });
}

#[test]
fn snapshots_stay_what_they_were() {
    on_cpu(|| {
        let dtype = Dtype::Float32;
        let layer = layer(dtype);
        for empty in [limited(16), packed(4, 64, 10), packed(8, 32, 0)] {
            let mut cache = empty.clone();
            let mut snapshots = Vec::new();
            for length in [7, 1, 1, 9, 1, 1, 1, 20, 1, 1] {
                snapshots.push((cache.clone(), length));
                let output = forward(&layer, length, dtype, &mut cache);
                if let Some((_, last)) = snapshots.last_mut() {
                    *last = length;
                }
                // Every snapshot so far gives the same as when it was taken.
                for (snapshot, length) in &snapshots {
                    let mut branch = snapshot.clone();
                    let first = forward(&layer, *length, dtype, &mut branch);
                    let mut again = snapshot.clone();
                    assert_same(&first, &forward(&layer, *length, dtype, &mut again));
                    if snapshot.len() + length == cache.len() {
                        assert_same(&first, &output);
                    }
                }
            }
            // To states and back.
            let mut restored = empty;
            restored.restore(cache.to_states().unwrap()).unwrap();
            let found = forward(&layer, 2, dtype, &mut restored);
            assert_near(&found, &forward(&layer, 2, dtype, &mut cache), 2e-5);
        }
    });
}

#[test]
fn the_last_tokens_of_a_packed_cache_can_be_forgotten() {
    on_cpu(|| {
        let dtype = Dtype::Float32;
        let layer = layer(dtype);
        let mut cache = packed(8, 64, 0);
        forward(&layer, 20, dtype, &mut cache);
        let mut snapshot = cache.clone();
        let expected = forward(&layer, 3, dtype, &mut snapshot);
        forward(&layer, 5, dtype, &mut cache);
        cache.trim(5).unwrap();
        assert_same(&forward(&layer, 3, dtype, &mut cache), &expected);
    });
}

#[test]
fn what_does_not_fit_is_refused() {
    on_cpu(|| {
        let layer = layer(Dtype::Float32);
        let mut cache = packed(4, 128, 0);
        let x = inputs(0, 3, Dtype::Float32);
        let state = cache.layers_mut()[0].attention().unwrap();
        let mask = state.mask(3).unwrap();
        layer.forward(&x, &mask, state).unwrap();
        let error = cache.settle().unwrap_err().to_string();
        let expected =
            "kv_group_size: expected a divisor of the width 64 of keys and values, found 128";
        assert_eq!(error, expected);
        assert!(Cache::attention(1).limit(4, 4).is_err());
        assert!(cache.limit(16, 4).is_err());
        let quantization = KvQuantization {
            bits: 4,
            group_size: 64,
            start: 0,
        };
        assert!(limited(8).set_quantization(quantization).is_err());
        for (bits, group_size, start) in [(7, 64, 0), (4, 16, 0), (4, 64, -1)] {
            let wrong = KvQuantization {
                bits,
                group_size,
                start,
            };
            assert!(Cache::attention(1).set_quantization(wrong).is_err());
        }
        // A packed state in an array of another shape.
        let mut whole = packed(4, 64, 0);
        forward(&layer, 5, Dtype::Float32, &mut whole);
        let mut states = whole.to_states().unwrap();
        if let LayerState::Attention(state) = &mut states[0] {
            state.packing = state.packing.map(|form| KvPacking { bits: 8, ..form });
        }
        assert!(packed(4, 64, 0).restore(states).is_err());
    });
}
