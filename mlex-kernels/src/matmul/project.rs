//! Several projections of the same activations.

use std::borrow::Cow;

use smallvec::SmallVec;

use super::few::{self, Operand, Part, Side};
use super::quantized::{Then, rows_of};
use super::{Block, Linear, Precision, QuantizedWeight, dense, is_few, quantized};
use crate::activation::{Activation, gated};
use crate::error::{check, check_len};
use crate::simd::Level;
use crate::threads::Expectation;
use crate::{Element, Floats, Result};

/// Weights `[n, k]` of a projection, and a bias for each output or none.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Projection<'a> {
    /// Floating-point weights, which have their bias with them.
    Dense(Linear<'a>),
    /// Quantized weights of one expert.
    Quantized(QuantizedWeight<'a>, Option<Floats<'a>>),
}

impl<'a> Projection<'a> {
    /// Number of outputs.
    pub fn n(&self) -> usize {
        match self {
            Self::Dense(w) => w.n(),
            Self::Quantized(w, _) => w.n(),
        }
    }

    /// Number of inputs.
    pub fn k(&self) -> usize {
        match self {
            Self::Dense(w) => w.k(),
            Self::Quantized(w, _) => w.k(),
        }
    }

    fn operand(&self) -> Operand<'a> {
        match self {
            Self::Dense(w) => w.operand(),
            Self::Quantized(w, _) => Operand::Quantized(w.weights(0)),
        }
    }

    /// The bias in f32; empty for none.
    fn bias(&self) -> Cow<'a, [f32]> {
        let bias = match self {
            Self::Dense(w) => w.bias(),
            Self::Quantized(_, bias) => *bias,
        };
        bias.map_or(Cow::Borrowed(&[]), |bias| bias.widened())
    }

    /// The number of rows of `x`, when this takes them and `y` has as many.
    fn check<T>(&self, y: &[T], x: &[T]) -> Result<usize> {
        if let Self::Quantized(w, bias) = self {
            let one = w.experts() == 1;
            check(one, "project: weight", "one expert", w.experts())?;
            if let Some(bias) = bias {
                check_len("project: bias", w.n(), bias.len())?;
            }
        }
        rows_of("project: x", x.len(), self.k(), y.len(), self.n())
    }

    /// One product of rows that were checked.
    fn run<T: Element>(
        &self,
        y: &mut [T],
        x: &[T],
        rows: usize,
        bias: &[f32],
        precision: Precision,
    ) {
        match self {
            Self::Dense(w) => dense::run(y, x, w, precision, bias, rows),
            Self::Quantized(w, _) if is_many(rows) && w.k() > 0 => {
                let block = Block {
                    rows: 0..rows,
                    expert: 0,
                };
                let then = Then { bias, gates: None };
                quantized::run(y, x, w, precision, &[block], then);
            }
            Self::Quantized(w, _) => {
                // Without columns there is only the bias.
                for row in y.chunks_exact_mut(w.n()) {
                    for (i, y) in row.iter_mut().enumerate() {
                        *y = T::from_f32(bias.get(i).copied().unwrap_or(0.0));
                    }
                }
            }
        }
    }
}

fn is_many(rows: usize) -> bool {
    !is_few(&Block {
        rows: 0..rows,
        expert: 0,
    })
}

