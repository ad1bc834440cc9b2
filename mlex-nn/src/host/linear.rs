//! Activations times weights: one or several projections of the same input in one node.

use mlex_core::{
    Array, Dtype, HostOp, HostOutput, HostView, HostViewMut, QuantizationMode, Quantized, host_op,
};
use mlex_kernels::{
    Activation as Gate, Linear as DenseWeight, Mode, Precision, QuantizedWeight, Scales,
    quantized_matmul,
};

use super::scratch::Scratch;
use super::{activation, applies, by_dtype, floats, keeps_dtype, kernel_error, size};
use crate::linear::Matrix;
use crate::{Activation, Result};

/// A projection: its matrix `[N, K]` and bias `[N]`.
pub(crate) type Projection<'a> = (&'a Matrix, Option<&'a Array>);

/// `x` `[.., K]` times the transposed matrix, plus the bias: `[.., N]`.
pub(crate) fn linear(x: &Array, projection: Projection<'_>) -> Result<Option<Array>> {
    Ok(linear_many(x, &[projection])?.and_then(|mut outputs| outputs.pop()))
}

/// Several projections of `x`, each as [`linear`].
pub(crate) fn linear_many(x: &Array, projections: &[Projection<'_>]) -> Result<Option<Vec<Array>>> {
    let Some((op, inputs)) = project(x, projections, None)? else {
        return Ok(None);
    };
    Ok(Some(host_op(&std::sync::Arc::new(op), &inputs)?))
}

/// `activation(gate(x)) * up(x)`.
pub(crate) fn gated_linear(
    x: &Array,
    activation: Activation,
    gate: Projection<'_>,
    up: Projection<'_>,
) -> Result<Option<Array>> {
    let gate_kind = activation::kernel(activation);
    let Some((op, inputs)) = project(x, &[gate, up], Some(gate_kind))? else {
        return Ok(None);
    };
    if op.outputs[0] != op.outputs[1] {
        return Ok(None);
    }
    Ok(Some(super::single(op, &inputs)?))
}

/// The operation and its inputs, where the kernels can do it.
fn project<'a>(
    x: &'a Array,
    projections: &[Projection<'a>],
    gate: Option<Gate>,
) -> Result<Option<(ProjectOp, Vec<&'a Array>)>> {
    if !applies(x)? {
        return Ok(None);
    }
    let mut inputs = vec![x];
    let mut parts = Vec::with_capacity(projections.len());
    let mut outputs = Vec::with_capacity(projections.len());
    for &(matrix, bias) in projections {
        let first = inputs.len();
        let (rows, kind) = match matrix {
            Matrix::Dense { weight, .. } => {
                if !keeps_dtype(x, weight) {
                    return Ok(None);
                }
                inputs.push(weight);
                (weight.dim(0)?, Kind::Dense)
            }
            Matrix::Quantized { weight, .. } => {
                let Some(mode) = mode(weight.layout) else {
                    return Ok(None);
                };
                inputs.extend([&weight.weight, &weight.scales]);
                if let Some(biases) = &weight.biases {
                    if !keeps_dtype(x, &weight.scales) || !keeps_dtype(x, biases) {
                        return Ok(None);
                    }
                    inputs.push(biases);
                }
                (weight.weight.dim(0)?, Kind::Quantized(mode))
            }
        };
        if let Some(bias) = bias {
            if !keeps_dtype(x, bias) {
                return Ok(None);
            }
            inputs.push(bias);
        }
        let mut shape = x.shape().to_vec();
        if let Some(last) = shape.last_mut() {
            *last = rows;
        }
        outputs.push(HostOutput::new(shape, x.dtype()));
        parts.push(Part {
            kind,
            first,
            has_bias: bias.is_some(),
        });
    }
    let precision = match x.dtype() {
        // Products of bf16 numbers are exact in the f32 sums of bf16 instructions.
        Dtype::Bfloat16 => Precision::Bf16,
        _ => Precision::F32,
    };
    let op = ProjectOp {
        parts,
        outputs,
        precision,
        gate,
    };
    Ok(Some((op, inputs)))
}

/// The same weight with scales and biases in float16, where that loses nothing and the kernels
/// will read them: a tenth to a seventh less to read for each token. GGUF files have them so.
pub(crate) fn narrowed(weight: mlex_core::QuantizedWeight) -> Result<mlex_core::QuantizedWeight> {
    let Some(biases) = &weight.biases else {
        return Ok(weight);
    };
    let wide = weight.scales.dtype() == Dtype::Float32 && biases.dtype() == Dtype::Float32;
    if !wide || !applies(&weight.scales)? {
        return Ok(weight);
    }
    let (Some(scales), Some(biases)) = (exact_half(&weight.scales)?, exact_half(biases)?) else {
        return Ok(weight);
    };
    Ok(mlex_core::QuantizedWeight {
        scales,
        biases: Some(biases),
        ..weight
    })
}

/// An f32 array in float16, if every value is one.
fn exact_half(array: &Array) -> Result<Option<Array>> {
    let half = array.as_type(Dtype::Float16)?;
    let same = half.as_type(Dtype::Float32)?.equal(array)?;
    let axes: Vec<i32> = (0..array.ndim() as i32).collect();
    Ok(same.all(&axes, false)?.item::<bool>()?.then_some(half))
}

fn mode(layout: Quantized) -> Option<Mode> {
    Some(match layout.mode {
        QuantizationMode::Affine => Mode::Affine {
            bits: u8::try_from(layout.bits).ok()?,
            group_size: usize::try_from(layout.group_size).ok()?,
        },
        QuantizationMode::Mxfp4 => Mode::Mxfp4,
        QuantizationMode::Mxfp8 => Mode::Mxfp8,
        QuantizationMode::Nvfp4 => Mode::Nvfp4,
        _ => return None,
    })
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Dense,
    Quantized(Mode),
}

/// Where the arrays of a projection are among the inputs.
#[derive(Clone, Copy, Debug)]
struct Part {
    kind: Kind,
    first: usize,
    has_bias: bool,
}

struct ProjectOp {
    parts: Vec<Part>,
    /// Of each part.
    outputs: Vec<HostOutput>,
    precision: Precision,
    /// Two parts give one output: the first, activated, times the second.
    gate: Option<Gate>,
}

impl ProjectOp {
    fn part<T: Scratch>(
        &self,
        part: Part,
        inputs: &[HostView<'_>],
        y: &mut [T],
    ) -> mlex_core::Result<()> {
        let x = inputs[0].as_slice::<T>()?;
        let weight = inputs[part.first];
        let n = size(weight.shape()[0]);
        let mut next = part.first + 1;
        match part.kind {
            Kind::Dense => {
                let k = size(weight.shape()[1]);
                let weight = DenseWeight::new(n, k, floats(&weight)?, None);
                let weight = weight.map_err(kernel_error(self.name()))?;
                mlex_kernels::linear(y, x, &weight, self.precision)
            }
            Kind::Quantized(mode) => {
                let k = inputs[0].shape().last().copied().map_or(0, size);
                let scales = if matches!(mode, Mode::Affine { .. }) {
                    next += 2;
                    let (scales, biases) = (inputs[part.first + 1], inputs[part.first + 2]);
                    Scales::Affine {
                        scales: floats(&scales)?,
                        biases: floats(&biases)?,
                    }
                } else {
                    next += 1;
                    Scales::Bytes(inputs[part.first + 1].as_slice()?)
                };
                let weight = QuantizedWeight::new(mode, n, k, weight.as_slice()?, scales);
                let weight = weight.map_err(kernel_error(self.name()))?;
                quantized_matmul(y, x, &weight, self.precision)
            }
        }
        .map_err(kernel_error(self.name()))?;
        if part.has_bias && n > 0 {
            let bias = floats(&inputs[next])?;
            for row in y.chunks_exact_mut(n) {
                for (index, y) in row.iter_mut().enumerate() {
                    *y = T::from_f32(y.to_f32() + bias.get(index));
                }
            }
        }
        Ok(())
    }
}

impl HostOp for ProjectOp {
    fn name(&self) -> &'static str {
        if self.gate.is_some() {
            "gated_linear"
        } else {
            "linear"
        }
    }

    fn outputs(&self, _inputs: &[&Array]) -> mlex_core::Result<Vec<HostOutput>> {
        let count = if self.gate.is_some() {
            1
        } else {
            self.outputs.len()
        };
        Ok(self.outputs[..count].to_vec())
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        by_dtype!(inputs[0].dtype(), T => {
            let Some(gate) = self.gate else {
                return self.parts.iter().zip(outputs).try_for_each(|(&part, output)| {
                    self.part(part, inputs, output.as_mut_slice::<T>()?)
                });
            };
            let out = outputs[0].as_mut_slice::<T>()?;
            let count = out.len();
            <T as Scratch>::with(2 * count, |memory| {
                let (gated, up) = memory.split_at_mut(count);
                self.part(self.parts[0], inputs, gated)?;
                self.part(self.parts[1], inputs, up)?;
                mlex_kernels::gated(out, gated, up, gate).map_err(kernel_error(self.name()))
            })
        })
    }
}
