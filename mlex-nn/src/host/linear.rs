//! Activations times weights: one or several projections of the same input in one step.

use mlex_core::{Array, Dtype, HostView, HostViewMut};
use mlex_kernels::{
    Activation as Gate, Expectation, Precision, expect_projections, project, project_gated,
};
use smallvec::SmallVec;

use super::sequence::{Sequence, Shape, Step, Value};
use super::weight::{Part, Weight, precision};
use super::{activation, applies, by_dtype, columns, kernel_error};
use crate::{Activation, Result};

/// `x` `[.., K]` times the transposed matrix, plus the bias: `[.., N]`.
pub(crate) fn linear(x: &Array, weight: Weight<'_>) -> Result<Option<Array>> {
    let Some((mut sequence, x)) = Sequence::start(x)? else {
        return Ok(None);
    };
    match record_linear(&mut sequence, x, [weight])? {
        Some(outputs) => Ok(sequence.finish(&outputs)?.pop()),
        None => Ok(None),
    }
}

/// Several projections of `x`, each as [`linear`].
pub(crate) fn linear_many<const N: usize>(
    x: &Array,
    weights: [Weight<'_>; N],
) -> Result<Option<Vec<Array>>> {
    let Some((mut sequence, x)) = Sequence::start(x)? else {
        return Ok(None);
    };
    match record_linear(&mut sequence, x, weights)? {
        Some(outputs) => Ok(Some(sequence.finish(&outputs)?)),
        None => Ok(None),
    }
}

/// `activation(gate(x)) * up(x)`.
pub(crate) fn gated_linear(
    x: &Array,
    activation: Activation,
    gate: Weight<'_>,
    up: Weight<'_>,
) -> Result<Option<Array>> {
    let Some((mut sequence, x)) = Sequence::start(x)? else {
        return Ok(None);
    };
    match record_gated(&mut sequence, x, activation, gate, up)? {
        Some(output) => Ok(sequence.finish(&[output])?.pop()),
        None => Ok(None),
    }
}

/// Several projections of `x`, each as [`linear`].
pub(crate) fn record_linear<const N: usize>(
    sequence: &mut Sequence,
    x: Value,
    weights: [Weight<'_>; N],
) -> Result<Option<[Value; N]>> {
    let dtype = sequence.dtype(x);
    let columns = sequence.shape(x).last().copied();
    let mut parts: SmallVec<[Part; 3]> = SmallVec::new();
    for weight in weights {
        match Part::new(dtype, weight)? {
            // MLX's operation says what does not fit.
            Some(part) if Some(part.k()) == columns => parts.push(part),
            _ => return Ok(None),
        }
    }
    let mut outputs = [x; N];
    for (output, part) in outputs.iter_mut().zip(&parts) {
        *output = self::output(sequence, x, part.n());
    }
    let precision = precision(dtype);
    sequence.step(ProjectStep { parts, precision }, &[x], &outputs);
    Ok(Some(outputs))
}

/// As [`gated_linear`].
pub(crate) fn record_gated(
    sequence: &mut Sequence,
    x: Value,
    activation: Activation,
    gate: Weight<'_>,
    up: Weight<'_>,
) -> Result<Option<Value>> {
    let dtype = sequence.dtype(x);
    let (Some(gate), Some(up)) = (Part::new(dtype, gate)?, Part::new(dtype, up)?) else {
        return Ok(None);
    };
    let columns = sequence.shape(x).last().copied();
    if gate.n() != up.n() || [gate.k(), up.k()].map(Some) != [columns; 2] {
        return Ok(None);
    }
    let y = output(sequence, x, gate.n());
    let step = GatedStep {
        parts: [gate, up],
        activation: activation::kernel(activation),
        precision: precision(dtype),
    };
    sequence.step(step, &[x], &[y]);
    Ok(Some(y))
}

/// `[.., n]` for `x` `[.., k]`.
fn output(sequence: &mut Sequence, x: Value, n: i32) -> Value {
    let mut shape = Shape::from_slice(sequence.shape(x));
    if let Some(last) = shape.last_mut() {
        *last = n;
    }
    sequence.output(&shape, sequence.dtype(x))
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

/// What the product reads. Weights that do not fit are refused when the step runs.
fn expectation(parts: &[Part], gated: bool) -> Option<Expectation> {
    let weights = parts
        .iter()
        .map(|part| part.projection(super::size(part.k())));
    let weights: mlex_core::Result<SmallVec<[_; 4]>> = weights.collect();
    Some(expect_projections(&weights.ok()?, gated))
}

struct ProjectStep {
    parts: SmallVec<[Part; 3]>,
    precision: Precision,
}

impl Step for ProjectStep {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn expectation(&self) -> Option<Expectation> {
        expectation(&self.parts, false)
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let x = inputs[0];
        let parts = self.parts.iter().map(|part| part.projection(columns(&x)));
        let weights = parts.collect::<mlex_core::Result<SmallVec<[_; 3]>>>()?;
        by_dtype!(x.dtype(), T => {
            let outputs = outputs.iter_mut().map(HostViewMut::as_mut_slice::<T>);
            let mut outputs = outputs.collect::<mlex_core::Result<SmallVec<[_; 3]>>>()?;
            project(&mut outputs, x.as_slice::<T>()?, &weights, self.precision)
        })
        .map_err(kernel_error(self.name()))
    }
}

/// `activation(first) * second`
struct GatedStep {
    parts: [Part; 2],
    activation: Gate,
    precision: Precision,
}

impl Step for GatedStep {
    fn name(&self) -> &'static str {
        "gated_linear"
    }

    fn expectation(&self) -> Option<Expectation> {
        expectation(&self.parts, true)
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let x = inputs[0];
        let [gate, up] = &self.parts;
        let (gate, up) = (gate.projection(columns(&x))?, up.projection(columns(&x))?);
        let weights = [&gate, &up];
        by_dtype!(x.dtype(), T => {
            let (y, x) = (outputs[0].as_mut_slice::<T>()?, x.as_slice::<T>()?);
            project_gated(y, x, weights, self.activation, self.precision)
        })
        .map_err(kernel_error(self.name()))
    }
}
