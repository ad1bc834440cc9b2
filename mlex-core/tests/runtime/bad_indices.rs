//! Indices: MLX follows them without a look, here they stay in bounds.

use mlex_core::{Array, Dtype, QuantizationMode, Quantized, QuantizedWeight};

use crate::bad_arguments::{ints, refused};
use crate::{floats, ramp};

#[test]
fn taken_indices_stay_in_bounds() {
    let x = ramp(&[4]);
    let far = ints(&[0, 3, 4, 1_000_000, i32::MAX, -1, -4, -5, i32::MIN]);
    let expected = [0.0, 3.0, 3.0, 3.0, 3.0, 3.0, 0.0, 0.0, 0.0];
    assert_eq!(floats(&x.take(&far, 0).unwrap()), expected);
    assert_eq!(floats(&x.take_flat(&far).unwrap()), expected);
    assert_eq!(floats(&x.take_along_axis(&far, 0).unwrap()), expected);
    for dtype in [Dtype::Int64, Dtype::Int8, Dtype::Int16] {
        let near = ints(&[-5, -4, -1, 3, 4, 127]).as_type(dtype).unwrap();
        let expected = [0.0, 0.0, 3.0, 3.0, 3.0, 3.0];
        assert_eq!(floats(&x.take(&near, 0).unwrap()), expected, "{dtype}");
    }
    for dtype in [Dtype::Uint8, Dtype::Uint16, Dtype::Uint32, Dtype::Uint64] {
        let near = ints(&[0, 3, 4, 200]).as_type(dtype).unwrap();
        assert_eq!(
            floats(&x.take(&near, 0).unwrap()),
            [0.0, 3.0, 3.0, 3.0],
            "{dtype}"
        );
    }
    // A dimension that the indices' type cannot leave.
    let wide = ramp(&[300]);
    let bytes = Array::from_slice(&[0u8, 255], &[2]).unwrap();
    assert_eq!(floats(&wide.take(&bytes, 0).unwrap()), [0.0, 255.0]);
    let signed = Array::from_slice(&[-128i8, 127], &[2]).unwrap();
    assert_eq!(floats(&wide.take(&signed, 0).unwrap()), [172.0, 127.0]);
    let last = Array::from_slice(&[u64::MAX, u64::MAX / 2], &[2]).unwrap();
    assert_eq!(floats(&x.take(&last, 0).unwrap()), [3.0, 3.0]);
}

#[test]
fn gathered_windows_stay_in_bounds() {
    let x = ramp(&[6]);
    let window = |indices: &Array| floats(&x.gather([indices], &[0], &[3]).unwrap());
    assert_eq!(
        window(&ints(&[3, 4, 99])),
        [3., 4., 5., 3., 4., 5., 3., 4., 5.]
    );
    // -3 has room for three, -1 has not.
    assert_eq!(
        window(&ints(&[-3, -1, -99])),
        [3., 4., 5., 3., 4., 5., 0., 1., 2.]
    );
    let small = Array::from_slice(&[-3i8, 100], &[2]).unwrap();
    assert_eq!(window(&small), [3., 4., 5., 3., 4., 5.]);
    let long = ramp(&[200]);
    let small = Array::from_slice(&[-100i8], &[1]).unwrap();
    let found = long.gather([&small], &[0], &[2]).unwrap();
    assert_eq!(floats(&found), [100.0, 101.0]);
    let unsigned = Array::from_slice(&[5u32, u32::MAX], &[2]).unwrap();
    assert_eq!(window(&unsigned), [3., 4., 5., 3., 4., 5.]);
    refused(x.gather([&ints(&[0])], &[1], &[1]));
    refused(x.gather([&ints(&[0])], &[-1], &[1]));
    refused(x.gather([&ints(&[0])], &[0], &[7]));
    refused(x.gather([&ints(&[0]), &ints(&[0])], &[0], &[1]));
}

#[test]
fn scattered_updates_stay_in_bounds() {
    let x = Array::zeros(&[4], Dtype::Float32).unwrap();
    let one = Array::ones(&[2, 1], Dtype::Float32).unwrap();
    let far = ints(&[1_000_000, i32::MIN]);
    assert_eq!(
        floats(&x.scatter([&far], &one, &[0]).unwrap()),
        [1., 0., 0., 1.]
    );
    assert_eq!(
        floats(&x.scatter_add([&far], &one, &[0]).unwrap()),
        [1., 0., 0., 1.]
    );
    let two = Array::ones(&[2, 2], Dtype::Float32).unwrap();
    let end = ints(&[3, 3]);
    assert_eq!(
        floats(&x.scatter_add([&end], &two, &[0]).unwrap()),
        [0., 0., 2., 2.]
    );
    let flat = Array::ones(&[2], Dtype::Float32).unwrap();
    assert_eq!(
        floats(&x.put_along_axis(&far, &flat, 0).unwrap()),
        [1., 0., 0., 1.]
    );
    assert_eq!(
        floats(&x.scatter_add_axis(&far, &flat, 0).unwrap()),
        [1., 0., 0., 1.]
    );
    refused(x.scatter([&ints(&[0])], &flat, &[0]));
    refused(x.scatter(
        [&ints(&[0])],
        &Array::ones(&[1, 5], Dtype::Float32).unwrap(),
        &[0],
    ));
}

