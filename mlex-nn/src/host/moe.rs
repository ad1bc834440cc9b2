//! The experts of a mixture in one node: the choice of experts, their products with the rows
//! of each expert together, and the weighted sum.

use mlex_core::{Array, Dtype, HostOp, HostOutput, HostView, HostViewMut, host_op};
use mlex_kernels::{
    Activation, Linear, Mode, Precision, QuantizedWeight, Routes, Scales, gather_quantized_matmul,
};

use super::linear::mode;
use super::scratch::Scratch;
use super::{activation, applies, by_dtype, floats, keeps_dtype, kernel_error, size};
use crate::Result;
use crate::moe::{Experts, Mixture};

/// `x` `[.., D]` through the experts that `logits` `[.., E]` choose: `[.., D]`.
pub(crate) fn mixture(x: &Array, logits: &Array, layer: &Mixture<'_>) -> Result<Option<Array>> {
    if !applies(x)? || !keeps_dtype(x.dtype(), logits) {
        return Ok(None);
    }
    let mut inputs = vec![x, logits];
    let mut parts = Vec::with_capacity(3);
    for experts in [layer.gate, layer.up, layer.down] {
        let first = inputs.len();
        let kind = match experts {
            Experts::Dense { weight, .. } => {
                if !keeps_dtype(x.dtype(), weight) {
                    return Ok(None);
                }
                inputs.push(weight);
                Kind::Dense
            }
            Experts::Quantized(weight) => {
                let Some(mode) = mode(weight.layout) else {
                    return Ok(None);
                };
                inputs.extend([&weight.weight, &weight.scales]);
                if let Some(biases) = &weight.biases {
                    if !keeps_dtype(x.dtype(), &weight.scales) || !keeps_dtype(x.dtype(), biases) {
                        return Ok(None);
                    }
                    inputs.push(biases);
                }
                Kind::Quantized(mode)
            }
        };
        parts.push(Part { kind, first });
    }
    let op = MixtureOp {
        parts,
        experts: size(layer.config.num_experts),
        per_token: size(layer.config.experts_per_token),
        normalize: layer.config.normalize,
        hidden: size(layer.config.hidden_size),
        inner: size(layer.config.intermediate_size),
        activation: activation::kernel(layer.config.activation),
        precision: match x.dtype() {
            Dtype::Bfloat16 => Precision::Bf16,
            _ => Precision::F32,
        },
    };
    Ok(host_op(&std::sync::Arc::new(op), &inputs)?.pop())
}

const NAME: &str = "mixture";

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
}

struct MixtureOp {
    /// Gate, up and down projection.
    parts: Vec<Part>,
    experts: usize,
    per_token: usize,
    normalize: bool,
    hidden: usize,
    inner: usize,
    activation: Activation,
    precision: Precision,
}

impl MixtureOp {
    /// `y[row] = x[row]` times the matrix `[n, k]` of the row's expert.
    fn product<T: Scratch>(
        &self,
        part: usize,
        inputs: &[HostView<'_>],
        experts: &[u32],
        [n, k]: [usize; 2],
        x: &[T],
        y: &mut [T],
    ) -> mlex_core::Result<()> {
        let Part { kind, first } = self.parts[part];
        let weight = inputs[first];
        match kind {
            Kind::Quantized(mode) => {
                let scales = if matches!(mode, Mode::Affine { .. }) {
                    Scales::Affine {
                        scales: floats(&inputs[first + 1])?,
                        biases: floats(&inputs[first + 2])?,
                    }
                } else {
                    Scales::Bytes(inputs[first + 1].as_slice()?)
                };
                let packed = weight.as_slice()?;
                QuantizedWeight::with_experts(mode, self.experts, n, k, packed, scales).and_then(
                    |weight| gather_quantized_matmul(y, x, experts, &weight, self.precision),
                )
            }
            Kind::Dense => {
                let all = floats(&weight)?;
                let mut start = 0;
                // Experts ascend, so that the rows of each are together.
                let blocks = experts.chunk_by(|a, b| a == b);
                blocks.map(<[u32]>::len).try_for_each(|count| {
                    let expert = experts[start] as usize;
                    let weight = all.slice(expert * n * k..(expert + 1) * n * k);
                    let rows = start..start + count;
                    start = rows.end;
                    let x = &x[rows.start * k..rows.end * k];
                    let y = &mut y[rows.start * n..rows.end * n];
                    mlex_kernels::linear(y, x, &Linear::new(n, k, weight, None)?, self.precision)
                })
            }
        }
        .map_err(kernel_error(NAME))
    }

    fn compute<T: Scratch>(&self, inputs: &[HostView<'_>], out: &mut [T]) -> mlex_core::Result<()> {
        let (hidden, inner) = (self.hidden, self.inner);
        let x = inputs[0].as_slice::<T>()?;
        let logits = floats(&inputs[1])?;
        let routes = Routes::top(logits, self.experts, self.per_token, self.normalize)
            .map_err(kernel_error(NAME))?;
        let rows = routes.experts().len();
        T::with(rows * (2 * hidden + 3 * inner), |memory| {
            let (gathered, memory) = memory.split_at_mut(rows * hidden);
            let (y, memory) = memory.split_at_mut(rows * hidden);
            let (gate, memory) = memory.split_at_mut(rows * inner);
            let (up, gated) = memory.split_at_mut(rows * inner);
            let experts = routes.experts();
            routes
                .gather(gathered, x, hidden)
                .map_err(kernel_error(NAME))?;
            self.product(0, inputs, experts, [inner, hidden], gathered, gate)?;
            self.product(1, inputs, experts, [inner, hidden], gathered, up)?;
            mlex_kernels::gated(gated, gate, up, self.activation).map_err(kernel_error(NAME))?;
            self.product(2, inputs, experts, [hidden, inner], gated, y)?;
            routes.combine(out, y, hidden).map_err(kernel_error(NAME))
        })
    }
}

impl HostOp for MixtureOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[&Array]) -> mlex_core::Result<Vec<HostOutput>> {
        Ok(vec![HostOutput::new(inputs[0].shape(), inputs[0].dtype())])
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        by_dtype!(inputs[0].dtype(), T => self.compute::<T>(inputs, outputs[0].as_mut_slice()?))
    }
}
