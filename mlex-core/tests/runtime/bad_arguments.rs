//! Arguments that MLX divides by, multiplies or follows without a look: an error or a defined
//! result, never a crash, never memory of others.

use mlex_core::{
    Array, AttentionMask, Dtype, QuantizationMode, Quantized, QuantizedWeight, Result, Rope, random,
};

use crate::{floats, ramp};

pub(crate) fn ints(values: &[i32]) -> Array {
    Array::from_slice(values, &[values.len() as i32]).unwrap()
}

/// The error of a call that must have one, in one line.
#[track_caller]
pub(crate) fn refused(result: Result<Array>) {
    match result.and_then(|array| array.eval().map(|()| array)) {
        Ok(array) => panic!("{array:?} where an error is expected"),
        Err(error) => assert!(!error.to_string().contains('\n'), "{error}"),
    }
}

#[test]
fn shapes_with_more_elements_than_can_be_counted() {
    // Views of one element; together they have 2^64, which MLX would count as none.
    let one = ramp(&[1, 1, 1, 1]);
    let tall = one.broadcast_to(&[1 << 16, 1 << 16, 1, 1]).unwrap();
    let wide = one.broadcast_to(&[1, 1, 1 << 16, 1 << 16]).unwrap();
    for error in [
        tall.add(&wide).unwrap_err(),
        tall.divmod(&wide).unwrap_err(),
    ] {
        let text = error.to_string();
        assert!(text.contains("the result would have the shape"), "{text}");
        assert!(text.contains("[65536, 65536, 65536, 65536]"), "{text}");
    }
}

#[test]
fn layouts_that_mlx_does_not_have() {
    let weight = ramp(&[4, 64]);
    let good = Quantized {
        bits: 4,
        group_size: 32,
        mode: QuantizationMode::Affine,
    };
    let mut packed = QuantizedWeight::quantize(&weight, good).unwrap();
    for (bits, group_size, mode) in [
        (0, 32, QuantizationMode::Affine),
        (4, 0, QuantizationMode::Affine),
        (7, 64, QuantizationMode::Affine),
        (-4, -32, QuantizationMode::Affine),
        (4, 16, QuantizationMode::Affine),
        (8, 32, QuantizationMode::Mxfp4),
        (4, 32, QuantizationMode::Nvfp4),
        (0, 0, QuantizationMode::Mxfp8),
    ] {
        packed.layout = Quantized {
            bits,
            group_size,
            mode,
        };
        let index = ints(&[0]);
        assert!(QuantizedWeight::quantize(&weight, packed.layout).is_err());
        refused(packed.dequantize(None));
        refused(packed.matmul(&weight));
        refused(packed.gather_matmul(&weight, None, Some(&index), false));
    }
    // Arrays that do not belong together.
    packed.layout = Quantized { bits: 8, ..good };
    refused(packed.dequantize(None));
    refused(packed.matmul(&weight));
    packed.layout = good;
    packed.scales = ramp(&[4, 1]);
    refused(packed.dequantize(None));
    refused(packed.matmul(&weight));
    packed.scales = ramp(&[4, 2]);
    packed.weight = ramp(&[4, 8]);
    refused(packed.dequantize(None));
    refused(packed.matmul(&weight));
}

#[test]
fn strides_of_a_slice() {
    let x = ramp(&[5]);
    refused(x.slice(&[0], &[5], Some(&[0])));
    refused(x.slice_update_strided(&x, &[0], &[5], Some(&[0])));
    refused(x.slice(&[0, 0], &[5, 5], None));
    refused(x.slice(&[0], &[5], Some(&[1, 1])));
    let strided =
        |start, stop, stride| floats(&x.slice(&[start], &[stop], Some(&[stride])).unwrap());
    assert_eq!(strided(1, 5, i32::MAX), [1.0]);
    assert_eq!(strided(4, i32::MIN + 9, i32::MIN), [4.0]);
    assert_eq!(strided(0, i32::MAX, 2), [0.0, 2.0, 4.0]);
    assert!(strided(9, 12, 1).is_empty());
    assert!(strided(3, 1, 1).is_empty());
    assert!(strided(-99, 2, -1).is_empty());
    refused(x.at(0, 5));
    refused(x.at(0, -6));
    refused(x.at(1, 0));
}

