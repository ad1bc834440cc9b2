//! Products with quantized weights on NVIDIA GPUs, where MLX's are slow or not right.
//!
//! Measured on an H200 with MLX 0.32.4; docs/backends.md has the numbers.

mod attention;
mod few_rows;
mod norm;

use mlex_core::{Array, Dtype, QuantizationMode, Quantized, QuantizedWeight};

use crate::Result;

pub(crate) use attention::{capacity, normed_and_rotated};
pub(crate) use few_rows::{gated_linear, linear_three};
pub(crate) use norm::add_rms_norm;

/// From how many rows on, and products of two numbers, a weight is unpacked and multiplied by
/// cuBLAS: MLX's kernel reaches a seventh of what the tensor cores do, and unpacking takes as long
/// as it needs for some 200 rows.
const MANY_ROWS: usize = 192;
const MANY_PRODUCTS: i64 = 1 << 32;
/// The same of experts: from how many rows for each of them, on average. MLX's kernel reads an
/// expert's weight again for each row.
const MANY_ROWS_OF_EXPERT: usize = 12;
/// The most bytes that the experts of a projection may take unpacked, and the most experts that
/// MLX's product takes.
const MOST_UNPACKED: i64 = 2 << 30;
const MOST_EXPERTS: i32 = 1024;

/// `x` `[.., K]` times a quantized weight `[N, K]`, transposed: `[.., N]`.
///
/// # Errors
/// When the shapes do not fit.
pub(crate) fn quantized_matmul(x: &Array, weight: &QuantizedWeight) -> Result<Array> {
    let columns = x.dim(-1)?;
    let rows = x.size() / columns.max(1) as usize;
    if let Some(y) = few_rows::product(x, weight)? {
        return Ok(y);
    }
    let Quantized {
        group_size, mode, ..
    } = weight.layout;
    // MLX's product for one group per row, which it has for GPUs of compute capability 9 alone, is
    // wrong by as much as the result is large, in every dtype, unless there is one row.
    let one_group = mode == QuantizationMode::Affine && group_size >= columns && rows > 1;
    // Its kernel for float32 and groups of 128 asks for more shared memory than a block gets, with
    // more than 32 rows, and is refused.
    let refused = x.dtype() == Dtype::Float32 && group_size >= 128 && rows > 32;
    let products = rows as i64 * i64::from(columns) * i64::from(weight.weight.dim(0)?);
    let many = rows >= MANY_ROWS && products >= MANY_PRODUCTS;
    if one_group || refused || (many && is_half(x.dtype())) {
        return Ok(x.matmul(&unpacked(weight, x.dtype())?.t()?)?);
    }
    Ok(weight.matmul(x)?)
}

/// `x` `[R, 1, K]` with the weight of `[E, N, K]` that `indices` `[R]` names, transposed:
/// `[R, 1, N]`; `sorted` says that they ascend, and more shapes are possible otherwise.
///
/// # Errors
/// When the shapes do not fit.
pub(crate) fn gather_matmul(
    x: &Array,
    weight: &QuantizedWeight,
    indices: &Array,
    sorted: bool,
) -> Result<Array> {
    let (experts, rows) = (weight.weight.dim(0)?, weight.weight.dim(1)?);
    let unpacked_bytes = i64::from(experts) * i64::from(rows) * i64::from(x.dim(-1)?) * 2;
    let many = indices.size() >= MANY_ROWS_OF_EXPERT * experts.max(1) as usize;
    let fits = experts <= MOST_EXPERTS && unpacked_bytes <= MOST_UNPACKED;
    if sorted && many && fits && is_half(x.dtype()) {
        let transposed = unpacked(weight, x.dtype())?.swap_axes(-1, -2)?;
        return Ok(x.gather_mm(&transposed, None, Some(indices), true)?);
    }
    Ok(weight.gather_matmul(x, None, Some(indices), sorted)?)
}

/// A number as a constant of a kernel, which are whole.
fn bits_of(number: f32) -> i32 {
    i32::from_ne_bytes(number.to_ne_bytes())
}

fn is_half(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::Float16 | Dtype::Bfloat16)
}

/// A weight `[.., N, K]` in `dtype`.
fn unpacked(weight: &QuantizedWeight, dtype: Dtype) -> Result<Array> {
    let cast = |array: &Array| match array.dtype() {
        found if found.is_float() && found != dtype => array.as_type(dtype),
        _ => Ok(array.clone()),
    };
    let weight = QuantizedWeight {
        weight: weight.weight.clone(),
        scales: cast(&weight.scales)?,
        biases: weight.biases.as_ref().map(cast).transpose()?,
        layout: weight.layout,
    };
    Ok(weight.dequantize(Some(dtype))?)
}
