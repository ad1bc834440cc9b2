//! Weights as the kernels read them, dense or quantized.

use std::sync::Arc;

use mlex_core::{Array, Dtype, HostConstant, QuantizationMode, Quantized};
use mlex_kernels::{
    Floats, Linear as DenseWeight, Mode, Precision, Projection, QuantizedWeight, Scales,
};

use super::constants::Constants;
use super::{floats, keeps, kernel_error, size};
use crate::Result;
use crate::linear::{Matrix, Stored};

/// A projection: its matrix `[N, K]`, or `[E, N, K]` of experts, and bias `[N]`.
#[derive(Clone, Copy)]
pub(crate) struct Weight<'a> {
    pub(crate) matrix: &'a Matrix,
    pub(crate) bias: Option<(&'a Array, &'a Constants)>,
}

/// How products of activations of a type are computed.
pub(super) fn precision(dtype: Dtype) -> Precision {
    match dtype {
        // Products of bf16 numbers are exact in the f32 sums of bf16 instructions.
        Dtype::Bfloat16 => Precision::Bf16,
        _ => Precision::F32,
    }
}

/// The kernels' name of a layout.
pub(crate) fn mode(layout: Quantized) -> Option<Mode> {
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

/// A weight as the kernels read it.
pub(super) struct Part {
    /// Dense without a mode.
    mode: Option<Mode>,
    /// The weight; the scales and biases of a quantized one.
    weight: Arc<[HostConstant]>,
    bias: Option<Arc<[HostConstant]>>,
}

impl Part {
    /// None where `x` of this dtype times the weight is not what the kernels compute.
    pub(super) fn new(dtype: Dtype, Weight { matrix, bias }: Weight<'_>) -> Result<Option<Self>> {
        let weight = matrix.constants.of(matrix.arrays())?;
        let mode = match &matrix.stored {
            Stored::Dense { .. } => None,
            Stored::Quantized { weight, .. } => match mode(weight.layout) {
                Some(mode) => Some(mode),
                None => return Ok(None),
            },
        };
        // Without biases scales are bytes.
        let floats = match (mode, &weight[..]) {
            (None, all) => all,
            (Some(_), [_, scales_and_biases @ ..]) if scales_and_biases.len() > 1 => {
                scales_and_biases
            }
            (Some(_), _) => &[],
        };
        if !floats.iter().all(|floats| keeps(dtype, floats.dtype())) {
            return Ok(None);
        }
        let bias = bias.map(|(bias, constants)| constants.of([bias]));
        let bias = bias.transpose()?;
        if bias.iter().any(|bias| !keeps(dtype, bias[0].dtype())) {
            return Ok(None);
        }
        Ok(Some(Self { mode, weight, bias }))
    }

    /// Rows of the one matrix.
    pub(super) fn n(&self) -> i32 {
        self.weight[0].shape().first().copied().unwrap_or_default()
    }

    /// Columns of the one matrix, before it was packed.
    pub(super) fn k(&self) -> i32 {
        let stored = self.weight[0].shape().get(1).copied().unwrap_or_default();
        match self.mode {
            Some(mode) => (i64::from(stored) * 32 / mode.bits() as i64) as i32,
            None => stored,
        }
    }

    /// The one matrix, for `x` of `k` columns.
    pub(super) fn projection(&self, k: usize) -> mlex_core::Result<Projection<'_>> {
        let weight = self.weight[0].view();
        let n = size(weight.shape()[0]);
        let bias = self.bias.as_ref().map(|bias| floats(&bias[0].view()));
        let bias = bias.transpose()?;
        let Some(mode) = self.mode else {
            let k = size(weight.shape()[1]);
            let weight = DenseWeight::new(n, k, floats(&weight)?, bias);
            return Ok(Projection::Dense(weight.map_err(kernel_error("linear"))?));
        };
        let weight = QuantizedWeight::new(mode, n, k, weight.as_slice()?, self.scales()?);
        let weight = weight.map_err(kernel_error("linear"))?;
        Ok(Projection::Quantized(weight, bias))
    }

    /// The matrices of all experts, for `x` of `k` columns.
    pub(super) fn experts(&self, k: usize) -> mlex_core::Result<ExpertWeights<'_>> {
        let weight = self.weight[0].view();
        let (experts, n) = (size(weight.shape()[0]), size(weight.shape()[1]));
        let Some(mode) = self.mode else {
            let weight = floats(&weight)?;
            return Ok(ExpertWeights::Dense { weight, n });
        };
        let packed = weight.as_slice()?;
        let weight = QuantizedWeight::with_experts(mode, experts, n, k, packed, self.scales()?);
        let weight = weight.map_err(kernel_error("mixture"))?;
        Ok(ExpertWeights::Quantized(weight))
    }

    /// The scales of a quantized weight.
    fn scales(&self) -> mlex_core::Result<Scales<'_>> {
        let scales = self.weight[1].view();
        Ok(match self.weight.get(2) {
            Some(biases) => Scales::Affine {
                scales: floats(&scales)?,
                biases: floats(&biases.view())?,
            },
            None => Scales::Bytes(scales.as_slice()?),
        })
    }
}

/// Matrices `[E, N, K]`.
pub(super) enum ExpertWeights<'a> {
    Dense { weight: Floats<'a>, n: usize },
    Quantized(QuantizedWeight<'a>),
}
