//! The attention cache against plain lists of all keys and values.
#![allow(clippy::unwrap_used, reason = "a helper fails as its test would")]

use mlex_core::{Array, AttentionMask, Device, Dtype};
use mlex_nn::attention::attention;
use mlex_nn::{Cache, KvCache, LayerCache, Mask, Offset};

const HEADS: i32 = 2;
const DIM: i32 = 4;

/// Distinct values `[batch, HEADS, len, DIM]` for positions from `start` on: each is a smooth
/// function of batch row, head, position and entry, scaled by `seed`.
fn tokens(batch: i32, start: i32, len: i32, seed: f32) -> Array {
    let mut values = Vec::new();
    for row in 0..batch {
        for head in 0..HEADS {
            for position in start..start + len {
                for entry in 0..DIM {
                    let place = (row * 31 + head * 17 + position * 7 + entry * 3) as f32;
                    values.push((place * 0.37 * seed).sin());
                }
            }
        }
    }
    Array::from_slice(&values, &[batch, HEADS, len, DIM]).unwrap()
}

fn keys(start: i32, len: i32) -> Array {
    tokens(1, start, len, 1.0)
}

fn values(start: i32, len: i32) -> Array {
    tokens(1, start, len, 1.3)
}

fn vec(array: &Array) -> Vec<f32> {
    array.to_vec().unwrap()
}

#[track_caller]
fn assert_same(found: &Array, expected: &Array) {
    assert_eq!(found.shape(), expected.shape());
    assert_eq!(vec(found), vec(expected));
}

#[track_caller]
fn assert_close(found: &Array, expected: &Array) {
    assert_eq!(found.shape(), expected.shape());
    for (index, (a, b)) in vec(found).iter().zip(vec(expected)).enumerate() {
        assert!((a - b).abs() < 1e-5, "{a} where {b} is expected at {index}");
    }
}

/// Adds positions from the cache's length on, and checks what comes back.
#[track_caller]
fn extend(cache: &mut KvCache, len: i32) {
    let start = cache.len();
    let (k, v) = cache
        .update(&keys(start, len), &values(start, len))
        .unwrap();
    assert_same(&k, &keys(0, start + len));
    assert_same(&v, &values(0, start + len));
    assert_eq!(cache.len(), start + len);
}

/// The positions that there is room for; on a GPU in whole steps, as on CUDA there may be a few more.
fn capacity(cache: &KvCache) -> i32 {
    let capacity = cache.arrays().next().unwrap().dim(2).unwrap();
    match Device::preferred().unwrap() {
        Device::Cpu => capacity,
        _ => capacity / 256 * 256,
    }
}

#[test]
fn chunks_give_what_the_whole_gives() {
    for chunks in [&[7, 1, 1, 5][..], &[250, 10, 1], &[1, 600, 3], &[256, 1]] {
        let mut cache = KvCache::default();
        for &len in chunks {
            extend(&mut cache, len);
        }
    }
}

#[test]
fn buffers_grow_in_steps() {
    let mut cache = KvCache::default();
    assert_eq!(cache.arrays().count(), 0);
    for (len, expected) in [(1, 256), (254, 256), (1, 256), (1, 512), (300, 768)] {
        extend(&mut cache, len);
        assert_eq!(capacity(&cache), expected, "at {} tokens", cache.len());
    }
    let mut cache = KvCache::default();
    extend(&mut cache, 512);
    assert_eq!(capacity(&cache), 512);
}

#[test]
fn dtypes_are_kept() {
    let half = |x: Array| x.as_type(Dtype::Bfloat16).unwrap();
    let mut cache = KvCache::default();
    let (k, v) = cache.update(&half(keys(0, 3)), &values(0, 3)).unwrap();
    assert_eq!((k.dtype(), v.dtype()), (Dtype::Bfloat16, Dtype::Float32));
}

