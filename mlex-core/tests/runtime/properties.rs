//! Drawn arrays against plain Rust on vectors.

use half::{bf16, f16};
use mlex_core::{Array, Dtype};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::{floats, ramp};

/// A shape of one to four dimensions.
fn shapes() -> impl Strategy<Value = Vec<i32>> {
    vec(1..6i32, 1..5)
}

/// The place of each element in row-major order, by its index in every dimension.
fn places(shape: &[i32]) -> Vec<Vec<i32>> {
    let mut places = vec![vec![]];
    for &dim in shape {
        places = places
            .into_iter()
            .flat_map(|place: Vec<i32>| (0..dim).map(move |index| [&place[..], &[index]].concat()))
            .collect();
    }
    places
}

/// The value that [`ramp`] has at a place.
fn value(shape: &[i32], place: &[i32]) -> f32 {
    let flat = |sum, (&dim, &index): (&i32, &i32)| sum * dim + index;
    shape.iter().zip(place).fold(0, flat) as f32
}

/// Python's `range(*slice(start, stop, stride).indices(dim))`.
fn slice_indices(dim: i32, start: i32, stop: i32, stride: i32) -> Vec<i32> {
    let (low, high) = if stride > 0 { (0, dim) } else { (-1, dim - 1) };
    let bound = |at: i32| (if at < 0 { at + dim } else { at }).clamp(low, high);
    let (mut at, stop) = (bound(start), bound(stop));
    let mut indices = Vec::new();
    while if stride > 0 { at < stop } else { at > stop } {
        indices.push(at);
        at += stride;
    }
    indices
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn floats_are_rounded_as_the_half_crate_does(bits in vec(any::<u32>(), 1..50)) {
        let values: Vec<f32> = bits.iter().map(|&bits| f32::from_bits(bits)).collect();
        let array = Array::from_slice(&values, &[values.len() as i32]).unwrap();
        let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        let half = array.as_type(Dtype::Float16).unwrap().to_vec::<f16>().unwrap();
        let brain = array.as_type(Dtype::Bfloat16).unwrap().to_vec::<bf16>().unwrap();
        for ((&x, half), brain) in values.iter().zip(half).zip(brain) {
            prop_assert!(same(half.to_f32(), f16::from_f32(x).to_f32()), "f16 of {x:e}");
            prop_assert!(same(brain.to_f32(), bf16::from_f32(x).to_f32()), "bf16 of {x:e}");
        }
        let back = array.as_type(Dtype::Float64).unwrap().as_type(Dtype::Float32).unwrap();
        for (a, b) in back.to_vec::<f32>().unwrap().into_iter().zip(values) {
            prop_assert!(same(a, b));
        }
    }

    #[test]
    fn integers_wrap_as_rusts_do(values in vec(any::<i32>(), 1..50)) {
        let array = Array::from_slice(&values, &[values.len() as i32]).unwrap();
        let cast = |dtype| array.as_type(dtype).unwrap();
        let model = |f: fn(i32) -> i64| values.iter().map(|&x| f(x)).collect::<Vec<_>>();
        let wide = |array: Array| array.as_type(Dtype::Int64).unwrap().to_vec::<i64>().unwrap();
        prop_assert_eq!(wide(cast(Dtype::Uint8)), model(|x| (x as u8).into()));
        prop_assert_eq!(wide(cast(Dtype::Int8)), model(|x| (x as i8).into()));
        prop_assert_eq!(wide(cast(Dtype::Uint16)), model(|x| (x as u16).into()));
        prop_assert_eq!(wide(cast(Dtype::Int16)), model(|x| (x as i16).into()));
        prop_assert_eq!(wide(cast(Dtype::Uint32)), model(|x| (x as u32).into()));
        prop_assert_eq!(wide(cast(Dtype::Int64)), model(i64::from));
        prop_assert_eq!(wide(cast(Dtype::Bool)), model(|x| (x != 0).into()));
        let float = cast(Dtype::Float32).to_vec::<f32>().unwrap();
        prop_assert_eq!(float, values.iter().map(|&x| x as f32).collect::<Vec<_>>());
    }

    #[test]
    fn numbers_take_the_dtype_of_the_array(x in -1000i32..1000, y in -100i32..100) {
        let check = |dtype: Dtype| {
            let array = Array::scalar(x).unwrap().as_type(dtype).unwrap();
            let sum = array.add(y).unwrap();
            (sum.dtype(), sum.as_type(Dtype::Int64).unwrap().item::<i64>().unwrap())
        };
        prop_assert_eq!(check(Dtype::Int32), (Dtype::Int32, i64::from(x + y)));
        prop_assert_eq!(check(Dtype::Int64), (Dtype::Int64, i64::from(x + y)));
        prop_assert_eq!(check(Dtype::Int16), (Dtype::Int16, i64::from(x + y)));
        prop_assert_eq!(check(Dtype::Float32), (Dtype::Float32, i64::from(x + y)));
        prop_assert_eq!(check(Dtype::Float16).0, Dtype::Float16);
        prop_assert_eq!(check(Dtype::Bfloat16).0, Dtype::Bfloat16);
        let bytes = (x as u8).wrapping_add(y as u8);
        prop_assert_eq!(check(Dtype::Uint8), (Dtype::Uint8, i64::from(bytes)));
    }

    #[test]
    fn slices_are_pythons(
        shape in shapes(),
        bounds in vec((-9..9i32, -9..9i32, prop_oneof![-4..0i32, 1..5i32]), 4),
    ) {
        let bounds = &bounds[..shape.len()];
        let column = |f: fn(&(i32, i32, i32)) -> i32| bounds.iter().map(f).collect::<Vec<_>>();
        let (start, stop, strides) = (column(|b| b.0), column(|b| b.1), column(|b| b.2));
        let indices: Vec<Vec<i32>> = shape
            .iter()
            .zip(bounds)
            .map(|(&dim, &(start, stop, stride))| slice_indices(dim, start, stop, stride))
            .collect();
        let kept: Vec<i32> = indices.iter().map(|indices| indices.len() as i32).collect();
        let expected: Vec<f32> = places(&kept)
            .iter()
            .map(|place| {
                let from: Vec<i32> = place
                    .iter()
                    .zip(&indices)
                    .map(|(&at, indices)| indices[at as usize])
                    .collect();
                value(&shape, &from)
            })
            .collect();
        let x = ramp(&shape);
        let slice = x.slice(&start, &stop, Some(&strides)).unwrap();
        prop_assert_eq!(slice.shape(), &kept[..]);
        prop_assert_eq!(floats(&slice), &expected[..]);

        // What is put there is what is taken from there, and nothing else changes.
        let update = slice.add(1000.0).unwrap();
        let updated = x.slice_update_strided(&update, &start, &stop, Some(&strides)).unwrap();
        let again = updated.slice(&start, &stop, Some(&strides)).unwrap();
        prop_assert_eq!(floats(&again), floats(&update));
        let changed = floats(&updated).iter().filter(|&&x| x >= 1000.0).count();
        prop_assert_eq!(changed, expected.len());
    }

    #[test]
    fn transposed_and_back(shape in shapes(), seed in any::<u64>()) {
        let mut axes: Vec<i32> = (0..shape.len() as i32).collect();
        axes.rotate_left(seed as usize % shape.len());
        if seed % 3 == 0 {
            axes.reverse();
        }
        let x = ramp(&shape);
        let turned = x.transpose(&axes).unwrap();
        let to: Vec<i32> = axes.iter().map(|&axis| shape[axis as usize]).collect();
        prop_assert_eq!(turned.shape(), &to[..]);
        let expected: Vec<f32> = places(&to)
            .iter()
            .map(|place| {
                let mut from = vec![0; shape.len()];
                for (&axis, &at) in axes.iter().zip(place) {
                    from[axis as usize] = at;
                }
                value(&shape, &from)
            })
            .collect();
        prop_assert_eq!(floats(&turned), &expected[..]);
        // A reshape reads in the new order, whatever lies in memory.
        prop_assert_eq!(floats(&turned.reshape(&[-1]).unwrap()), expected);

        let mut inverse = vec![0; axes.len()];
        for (place, &axis) in axes.iter().enumerate() {
            inverse[axis as usize] = place as i32;
        }
        prop_assert_eq!(floats(&turned.transpose(&inverse).unwrap()), floats(&x));
    }

    #[test]
    fn split_and_joined(shape in shapes(), at in 0..6i32, axis in 0..4i32) {
        let axis = axis % shape.len() as i32;
        let x = ramp(&shape);
        let at = at.min(shape[axis as usize]);
        let parts = x.split_at(&[at], axis).unwrap();
        prop_assert_eq!(parts.len(), 2);
        let joined = Array::concatenate(&parts, axis).unwrap();
        prop_assert_eq!(joined.shape(), &shape[..]);
        prop_assert_eq!(floats(&joined), floats(&x));
    }

    #[test]
    fn taken_by_any_index(size in 1..40i32, indices in vec(any::<i32>(), 0..20)) {
        let x = ramp(&[size]);
        let list = Array::from_slice(&indices, &[indices.len() as i32]).unwrap();
        let expected: Vec<f32> = indices
            .iter()
            .map(|&index| {
                let index = i64::from(index);
                let from_start = if index < 0 { index + i64::from(size) } else { index };
                from_start.clamp(0, i64::from(size) - 1) as f32
            })
            .collect();
        prop_assert_eq!(floats(&x.take(&list, 0).unwrap()), expected);
    }

    #[test]
    fn strided_views_read_what_they_say(
        shape in vec(0..5i32, 0..4),
        strides in vec(-6..7i64, 3),
        offset in 0..40usize,
    ) {
        let strides = &strides[..shape.len()];
        let x = ramp(&[30]);
        let reached: Vec<i64> = places(&shape)
            .iter()
            .map(|place| {
                let steps = place.iter().zip(strides);
                offset as i64 + steps.map(|(&at, stride)| i64::from(at) * stride).sum::<i64>()
            })
            .collect();
        let inside = reached.iter().all(|place| (0..30).contains(place));
        match x.as_strided(&shape, strides, offset) {
            Ok(view) => {
                prop_assert!(inside, "reaches {reached:?}");
                let expected: Vec<f32> = reached.iter().map(|&place| place as f32).collect();
                prop_assert_eq!(floats(&view), expected);
            }
            Err(_) => prop_assert!(!inside || offset > 30),
        }
    }

    #[test]
    fn partitioned_around_an_element(values in vec(-50..50i32, 1..40), at in any::<prop::sample::Index>()) {
        let kth = at.index(values.len());
        let array = Array::from_slice(&values, &[values.len() as i32]).unwrap();
        let mut sorted = values.clone();
        sorted.sort_unstable();
        let parted = array.partition(kth as i32, 0).unwrap().to_vec::<i32>().unwrap();
        prop_assert_eq!(parted[kth], sorted[kth]);
        prop_assert!(parted[..kth].iter().all(|&x| x <= sorted[kth]));
        prop_assert!(parted[kth..].iter().all(|&x| x >= sorted[kth]));
        let order = array.argpartition(kth as i32, 0).unwrap().to_vec::<u32>().unwrap();
        prop_assert_eq!(values[order[kth] as usize], sorted[kth]);
        let order = array.argsort(0).unwrap().to_vec::<u32>().unwrap();
        let ordered: Vec<i32> = order.iter().map(|&index| values[index as usize]).collect();
        prop_assert_eq!(ordered, sorted);
    }
}
