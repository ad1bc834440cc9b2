//! Mamba 2 for many positions, in chunks. The formulas are at the head of `mlex-nn`'s
//! `mamba2/scan.rs`, which is the same in operations on arrays.
//!
//! Within a task the states are held as panels of `2 * LANES` entries of a head, `[N, width]` each.

use super::{CHUNK, Gates, Job};
use crate::Element;
use crate::panels::{Panels, Product, TileShape, cut};
use crate::simd::attention::Transpose;
use crate::simd::gated_delta::Scale;
use crate::simd::mamba2::{ChunkMatrix, Mix};
use crate::simd::rows::Narrow;
use crate::simd::scratch;
use crate::threads::Tile;

/// Memory of one task.
struct Memory<'a> {
    b_taps: &'a mut [f32],
    c_taps: &'a mut [f32],
    /// For each head.
    x_taps: &'a mut [f32],
    window: &'a mut [f32],
    /// `[CHUNK, padded state]`.
    b: &'a mut [f32],
    c: &'a mut [f32],
    /// `[CHUNK, padded head]`.
    x: &'a mut [f32],
    y: &'a mut [f32],
    /// `[padded state, CHUNK]`: what is read.
    across: &'a mut [f32],
    /// `[CHUNK / width, padded state, width]`: what is written.
    columns: &'a mut [f32],
    /// `[CHUNK, CHUNK]`: the products of what is read and what is written.
    gram: &'a mut [f32],
    matrix: &'a mut [f32],
    /// `[CHUNK, width]`: products with a panel of the state.
    seen: &'a mut [f32],
    /// `[heads, panels, padded state, width]`.
    states: &'a mut [f32],
}

/// Sizes of one task.
#[derive(Clone, Copy)]
struct Sizes {
    heads: usize,
    /// Entries of what is written and read, padded.
    state: usize,
    /// Width of a head, padded to whole panels.
    dim: usize,
    /// Rows and columns of a GEMM tile.
    tile: usize,
    width: usize,
}

impl<'a> Memory<'a> {
    fn new(buffer: &'a mut scratch::Buffer, sizes: Sizes, kernel: usize) -> Self {
        let Sizes {
            heads,
            state,
            dim,
            width,
            ..
        } = sizes;
        let taps = kernel + 1;
        let columns = CHUNK.next_multiple_of(width) * state;
        let lengths = [
            taps * state,
            taps * state,
            taps * heads * dim,
            (CHUNK + kernel) * state.max(dim),
            CHUNK * state,
            CHUNK * state,
            CHUNK * dim,
            CHUNK * dim,
            CHUNK * state,
            columns,
            CHUNK * CHUNK,
            CHUNK * CHUNK,
            CHUNK * width,
            heads * dim * state,
        ];
        let total = lengths.iter().sum();
        let mut memory = &mut buffer.floats(total)[..total];
        let [
            b_taps,
            c_taps,
            x_taps,
            window,
            b,
            c,
            x,
            y,
            across,
            columns,
            gram,
            matrix,
            seen,
            states,
        ] = lengths.map(|count| cut(&mut memory, count));
        Self {
            b_taps,
            c_taps,
            x_taps,
            window,
            b,
            c,
            x,
            y,
            across,
            columns,
            gram,
            matrix,
            seen,
            states,
        }
    }
}

