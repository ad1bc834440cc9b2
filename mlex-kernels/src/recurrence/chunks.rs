//! Many positions, in chunks.
//!
//! Within a task the states are held as panels of `2 * LANES` entries of a head, `[shared, width]`
//! each, so that all products have the shape of the GEMM's micro-tile: rows are positions (or
//! entries of what is shared), lanes are entries of a head.

use super::panels::{Panels, Product, TileShape, cut};
use super::{CHUNK, Entries, Gates, Matrices, Part, Recurrence, Rule};
use crate::Element;
use crate::simd::attention::Transpose;
use crate::simd::gated_delta::Scale;
use crate::simd::scratch;
use crate::threads::Tile;

/// Memory of one task.
struct Memory<'a> {
    /// `[K + 1, shared]` each: the taps.
    written_taps: &'a mut [f32],
    read_taps: &'a mut [f32],
    /// `[heads, K + 1, dim]`.
    x_taps: &'a mut [f32],
    window: &'a mut [f32],
    /// `[CHUNK, shared]` each.
    written: &'a mut [f32],
    read: &'a mut [f32],
    /// `[CHUNK, dim]` each.
    x: &'a mut [f32],
    y: &'a mut [f32],
    /// `[shared, meets, CHUNK]`: the rows that meet the state.
    across: &'a mut [f32],
    /// `[CHUNK / width, shared, width]`: what is written.
    columns: &'a mut [f32],
    /// `[meets, CHUNK, CHUNK]`: the products of the two.
    gram: &'a mut [f32],
    matrices: &'a mut [f32],
    /// `[meets, CHUNK, width]`: products with a panel of the state.
    products: &'a mut [f32],
    /// `[heads, panels, shared, width]`.
    states: &'a mut [f32],
}

/// Sizes of one task.
#[derive(Clone, Copy)]
struct TaskSizes {
    /// Rows that meet the state.
    meets: usize,
    heads: usize,
    /// Width of what is shared, padded.
    shared: usize,
    /// Width of a head, padded to whole panels.
    dim: usize,
    /// Rows and columns of a GEMM tile.
    tile: usize,
    width: usize,
}

/// Where a chunk is.
#[derive(Clone, Copy)]
struct Place {
    batch: usize,
    /// The group of the task, and its first head.
    group: usize,
    first: usize,
    /// The first position, and how many there are.
    span: [usize; 2],
}

impl<'a> Memory<'a> {
    fn new(buffer: &'a mut scratch::Buffer, sizes: TaskSizes, kernel: usize) -> Self {
        let TaskSizes {
            meets,
            heads,
            shared,
            dim,
            width,
            ..
        } = sizes;
        let taps = kernel + 1;
        let lengths = [
            taps * shared,
            taps * shared,
            taps * heads * dim,
            (CHUNK + kernel) * shared.max(dim),
            CHUNK * shared,
            CHUNK * shared,
            CHUNK * dim,
            CHUNK * dim,
            meets * CHUNK * shared,
            CHUNK.next_multiple_of(width) * shared,
            meets * CHUNK * CHUNK,
            meets * CHUNK * CHUNK,
            meets * CHUNK * width,
            heads * dim * shared,
        ];
        let total = lengths.iter().sum();
        let mut memory = &mut buffer.floats(total)[..total];
        let [
            written_taps,
            read_taps,
            x_taps,
            window,
            written,
            read,
            x,
            y,
            across,
            columns,
            gram,
            matrices,
            products,
            states,
        ] = lengths.map(|count| cut(&mut memory, count));
        Self {
            written_taps,
            read_taps,
            x_taps,
            window,
            written,
            read,
            x,
            y,
            across,
            columns,
            gram,
            matrices,
            products,
            states,
        }
    }
}

