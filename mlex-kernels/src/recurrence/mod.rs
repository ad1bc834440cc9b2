//! What recurrent layers have in common between their projections: a short convolution, and heads
//! with states that go on from position to position. Groups of heads share what is written to
//! their states and what is read from them.
//!
//! Few positions are done one after another, each in one pass over the state. Many are done in
//! chunks of [`CHUNK`], as matrix products, while the states stay in the cache of the core. How a
//! state changes is a [`Rule`].

mod chunks;
mod panels;
mod steps;

use crate::conv::{Channels, ConvInputs, ConvLayer, ConvShape, Convolution};
use crate::error::{check, check_len, product};
use crate::simd::{Level, scratch};
use crate::threads::{Rows, Tile, Tiling, parallel_tiles, threads};
use crate::{Element, Result, causal_conv_tail};

/// Positions of a chunk; the stride of its matrices.
pub(crate) const CHUNK: usize = 32;
/// Up to how many positions they are done one by one.
const STEPS: usize = 4;

/// How errors name the parts of a layer.
#[derive(Debug)]
pub(crate) struct Names {
    pub(crate) shape: &'static str,
    pub(crate) heads: &'static str,
    /// What the heads are to be.
    pub(crate) multiple: &'static str,
    pub(crate) out: &'static str,
    pub(crate) state: &'static str,
    pub(crate) tail: &'static str,
}

/// What the heads of a group share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// What their states are changed by.
    Written,
    /// What they are asked for.
    Read,
}

/// The sizes of a layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) batch: usize,
    pub(crate) length: usize,
    /// Heads, with a state `[dim, shared]` each.
    pub(crate) heads: usize,
    pub(crate) dim: usize,
    /// Groups of heads.
    pub(crate) groups: usize,
    /// The width of what is written and of what is read.
    pub(crate) shared: usize,
    /// Positions that the convolution sees.
    pub(crate) kernel: usize,
    /// The convolution's channels are those of the heads, what is written and what is read;
    /// otherwise what is read, what is written and those of the heads.
    pub(crate) heads_first: bool,
}

impl Sizes {
    /// The width of all heads.
    pub(crate) fn inner(&self) -> usize {
        self.heads * self.dim
    }

    /// The channels of the convolution.
    pub(crate) fn channels(&self) -> usize {
        self.inner() + 2 * self.groups * self.shared
    }

    pub(crate) fn per_group(&self) -> usize {
        self.heads / self.groups
    }

    pub(crate) fn conv(&self) -> ConvShape {
        ConvShape {
            batch: self.batch,
            length: self.length,
            channels: self.channels(),
            kernel: self.kernel,
        }
    }

    /// Says that no product of sizes that is needed overflows.
    pub(crate) fn validate(&self, names: &Names) -> Result<()> {
        let what = names.shape;
        for size in [self.heads, self.dim, self.groups, self.shared, self.kernel] {
            check(size > 0, what, "heads and dimensions", size)?;
        }
        let whole = self.heads.is_multiple_of(self.groups);
        check(whole, names.heads, names.multiple, self.heads)?;
        let inner = product(what, &[self.heads, self.dim])?;
        let shared = product(what, &[2, self.groups, self.shared])?;
        let channels = inner
            .checked_add(shared)
            .ok_or(crate::KernelError::Overflow { what })?;
        product(what, &[self.batch, self.length, channels])?;
        product(what, &[self.batch, self.kernel, channels])?;
        product(what, &[self.batch, inner, self.shared])?;
        Ok(())
    }

    /// The channels of what a group shares.
    fn shared_channels(&self, part: Part, group: usize) -> Channels {
        let start = if self.heads_first { self.inner() } else { 0 };
        let second = self.heads_first == (part == Part::Read);
        Channels {
            first: start + (usize::from(second) * self.groups + group) * self.shared,
            count: self.shared,
            padded: self.shared.next_multiple_of(16),
        }
    }