impl<T: Element> Job<'_, T> {
    /// The positions from `start` on, in chunks.
    pub(super) fn chunks(
        &self,
        buffer: &mut scratch::Buffer,
        tile: &mut Tile<'_, T>,
        start: usize,
    ) {
        let shape = self.shape;
        let (batch, dim) = (tile.plane, shape.head_dim);
        let (first, heads) = (tile.column / dim, tile.columns / dim);
        let group = first / shape.per_group();
        let (rows, width) = self.level.dispatch(TileShape);
        let sizes = Sizes {
            heads,
            state: shape.state.next_multiple_of(16),
            dim: dim.next_multiple_of(width.max(16)),
            tile: rows,
            width,
        };
        let memory = &mut Memory::new(buffer, sizes, shape.kernel);
        self.conv.taps(self.shared(group, 0), memory.b_taps);
        self.conv.taps(self.shared(group, 1), memory.c_taps);
        let per_head = self.conv.taps_len(sizes.dim);
        for (index, taps) in memory.x_taps.chunks_exact_mut(per_head).enumerate() {
            self.conv
                .taps(self.heads(first + index, 1, sizes.dim), taps);
        }
        let taken: Vec<&mut [f32]> = (first..first + heads)
            .map(|head| self.states.take(batch * shape.heads + head))
            .collect();
        let panels = Panels {
            dim: shape.state,
            rows: sizes.state,
            width,
        };
        let state_len = sizes.dim * sizes.state;
        for (state, to) in taken.iter().zip(memory.states.chunks_exact_mut(state_len)) {
            panels.unpack(self.level, state, to);
        }
        for position in (start..shape.length).step_by(CHUNK) {
            let span = [position, CHUNK.min(shape.length - position)];
            self.group(memory, sizes, batch, group, span);
            for index in 0..heads {
                self.chunk(memory, sizes, [batch, first + index, index], span);
                let rows = memory.y.chunks_exact(sizes.dim).take(span[1]);
                for (i, y) in rows.enumerate() {
                    let to = &mut tile.row_mut(position + i)[index * dim..][..dim];
                    self.level.dispatch(Narrow {
                        from: &y[..dim],
                        bias: &[],
                        to,
                    });
                }
            }
        }
        for (state, from) in taken.into_iter().zip(memory.states.chunks_exact(state_len)) {
            panels.pack(self.level, state, from);
        }
    }

    /// What the heads of a group share in a chunk, and its products.
    fn group(
        &self,
        memory: &mut Memory<'_>,
        sizes: Sizes,
        batch: usize,
        group: usize,
        span: [usize; 2],
    ) {
        let (n, state, width) = (span[1], sizes.state, sizes.width);
        let (b, c) = (self.shared(group, 0), self.shared(group, 1));
        let next = [span[0] + n, CHUNK];
        self.conv.prefetch(b, batch, next);
        self.conv.prefetch(c, batch, next);
        let window = &mut *memory.window;
        self.conv
            .run(b, batch, span, memory.b_taps, window, memory.b);
        self.conv
            .run(c, batch, span, memory.c_taps, window, memory.c);
        self.level.dispatch(Transpose {
            from: memory.c,
            rows: n,
            columns: state,
            to: memory.across,
            to_stride: CHUNK,
        });
        for panel in 0..n.div_ceil(width) {
            let columns = &mut memory.columns[panel * state * width..][..state * width];
            let first = panel * width;
            let rows = width.min(n - first);
            if rows < width {
                // What is left from before counts for nothing, but is not to be infinite.
                columns.fill(0.0);
            }
            self.level.dispatch(Transpose {
                from: &memory.b[first * state..],
                rows,
                columns: state,
                to: columns,
                to_stride: width,
            });
            let product = Product {
                k: state,
                rows: n,
                a: memory.across,
                a_stride: CHUNK,
                b: columns,
                c: &mut memory.gram[first..],
                c_stride: CHUNK,
                accumulate: false,
            };
            product.run(self.level, sizes.tile);
        }
    }

    /// A chunk of one head, number `index` of the task: its outputs into `memory.y`, its state
    /// goes on.
    fn chunk(
        &self,
        memory: &mut Memory<'_>,
        sizes: Sizes,
        [batch, head, index]: [usize; 3],
        span: [usize; 2],
    ) {
        let Sizes {
            state: rows,
            dim,
            tile,
            width,
            ..
        } = sizes;
        let n = span[1];
        let per_head = self.conv.taps_len(dim);
        let taps = &memory.x_taps[index * per_head..][..per_head];
        let channels = self.heads(head, 1, dim);
        self.conv.prefetch(channels, batch, [span[0] + n, CHUNK]);
        self.conv
            .run(channels, batch, span, taps, memory.window, memory.x);

        let (mut decays, mut steps) = ([0.0; CHUNK], [0.0; CHUNK]);
        for i in 0..n {
            let Gates { decay, dt } = self.gates(batch, span[0] + i, head);
            (decays[i], steps[i]) = (decay, dt);
        }
        let (mut to_end, mut from_start) = ([0.0; CHUNK], [0.0; CHUNK]);
        self.level.dispatch(ChunkMatrix {
            decay: &decays[..n],
            dt: &steps,
            d: self.layer.d.get(head),
            gram: memory.gram,
            matrix: memory.matrix,
            stride: CHUNK,
            to_end: &mut to_end,
            from_start: &mut from_start,
        });
        let states = &mut memory.states[index * dim * rows..][..dim * rows];
        for (panel, state) in states.chunks_exact_mut(rows * width).enumerate() {
            let product = Product {
                k: rows,
                rows: n,
                a: memory.across,
                a_stride: CHUNK,
                b: state,
                c: memory.seen,
                c_stride: width,
                accumulate: false,
            };
            product.run(self.level, tile);
            self.level.dispatch(Mix {
                n,
                matrix: memory.matrix,
                stride: CHUNK,
                from_start: &from_start,
                to_end: &to_end,
                x: &memory.x[panel * width..],
                x_stride: dim,
                seen: memory.seen,
                out: &mut memory.y[panel * width..],
            });
            self.level.dispatch(Scale {
                x: state,
                factor: from_start[n - 1],
            });
            let product = Product {
                k: n,
                rows,
                a: memory.b,
                a_stride: rows,
                b: memory.seen,
                c: state,
                c_stride: width,
                accumulate: true,
            };
            product.run(self.level, tile);
        }
    }
}