#[test]
fn views_stay_within_the_array() {
    let x = ramp(&[10]);
    let view = |shape: &[i32], strides: &[i64], offset| x.as_strided(shape, strides, offset);
    assert_eq!(floats(&view(&[3], &[-4], 9).unwrap()), [9.0, 5.0, 1.0]);
    assert_eq!(
        floats(&view(&[2, 2], &[0, 9], 0).unwrap()),
        [0.0, 9.0, 0.0, 9.0]
    );
    assert_eq!(view(&[0, 7], &[100, 100], 10).unwrap().size(), 0);
    assert_eq!(floats(&view(&[], &[], 9).unwrap()), [9.0]);
    refused(view(&[], &[], 10));
    refused(view(&[11], &[1], 0));
    refused(view(&[2], &[10], 0));
    refused(view(&[2], &[-1], 0));
    refused(view(&[2, 2], &[5, 5], 0));
    refused(view(&[2], &[1, 1], 0));
    refused(view(&[-1], &[1], 0));
    refused(view(&[i32::MAX; 3], &[i64::MAX; 3], usize::MAX));
    refused(view(&[3, 3], &[i64::MAX, i64::MIN], 0));
}

#[test]
fn shapes_that_memory_cannot_have() {
    let key = random::key(0).unwrap();
    let one = Array::scalar(1f32).unwrap();
    for shape in [
        &[-1][..],
        &[2, -3],
        &[i32::MAX; 3],
        &[65536; 4],
        &[i32::MIN],
    ] {
        let f32 = Dtype::Float32;
        refused(Array::zeros(shape, f32));
        refused(Array::ones(shape, f32));
        refused(Array::full(shape, 0.5, f32));
        refused(one.broadcast_to(shape));
        refused(random::uniform(0.0, 1.0, shape, f32, &key));
        refused(random::normal(0.0, 1.0, shape, f32, &key));
        refused(random::gumbel(shape, f32, &key));
        refused(random::bernoulli(0.5, shape, &key));
        refused(random::integers(0, 2, shape, Dtype::Int32, &key));
    }
    refused(ramp(&[2]).tile(&[-1]));
    refused(ramp(&[2]).repeat(-1, 0));
    refused(ramp(&[2]).pad(&[0], &[(-1, 0)], 0.0));
    refused(ramp(&[2]).pad(&[5], &[(1, 0)], 0.0));
    refused(random::split(&key, -1));
    refused(random::permutation(-1, &key));
    refused(random::uniform(0.0, 1.0, &[2], Dtype::Float32, &ramp(&[2])));
    refused(Array::linspace(0.0, 1.0, -1, Dtype::Float32));
    refused(Array::arange(0.0, f64::INFINITY, 1.0, Dtype::Float32));
    refused(Array::arange(0.0, f64::NAN, 1.0, Dtype::Float32));
    refused(Array::arange(0.0, 1e18, 1.0, Dtype::Float32));
}

#[test]
fn what_is_left_of_nothing() {
    refused(ramp(&[2, 0]).unflatten(1, &[-1, 0]));
    refused(ramp(&[6]).unflatten(0, &[0, -1]));
    refused(ramp(&[6]).unflatten(0, &[4, -1]));
    refused(ramp(&[0]).reshape(&[-1, 0]));
    refused(ramp(&[6]).reshape(&[-1, -1]));
    for parts in [0, -2, 4] {
        assert!(ramp(&[6]).split(parts, 0).is_err());
    }
}

