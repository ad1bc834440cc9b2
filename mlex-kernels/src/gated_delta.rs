//! A gated delta net between its projections: the short convolution, the norms of queries and
//! keys, the gated delta rule, and the gated norm of the output, head by head.
//!
//! In a chunk the rule is a triangular system ("Parallelizing Linear Transformers with the Delta
//! Rule over Sequence Length"): per head a few small matrix products and one substitution. The
//! formulas are at the head of `mlex-nn`'s `gated_delta/rule.rs`, which is the same in operations
//! on arrays.

use crate::conv::{ConvInputs, ConvLayer, Strided};
use crate::error::check_len;
use crate::recurrence::{
    self, CHUNK, Entries, Gates, Matrices, Names, Part, Position, Recurrence, Rule, Sizes, softplus,
};
use crate::simd::Level;
use crate::simd::gated_delta::{Decays, GatedNorm, Normalize, Step, Substitute, prefetch};
use crate::{Element, Floats, Result};

const NAMES: Names = Names {
    shape: "gated_delta: shape",
    heads: "gated_delta: value heads",
    multiple: "a multiple of the key heads",
    out: "gated_delta: out",
    state: "gated_delta: state",
    tail: "gated_delta: tail",
};

/// The epsilon of the norms of queries and keys.
const QK_EPS: f32 = 1e-6;

/// The sizes of a [`gated_delta`]. The channels `C` of the convolution are the queries and the
/// keys of all key heads and the values of all value heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaShape {
    /// Rows of the batch, `B`.
    pub batch: usize,
    /// Positions, `L`.
    pub length: usize,
    /// Heads of queries and keys, `H_k`.
    pub key_heads: usize,
    /// Heads of values, `H_v`; a multiple of the key heads.
    pub value_heads: usize,
    /// Width of a key, `D_k`.
    pub key_dim: usize,
    /// Width of a value, `D_v`.
    pub value_dim: usize,
    /// Positions that the convolution sees, `K`.
    pub kernel: usize,
}

impl DeltaShape {
    /// The channels of the convolution, `C`.
    pub fn channels(&self) -> usize {
        self.sizes().channels()
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            batch: self.batch,
            length: self.length,
            heads: self.value_heads,
            dim: self.value_dim,
            groups: self.key_heads,
            shared: self.key_dim,
            kernel: self.kernel,
            heads_first: false,
        }
    }
}

/// The parameters of a [`gated_delta`].
#[derive(Debug, Clone, Copy)]
pub struct DeltaLayer<'a> {
    /// The convolution, `[K, C]`, the tap of the position itself last.
    pub conv: Floats<'a>,
    /// The logarithm of the decay's rate, `[H_v]`.
    pub a_log: Floats<'a>,
    /// Added to the decay's input, `[H_v]`.
    pub dt_bias: Floats<'a>,
    /// The weight of the output's norm, `[D_v]`.
    pub norm: Floats<'a>,
    /// The epsilon of that norm.
    pub norm_eps: f32,
}

/// What a [`gated_delta`] computes on.
#[derive(Debug, Clone, Copy)]
pub struct DeltaInputs<'a, T> {
    /// Queries, keys and values before the convolution, rows of `C`.
    pub qkv: Strided<'a, T>,
    /// The gate of the output, rows of `H_v * D_v`.
    pub gate: Strided<'a, T>,
    /// The logit of the step size, rows of `H_v`.
    pub beta: Strided<'a, T>,
    /// The input of the decay, rows of `H_v`.
    pub decay: Strided<'a, T>,
    /// The last inputs of the convolution before these, `[B, K - 1, C]`; zero if empty.
    pub before: &'a [T],
    /// How many of the positions of each batch row are padding, at its start; none if empty.
    pub padding: &'a [usize],
}

impl<'a, T: Element> DeltaInputs<'a, T> {
    fn conv(&self) -> ConvInputs<'a, T> {
        ConvInputs {
            x: self.qkv,
            before: self.before,
            padding: self.padding,
        }
    }

    fn validate(&self, shape: &DeltaShape) -> Result<()> {
        let rows = shape.batch * shape.length;
        let heads = shape.value_heads;
        let values = heads * shape.value_dim;
        self.qkv
            .validate("gated_delta: qkv", rows, shape.channels())?;
        self.gate.validate("gated_delta: gate", rows, values)?;
        self.beta.validate("gated_delta: beta", rows, heads)?;
        self.decay.validate("gated_delta: decay", rows, heads)?;
        self.conv().validate(&shape.sizes().conv())
    }
}

/// What the next call needs of the inputs of the convolution: the last `K - 1` of them, into
/// `out` `[B, K - 1, C]`.
///
/// # Errors
/// When a slice has another length than `shape` says.
pub fn gated_delta_tail<T: Element>(
    out: &mut [T],
    inputs: &DeltaInputs<'_, T>,
    shape: &DeltaShape,
) -> Result<()> {
    recurrence::tail(&NAMES, &shape.sizes(), &inputs.conv(), out)
}