#[test]
fn indices_are_integers() {
    let x = ramp(&[4]);
    let bools = Array::from_slice(&[true, false], &[2]).unwrap();
    let updates = Array::ones(&[2, 1], Dtype::Float32).unwrap();
    for odd in [ramp(&[2]), bools] {
        refused(x.take(&odd, 0));
        refused(x.take_along_axis(&odd, 0));
        refused(x.put_along_axis(&odd, &ramp(&[2]), 0));
        refused(x.gather([&odd], &[0], &[1]));
        refused(x.scatter([&odd], &updates, &[0]));
    }
}

#[test]
fn nothing_is_taken_from_nothing() {
    let empty = ramp(&[0, 3]);
    let index = ints(&[0]);
    refused(empty.take(&index, 0));
    refused(empty.gather([&index], &[0], &[1, 3]));
    refused(empty.take_along_axis(&Array::zeros(&[1, 3], Dtype::Int32).unwrap(), 0));
    let none = Array::from_slice::<i32>(&[], &[0]).unwrap();
    assert_eq!(empty.take(&none, 0).unwrap().shape(), [0, 3]);
    assert_eq!(ramp(&[3]).take(&none, 0).unwrap().shape(), [0]);
}

#[test]
fn matrices_are_picked_in_bounds() {
    let x = ramp(&[2, 1, 2]);
    let picked = x.gather_mm(
        &ramp(&[3, 2, 1]),
        Some(&ints(&[0, 9])),
        Some(&ints(&[-7, 5])),
        false,
    );
    // x[0] @ w[0] and x[1] @ w[2].
    assert_eq!(floats(&picked.unwrap()), [1.0, 2.0 * 4.0 + 3.0 * 5.0]);
    let half = |x: Array| x.as_type(Dtype::Bfloat16).unwrap();
    let (x, w) = (half(x), half(ramp(&[3, 2, 1])));
    let picked = x.gather_mm(&w, None, Some(&ints(&[0, 2])), true).unwrap();
    assert_eq!(picked.dtype(), Dtype::Bfloat16);
    let picked = picked.as_type(Dtype::Float32).unwrap();
    assert_eq!(floats(&picked), [1.0, 2.0 * 4.0 + 3.0 * 5.0]);

    let layout = Quantized {
        bits: 4,
        group_size: 32,
        mode: QuantizationMode::Affine,
    };
    let experts = ramp(&[2, 8, 32]).multiply(0.01).unwrap();
    let packed = QuantizedWeight::quantize(&experts, layout).unwrap();
    let x = ramp(&[1, 1, 32]).multiply(0.1).unwrap();
    let pick = |index: i32| {
        let y = packed.gather_matmul(&x, None, Some(&ints(&[index])), false);
        floats(&y.unwrap())
    };
    assert_eq!(pick(1_000_000), pick(1));
    assert_eq!(pick(-1), pick(0));
    refused(packed.gather_matmul(&x, None, Some(&ramp(&[1])), false));
}

#[test]
fn rows_for_a_mask() {
    let x = ramp(&[2, 3, 2]);
    let mask = Array::from_slice(&[false, true, false, true, false, true], &[2, 3]).unwrap();
    let rows = ramp(&[3, 2]).add(100.0).unwrap();
    let expected = [0., 1., 100., 101., 4., 5., 102., 103., 8., 9., 104., 105.];
    assert_eq!(floats(&x.masked_scatter(&mask, &rows).unwrap()), expected);
    // Too many are left over, of too few the last one stands in.
    let more = ramp(&[9, 2]).add(100.0).unwrap();
    assert_eq!(floats(&x.masked_scatter(&mask, &more).unwrap()), expected);
    let one = x.masked_scatter(&mask, &ramp(&[1, 2])).unwrap();
    assert_eq!(
        floats(&one),
        [0., 1., 0., 1., 4., 5., 0., 1., 8., 9., 0., 1.]
    );
    // A mask of single elements.
    let whole = Array::from_slice(&[true, false], &[2]).unwrap();
    let flat = ramp(&[2])
        .masked_scatter(&whole, &ramp(&[1]).add(7.0).unwrap())
        .unwrap();
    assert_eq!(floats(&flat), [7.0, 1.0]);
    refused(x.masked_scatter(&mask, &ramp(&[0, 2])));
    refused(x.masked_scatter(&mask, &ramp(&[3, 4])));
    refused(x.masked_scatter(&ramp(&[2, 3]), &rows));
    refused(x.masked_scatter(&whole.broadcast_to(&[3, 2]).unwrap(), &rows));
}