#[test]
fn reductions_of_nothing() {
    let empty = ramp(&[0, 2]);
    refused(empty.max(&[0], false));
    refused(empty.min_all());
    refused(empty.argmax(0, false));
    refused(ramp(&[2, 0]).argmax(0, false));
    refused(
        ramp(&[2, 0])
            .rms_norm(None, 1e-5)
            .and_then(|x| x.logsumexp(&[-1], false)),
    );
    assert_eq!(floats(&empty.sum(&[0], false).unwrap()), [0.0, 0.0]);
    assert_eq!(floats(&empty.prod(&[0], false).unwrap()), [1.0, 1.0]);
    for array in [
        empty.softmax(&[0], true),
        empty.sort(0),
        empty.argsort(0),
        empty.cumsum(0, false, true),
        empty.t(),
        empty.topk(0, 0),
        ramp(&[0]).roll(3, 0),
        empty.rms_norm(None, 1e-5),
        empty.layer_norm(None, None, 1e-5),
        ramp(&[2, 0]).softmax(&[-1], false),
        ramp(&[2, 0]).sort(0),
        ramp(&[2, 0]).sort(1),
        ramp(&[2, 0]).argsort(-1),
        ramp(&[2, 0]).partition(1, 0),
        ramp(&[2, 0]).argpartition(0, 0),
        ramp(&[2, 0]).cumprod(0, true, false),
        ramp(&[2, 0]).cummax(1, true, false),
        ramp(&[2, 0]).logcumsumexp(1, true, true),
        ramp(&[2, 0]).tile(&[2, 2]),
        ramp(&[2, 0]).repeat(2, 1),
        ramp(&[2, 0]).contiguous(),
        ramp(&[2, 0]).t().and_then(|x| x.add(1.0)),
        ramp(&[2, 0]).view(Dtype::Int32),
        ramp(&[2, 0]).nan_to_num(0.0, None, None),
    ] {
        let array = array.unwrap().as_type(Dtype::Float32).unwrap();
        assert!(floats(&array).is_empty());
    }
}

#[test]
fn products_of_nothing() {
    let shape = |array: Result<Array>| {
        let array = array.unwrap();
        array.eval().unwrap();
        array.shape().to_vec()
    };
    let product = ramp(&[2, 0]).matmul(&ramp(&[0, 3])).unwrap();
    assert_eq!(floats(&product), [0.0; 6]);
    assert_eq!(shape(ramp(&[0, 2]).matmul(&ramp(&[2, 3]))), [0, 3]);
    assert_eq!(shape(ramp(&[2, 2]).matmul(&ramp(&[2, 0]))), [2, 0]);
    assert_eq!(shape(ramp(&[0, 2, 2]).matmul(&ramp(&[2, 3]))), [0, 2, 3]);
    assert_eq!(
        shape(ramp(&[0, 3]).addmm(&ramp(&[0, 2]), &ramp(&[2, 3]), 1.0, 1.0)),
        [0, 3]
    );
    assert_eq!(shape(ramp(&[0, 2]).inner(&ramp(&[3, 2]))), [0, 3]);
    assert_eq!(
        shape(ramp(&[0, 2]).tensordot(&ramp(&[2, 3]), &[1], &[0])),
        [0, 3]
    );
    assert_eq!(
        shape(Array::einsum("ij,jk->ik", [&ramp(&[0, 2]), &ramp(&[2, 3])])),
        [0, 3]
    );
    assert_eq!(shape(ramp(&[0]).outer(&ramp(&[3]))), [0, 3]);
    let index = ints(&[0]);
    assert_eq!(
        shape(ramp(&[1, 0, 2]).gather_mm(&ramp(&[1, 2, 3]), Some(&index), None, false)),
        [1, 0, 3]
    );
    refused(ramp(&[0, 1, 2]).gather_mm(&ramp(&[1, 2, 3]), Some(&index), None, false));
    assert_eq!(
        shape(ramp(&[0, 5, 2]).conv1d(&ramp(&[1, 2, 2]), 1, 0, 1, 1)),
        [0, 4, 1]
    );

    let layout = Quantized {
        bits: 4,
        group_size: 32,
        mode: QuantizationMode::Affine,
    };
    let packed = QuantizedWeight::quantize(&ramp(&[8, 32]), layout).unwrap();
    assert_eq!(shape(packed.matmul(&ramp(&[0, 32]))), [0, 8]);
    assert_eq!(
        shape(packed.matmul_oriented(&ramp(&[0, 8]), false)),
        [0, 32]
    );
    let x = ramp(&[1, 0, 32]);
    assert_eq!(
        shape(packed.gather_matmul(&x, None, Some(&index), false)),
        [1, 0, 8]
    );

    let mask = AttentionMask::None;
    let keys = ramp(&[1, 1, 3, 8]);
    assert_eq!(
        shape(ramp(&[1, 1, 0, 8]).attention(&keys, &keys, 1.0, mask, None)),
        [1, 1, 0, 8]
    );
    let none = ramp(&[1, 1, 0, 8]);
    let over_nothing = ramp(&[1, 1, 2, 8]).attention(&none, &none, 1.0, mask, None);
    assert_eq!(shape(over_nothing), [1, 1, 2, 8]);
    let rope = Rope {
        dims: 8,
        traditional: false,
        base: 1e4,
        scale: 1.0,
        freqs: None,
    };
    assert_eq!(shape(none.rope(rope, 3)), [1, 1, 0, 8]);
}