/// A gated delta net from the projections of its input to what its output projection takes:
/// `out` `[B, L, H_v * D_v]`, and `state` `[B, H_v, D_v, D_k]` goes on by `L` positions. Padding
/// leaves the state as it is and gives 0.
///
/// Everything is computed in f32; see the source of the module for how.
///
/// # Errors
/// When a slice has another length than `shape` says.
pub fn gated_delta<T: Element>(
    out: &mut [T],
    state: &mut [f32],
    inputs: &DeltaInputs<'_, T>,
    layer: &DeltaLayer<'_>,
    shape: &DeltaShape,
) -> Result<()> {
    let sizes = shape.sizes();
    sizes.validate(&NAMES)?;
    inputs.validate(shape)?;
    let outputs = shape.batch * shape.length * sizes.inner();
    check_len(NAMES.out, outputs, out.len())?;
    check_len("gated_delta: a_log", sizes.heads, layer.a_log.len())?;
    check_len("gated_delta: dt_bias", sizes.heads, layer.dt_bias.len())?;
    check_len("gated_delta: norm", sizes.dim, layer.norm.len())?;
    let conv = ConvLayer {
        taps: layer.conv,
        bias: None,
        activate: true,
        residual: false,
    };
    let norm = layer.norm.widened();
    let rule = Delta {
        inputs,
        layer,
        norm: &norm,
        shape,
    };
    Recurrence::new(&NAMES, sizes, inputs.conv(), conv, state, rule)?.run(out);
    Ok(())
}

struct Delta<'a, T> {
    inputs: &'a DeltaInputs<'a, T>,
    layer: &'a DeltaLayer<'a>,
    norm: &'a [f32],
    shape: &'a DeltaShape,
}

impl<'a, T: Element> Delta<'a, T> {
    /// The gate of a head's output.
    fn gate(&self, row: usize, head: usize) -> &'a [T] {
        let dim = self.shape.value_dim;
        let gate = self.inputs.gate.row(row, self.shape.value_heads * dim);
        &gate[head * dim..(head + 1) * dim]
    }
}

/// What is written are keys, what is read are queries. A key meets the state too: what it finds
/// there is replaced.
impl<T: Element> Rule<T> for Delta<'_, T> {
    const MEETS: &'static [Part] = &[Part::Written, Part::Read];

    /// Divides rows by their length; queries are divided by the root of the width, too.
    fn prepare(&self, level: Level, part: Part, rows: &mut [f32]) {
        let count = self.shape.key_dim;
        // For rows whose mean square is 1.
        let scale = (count as f32).powf(-0.5);
        level.dispatch(Normalize {
            rows,
            dim: count.next_multiple_of(16),
            count,
            scale: match part {
                Part::Written => scale,
                Part::Read => scale * scale,
            },
            eps: QK_EPS,
        });
    }

    fn gates(&self, row: usize, head: usize) -> Gates {
        let at = |rows: &Strided<'_, T>| rows.data[row * rows.stride + head].to_f32();
        let x = at(&self.inputs.decay) + self.layer.dt_bias.get(head);
        let rate = self.layer.a_log.get(head).exp();
        Gates {
            decay: (-rate * softplus(x)).exp(),
            step: 1.0 / (1.0 + (-at(&self.inputs.beta)).exp()),
        }
    }

    fn step(&self, level: Level, _head: usize, position: Position<'_>) {
        level.dispatch(Step {
            state: position.state,
            query: position.read,
            key: position.written,
            value: position.x,
            decay: position.gates.decay,
            beta: position.gates.step,
            out: position.out,
        });
    }

    fn matrices(&self, level: Level, _head: usize, chunk: Matrices<'_>) {
        let (keys, queries) = chunk.gram.split_at(CHUNK * CHUNK);
        let (system, attention) = chunk.matrices.split_at_mut(CHUNK * CHUNK);
        level.dispatch(Decays {
            decay: chunk.decays,
            beta: chunk.steps,
            keys,
            queries,
            system,
            attention,
            stride: CHUNK,
            to_end: chunk.to_end,
            from_start: chunk.from_start,
        });
    }

    fn entries(&self, level: Level, entries: Entries<'_>) {
        let (system, attention) = entries.matrices.split_at(CHUNK * CHUNK);
        let (keys, queries) = entries.products.split_at_mut(entries.product_len);
        level.dispatch(Substitute {
            n: entries.n,
            system,
            attention,
            stride: CHUNK,
            beta: entries.steps,
            from_start: entries.from_start,
            to_end: entries.to_end,
            values: entries.x,
            value_stride: entries.stride,
            keys,
            queries,
            out: entries.out,
        });
    }

    fn prefetch(&self, row: usize, head: usize) {
        prefetch(self.gate(row, head));
    }

    /// Normalizes and gates.
    fn finish(&self, level: Level, y: &[f32], row: usize, head: usize, out: &mut [T]) {
        level.dispatch(GatedNorm {
            x: y,
            weight: self.norm,
            gate: self.gate(row, head),
            eps: self.layer.norm_eps,
            out,
        });
    }
}
