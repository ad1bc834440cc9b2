//! Products with quantized weights against f64, for few and many rows: the device decides which of
//! several ways computes them.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use mlex_core::{Array, Dtype, QuantizationMode, Quantized, QuantizedWeight, random};
use mlex_nn::{LazyTensor, Linear, QuantizationConfig, Weights};

fn uniform(seed: u64, shape: &[i32]) -> Array {
    let key = random::key(seed).unwrap();
    random::uniform(-1.0, 1.0, shape, Dtype::Float32, &key).unwrap()
}

fn f64s(array: &Array) -> Vec<f64> {
    let values: Vec<f32> = array.as_type(Dtype::Float32).unwrap().to_vec().unwrap();
    values.into_iter().map(f64::from).collect()
}

/// A layer of `[outputs, columns]`, and its weight.
fn layer(outputs: i32, columns: i32, layout: Quantized, dtype: Dtype) -> (Linear, Vec<f64>) {
    layer_with(outputs, columns, layout, dtype, dtype)
}

/// The same with biases of another type than the scales.
fn layer_with(
    outputs: i32,
    columns: i32,
    layout: Quantized,
    scales: Dtype,
    biases: Dtype,
) -> (Linear, Vec<f64>) {
    let weight = uniform(1, &[outputs, columns]).as_type(scales).unwrap();
    let mut packed = QuantizedWeight::quantize(&weight, layout).unwrap();
    packed.biases = packed.biases.map(|array| array.as_type(biases).unwrap());
    let wide = |array: &Array| array.as_type(Dtype::Float32).unwrap();
    let exact = QuantizedWeight {
        weight: packed.weight.clone(),
        scales: wide(&packed.scales),
        biases: packed.biases.as_ref().map(wide),
        layout,
    };
    let exact = f64s(&exact.dequantize(Some(Dtype::Float32)).unwrap());
    let tensors = [
        ("weight", Some(packed.weight)),
        ("scales", Some(packed.scales)),
        ("biases", packed.biases),
    ];
    let ready = |(name, array): (&str, Option<Array>)| {
        array.map(|array| (name.to_owned(), LazyTensor::ready(array)))
    };
    let tensors: BTreeMap<_, _> = tensors.into_iter().filter_map(ready).collect();
    let weights = Weights::new(tensors, QuantizationConfig::uniform(layout));
    let layer = Linear::load(&weights, columns, outputs, false).unwrap();
    (layer, exact)
}

/// How far products of `rows` rows, of which some are a batch, are off, relative to the largest.
fn error_of(layer: &Linear, weight: &[f64], columns: i32, rows: i32, dtype: Dtype) -> f64 {
    let shape = if rows % 2 == 0 {
        vec![2, rows / 2, columns]
    } else {
        vec![1, rows, columns]
    };
    let x = uniform(2, &shape).as_type(dtype).unwrap();
    let y = layer.forward(&x).unwrap();
    assert_eq!(y.dtype(), dtype);
    assert_eq!(y.shape()[..2], shape[..2]);
    let (x, y, columns) = (f64s(&x), f64s(&y), columns as usize);
    let (mut error, mut largest) = (0.0f64, 0.0f64);
    let outputs = weight.len() / columns;
    let pairs = x.chunks_exact(columns).zip(y.chunks_exact(outputs));
    // Not all of many: f64 is slow.
    for (x, y) in pairs.step_by((rows as usize / 6).max(1)) {
        for (row, y) in weight.chunks_exact(columns).zip(y) {
            let exact: f64 = row.iter().zip(x).map(|(a, b)| a * b).sum();
            largest = largest.max(exact.abs());
            error = error.max((exact - y).abs());
        }
    }
    assert!(largest > 0.0);
    error / largest
}

const AFFINE: [(i32, i32); 4] = [(4, 32), (4, 64), (4, 128), (8, 64)];

#[test]
fn any_number_of_rows_is_multiplied() {
    // What rounding of the weights, where they are unpacked, and of the result gives.
    for (dtype, tolerance) in [
        (Dtype::Float32, 1e-4),
        (Dtype::Float16, 2e-3),
        (Dtype::Bfloat16, 1.2e-2),
    ] {
        for (bits, group_size) in AFFINE {
            let layout = Quantized {
                bits,
                group_size,
                mode: QuantizationMode::Affine,
            };
            // One group per row, and a number of rows that no tile divides.
            for (outputs, columns) in [(64, group_size), (130, 4 * group_size)] {
                let (layer, weight) = layer(outputs, columns, layout, dtype);
                for rows in [1, 2, 7, 20, 140] {
                    let error = error_of(&layer, &weight, columns, rows, dtype);
                    assert!(
                        error <= tolerance,
                        "{layout}, [{outputs}, {columns}], {rows} rows, {dtype}: {error}"
                    );
                }
            }
        }
    }
}

#[test]
fn large_weights_are_multiplied() {
    // Large enough for a kernel of our own on CUDA, and to be unpacked for many rows; no multiples
    // of its tile among them.
    for (outputs, columns, group_size) in [(2048, 4096, 64), (8197, 1024, 32), (1030, 8192, 128)] {
        let layout = Quantized {
            bits: 4,
            group_size,
            mode: QuantizationMode::Affine,
        };
        for (dtype, tolerance) in [(Dtype::Float16, 2e-3), (Dtype::Bfloat16, 1.2e-2)] {
            let (layer, weight) = layer(outputs, columns, layout, dtype);
            for rows in [1, 3, 8, 600] {
                let error = error_of(&layer, &weight, columns, rows, dtype);
                assert!(
                    error <= tolerance,
                    "{layout}, [{outputs}, {columns}], {rows} rows, {dtype}: {error}"
                );
            }
        }
    }
}

/// MLX knows a compiled kernel of ours by its constants, so that types which they do not name would be
/// taken for those of the first use.
#[test]
fn scales_of_other_types_are_not_taken_for_each_other() {
    let layout = Quantized {
        bits: 4,
        group_size: 64,
        mode: QuantizationMode::Affine,
    };
    let (half, float) = (Dtype::Bfloat16, Dtype::Float32);
    for (scales, biases) in [(half, half), (float, float), (half, float), (half, half)] {
        let (layer, weight) = layer_with(1040, 1024, layout, scales, biases);
        for rows in [3, 8] {
            let error = error_of(&layer, &weight, 1024, rows, half);
            assert!(error <= 1.2e-2, "{scales}, {biases}, {rows} rows: {error}");
        }
    }
}