#[test]
fn scans_along_one_element() {
    // The stride of a dimension of size 1 may be anything, 0 too.
    let one = Array::scalar(3f32).unwrap();
    for (array, axis) in [
        (one.broadcast_to(&[1]), 0),
        (one.broadcast_to(&[4]), 0),
        (ramp(&[3]).expand_dims(1), 1),
        (ramp(&[3]).expand_dims(0), 0),
        (one.broadcast_to(&[1, 3]), 0),
        (ramp(&[2, 1]).t(), 0),
        (ramp(&[2, 3]).slice_axis(0, 1, 2), 0),
        (ramp(&[2, 3]).slice_axis(1, 1, 2), 1),
    ] {
        let array = array.unwrap();
        let sums = array.cumsum(axis, false, true).unwrap();
        let total = sums.slice_axis(axis, -1, i32::MAX).unwrap();
        let before = array.cumprod(axis, true, false).unwrap();
        let last = before.slice_axis(axis, -1, i32::MAX).unwrap();
        assert!(floats(&last).iter().all(|&product| product == 1.0));
        assert_eq!(floats(&total), floats(&array.sum(&[axis], true).unwrap()));
        assert_eq!(array.sort(axis).unwrap().shape(), array.shape());
    }
}

#[test]
fn ranks_of_elements() {
    let x = ramp(&[5]);
    for k in [-1, 6] {
        refused(x.topk(k, 0));
    }
    for kth in [5, -6] {
        refused(x.partition(kth, 0));
        refused(x.argpartition(kth, 0));
    }
    refused(x.sort(1));
    refused(x.cumsum(-2, false, true));
}

#[test]
fn settings_of_convolutions() {
    let (x, w) = (ramp(&[1, 5, 2]), ramp(&[1, 2, 2]));
    refused(x.conv1d(&w, 0, 0, 1, 1));
    refused(x.conv1d(&w, -1, 0, 1, 1));
    refused(x.conv1d(&w, 1, 0, 0, 1));
    refused(x.conv1d(&w, 1, 0, 1, 0));
    refused(x.conv1d(&w, 1, 0, 1, 3));
    refused(x.conv1d(&w, 1, -3, 1, 1));
    refused(x.conv1d(&ramp(&[1, 9, 2]), 1, 0, 1, 1));
    refused(x.conv_transpose1d(&w, 0, 0, 1, 0, 1));
    let image = ramp(&[1, 4, 4, 1]);
    refused(image.conv2d(&w, (1, 1), (0, 0), (1, 1), 1));
    refused(image.conv2d(&ramp(&[1, 2, 2, 1]), (1, 0), (0, 0), (1, 1), 1));
}

