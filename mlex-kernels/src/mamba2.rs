//! A Mamba 2 layer between its projections: the short convolution, the selective state space
//! recurrence, and the gated norm of the output by groups.
//!
//! In a chunk the recurrence is a masked product of two matrices ("Transformers are SSMs"): per
//! head two products with the state and one with the matrix of the chunk. The formulas are at the
//! head of `mlex-nn`'s `mamba2/scan.rs`, which is the same in operations on arrays.

use crate::conv::{ConvInputs, ConvLayer, Strided};
use crate::error::{check, check_len};
use crate::recurrence::{
    self, CHUNK, Entries, Gates, Matrices, Names, Part, Position, Recurrence, Rule, Sizes, softplus,
};
use crate::simd::mamba2::{ChunkMatrix, GroupNorm, Mix, Step};
use crate::simd::rows::{Narrow, Widen};
use crate::simd::{Level, scratch};
use crate::threads::Tile;
use crate::{Element, Floats, Result};

const NAMES: Names = Names {
    shape: "mamba2: shape",
    heads: "mamba2: heads",
    multiple: "a multiple of the groups",
    out: "mamba2: out",
    state: "mamba2: state",
    tail: "mamba2: tail",
};

/// The sizes of a [`mamba2`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mamba2Shape {
    /// Rows of the batch, `B`.
    pub batch: usize,
    /// Positions, `L`.
    pub length: usize,
    /// Heads, `H`.
    pub heads: usize,
    /// Width of a head, `P`.
    pub head_dim: usize,
    /// Groups of heads that share their `B` and `C`, `G`; divides the heads.
    pub groups: usize,
    /// Entries of `B` and `C`, `N`.
    pub state: usize,
    /// Positions that the convolution sees, `K`.
    pub kernel: usize,
}

impl Mamba2Shape {
    /// The width of all heads, `H P`.
    pub fn inner(&self) -> usize {
        self.sizes().inner()
    }

    /// The channels of the convolution: all heads, and `B` and `C` of all groups.
    pub fn channels(&self) -> usize {
        self.sizes().channels()
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            batch: self.batch,
            length: self.length,
            heads: self.heads,
            dim: self.head_dim,
            groups: self.groups,
            shared: self.state,
            kernel: self.kernel,
            heads_first: true,
        }
    }
}

/// The parameters of a [`mamba2`].
#[derive(Debug, Clone, Copy)]
pub struct Mamba2Layer<'a> {
    /// The convolution, `[K, C]`, the tap of the position itself last.
    pub conv: Floats<'a>,
    /// Its bias, `[C]`.
    pub conv_bias: Option<Floats<'a>>,
    /// The logarithm of the decay's rate, `[H]`.
    pub a_log: Floats<'a>,
    /// Added to the step size before softplus, `[H]`.
    pub dt_bias: Floats<'a>,
    /// The least and the largest step size.
    pub dt_limit: (f32, f32),
    /// What of the input of a head goes to its output unchanged, `[H]`.
    pub d: Floats<'a>,
    /// The weight of the output's norm, `[H P]`.
    pub norm: Floats<'a>,
    /// The epsilon of that norm.
    pub norm_eps: f32,
}

/// What a [`mamba2`] computes on.
#[derive(Debug, Clone, Copy)]
pub struct Mamba2Inputs<'a, T> {
    /// The gate of the output, rows of `H P`.
    pub gate: Strided<'a, T>,
    /// What goes through the convolution: the inputs of the heads, `B` and `C`, rows of
    /// `H P + 2 G N`.
    pub channels: Strided<'a, T>,
    /// The step sizes before bias and softplus, rows of `H`.
    pub dt: Strided<'a, T>,
    /// The last inputs of the convolution before these, `[B, K - 1, H P + 2 G N]`; zero if empty.
    pub before: &'a [T],
    /// How many of the positions of each batch row are padding, at its start; none if empty.
    pub padding: &'a [usize],
}

impl<'a, T: Element> Mamba2Inputs<'a, T> {
    fn conv(&self) -> ConvInputs<'a, T> {
        ConvInputs {
            x: self.channels,
            before: self.before,
            padding: self.padding,
        }
    }

    fn validate(&self, shape: &Mamba2Shape) -> Result<()> {
        let rows = shape.batch * shape.length;
        self.gate.validate("mamba2: gate", rows, shape.inner())?;
        self.channels
            .validate("mamba2: channels", rows, shape.channels())?;
        self.dt.validate("mamba2: dt", rows, shape.heads)?;
        self.conv().validate(&shape.sizes().conv())
    }
}

/// What the next call needs of the inputs of the convolution: the last `K - 1` of them, into
/// `out` `[B, K - 1, H P + 2 G N]`.
///
/// # Errors
/// When a slice has another length than `shape` says.
pub fn mamba2_tail<T: Element>(
    out: &mut [T],
    inputs: &Mamba2Inputs<'_, T>,
    shape: &Mamba2Shape,
) -> Result<()> {
    recurrence::tail(&NAMES, &shape.sizes(), &inputs.conv(), out)
}