impl<T: Element, R: Rule<T>> Recurrence<'_, T, R> {
    /// The positions from `start` on, in chunks.
    pub(super) fn chunks(
        &self,
        buffer: &mut scratch::Buffer,
        tile: &mut Tile<'_, T>,
        start: usize,
    ) {
        let (batch, length, dim) = (tile.plane, self.sizes.length, self.sizes.dim);
        let (first, heads) = (tile.column / dim, tile.columns / dim);
        let group = first / self.sizes.per_group();
        let (rows, width) = self.level.dispatch(TileShape);
        let sizes = TaskSizes {
            meets: R::MEETS.len(),
            heads,
            shared: self.sizes.shared.next_multiple_of(16),
            dim: dim.next_multiple_of(width.max(16)),
            tile: rows,
            width,
        };
        let memory = &mut Memory::new(buffer, sizes, self.sizes.kernel);
        let shared = |part| self.sizes.shared_channels(part, group);
        self.conv.taps(shared(Part::Written), memory.written_taps);
        self.conv.taps(shared(Part::Read), memory.read_taps);
        let per_head = self.conv.taps_len(sizes.dim);
        for (index, taps) in memory.x_taps.chunks_exact_mut(per_head).enumerate() {
            let channels = self.sizes.head_channels(first + index, 1, sizes.dim);
            self.conv.taps(channels, taps);
        }
        let taken: Vec<&mut [f32]> = (first..first + heads)
            .map(|head| self.states.take(batch * self.sizes.heads + head))
            .collect();
        let panels = Panels {
            dim: self.sizes.shared,
            rows: sizes.shared,
            width,
        };
        let state_len = sizes.dim * sizes.shared;
        for (state, to) in taken.iter().zip(memory.states.chunks_exact_mut(state_len)) {
            panels.unpack(self.level, state, to);
        }
        for position in (start..length).step_by(CHUNK) {
            let n = CHUNK.min(length - position);
            let place = Place {
                batch,
                group,
                first,
                span: [position, n],
            };
            self.group(memory, sizes, place);
            for index in 0..heads {
                self.chunk(memory, sizes, place, index);
                let rows = memory.y.chunks_exact(sizes.dim).take(n);
                for (i, y) in rows.enumerate() {
                    let row = batch * length + position + i;
                    let out = &mut tile.row_mut(position + i)[index * dim..][..dim];
                    self.rule
                        .finish(self.level, &y[..dim], row, first + index, out);
                }
            }
        }
        for (state, from) in taken.into_iter().zip(memory.states.chunks_exact(state_len)) {
            panels.pack(self.level, state, from);
        }
    }

    /// What the heads of a group share in a chunk, and its products with what is written.
    fn group(&self, memory: &mut Memory<'_>, sizes: TaskSizes, place: Place) {
        let Place {
            batch, group, span, ..
        } = place;
        let TaskSizes {
            meets,
            shared,
            width,
            ..
        } = sizes;
        let n = span[1];
        let next = [span[0] + n, CHUNK];
        let parts = [Part::Written, Part::Read].map(|part| self.sizes.shared_channels(part, group));
        for channels in parts {
            self.conv.prefetch(channels, batch, next);
        }
        let taps = [&*memory.written_taps, &*memory.read_taps];
        let to = [&mut *memory.written, &mut *memory.read];
        for ((channels, taps), to) in parts.into_iter().zip(taps).zip(to) {
            self.conv
                .run(channels, batch, span, taps, memory.window, to);
        }
        let (written, read) = (
            &mut memory.written[..n * shared],
            &mut memory.read[..n * shared],
        );
        self.rule.prepare(self.level, Part::Written, written);
        self.rule.prepare(self.level, Part::Read, read);
        for (index, part) in R::MEETS.iter().enumerate() {
            self.level.dispatch(Transpose {
                from: match part {
                    Part::Written => written,
                    Part::Read => read,
                },
                from_stride: shared,
                rows: n,
                columns: shared,
                to: &mut memory.across[index * CHUNK..],
                to_stride: meets * CHUNK,
            });
        }
        for panel in 0..n.div_ceil(width) {
            let columns = &mut memory.columns[panel * shared * width..][..shared * width];
            let first = panel * width;
            let rows = width.min(n - first);
            if rows < width {
                // What is left from before counts for nothing, but is not to be infinite.
                columns.fill(0.0);
            }
            self.level.dispatch(Transpose {
                from: &written[first * shared..],
                from_stride: shared,
                rows,
                columns: shared,
                to: columns,
                to_stride: width,
            });
            for index in 0..meets {
                let product = Product {
                    k: shared,
                    rows: n,
                    a: &memory.across[index * CHUNK..],
                    a_stride: meets * CHUNK,
                    b: columns,
                    c: &mut memory.gram[index * CHUNK * CHUNK + first..],
                    c_stride: CHUNK,
                    accumulate: false,
                };
                product.run(self.level, sizes.tile);
            }
        }
    }

    /// A chunk of one head, number `index` of the task: its outputs into `memory.y`, its state
    /// goes on.
    fn chunk(&self, memory: &mut Memory<'_>, sizes: TaskSizes, place: Place, index: usize) {
        let TaskSizes {
            meets,
            shared,
            dim,
            tile,
            width,
            ..
        } = sizes;
        let Place {
            batch, first, span, ..
        } = place;
        let (head, n) = (first + index, span[1]);
        let channels = self.sizes.head_channels(head, 1, dim);
        self.conv.prefetch(channels, batch, [span[0] + n, CHUNK]);
        let rows = batch * self.sizes.length + span[0];
        let rows = rows..rows + n;
        for row in rows.clone() {
            self.rule.prefetch(row, head);
        }
        let per_head = self.conv.taps_len(dim);
        let taps = &memory.x_taps[index * per_head..][..per_head];
        self.conv
            .run(channels, batch, span, taps, memory.window, memory.x);

        let (mut decays, mut steps) = ([0.0; CHUNK], [0.0; CHUNK]);
        for (i, row) in rows.enumerate() {
            let Gates { decay, step } = self.rule.gates(row, head);
            (decays[i], steps[i]) = (decay, step);
        }
        let (mut to_end, mut from_start) = ([0.0; CHUNK], [0.0; CHUNK]);
        let matrices = Matrices {
            decays: &decays[..n],
            steps: &steps,
            gram: memory.gram,
            matrices: memory.matrices,
            to_end: &mut to_end,
            from_start: &mut from_start,
        };
        self.rule.matrices(self.level, head, matrices);

        let product_len = CHUNK * width;
        let states = &mut memory.states[index * dim * shared..][..dim * shared];
        for (panel, state) in states.chunks_exact_mut(shared * width).enumerate() {
            for (index, c) in memory.products.chunks_exact_mut(product_len).enumerate() {
                let product = Product {
                    k: shared,
                    rows: n,
                    a: &memory.across[index * CHUNK..],
                    a_stride: meets * CHUNK,
                    b: state,
                    c,
                    c_stride: width,
                    accumulate: false,
                };
                product.run(self.level, tile);
            }
            let entries = Entries {
                n,
                steps: &steps,
                matrices: memory.matrices,
                to_end: &to_end,
                from_start: &from_start,
                x: &memory.x[panel * width..],
                stride: dim,
                products: memory.products,
                product_len,
                out: &mut memory.y[panel * width..],
            };
            self.rule.entries(self.level, entries);
            self.level.dispatch(Scale {
                x: state,
                factor: from_start[n - 1],
            });
            let product = Product {
                k: n,
                rows: shared,
                a: memory.written,
                a_stride: shared,
                b: memory.products,
                c: state,
                c_stride: width,
                accumulate: true,
            };
            product.run(self.level, tile);
        }
    }
}