#[test]
fn settings_of_the_fused_operations() {
    let x = ramp(&[1, 2, 3, 8]);
    let rope = Rope {
        dims: 8,
        traditional: false,
        base: 1e4,
        scale: 1.0,
        freqs: None,
    };
    for dims in [0, -2, 7, 10] {
        refused(x.rope(Rope { dims, ..rope }, 0));
    }
    let short = ramp(&[3]);
    let freqs = Some(&short);
    refused(x.rope(Rope { freqs, ..rope }, 0));
    refused(x.rope_at(rope, &ints(&[0, 1, 2])));
    refused(x.rope_at(rope, &ramp(&[1])));
    refused(x.rms_norm(Some(&ramp(&[3])), 1e-5));
    refused(x.layer_norm(Some(&ramp(&[8])), Some(&ramp(&[4])), 1e-5));

    let mask = AttentionMask::None;
    refused(x.attention(&ramp(&[1, 3, 3, 8]), &ramp(&[1, 3, 3, 8]), 1.0, mask, None));
    refused(x.attention(&ramp(&[1, 2, 3, 4]), &x, 1.0, mask, None));
    refused(x.attention(&x, &ramp(&[1, 2, 4, 8]), 1.0, mask, None));
    refused(x.attention(&x, &x, 1.0, mask, Some(&ramp(&[5]))));
    let wrong = ramp(&[7, 7]);
    refused(x.attention(&x, &x, 1.0, AttentionMask::Array(&wrong), None));
    refused(ramp(&[8]).attention(&x, &x, 1.0, mask, None));
}