/// `outputs[i] = x weights[i]^T + bias`, each as [`linear`](crate::linear) or
/// [`quantized_matmul`](crate::quantized_matmul) computes it. A few rows (a decode step) are
/// taken through all weights at once.
///
/// # Errors
/// When there is not an output for each of the weights, the weights differ in their columns, `x`
/// or an output is not whole rows, or a weight has several experts.
pub fn project<T: Element>(
    outputs: &mut [&mut [T]],
    x: &[T],
    weights: &[Projection<'_>],
    precision: Precision,
) -> Result<()> {
    check_len("project: outputs", weights.len(), outputs.len())?;
    let k = weights.first().map_or(0, Projection::k);
    let mut rows = 0;
    for (weight, y) in weights.iter().zip(&*outputs) {
        check_len("project: columns", k, weight.k())?;
        rows = weight.check(y, x)?;
    }
    let biases: SmallVec<[_; 4]> = weights.iter().map(Projection::bias).collect();
    if k == 0 || is_many(rows) {
        for ((weight, y), bias) in weights.iter().zip(outputs).zip(&biases) {
            if !y.is_empty() {
                weight.run(y, x, rows, bias, precision);
            }
        }
        return Ok(());
    }
    let parts: SmallVec<[Part<'_>; 4]> = weights
        .iter()
        .zip(&biases)
        .map(|(weight, bias)| Part {
            first: side(weight, bias),
            second: None,
            x: 0,
            columns: weight.n(),
        })
        .collect();
    few::run(Level::current(), outputs, &[x], k, &parts);
    Ok(())
}

/// `y = activation(gate(x)) * up(x)`: both products are rounded to the element type, what
/// follows is in f32 and rounded once.
///
/// # Errors
/// As [`project`], or when the two have different numbers of outputs.
pub fn project_gated<T: Element>(
    y: &mut [T],
    x: &[T],
    [gate, up]: [&Projection<'_>; 2],
    activation: Activation,
    precision: Precision,
) -> Result<()> {
    check_len("project_gated: up", gate.n(), up.n())?;
    check_len("project_gated: columns", gate.k(), up.k())?;
    let rows = gate.check(y, x)?;
    up.check(y, x)?;
    let level = Level::current();
    let (gate_bias, up_bias) = (gate.bias(), up.bias());
    if let (Projection::Quantized(first, _), Projection::Quantized(second, _)) = (gate, up)
        && is_many(rows)
        && first.k() > 0
        && first.mode() == second.mode()
    {
        let then = Then {
            bias: &gate_bias,
            gates: Some((second, &up_bias, activation.gate())),
        };
        let block = Block {
            rows: 0..rows,
            expert: 0,
        };
        quantized::run(y, x, first, precision, &[block], then);
        return Ok(());
    }
    let few = !is_many(rows) && gate.k() > 0;
    if !few || !few::can_gate(level, &gate.operand(), &up.operand()) {
        let mut gated_by = vec![T::from_f32(0.0); y.len()];
        let mut by = vec![T::from_f32(0.0); y.len()];
        project(&mut [&mut gated_by], x, &[*gate], precision)?;
        project(&mut [&mut by], x, &[*up], precision)?;
        return gated(y, &gated_by, &by, activation);
    }
    let part = Part {
        first: side(gate, &gate_bias),
        second: Some((side(up, &up_bias), activation.gate())),
        x: 0,
        columns: gate.n(),
    };
    few::run(level, &mut [y], &[x], gate.k(), &[part]);
    Ok(())
}

/// What [`project`] or [`project_gated`] reads with these weights and few rows. It depends on
/// the number of threads.
pub fn expect_projections(weights: &[Projection<'_>], gated: bool) -> Expectation {
    let part = |first, second| Part {
        first: side(first, &[]),
        second,
        x: 0,
        columns: first.n(),
    };
    let Some(k) = weights.first().map(Projection::k).filter(|&k| k > 0) else {
        return Expectation::default();
    };
    match weights {
        [gate, up] if gated => {
            // Which function it is does not matter here.
            let gate_by = Activation::Silu.gate();
            few::expectation(k, &[part(gate, Some((side(up, &[]), gate_by)))])
        }
        _ => {
            let parts = weights.iter().map(|weight| part(weight, None));
            few::expectation(k, &parts.collect::<SmallVec<[_; 4]>>())
        }
    }
}

fn side<'a>(weight: &Projection<'a>, bias: &'a [f32]) -> Side<'a> {
    Side {
        operand: weight.operand(),
        bias,
    }
}
