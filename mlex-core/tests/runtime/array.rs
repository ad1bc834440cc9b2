//! Data into arrays and out of them.

use half::{bf16, f16};
use mlex_core::{Array, Complex64, Dtype, Element, ErrorKind, async_eval, eval};

use crate::{floats, ramp};

fn round_trip<T: Element + PartialEq + std::fmt::Debug>(values: [T; 6]) {
    let array = Array::from_slice(&values, &[2, 3]).unwrap();
    assert_eq!(array.dtype(), T::DTYPE);
    assert_eq!(
        (array.shape(), array.ndim(), array.size()),
        (&[2, 3][..], 2, 6)
    );
    assert_eq!(array.nbytes(), 6 * T::DTYPE.size_in_bytes());
    assert_eq!(array.as_slice::<T>().unwrap(), values);
    // An evaluated result, not only the data as they came in.
    let copy = array.copy().unwrap();
    assert_eq!(copy.to_vec::<T>().unwrap(), values);
    let again = Array::from_bytes(array.as_bytes().unwrap(), &[6], T::DTYPE).unwrap();
    assert_eq!(again.as_slice::<T>().unwrap(), values);

    let scalar = Array::scalar(values[1]).unwrap();
    assert_eq!((scalar.shape(), scalar.size()), (&[][..], 1));
    assert_eq!(scalar.item::<T>().unwrap(), values[1]);
}

#[test]
fn every_dtype_goes_in_and_out() {
    round_trip([true, false, false, true, true, false]);
    round_trip([0u8, 1, 2, 127, 128, u8::MAX]);
    round_trip([0u16, 1, 2, 3, 4, u16::MAX]);
    round_trip([0u32, 1, 2, 3, 4, u32::MAX]);
    round_trip([0u64, 1, 2, 3, 4, u64::MAX]);
    round_trip([0i8, -1, 2, -3, i8::MIN, i8::MAX]);
    round_trip([0i16, -1, 2, -3, i16::MIN, i16::MAX]);
    round_trip([0i32, -1, 2, -3, i32::MIN, i32::MAX]);
    round_trip([0i64, -1, 2, -3, i64::MIN, i64::MAX]);
    round_trip([
        0.0f32,
        -0.5,
        f32::MAX,
        f32::MIN_POSITIVE,
        f32::INFINITY,
        3e-45,
    ]);
    round_trip([
        0.0f64,
        -0.5,
        f64::MAX,
        f64::MIN_POSITIVE,
        f64::INFINITY,
        0.1,
    ]);
    round_trip([0.0, -0.5, 65504.0, 6e-8, 1.0, 2.0].map(f16::from_f32));
    round_trip([0.0, -0.5, 3e38, 1e-40, 1.0, 2.0].map(bf16::from_f32));
    let complex = |re: f32, im: f32| Complex64 { re, im };
    round_trip([1, 2, 3, 4, 5, 6].map(|n| complex(n as f32, -0.5 * n as f32)));
}

#[test]
fn another_element_type_is_refused() {
    let array = ramp(&[3]);
    let error = array.as_slice::<i32>().unwrap_err();
    assert_eq!(error.to_string(), "expected dtype int32, found float32");
    assert!(array.to_vec::<f64>().is_err());
    assert!(array.item::<bf16>().is_err());
}

#[test]
fn slices_need_row_major_order() {
    let matrix = ramp(&[2, 3]);
    let turned = matrix.t().unwrap();
    let error = turned.as_slice::<f32>().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::NotContiguous), "{error}");
    assert!(turned.as_bytes().is_err());
    assert_eq!(floats(&turned), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    let straight = turned.contiguous().unwrap();
    assert_eq!(straight.as_slice::<f32>().unwrap(), floats(&turned));

    let spread = Array::scalar(2.5f32).unwrap().broadcast_to(&[3]).unwrap();
    assert!(spread.as_slice::<f32>().is_err());
    assert_eq!(floats(&spread), [2.5; 3]);
    let columns = matrix.slice_axis(1, 1, 3).unwrap();
    assert!(columns.as_slice::<f32>().is_err());
    assert_eq!(floats(&columns), [1.0, 2.0, 4.0, 5.0]);
    let backwards = ramp(&[4]).slice(&[3], &[-5], Some(&[-1])).unwrap();
    assert_eq!(floats(&backwards), [3.0, 2.0, 1.0, 0.0]);
}

