//! A Mamba 2 layer between its projections: the short convolution, the selective state space
//! recurrence, and the gated norm of the output by groups.
//!
//! Few positions are done one after another, each in one pass over the state. Many are done in
//! chunks of [`CHUNK`], in which the recurrence is a masked product of two matrices
//! ("Transformers are SSMs"): per chunk and head two products with the state, which stays in the
//! cache of the core, and one with the matrix of the chunk. Heads of a group share what is written
//! to their states and read from them.

mod chunks;

use crate::conv::{Channels, ConvInputs, ConvLayer, ConvShape, Convolution, Strided};
use crate::error::{check, check_len, product};
use crate::panels::cut;
use crate::simd::mamba2::{GroupNorm, Step};
use crate::simd::rows::{Narrow, Widen};
use crate::simd::{Level, scratch};
use crate::threads::{Rows, Tile, Tiling, parallel_tiles, threads};
use crate::{Element, Floats, Result, causal_conv_tail};

/// Positions of a chunk.
const CHUNK: usize = 32;
/// Up to how many positions they are done one by one.
const STEPS: usize = 4;
/// Positions whose output one task normalizes.
const NORM_ROWS: usize = 16;

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
        self.heads * self.head_dim
    }

    /// The channels of the convolution: all heads, and `B` and `C` of all groups.
    pub fn channels(&self) -> usize {
        self.inner() + 2 * self.groups * self.state
    }

    fn per_group(&self) -> usize {
        self.heads / self.groups
    }

    fn conv(&self) -> ConvShape {
        ConvShape {
            batch: self.batch,
            length: self.length,
            channels: self.channels(),
            kernel: self.kernel,
        }
    }

    fn validate(&self) -> Result<()> {
        const WHAT: &str = "mamba2: shape";
        for size in [
            self.heads,
            self.head_dim,
            self.groups,
            self.state,
            self.kernel,
        ] {
            check(size > 0, WHAT, "heads and dimensions", size)?;
        }
        check(
            self.heads.is_multiple_of(self.groups),
            "mamba2: heads",
            "a multiple of the groups",
            self.heads,
        )?;
        let inner = product(WHAT, &[self.heads, self.head_dim])?;
        let shared = product(WHAT, &[2, self.groups, self.state])?;
        let channels = inner
            .checked_add(shared)
            .ok_or(crate::KernelError::Overflow { what: WHAT })?;
        product(WHAT, &[self.batch, self.length, channels])?;
        product(WHAT, &[self.batch, self.kernel, channels])?;
        product(WHAT, &[self.batch, inner, self.state])?;
        Ok(())
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
        self.conv().validate(&shape.conv())
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
    shape.validate()?;
    let kept = shape.batch * (shape.kernel - 1) * shape.channels();
    check_len("mamba2: tail", kept, out.len())?;
    causal_conv_tail(out, &inputs.conv(), &shape.conv())
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
    shape.validate()?;
    inputs.validate(shape)?;
    let &Mamba2Shape {
        batch,
        length,
        heads,
        head_dim,
        ..
    } = shape;
    let inner = shape.inner();
    check_len("mamba2: out", batch * length * inner, out.len())?;
    check_len("mamba2: state", batch * inner * shape.state, state.len())?;
    let conv = ConvLayer {
        taps: layer.conv,
        bias: layer.conv_bias,
        activate: true,
        residual: false,
    };
    conv.validate(&shape.conv())?;
    check_len("mamba2: a_log", heads, layer.a_log.len())?;
    check_len("mamba2: dt_bias", heads, layer.dt_bias.len())?;
    check_len("mamba2: d", heads, layer.d.len())?;
    check_len("mamba2: norm", inner, layer.norm.len())?;
    let (least, most) = layer.dt_limit;
    let ordered = least <= most;
    check(ordered, "mamba2: dt_limit", "a range", usize::from(ordered))?;
    let norm = layer.norm.widened();
    let level = Level::current();
    let job = Job {
        level,
        conv: Convolution {
            level,
            inputs: inputs.conv(),
            layer: conv,
            shape: shape.conv(),
        },
        inputs,
        layer,
        norm: &norm,
        shape,
        states: Rows::new(state, head_dim * shape.state),
    };
    // Heads of a group are done together, unless that leaves threads idle.
    let per_group = shape.per_group();
    let enough = |together: &usize| {
        per_group.is_multiple_of(*together) && batch * heads / together >= threads()
    };
    let together = (1..=per_group).rev().find(enough).unwrap_or(1);
    let whole_groups = together == per_group;
    let tiling = Tiling {
        planes: batch,
        rows: length,
        columns: inner,
        tile_rows: length.max(1),
        tile_columns: together * head_dim,
    };
    parallel_tiles(out, tiling, |mut tile| {
        let start = job.conv.inputs.start(tile.plane, &job.conv.shape);
        for position in 0..start {
            tile.row_mut(position).fill(T::from_f32(0.0));
        }
        scratch::with(1, |[buffer, ..]| {
            if length - start <= STEPS {
                job.steps(buffer, &mut tile, start);
            } else {
                job.chunks(buffer, &mut tile, start);
            }
        });
        if whole_groups {
            job.norm(&mut tile, start);
        }
    });
    if !whole_groups {
        let tiling = Tiling {
            tile_rows: NORM_ROWS,
            tile_columns: per_group * head_dim,
            ..tiling
        };
        parallel_tiles(out, tiling, |mut tile| {
            let start = job.conv.inputs.start(tile.plane, &job.conv.shape);
            let first = start.saturating_sub(tile.row).min(tile.rows);
            job.norm(&mut tile, first);
        });
    }
    Ok(())
}