    /// The channels of `count` heads from `first` on.
    fn head_channels(&self, first: usize, count: usize, padded: usize) -> Channels {
        let start = if self.heads_first {
            0
        } else {
            2 * self.groups * self.shared
        };
        Channels {
            first: start + first * self.dim,
            count: count * self.dim,
            padded,
        }
    }
}

/// What a head does at a position.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gates {
    /// What its state is multiplied by.
    pub(crate) decay: f32,
    /// The step size.
    pub(crate) step: f32,
}

/// One position of one head.
pub(crate) struct Position<'a> {
    pub(crate) gates: Gates,
    /// `[dim, shared]`; goes on by the position.
    pub(crate) state: &'a mut [f32],
    /// `[shared]`
    pub(crate) written: &'a [f32],
    /// `[shared]`
    pub(crate) read: &'a [f32],
    /// `[dim]`
    pub(crate) x: &'a [f32],
    /// `[dim]`: becomes the output.
    pub(crate) out: &'a mut [f32],
}

/// The matrices of a chunk of one head, `[CHUNK, CHUNK]` each, one for each row that
/// [`meets`](Rule::MEETS) the state.
pub(crate) struct Matrices<'a> {
    /// For each position.
    pub(crate) decays: &'a [f32],
    /// `[CHUNK]`: for each position, and 0.
    pub(crate) steps: &'a [f32],
    /// The products of those rows with what is written.
    pub(crate) gram: &'a [f32],
    /// Become what the rule needs of them.
    pub(crate) matrices: &'a mut [f32],
    /// `[CHUNK]`: becomes, for each position, what is left of it at the end.
    pub(crate) to_end: &'a mut [f32],
    /// `[CHUNK]`: becomes, for each position, what is left there of the state before the chunk.
    pub(crate) from_start: &'a mut [f32],
}

/// A chunk of some entries of one head, as wide as a panel.
pub(crate) struct Entries<'a> {
    /// Positions.
    pub(crate) n: usize,
    pub(crate) steps: &'a [f32],
    /// As [`Rule::matrices`] made them.
    pub(crate) matrices: &'a [f32],
    pub(crate) to_end: &'a [f32],
    pub(crate) from_start: &'a [f32],
    /// The inputs of the head, rows `stride` apart.
    pub(crate) x: &'a [f32],
    pub(crate) stride: usize,
    /// `[CHUNK, width]` for each row that meets the state: their products. The first becomes what
    /// the state is changed by, along with what is written.
    pub(crate) products: &'a mut [f32],
    /// `CHUNK` times the width.
    pub(crate) product_len: usize,
    /// As `x`: becomes the outputs.
    pub(crate) out: &'a mut [f32],
}

/// How a state changes, and what becomes of what is read from it.
pub(crate) trait Rule<T: Element>: Sync {
    /// The rows of a position that meet the state as it was before it.
    const MEETS: &'static [Part];

    /// What becomes of rows that a group shares after the convolution.
    fn prepare(&self, _level: Level, _part: Part, _rows: &mut [f32]) {}

    /// Of a head at a row of the inputs.
    fn gates(&self, row: usize, head: usize) -> Gates;

