//! Which implementation computes: one function for each operation that has several.

use mlex_core::{Array, Device, Dtype, GpuLanguage, Quantized, QuantizedWeight, Stream};

use crate::host::Weight;
use crate::linear::Stored;
use crate::{Result, cuda, gpu, host};

pub use crate::host::set_kernels;

/// From how many rows of `x` MLX's CPU backend dequantizes a weight and multiplies by BLAS: its
/// own quantized product is scalar there, and unpacking costs about as much as two rows.
const DEQUANTIZE_ROWS: usize = 4;

/// `x` `[.., K]` times the transposed matrix `[N, K]`, plus `bias` `[N]`: `[.., N]`.
///
/// # Errors
/// When the shapes do not fit.
pub(crate) fn linear(x: &Array, weight: Weight<'_>) -> Result<Array> {
    if let Some(y) = host::linear(x, weight)? {
        return Ok(y);
    }
    let y = match &weight.matrix.stored {
        Stored::Dense { transposed, .. } => x.matmul(transposed)?,
        Stored::Quantized { weight, .. } => quantized_matmul(x, weight)?,
    };
    Ok(match weight.bias {
        Some((bias, _)) => y.add(bias)?,
        None => y,
    })
}

/// The place of the largest element along the last dimension, of several the first:
/// int32 `[..]` for `x` `[.., N]`.
///
/// # Errors
/// When `x` has no dimension or no elements.
pub fn argmax(x: &Array) -> Result<Array> {
    match host::argmax(x)? {
        Some(y) => Ok(y),
        None => Ok(x.argmax(-1, false)?.as_type(Dtype::Int32)?),
    }
}

/// Quantizes a weight `[.., N, K]`. On a CPU stream the kernels do it at once, with the bits of
/// MLX's CPU backend; elsewhere it is MLX's node of the graph.
///
/// # Errors
/// When MLX does not have the layout or K does not divide into groups.
pub fn quantize(weight: &Array, layout: Quantized) -> mlex_core::Result<QuantizedWeight> {
    match host::quantize(weight, layout)? {
        Some(packed) => Ok(packed),
        None => QuantizedWeight::quantize(weight, layout),
    }
}

/// `x` `[.., K]` times a quantized weight `[N, K]`, transposed, by MLX: `[.., N]`.
fn quantized_matmul(x: &Array, weight: &QuantizedWeight) -> Result<Array> {
    if Stream::current()?.device() != Device::Cpu {
        return match gpu::language()? {
            Some(GpuLanguage::Cuda) => cuda::quantized_matmul(x, weight),
            _ => Ok(weight.matmul(x)?),
        };
    }
    // On the CPU MLX adds up in the type of `x`: a half type loses most of its digits so, and
    // takes eight times as long as f32 (on a GPU sums are f32).
    let wide = x.as_type(Dtype::Float32)?;
    let columns = x.dim(-1)?.max(1) as usize;
    let product = if x.size() / columns >= DEQUANTIZE_ROWS {
        wide.matmul(&widened(weight)?.dequantize(Some(Dtype::Float32))?.t()?)?
    } else {
        widened(weight)?.matmul(&wide)?
    };
    Ok(product.as_type(x.dtype())?)
}

/// The same weight with scales and biases in f32, where they are floating point.
pub(crate) fn widened(weight: &QuantizedWeight) -> Result<QuantizedWeight> {
    let wide = |array: &Array| -> Result<Array> {
        if array.dtype().is_float() {
            Ok(array.as_type(Dtype::Float32)?)
        } else {
            Ok(array.clone())
        }
    };
    Ok(QuantizedWeight {
        weight: weight.weight.clone(),
        scales: wide(&weight.scales)?,
        biases: weight.biases.as_ref().map(wide).transpose()?,
        layout: weight.layout,
    })
}
