//! What tokens of images need of layers: positions in several directions, masks with spans that
//! see ahead, caches whose positions jump. Expected values are arithmetic.
#![allow(clippy::unwrap_used)]

use mlex_core::{Array, Dtype};
use mlex_nn::{Cache, KvCache, Mask, Offset, Rope, RopeConfig, RopeScaling, Rotations};

fn values(count: usize, shape: &[i32]) -> Array {
    let values: Vec<f32> = (0..count).map(|n| (n as f32 * 0.37).sin()).collect();
    Array::from_slice(&values, shape).unwrap()
}

fn rope(dims: i32) -> Rope {
    let config = RopeConfig {
        dims,
        base: 100.0,
        traditional: false,
        scaling: RopeScaling::Linear { factor: 2.0 },
    };
    Rope::new(&config).unwrap()
}

fn close(a: &Array, b: &Array) {
    let (a, b): (Vec<f32>, Vec<f32>) = (a.to_vec().unwrap(), b.to_vec().unwrap());
    assert_eq!(a.len(), b.len());
    let largest = a.iter().zip(&b).map(|(a, b)| (a - b).abs());
    let largest = largest.fold(0.0, f32::max);
    assert!(largest < 1e-5, "{largest}");
}

#[test]
fn one_position_in_all_directions_is_the_usual_rotation() {
    let x = values(2 * 5 * 24, &[1, 2, 5, 24]);
    let rope = rope(16);
    let expected = rope.forward(&x, &Offset::Same(7)).unwrap();
    let positions: Vec<i32> = (7..12).collect();
    let each = vec![positions; 3];
    let directions = [0, 1, 2, 0, 1, 2, 0, 1];
    let rotations = rope.rotations(&each, &directions).unwrap();
    close(&rotations.apply(&x).unwrap(), &expected);
}

#[test]
fn each_pair_turns_by_its_direction() {
    let x = values(3 * 8, &[1, 1, 3, 8]);
    let each = [vec![1, 1, 1], vec![4, 5, 6], vec![9, 8, 7]];
    let directions = [2, 0, 1, 2];
    let rotations = rope(8).rotations(&each, &directions).unwrap();
    let found: Vec<f32> = rotations.apply(&x).unwrap().to_vec().unwrap();
    let x: Vec<f32> = x.to_vec().unwrap();
    for token in 0..3 {
        for (pair, &direction) in directions.iter().enumerate() {
            let position = each[direction][token] as f32 / 2.0;
            let angle = position / 100_f32.powf(pair as f32 / 4.0);
            let (a, b) = (x[token * 8 + pair], x[token * 8 + pair + 4]);
            let expected = [
                a * angle.cos() - b * angle.sin(),
                b * angle.cos() + a * angle.sin(),
            ];
            let found = [found[token * 8 + pair], found[token * 8 + pair + 4]];
            assert!((found[0] - expected[0]).abs() < 1e-5);
            assert!((found[1] - expected[1]).abs() < 1e-5);
        }
    }
}

#[test]
fn each_part_of_a_head_turns_by_its_angles() {
    let x = values(2 * 3 * 8, &[1, 2, 3, 8]);
    // Two parts of four entries, of each of which one pair turns; what turns is halved.
    let angles = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0];
    let rotations = Rotations::of_parts(&angles, 2, 1, 0.5).unwrap();
    let found: Vec<f32> = rotations.apply(&x).unwrap().to_vec().unwrap();
    let x: Vec<f32> = x.to_vec().unwrap();
    for (n, (found, x)) in found.chunks(4).zip(x.chunks(4)).enumerate() {
        let (sin, cos) = angles[n % 6].sin_cos();
        let [first, second] = [x[0] * cos - x[1] * sin, x[1] * cos + x[0] * sin];
        let expected = [first / 2.0, second / 2.0, x[2], x[3]];
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-5, "{n}");
        }
    }
    assert!(Rotations::of_parts(&angles, 4, 1, 1.0).is_err());
    assert!(Rotations::of_parts(&angles, 0, 1, 1.0).is_err());
}

#[test]
fn directions_must_fit() {
    let rope = rope(8);
    let each = [vec![1, 2], vec![1, 2]];
    assert!(rope.rotations(&each, &[0, 1, 0]).is_err());
    assert!(rope.rotations(&each, &[0, 1, 0, 2]).is_err());
    assert!(
        rope.rotations(&[vec![1], vec![1, 2]], &[0, 1, 0, 1])
            .is_err()
    );
}

/// A cache that has seen so many tokens.
fn seen(window: Option<i32>, count: i32) -> KvCache {
    let mut cache = match window {
        Some(window) => KvCache::with_window(window).unwrap(),
        None => KvCache::default(),
    };
    if count > 0 {
        let keys = Array::zeros(&[1, 1, count, 16], Dtype::Float32).unwrap();
        cache.update(&keys, &keys).unwrap();
    }
    cache
}

#[test]
fn tokens_of_a_span_see_each_other() {
    for window in [None, Some(4), Some(50)] {
        for before in [0, 3, 9] {
            let spans = [1..4, 6..11];
            let new = 12;
            let cache = seen(window, before);
            let Mask::Array(mask) = cache.mask_with_spans(new, &spans).unwrap() else {
                panic!("a mask of spans is an array");
            };
            let keys = mask.dim(-1).unwrap();
            let mask: Vec<bool> = mask.to_vec().unwrap();
            let first = before + new - keys;
            for query in 0..new {
                for key in 0..keys {
                    let (q, k) = (before + query, first + key);
                    let near = window.is_none_or(|window| q - k < window);
                    let together = spans
                        .iter()
                        .any(|span| span.contains(&query) && span.contains(&(k - before)));
                    let expected = (k <= q || together) && near;
                    let found = mask[(query * keys + key) as usize];
                    assert_eq!(found, expected, "{window:?} {before}: {query} {key}");
                }
            }
        }
    }
}

#[test]
fn without_spans_the_mask_is_the_usual_one() {
    let cache = seen(None, 3);
    assert!(matches!(cache.mask_with_spans(2, &[]), Ok(Mask::Causal)));
    assert!(matches!(cache.mask_with_spans(1, &[]), Ok(Mask::None)));
}

#[test]
fn positions_jump_and_are_not_taken_back() {
    let mut cache = Cache::new([mlex_nn::LayerCache::Attention(seen(None, 10))]);
    assert_eq!(cache.position(), 10);
    cache.set_position(4);
    assert_eq!((cache.position(), cache.len()), (4, 10));
    assert!(!cache.can_trim(1));
    let snapshot = cache.clone();
    let keys = Array::zeros(&[1, 1, 3, 16], Dtype::Float32).unwrap();
    let layer = cache.layers_mut()[0].attention().unwrap();
    layer.update(&keys, &keys).unwrap();
    assert_eq!(cache.position(), 7);
    assert!(cache.can_trim(3) && !cache.can_trim(4));
    cache.trim(2).unwrap();
    assert_eq!((cache.position(), cache.len()), (5, 11));
    assert_eq!(snapshot.position(), 4);
}