/// An operation of an axis, by its name.
type OfAxis = (&'static str, fn(&Array, i32) -> Result<Array>);

/// Every operation that takes an axis, on a matrix.
const OF_AXIS: &[OfAxis] = &[
    ("all", |x, axis| x.all(&[axis], false)),
    ("any", |x, axis| x.any(&[axis], false)),
    ("sum", |x, axis| x.sum(&[axis], true)),
    ("prod", |x, axis| x.prod(&[axis], true)),
    ("mean", |x, axis| x.mean(&[0, axis], true)),
    ("max", |x, axis| x.max(&[axis], true)),
    ("min", |x, axis| x.min(&[axis], true)),
    ("var", |x, axis| x.var(&[axis], true, 0)),
    ("std", |x, axis| x.std(&[axis], true, 0)),
    ("logsumexp", |x, axis| x.logsumexp(&[axis], true)),
    ("softmax", |x, axis| x.softmax(&[axis], true)),
    ("cumsum", |x, axis| x.cumsum(axis, false, true)),
    ("cumprod", |x, axis| x.cumprod(axis, false, true)),
    ("cummax", |x, axis| x.cummax(axis, true, true)),
    ("cummin", |x, axis| x.cummin(axis, true, false)),
    ("logcumsumexp", |x, axis| x.logcumsumexp(axis, false, true)),
    ("topk", |x, axis| x.topk(1, axis)),
    ("argmax", |x, axis| x.argmax(axis, true)),
    ("argmin", |x, axis| x.argmin(axis, false)),
    ("sort", |x, axis| x.sort(axis)),
    ("argsort", |x, axis| x.argsort(axis)),
    ("partition", |x, axis| x.partition(1, axis)),
    ("argpartition", |x, axis| x.argpartition(-1, axis)),
    ("transpose", |x, axis| x.transpose(&[0, axis])),
    ("swap_axes", |x, axis| x.swap_axes(0, axis)),
    ("move_axis", |x, axis| x.move_axis(axis, 0)),
    ("move_axis to", |x, axis| x.move_axis(0, axis)),
    ("squeeze", |x, axis| x.squeeze(axis)),
    ("unflatten", |x, axis| x.unflatten(axis, &[1, -1])),
    ("repeat", |x, axis| x.repeat(2, axis)),
    ("roll", |x, axis| x.roll(1, axis)),
    ("pad", |x, axis| x.pad(&[axis], &[(1, 1)], 0.0)),
    ("pad_edge", |x, axis| x.pad_edge(&[axis], &[(1, 1)])),
    ("concatenate", |x, axis| Array::concatenate([x, x], axis)),
    ("split", |x, axis| Ok(x.split(1, axis)?.remove(0))),
    ("split_at", |x, axis| Ok(x.split_at(&[1], axis)?.remove(0))),
    ("diagonal", |x, axis| x.diagonal(0, 0, axis)),
    ("slice_axis", |x, axis| x.slice_axis(axis, 0, 1)),
    ("slice_update_axis", |x, axis| {
        x.slice_update_axis(x, axis, 0, 2)
    }),
    ("take", |x, axis| x.take(&ints(&[0]), axis)),
    ("take_along_axis", |x, axis| {
        x.take_along_axis(&square(), axis)
    }),
    ("put_along_axis", |x, axis| {
        x.put_along_axis(&square(), x, axis)
    }),
    ("scatter_add_axis", |x, axis| {
        x.scatter_add_axis(&square(), x, axis)
    }),
    ("tensordot", |x, axis| x.tensordot(x, &[axis], &[0])),
    ("tensordot of", |x, axis| x.tensordot(x, &[0], &[axis])),
    ("categorical", |x, axis| {
        random::categorical(x, axis, &random::key(1)?)
    }),
    ("categorical_samples", |x, axis| {
        random::categorical_samples(x, axis, 3, &random::key(1)?)
    }),
    ("at", |x, axis| x.at(axis, 0)),
];

fn square() -> Array {
    Array::zeros(&[2, 2], Dtype::Int32).unwrap()
}

#[test]
fn axes_that_are_not_there() {
    let x = ramp(&[2, 2]);
    for (name, operation) in OF_AXIS {
        for axis in [2, 3, 100, -3, -100, i32::MAX, i32::MIN] {
            let result = operation(&x, axis).and_then(|array| array.eval());
            let error = result.expect_err(&format!("{name} of axis {axis}"));
            assert!(!error.to_string().contains('\n'), "{error}");
        }
    }
    for axis in [3, -4, i32::MAX, i32::MIN] {
        refused(x.expand_dims(axis));
        refused(Array::stack([&x, &x], axis));
    }
    for (start, end) in [(0, 2), (-3, 1), (2, 3), (i32::MIN, i32::MAX)] {
        // MLX cuts these to what is there; all that counts is that nothing else is read.
        if let Ok(flat) = x.flatten(start, end) {
            assert_eq!(floats(&flat), floats(&x));
        }
    }
}

#[test]
fn axes_given_twice_or_not_paired() {
    let x = ramp(&[2, 2]);
    refused(x.sum(&[0, 0], false));
    refused(x.transpose(&[0, 0]));
    refused(x.transpose(&[0]));
    refused(x.softmax(&[1, -1], true));
    refused(x.tensordot(&x, &[0, 1], &[0]));
    refused(x.diagonal(0, 1, -1));
    refused(x.pad(&[0, 1], &[(1, 1)], 0.0));
    refused(x.pad(&[0], &[(1, 1), (2, 2)], 0.0));
    refused(x.pad(&[0], &[(i32::MAX, i32::MAX)], 0.0));
    refused(x.gather([&ints(&[0])], &[0, 0], &[1, 1]));
    refused(x.gather([&ints(&[0])], &[0], &[1]));
    refused(Array::concatenate([], 0));
    refused(Array::stack([], 0));
}

#[test]
fn numbers_of_elements_that_overflow() {
    let wide = Array::zeros(&[1 << 30], Dtype::Float32).unwrap();
    for array in [
        wide.repeat(1 << 20, 0),
        wide.tile(&[1 << 20]),
        wide.expand_dims(0)
            .and_then(|x| x.tile(&[1 << 30, 1 << 10])),
        Array::tri(1 << 30, 1 << 30, 0, Dtype::Float32),
    ]
    .into_iter()
    .flatten()
    {
        // Never evaluated: it must not have a shape that lies.
        assert!(array.shape().iter().all(|&dim| dim >= 0), "{array:?}");
    }
}
