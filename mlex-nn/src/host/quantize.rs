//! Quantizing weights with the kernels: at once, not as a node of the graph.

use mlex_core::{Array, Element, Quantized, QuantizedWeight, Result};
use mlex_kernels::{ScalesMut, quantize as kernel};

use super::weight::mode;
use super::{applies, by_dtype, kernel_error, size};

/// `weight` `[.., N, K]` packed, with the bits that MLX's CPU backend gives.
pub(crate) fn quantize(weight: &Array, layout: Quantized) -> Result<Option<QuantizedWeight>> {
    layout.check()?;
    let divides = weight.ndim() > 1 && weight.dim(-1)? % layout.group_size == 0;
    if !divides || !applies(weight)? {
        return Ok(None);
    }
    by_dtype!(weight.dtype(), T => packed::<T>(weight, layout))
}

fn packed<T: Element + mlex_kernels::Element>(
    weight: &Array,
    layout: Quantized,
) -> Result<Option<QuantizedWeight>> {
    let Some(mode) = mode(layout) else {
        return Ok(None);
    };
    let columns = weight.dim(-1)?;
    let shape = |columns: i32| [&weight.shape()[..weight.ndim() - 1], &[columns]].concat();
    let groups_shape = shape(columns / layout.group_size);
    // The groups of a row are whole words.
    let weight_shape = shape((i64::from(columns) * i64::from(layout.bits) / 32) as i32);

    let values = weight.contiguous()?;
    let values = values.as_slice::<T>()?;
    let groups = values.len() / size(layout.group_size);
    let mut codes = vec![0u32; groups * size(layout.group_size) * size(layout.bits) / 32];
    let (scales, biases) = if layout.mode.has_biases() {
        let zero = <T as mlex_kernels::Element>::from_f32(0.0);
        let (mut scales, mut biases) = (vec![zero; groups], vec![zero; groups]);
        let outputs = ScalesMut::Affine {
            scales: &mut scales,
            biases: &mut biases,
        };
        kernel(mode, values, &mut codes, outputs).map_err(kernel_error("quantize"))?;
        (
            Array::from_slice(&scales, &groups_shape)?,
            Some(Array::from_slice(&biases, &groups_shape)?),
        )
    } else {
        let mut scales = vec![0u8; groups];
        kernel::<T>(mode, values, &mut codes, ScalesMut::Bytes(&mut scales))
            .map_err(kernel_error("quantize"))?;
        (Array::from_slice(&scales, &groups_shape)?, None)
    };
    Ok(Some(QuantizedWeight {
        weight: Array::from_slice(&codes, &weight_shape)?,
        scales,
        biases,
        layout,
    }))
}