#[test]
fn trimmed_tokens_are_forgotten() {
    let mut cache = KvCache::default();
    extend(&mut cache, 10);
    cache.trim(0).unwrap();
    cache.trim(4).unwrap();
    assert_eq!(cache.len(), 6);
    extend(&mut cache, 3);
    cache.trim(9).unwrap();
    assert!(cache.is_empty());
    extend(&mut cache, 2);
}

#[test]
fn what_cannot_be_trimmed_is_refused() {
    let mut cache = KvCache::default();
    extend(&mut cache, 5);
    for count in [6, -1, i32::MAX, i32::MIN] {
        assert!(!cache.can_trim(count));
        let error = cache.trim(count).unwrap_err().to_string();
        assert!(error.starts_with("tokens to trim: expected"), "{error}");
        assert_eq!(cache.len(), 5);
    }
    extend(&mut cache, 1);
}

#[test]
fn a_clone_is_a_snapshot() {
    let mut cache = KvCache::default();
    extend(&mut cache, 9);
    let snapshot = cache.clone();

    // The original goes on with other tokens, evaluated so that buffers may be reused.
    let other = tokens(1, 100, 4, 2.0);
    let (k, _) = cache.update(&other, &other).unwrap();
    k.eval().unwrap();
    cache.trim(6).unwrap();
    let (k, _) = cache.update(&other, &other).unwrap();
    k.eval().unwrap();
    assert_same(&k.slice_axis(2, 7, 11).unwrap(), &other);

    // Each clone of the snapshot still has the first nine, and goes on by itself.
    for len in [1, 300] {
        let mut restored = snapshot.clone();
        assert_eq!(restored.len(), 9);
        extend(&mut restored, len);
    }
}

#[test]
fn a_failed_update_changes_nothing() {
    let mut cache = KvCache::default();
    extend(&mut cache, 3);
    let good = keys(3, 2);
    let bad = [
        // Three dimensions; another number of heads, of entries, of rows, of positions.
        Array::zeros(&[HEADS, 2, DIM], Dtype::Float32).unwrap(),
        Array::zeros(&[1, 1, 2, DIM], Dtype::Float32).unwrap(),
        Array::zeros(&[1, HEADS, 2, 1], Dtype::Float32).unwrap(),
        tokens(2, 3, 2, 1.0),
        keys(3, 1),
    ];
    for bad in &bad {
        assert!(cache.update(&good, bad).is_err(), "values {bad:?}");
        assert!(cache.update(bad, &good).is_err(), "keys {bad:?}");
        assert_eq!(cache.len(), 3);
    }
    extend(&mut cache, 2);
    let mut cache = KvCache::default();
    assert!(cache.update(&keys(0, 2), &keys(0, 1)).is_err());
    assert!(cache.is_empty());
    extend(&mut cache, 1);
}

/// For each query (rows) and key (columns) whether it is seen, of `keys` keys in all.
fn brute_mask(queries: i32, keys: i32, window: i32, padding: &[i32]) -> Array {
    let mut seen = Vec::new();
    for &padding in padding {
        for query in keys - queries..keys {
            for key in 0..keys {
                seen.push(key <= query && key > query - window && key >= padding);
            }
        }
    }
    let rows = padding.len() as i32;
    Array::from_slice(&seen, &[rows, 1, queries, keys]).unwrap()
}

#[test]
fn a_window_gives_what_a_mask_over_everything_gives() {
    for window in [1, 3, 8, 300] {
        for chunks in [
            &[1, 1, 1, 1, 1, 1][..],
            &[5, 1, 4, 9, 1],
            &[20, 1, 1],
            &[280, 1, 1, 40, 1, 700, 1],
        ] {
            let mut cache = KvCache::with_window(window).unwrap();
            let (mut total, mut longest) = (0, 256);
            for &len in chunks {
                longest = longest.max(len);
                let queries = tokens(1, total, len, 0.7);
                let mask = cache.mask(len).unwrap();
                let (k, v) = cache
                    .update(&keys(total, len), &values(total, len))
                    .unwrap();
                let found = attention(&queries, &k, &v, 0.5, mask.as_attention(), None).unwrap();
                total += len;
                let all = brute_mask(len, total, window, &[0]);
                let mask = AttentionMask::Array(&all);
                let (k, v) = (keys(0, total), values(0, total));
                let expected = attention(&queries, &k, &v, 0.5, mask, None).unwrap();
                assert_close(&found, &expected);
                assert!(
                    k.dim(2).unwrap() <= total && capacity(&cache) < window + longest + 512,
                    "window {window}: {} positions held",
                    capacity(&cache)
                );
            }
        }
    }
}

