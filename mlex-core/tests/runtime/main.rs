//! What every user of the crate meets before any operation: arrays, errors, threads, streams,
//! compiled functions, files; and what bad arguments do.
#![allow(clippy::unwrap_used, reason = "a helper fails as its test would")]

mod array;
mod bad_arguments;
mod bad_indices;
mod compile;
mod errors;
mod every_dtype;
mod files;
mod properties;
mod streams;
mod threads;

use mlex_core::Array;

/// 0, 1, 2, .. as f32 in a shape.
fn ramp(shape: &[i32]) -> Array {
    let size: i32 = shape.iter().product();
    let values: Vec<f32> = (0..size).map(|value| value as f32).collect();
    Array::from_slice(&values, shape).unwrap()
}

fn floats(array: &Array) -> Vec<f32> {
    array.to_vec().unwrap()
}