    /// One position of a head.
    fn step(&self, level: Level, head: usize, position: Position<'_>);

    /// The matrices of a chunk of a head.
    fn matrices(&self, level: Level, head: usize, matrices: Matrices<'_>);

    /// A chunk of some entries of a head.
    fn entries(&self, level: Level, entries: Entries<'_>);

    /// Brings near what [`finish`](Self::finish) will need.
    fn prefetch(&self, _row: usize, _head: usize) {}

    /// What is read, `[dim]`, to the output of a head at a row of the inputs.
    fn finish(&self, level: Level, y: &[f32], row: usize, head: usize, out: &mut [T]);

    /// What becomes of the outputs of whole groups, a tile from its row `start` on.
    fn finish_groups(&self, _level: Level, _tile: &mut Tile<'_, T>, _start: usize) {}
}

/// A layer to be computed.
pub(crate) struct Recurrence<'a, T, R> {
    level: Level,
    sizes: Sizes,
    conv: Convolution<'a, T>,
    rule: R,
    /// One per batch row and head.
    states: Rows<'a, f32>,
}

impl<'a, T: Element, R: Rule<T>> Recurrence<'a, T, R> {
    /// Of sizes and inputs that are [valid](Sizes::validate); `state` is `[B, heads, dim, shared]`.
    pub(crate) fn new(
        names: &Names,
        sizes: Sizes,
        inputs: ConvInputs<'a, T>,
        layer: ConvLayer<'a>,
        state: &'a mut [f32],
        rule: R,
    ) -> Result<Self> {
        let Sizes {
            batch, dim, shared, ..
        } = sizes;
        check_len(names.state, batch * sizes.inner() * shared, state.len())?;
        let shape = sizes.conv();
        layer.validate(&shape)?;
        let level = Level::current();
        Ok(Self {
            level,
            sizes,
            conv: Convolution {
                level,
                inputs,
                layer,
                shape,
            },
            rule,
            states: Rows::new(state, dim * shared),
        })
    }

    /// Computes the outputs, `[B, L, heads * dim]`, and the states after them.
    pub(crate) fn run(&self, out: &mut [T]) {
        let Sizes {
            batch,
            length,
            heads,
            dim,
            ..
        } = self.sizes;
        // Heads of a group are done together, unless that leaves threads idle.
        let per_group = self.sizes.per_group();
        let enough = |together: &usize| {
            per_group.is_multiple_of(*together) && batch * heads / together >= threads()
        };
        let together = (1..=per_group).rev().find(enough).unwrap_or(1);
        let whole_groups = together == per_group;
        let tiling = Tiling {
            planes: batch,
            rows: length,
            columns: heads * dim,
            tile_rows: length.max(1),
            tile_columns: together * dim,
        };
        parallel_tiles(out, tiling, |mut tile| {
            let start = self.start(tile.plane);
            for position in 0..start {
                tile.row_mut(position).fill(T::from_f32(0.0));
            }
            scratch::with(1, |[buffer, ..]| {
                if length - start <= STEPS {
                    self.steps(buffer, &mut tile, start);
                } else {
                    self.chunks(buffer, &mut tile, start);
                }
            });
            if whole_groups {
                self.rule.finish_groups(self.level, &mut tile, start);
            }
        });
        if !whole_groups {
            self.finish_groups(out, tiling);
        }
    }

    /// [`Rule::finish_groups`] where tasks have been parts of groups.
    fn finish_groups(&self, out: &mut [T], tiling: Tiling) {
        /// Positions of a task.
        const ROWS: usize = 16;
        let tiling = Tiling {
            tile_rows: ROWS,
            tile_columns: self.sizes.per_group() * self.sizes.dim,
            ..tiling
        };
        parallel_tiles(out, tiling, |mut tile| {
            let first = self.start(tile.plane).saturating_sub(tile.row);
            let first = first.min(tile.rows);
            self.rule.finish_groups(self.level, &mut tile, first);
        });
    }

    /// Positions of padding in a batch row.
    fn start(&self, batch: usize) -> usize {
        self.conv.inputs.start(batch, &self.conv.shape)
    }
}

/// What the next call needs of the inputs of the convolution: the last `K - 1` of them.
pub(crate) fn tail<T: Element>(
    names: &Names,
    sizes: &Sizes,
    inputs: &ConvInputs<'_, T>,
    out: &mut [T],
) -> Result<()> {
    sizes.validate(names)?;
    let kept = sizes.batch * (sizes.kernel - 1) * sizes.channels();
    check_len(names.tail, kept, out.len())?;
    causal_conv_tail(out, inputs, &sizes.conv())
}

/// `ln(1 + e^x)`.
pub(crate) fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}