#[test]
fn a_long_chunk_does_not_stay_in_a_window() {
    for (window, chunk) in [(8, 3000), (512, 4096), (600, 5000)] {
        let mut cache = KvCache::with_window(window).unwrap();
        let most = window + 2 * 256 + 255;
        for len in [chunk, 1, 1, chunk, 7, 1] {
            let start = cache.len();
            let seen = start.min(window - 1) + len;
            let (k, v) = cache
                .update(&keys(start, len), &values(start, len))
                .unwrap();
            assert_same(&k, &keys(start + len - seen, seen));
            assert_same(&v, &values(start + len - seen, seen));
            assert!(
                len == chunk || capacity(&cache) <= most,
                "window {window}: {} positions held",
                capacity(&cache)
            );
        }
        // A few of the last tokens can still be taken back.
        cache.trim(9).unwrap();
        let start = cache.len();
        let (k, _) = cache.update(&keys(start, 1), &values(start, 1)).unwrap();
        assert_same(&k, &keys(start + 1 - window, window));
    }
}

#[test]
fn a_window_can_be_trimmed_while_it_is_whole() {
    let mut cache = KvCache::with_window(4).unwrap();
    extend(&mut cache, 3);
    assert!(cache.can_trim(3));
    cache.trim(1).unwrap();
    extend(&mut cache, 1);

    // Long past the buffers' step, old positions are gone for good.
    let mut cache = KvCache::with_window(4).unwrap();
    for _ in 0..300 {
        let start = cache.len();
        cache.update(&keys(start, 1), &values(start, 1)).unwrap();
    }
    assert!(!cache.can_trim(300));
    assert!(cache.trim(300).is_err());
    // What is left after a trim must still be what the next query sees.
    assert!(cache.can_trim(20));
    cache.trim(20).unwrap();
    let (k, _) = cache.update(&keys(280, 1), &values(280, 1)).unwrap();
    assert_same(&k, &keys(277, 4));
}

#[test]
fn windows_are_positive() {
    for window in [0, -1] {
        let error = KvCache::with_window(window).unwrap_err().to_string();
        assert_eq!(
            error,
            format!("sliding_window: expected a positive number, found {window}")
        );
    }
}

#[test]
fn masks_have_the_shapes_that_attention_takes() {
    let mut cache = KvCache::default();
    assert!(matches!(cache.mask(1).unwrap(), Mask::None));
    assert!(matches!(cache.mask(5).unwrap(), Mask::Causal));
    extend(&mut cache, 6);
    assert!(matches!(cache.mask(1).unwrap(), Mask::None));
    assert!(matches!(cache.mask(2).unwrap(), Mask::Causal));

    let mut cache = KvCache::with_window(4).unwrap();
    // Nothing of a short text is out of the window yet.
    assert!(matches!(cache.mask(4).unwrap(), Mask::Causal));
    let Mask::Array(mask) = cache.mask(6).unwrap() else {
        panic!("a mask for a text longer than the window");
    };
    assert_eq!(
        mask.to_vec::<bool>().unwrap(),
        brute_mask(6, 6, 4, &[0]).to_vec::<bool>().unwrap()
    );
    cache.update(&keys(0, 6), &values(0, 6)).unwrap();
    assert!(matches!(cache.mask(1).unwrap(), Mask::None));

    let mut cache = KvCache::default();
    cache.set_left_padding(&[0, 2]).unwrap();
    let Mask::Array(mask) = cache.mask(3).unwrap() else {
        panic!("a mask for padded rows");
    };
    assert_eq!(
        (mask.shape(), mask.dtype()),
        (&[2, 1, 3, 3][..], Dtype::Bool)
    );
    assert_eq!(
        mask.to_vec::<bool>().unwrap(),
        brute_mask(3, 3, 99, &[0, 2]).to_vec::<bool>().unwrap()
    );
}