struct Job<'a, T> {
    level: Level,
    conv: Convolution<'a, T>,
    inputs: &'a Mamba2Inputs<'a, T>,
    layer: &'a Mamba2Layer<'a>,
    norm: &'a [f32],
    shape: &'a Mamba2Shape,
    /// One per batch row and head.
    states: Rows<'a, f32>,
}

/// What a head does at a position.
#[derive(Clone, Copy)]
struct Gates {
    decay: f32,
    dt: f32,
}

impl<T: Element> Job<'_, T> {
    /// What is written to the states of a group (`index` 0) or read from them (1).
    fn shared(&self, group: usize, index: usize) -> Channels {
        let count = self.shape.state;
        Channels {
            first: self.shape.inner() + (index * self.shape.groups + group) * count,
            count,
            padded: count.next_multiple_of(16),
        }
    }

    /// The inputs of `count` heads from `first` on.
    fn heads(&self, first: usize, count: usize, padded: usize) -> Channels {
        let dim = self.shape.head_dim;
        Channels {
            first: first * dim,
            count: count * dim,
            padded,
        }
    }

    fn gates(&self, batch: usize, position: usize, head: usize) -> Gates {
        let row = batch * self.shape.length + position;
        let dt = self.inputs.dt.row(row, self.shape.heads)[head].to_f32();
        let x = dt + self.layer.dt_bias.get(head);
        let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
        let (least, most) = self.layer.dt_limit;
        let dt = softplus.max(least).min(most);
        let rate = self.layer.a_log.get(head).exp();
        Gates {
            decay: (-rate * dt).exp(),
            dt,
        }
    }

    /// Gates and normalizes the rows of a tile of one or more groups, from row `start` on.
    fn norm(&self, tile: &mut Tile<'_, T>, start: usize) {
        let width = self.shape.per_group() * self.shape.head_dim;
        scratch::with(1, |[buffer, ..]| {
            let memory = &mut buffer.floats(2 * width)[..2 * width];
            let (x, gates) = memory.split_at_mut(width);
            for row in start..tile.rows {
                let position = tile.plane * self.shape.length + tile.row + row;
                let gate = self.inputs.gate.row(position, self.shape.inner());
                let column = tile.column;
                let groups = tile.row_mut(row).chunks_exact_mut(width);
                for (index, out) in groups.enumerate() {
                    let first = column + index * width;
                    let columns = first..first + width;
                    let from = &*out;
                    self.level.dispatch(Widen { from, to: x });
                    let from = &gate[columns.clone()];
                    self.level.dispatch(Widen { from, to: gates });
                    self.level.dispatch(GroupNorm {
                        x,
                        gate: gates,
                        weight: &self.norm[columns],
                        eps: self.layer.norm_eps,
                    });
                    self.level.dispatch(Narrow {
                        from: x,
                        bias: &[],
                        to: out,
                    });
                }
            }
        });
    }

    /// The positions from `start` on, one by one.
    fn steps(&self, buffer: &mut scratch::Buffer, tile: &mut Tile<'_, T>, start: usize) {
        let shape = self.shape;
        let (batch, dim) = (tile.plane, shape.head_dim);
        let (first, count) = (tile.column / dim, tile.columns / dim);
        let group = first / shape.per_group();
        let (b, c) = (self.shared(group, 0), self.shared(group, 1));
        let x = self.heads(first, count, (count * dim).next_multiple_of(16));
        let lengths = [b, c, x].map(|channels| self.conv.taps_len(channels.padded));
        let widest = b.padded.max(x.padded);
        let total = lengths.iter().sum::<usize>()
            + shape.kernel * widest
            + b.padded
            + c.padded
            + 2 * x.padded;
        let mut memory = &mut buffer.floats(total)[..total];
        let mut cut = |count: usize| cut(&mut memory, count);
        let [b_taps, c_taps, x_taps] = lengths.map(&mut cut);
        let window = cut(shape.kernel * widest);
        let (to_b, to_c) = (cut(b.padded), cut(c.padded));
        let (to_x, y) = (cut(x.padded), cut(x.padded));
        self.conv.taps(b, b_taps);
        self.conv.taps(c, c_taps);
        self.conv.taps(x, x_taps);
        let mut states: Vec<&mut [f32]> = (first..first + count)
            .map(|head| self.states.take(batch * shape.heads + head))
            .collect();
        for position in start..shape.length {
            let span = [position, 1];
            self.conv.run(b, batch, span, b_taps, window, to_b);
            self.conv.run(c, batch, span, c_taps, window, to_c);
            self.conv.run(x, batch, span, x_taps, window, to_x);
            for (index, state) in states.iter_mut().enumerate() {
                let head = first + index;
                let Gates { decay, dt } = self.gates(batch, position, head);
                let columns = index * dim..(index + 1) * dim;
                self.level.dispatch(Step {
                    state,
                    x: &to_x[columns.clone()],
                    b: &to_b[..b.count],
                    c: &to_c[..c.count],
                    decay,
                    dt,
                    d: self.layer.d.get(head),
                    out: &mut y[columns],
                });
            }
            let (from, to) = (&y[..x.count], tile.row_mut(position));
            self.level.dispatch(Narrow {
                from,
                bias: &[],
                to,
            });
        }
    }
}