/// A Mamba 2 layer from the projection of its input to what its output projection takes: `out`
/// `[B, L, H P]`, and `state` `[B, H, P, N]` goes on by `L` positions. Padding leaves the state as
/// it is and gives 0.
///
/// Everything is computed in f32; see the source of the module for how.
///
/// # Errors
/// When a slice has another length than `shape` says.
pub fn mamba2<T: Element>(
    out: &mut [T],
    state: &mut [f32],
    inputs: &Mamba2Inputs<'_, T>,
    layer: &Mamba2Layer<'_>,
    shape: &Mamba2Shape,
) -> Result<()> {
    let sizes = shape.sizes();
    sizes.validate(&NAMES)?;
    inputs.validate(shape)?;
    let outputs = shape.batch * shape.length * sizes.inner();
    check_len(NAMES.out, outputs, out.len())?;
    check_len("mamba2: a_log", sizes.heads, layer.a_log.len())?;
    check_len("mamba2: dt_bias", sizes.heads, layer.dt_bias.len())?;
    check_len("mamba2: d", sizes.heads, layer.d.len())?;
    check_len("mamba2: norm", sizes.inner(), layer.norm.len())?;
    let (least, most) = layer.dt_limit;
    let ordered = least <= most;
    check(ordered, "mamba2: dt_limit", "a range", usize::from(ordered))?;
    let conv = ConvLayer {
        taps: layer.conv,
        bias: layer.conv_bias,
        activate: true,
        residual: false,
    };
    let norm = layer.norm.widened();
    let rule = Selective {
        inputs,
        layer,
        norm: &norm,
        sizes,
    };
    Recurrence::new(&NAMES, sizes, inputs.conv(), conv, state, rule)?.run(out);
    Ok(())
}

struct Selective<'a, T> {
    inputs: &'a Mamba2Inputs<'a, T>,
    layer: &'a Mamba2Layer<'a>,
    norm: &'a [f32],
    sizes: Sizes,
}

/// What is written is `B`, what is read is `C`.
impl<T: Element> Rule<T> for Selective<'_, T> {
    const MEETS: &'static [Part] = &[Part::Read];

    fn gates(&self, row: usize, head: usize) -> Gates {
        let dt = self.inputs.dt.row(row, self.sizes.heads)[head].to_f32();
        let (least, most) = self.layer.dt_limit;
        let step = softplus(dt + self.layer.dt_bias.get(head));
        let step = step.max(least).min(most);
        let rate = self.layer.a_log.get(head).exp();
        Gates {
            decay: (-rate * step).exp(),
            step,
        }
    }

    fn step(&self, level: Level, head: usize, position: Position<'_>) {
        level.dispatch(Step {
            state: position.state,
            x: position.x,
            b: position.written,
            c: position.read,
            decay: position.gates.decay,
            dt: position.gates.step,
            d: self.layer.d.get(head),
            out: position.out,
        });
    }

    fn matrices(&self, level: Level, head: usize, chunk: Matrices<'_>) {
        level.dispatch(ChunkMatrix {
            decay: chunk.decays,
            dt: chunk.steps,
            d: self.layer.d.get(head),
            gram: chunk.gram,
            matrix: chunk.matrices,
            stride: CHUNK,
            to_end: chunk.to_end,
            from_start: chunk.from_start,
        });
    }

    fn entries(&self, level: Level, entries: Entries<'_>) {
        level.dispatch(Mix {
            n: entries.n,
            matrix: entries.matrices,
            stride: CHUNK,
            from_start: entries.from_start,
            to_end: entries.to_end,
            x: entries.x,
            x_stride: entries.stride,
            seen: entries.products,
            out: entries.out,
        });
    }

    /// The gate and the norm need the whole group.
    fn finish(&self, level: Level, y: &[f32], _row: usize, _head: usize, out: &mut [T]) {
        level.dispatch(Narrow {
            from: y,
            bias: &[],
            to: out,
        });
    }

    /// Gates and normalizes.
    fn finish_groups(&self, level: Level, tile: &mut Tile<'_, T>, start: usize) {
        let width = self.sizes.per_group() * self.sizes.dim;
        scratch::with(1, |[buffer, ..]| {
            let memory = &mut buffer.floats(2 * width)[..2 * width];
            let (x, gates) = memory.split_at_mut(width);
            for row in start..tile.rows {
                let position = tile.plane * self.sizes.length + tile.row + row;
                let gate = self.inputs.gate.row(position, self.sizes.inner());
                let column = tile.column;
                let groups = tile.row_mut(row).chunks_exact_mut(width);
                for (index, out) in groups.enumerate() {
                    let first = column + index * width;
                    let columns = first..first + width;
                    let from = &*out;
                    level.dispatch(Widen { from, to: x });
                    let from = &gate[columns.clone()];
                    level.dispatch(Widen { from, to: gates });
                    level.dispatch(GroupNorm {
                        x,
                        gate: gates,
                        weight: &self.norm[columns],
                        eps: self.layer.norm_eps,
                    });
                    level.dispatch(Narrow {
                        from: x,
                        bias: &[],
                        to: out,
                    });
                }
            }
        });
    }
}