#[test]
fn a_padded_row_gives_what_it_gives_alone() {
    let padding = [0, 3, 1];
    for window in [None, Some(4)] {
        let new = || match window {
            Some(window) => KvCache::with_window(window).unwrap(),
            None => KvCache::default(),
        };
        let mut batch = new();
        batch.set_left_padding(&padding).unwrap();
        let mut alone = [new(), new(), new()];
        let mut total = 0;
        for len in [5, 1, 1, 3] {
            let (q, k, v) = (
                tokens(3, total, len, 0.7),
                tokens(3, total, len, 1.0),
                tokens(3, total, len, 1.3),
            );
            let Offset::PerRow(offsets) = batch.offset() else {
                panic!("an offset per row");
            };
            let expected: Vec<i32> = padding.iter().map(|padding| total - padding).collect();
            assert_eq!(offsets.to_vec(), expected);

            let mask = batch.mask(len).unwrap();
            let (keys, values) = batch.update(&k, &v).unwrap();
            let found = attention(&q, &keys, &values, 0.5, mask.as_attention(), None).unwrap();
            assert!(vec(&found).iter().all(|x| x.is_finite()));
            for (row, cache) in alone.iter_mut().enumerate() {
                let skip = (padding[row] - total).max(0).min(len);
                let part = |x: &Array| {
                    let row = x.slice_axis(0, row as i32, row as i32 + 1).unwrap();
                    row.slice_axis(2, skip, len).unwrap()
                };
                let mask = cache.mask(len - skip).unwrap();
                let (keys, values) = cache.update(&part(&k), &part(&v)).unwrap();
                let mask = mask.as_attention();
                let expected = attention(&part(&q), &keys, &values, 0.5, mask, None).unwrap();
                assert_close(&part(&found), &expected);
            }
            total += len;
        }
    }
}

#[test]
fn padding_is_announced_before_the_first_token() {
    let mut cache = KvCache::default();
    let error = cache.set_left_padding(&[1, -1]).unwrap_err().to_string();
    assert_eq!(error, "left padding: expected no negative number, found -1");
    cache.set_left_padding(&[0, 0]).unwrap();
    assert!(matches!(cache.offset(), Offset::Same(0)));
    extend(&mut cache, 2);
    assert!(matches!(cache.offset(), Offset::Same(2)));
    let error = cache.set_left_padding(&[1]).unwrap_err().to_string();
    assert_eq!(error, "left padding: expected an empty cache, found 2");
}

#[test]
fn layers_are_trimmed_together_or_not_at_all() {
    let windowed = LayerCache::Attention(KvCache::with_window(2).unwrap());
    let mut cache = Cache::new([LayerCache::Attention(KvCache::default()), windowed]);
    assert_eq!((cache.len(), cache.nbytes()), (0, 0));
    for position in 0..300 {
        for layer in cache.layers_mut() {
            let (k, v) = (keys(position, 1), values(position, 1));
            layer.attention().unwrap().update(&k, &v).unwrap();
        }
    }
    assert!(cache.nbytes() > 0);
    assert!(!cache.can_trim(290));
    assert!(cache.trim(290).is_err());
    let lengths = |cache: &Cache| -> Vec<i32> {
        let layers = cache.layers().iter();
        layers
            .map(|layer| match layer {
                LayerCache::Attention(cache) => cache.len(),
                layer => panic!("{layer:?}"),
            })
            .collect()
    };
    assert_eq!(lengths(&cache), [300, 300]);
    cache.trim(5).unwrap();
    assert_eq!(lengths(&cache), [295, 295]);
}
