//! Activations times weights.

use mlex_core::{Array, HostOp, HostOutput, HostView, HostViewMut, QuantizationMode, Quantized};
use mlex_kernels::{Linear, Mode, Precision, QuantizedWeight, Scales, quantized_matmul};

use super::{applies, by_dtype, floats, keeps_dtype, kernel_error, single};
use crate::Result;
use crate::linear::Matrix;

/// `x` `[.., K]` times the transposed matrix `[N, K]`, plus `bias` `[N]`.
pub(crate) fn linear(x: &Array, matrix: &Matrix, bias: Option<&Array>) -> Result<Option<Array>> {
    if !applies(x)? || bias.is_some_and(|bias| !keeps_dtype(x, bias)) {
        return Ok(None);
    }
    let output = |rows: i32| {
        let mut shape = x.shape().to_vec();
        if let Some(last) = shape.last_mut() {
            *last = rows;
        }
        HostOutput::new(shape, x.dtype())
    };
    let y = match matrix {
        Matrix::Dense { weight, .. } => {
            if !keeps_dtype(x, weight) {
                return Ok(None);
            }
            let op = DenseOp {
                output: output(weight.dim(0)?),
                precision: precision(x),
            };
            match bias {
                Some(bias) => return Ok(Some(single(op, &[x, weight, bias])?)),
                None => single(op, &[x, weight])?,
            }
        }
        Matrix::Quantized(weight) => {
            let Some(mode) = mode(weight.layout) else {
                return Ok(None);
            };
            let op = QuantizedOp {
                mode,
                output: output(weight.weight.dim(0)?),
                precision: precision(x),
            };
            match &weight.biases {
                Some(biases) if keeps_dtype(x, &weight.scales) && keeps_dtype(x, biases) => {
                    single(op, &[x, &weight.weight, &weight.scales, biases])?
                }
                None => single(op, &[x, &weight.weight, &weight.scales])?,
                Some(_) => return Ok(None),
            }
        }
    };
    Ok(Some(match bias {
        Some(bias) => y.add(bias)?,
        None => y,
    }))
}

/// Products of bf16 numbers are exact in the sums of f32 that bf16 instructions make.
fn precision(x: &Array) -> Precision {
    if x.dtype() == mlex_core::Dtype::Bfloat16 {
        Precision::Bf16
    } else {
        Precision::F32
    }
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

struct DenseOp {
    output: HostOutput,
    precision: Precision,
}

impl HostOp for DenseOp {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn outputs(&self, _inputs: &[&Array]) -> mlex_core::Result<Vec<HostOutput>> {
        Ok(vec![self.output.clone()])
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let (x, weight) = (inputs[0], inputs[1]);
        let (n, k) = (
            super::size(weight.shape()[0]),
            super::size(weight.shape()[1]),
        );
        let bias = inputs.get(2).map(floats).transpose()?;
        let weight = Linear::new(n, k, floats(&weight)?, bias).map_err(kernel_error("linear"))?;
        by_dtype!(x.dtype(), T => mlex_kernels::linear::<T>(
            outputs[0].as_mut_slice()?, x.as_slice()?, &weight, self.precision,
        ))
        .map_err(kernel_error("linear"))
    }
}

struct QuantizedOp {
    mode: Mode,
    output: HostOutput,
    precision: Precision,
}

impl HostOp for QuantizedOp {
    fn name(&self) -> &'static str {
        "quantized_linear"
    }

    fn outputs(&self, _inputs: &[&Array]) -> mlex_core::Result<Vec<HostOutput>> {
        Ok(vec![self.output.clone()])
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let (x, weight, scales) = (inputs[0], inputs[1], inputs[2]);
        let n = super::size(weight.shape()[0]);
        let k = x.shape().last().copied().map_or(0, super::size);
        let scales = match inputs.get(3) {
            Some(biases) => Scales::Affine {
                scales: floats(&scales)?,
                biases: floats(biases)?,
            },
            None => Scales::Bytes(scales.as_slice()?),
        };
        let weight = QuantizedWeight::new(self.mode, n, k, weight.as_slice()?, scales)
            .map_err(kernel_error("quantized_linear"))?;
        by_dtype!(x.dtype(), T => quantized_matmul::<T>(
            outputs[0].as_mut_slice()?, x.as_slice()?, &weight, self.precision,
        ))
        .map_err(kernel_error("quantized_linear"))
    }
}