#[test]
fn a_part_of_a_buffer_starts_where_it_should() {
    let rows = ramp(&[4, 3]).slice_axis(0, 1, 3).unwrap();
    assert_eq!(
        rows.as_slice::<f32>().unwrap(),
        [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    );
    assert_eq!(rows.as_bytes().unwrap().len(), 24);
    assert_eq!(ramp(&[5]).at(0, -1).unwrap().item::<f32>().unwrap(), 4.0);
}

#[test]
fn wrong_lengths_and_shapes_are_refused() {
    let refused = |shape: &[i32]| {
        let error = Array::from_slice(&[0f32; 6], shape).unwrap_err();
        error.to_string()
    };
    assert_eq!(refused(&[2, 2]), "elements: expected 4, found 6");
    assert_eq!(refused(&[]), "elements: expected 1, found 6");
    let shape = |text: &str| {
        format!("shape: expected dimensions whose product can be counted, found {text}")
    };
    assert_eq!(refused(&[-2, -3]), shape("[-2, -3]"));
    let huge = [i32::MAX; 4];
    assert_eq!(refused(&huge), shape(&format!("{huge:?}")));

    let error = Array::from_bytes(&[0; 6], &[3], Dtype::Float32).unwrap_err();
    assert_eq!(error.to_string(), "bytes: expected 12, found 6");
    assert!(Array::from_bytes(&[], &[i32::MAX; 3], Dtype::Float64).is_err());
}

#[test]
fn empty_arrays_have_no_elements() {
    for shape in [&[0][..], &[2, 0, 3], &[0, i32::MAX]] {
        let array = Array::from_slice::<f32>(&[], shape).unwrap();
        assert_eq!((array.shape(), array.size()), (shape, 0));
        assert!(array.as_slice::<f32>().unwrap().is_empty());
        assert!(array.to_vec::<f32>().unwrap().is_empty());
        let error = array.item::<f32>().unwrap_err().to_string();
        assert_eq!(error, "elements of the array: expected 1, found 0");
        let sum = array.sum_all().unwrap();
        assert_eq!(sum.item::<f32>().unwrap(), 0.0);
    }
    let joined = Array::concatenate([&ramp(&[0, 2]), &ramp(&[1, 2])], 0).unwrap();
    assert_eq!(floats(&joined), [0.0, 1.0]);
}

#[test]
fn dimensions_count_from_both_ends() {
    let array = ramp(&[2, 3, 4]);
    assert_eq!(
        [0, 2, -1, -3].map(|axis| array.dim(axis).unwrap()),
        [2, 4, 4, 2]
    );
    for axis in [3, -4, i32::MIN, i32::MAX] {
        let error = array.dim(axis).unwrap_err().to_string();
        assert!(
            error.contains(&format!("{axis} for shape [2, 3, 4]")),
            "{error}"
        );
    }
    assert!(Array::scalar(1u8).unwrap().dim(0).is_err());
}

#[test]
fn bytes_need_no_alignment() {
    let values = [1.5f64, -2.25, 1e300];
    let mut bytes = vec![0u8; 1];
    bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    for start in 0..8 {
        let mut shifted = vec![0u8; start];
        shifted.extend(&bytes[1..]);
        let array = Array::from_bytes(&shifted[start..], &[3], Dtype::Float64).unwrap();
        assert_eq!(array.as_slice::<f64>().unwrap(), values);
    }
}

#[test]
fn a_bool_is_0_or_1() {
    let array = Array::from_bytes(&[0, 1, 1], &[3], Dtype::Bool).unwrap();
    assert_eq!(array.as_slice::<bool>().unwrap(), [false, true, true]);
    let error = Array::from_bytes(&[0, 2, 1], &[3], Dtype::Bool).unwrap_err();
    assert_eq!(
        error.to_string(),
        "bool data: expected bytes 0 and 1, found another byte"
    );
    let bytes = Array::from_slice(&[7u8, 0], &[2]).unwrap();
    assert!(bytes.view(Dtype::Bool).is_err());
    // A conversion asks whether it is 0, and a view of bools as bytes is harmless.
    let bools = bytes.as_type(Dtype::Bool).unwrap();
    assert_eq!(bools.as_bytes().unwrap(), [1, 0]);
    assert_eq!(
        bools.view(Dtype::Uint8).unwrap().to_vec::<u8>().unwrap(),
        [1, 0]
    );
    // Operations on bools give bools.
    for odd in [
        bools.bitwise_invert().unwrap(),
        bools.bitwise_xor(&bools).unwrap(),
        bools
            .cumsum(0, false, true)
            .unwrap()
            .as_type(Dtype::Bool)
            .unwrap(),
        bools.add(&bools).unwrap(),
        bools.multiply(&bools).unwrap(),
        bools.maximum(&bools).unwrap(),
    ] {
        if odd.dtype() == Dtype::Bool {
            assert!(
                odd.as_bytes().unwrap().iter().all(|&byte| byte < 2),
                "{odd:?}"
            );
        }
    }
}

#[test]
fn views_keep_the_bytes() {
    let bits = Array::from_slice(&[1.0f32, -2.0], &[2]).unwrap();
    let words = bits.view(Dtype::Uint32).unwrap();
    assert_eq!(words.to_vec::<u32>().unwrap(), [0x3f80_0000, 0xc000_0000]);
    assert_eq!(bits.view(Dtype::Uint16).unwrap().shape(), [4]);
    assert!(
        Array::from_slice(&[1u8; 3], &[3])
            .unwrap()
            .view(Dtype::Uint16)
            .is_err()
    );
}

#[test]
fn a_clone_is_another_reference() {
    let array = ramp(&[3]).add(1.0).unwrap();
    let clone = array.clone();
    assert_eq!(floats(&array), [1.0, 2.0, 3.0]);
    drop(array);
    assert_eq!(clone.as_slice::<f32>().unwrap(), [1.0, 2.0, 3.0]);
}

#[test]
fn a_borrowed_slice_is_not_written_to() {
    // What refers to the data keeps an update from taking them over.
    let array = ramp(&[4]).add(0.0).unwrap();
    let before = array.as_slice::<f32>().unwrap();
    let update = Array::from_slice(&[9f32], &[1]).unwrap();
    let updated = array.slice_update_axis(&update, 0, 1, 2).unwrap();
    assert_eq!(floats(&updated), [0.0, 9.0, 2.0, 3.0]);
    assert_eq!(before, [0.0, 1.0, 2.0, 3.0]);
    // Nor does an update of a clone, whose original is gone.
    let clone = array.clone();
    let view = clone.as_slice::<f32>().unwrap();
    let updated = array.slice_update_axis(&update, 0, 0, 1).unwrap();
    drop(array);
    assert_eq!(floats(&updated), [9.0, 1.0, 2.0, 3.0]);
    assert_eq!(view, [0.0, 1.0, 2.0, 3.0]);
}

#[test]
fn several_arrays_are_computed_together() {
    let x = ramp(&[3]);
    let (a, b) = (x.add(1.0).unwrap(), x.multiply(2.0).unwrap());
    eval([&a, &b]).unwrap();
    assert_eq!(a.as_slice::<f32>().unwrap(), [1.0, 2.0, 3.0]);
    assert_eq!(b.as_slice::<f32>().unwrap(), [0.0, 2.0, 4.0]);
    eval([]).unwrap();
}

#[test]
fn async_results_can_be_read_and_built_on() {
    let mut x = ramp(&[64, 64]).multiply(1e-3).unwrap();
    for _ in 0..20 {
        let next = x.matmul(&x).unwrap().tanh().unwrap();
        async_eval([&next]).unwrap();
        x = next.add(0.01).unwrap();
    }
    async_eval([&x]).unwrap();
    let found = x.as_slice::<f32>().unwrap();
    assert!(found.iter().all(|value| value.is_finite()));
    async_eval([]).unwrap();
}

#[test]
fn arrays_print_in_one_way_and_debug_in_another() {
    let array = ramp(&[2]).multiply(0.5).unwrap();
    assert_eq!(format!("{array:?}"), "Array([2], float32)");
    assert_eq!(array.to_string(), "array([0, 0.5], dtype=float32)");
}
