//! Products with quantized weights on NVIDIA GPUs, where MLX's are slow or not right.
//!
//! Measured on an H200 with MLX 0.32.4; docs/backends.md has the numbers.

use mlex_core::{Array, Dtype, GpuLaunch, QuantizationMode, Quantized, QuantizedWeight};
use mlex_kernels::gpu::QUANTIZED_ROWS;

use crate::{Result, gpu};

/// Up to how many rows our kernel multiplies: the tensor cores take so many at once.
const FEW_ROWS: usize = 8;
/// How large a weight is, in numbers, that our kernel is worth it for: with one row, and with
/// more. A call of a kernel that is not MLX's takes the host some microseconds more, which a
/// smaller weight does not give back; MLX's takes a multiple of its time for more rows.
const LARGE: [i64; 2] = [1 << 23, 1 << 20];
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
    if let Some(y) = few_rows(x, weight, rows)? {
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

/// The product by our kernel, where it has the layout.
fn few_rows(x: &Array, weight: &QuantizedWeight, rows: usize) -> Result<Option<Array>> {
    let Quantized {
        bits,
        group_size,
        mode,
    } = weight.layout;
    let (dtype, columns) = (x.dtype(), x.dim(-1)?);
    let &[outputs, words] = weight.weight.shape() else {
        return Ok(None);
    };
    let applies = mode == QuantizationMode::Affine
        && bits == 4
        && is_half(dtype)
        && (1..=FEW_ROWS).contains(&rows)
        && i64::from(outputs) * i64::from(columns) >= LARGE[usize::from(rows > 1)]
        && i64::from(words) * 8 == i64::from(columns)
        && columns % group_size == 0;
    let Some(biases) = weight.biases.as_ref().filter(|_| applies) else {
        return Ok(None);
    };
    // Warps that share the rows of a block: with few rows in all there are few blocks.
    let warps = match outputs {
        8192.. => 4,
        1537.. => 8,
        _ => 16,
    };
    let mut shape = x.shape().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = outputs;
    }
    let launch = GpuLaunch {
        outputs: &[(&shape, dtype)],
        grid: [32, warps, outputs.saturating_add(15) / 16],
        group: [32, warps, 1],
        numbers: &[("GROUP", group_size), ("WARPS", warps)],
        flags: &[("HALF", dtype == Dtype::Float16)],
        types: &[("T", dtype)],
    };
    let inputs = [x, &weight.weight, &weight.scales, biases];
    let outputs = gpu::call_cuda(&QUANTIZED_ROWS, &inputs, &launch)?;
    Ok(outputs.and_then(|mut outputs| outputs.pop()))
}
