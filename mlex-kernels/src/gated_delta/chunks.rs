//! The gated delta rule for many positions, in chunks. The formulas are at the head of
//! `mlex-nn`'s `gated_delta/rule.rs`, which is the same in operations on arrays.
//!
//! Within a task the state is held as panels of `2 * LANES` entries of the values, `[D_k, width]`
//! each, so that all products have the shape of the GEMM's micro-tile: rows are positions (or
//! entries of a key), lanes are entries of a value.

use super::{CHUNK, Job};
use crate::Element;
use crate::panels::{Panels, Product, TileShape, cut};
use crate::simd::attention::Transpose;
use crate::simd::gated_delta::{Decays, Scale, Substitute, prefetch};
use crate::simd::scratch;
use crate::threads::Tile;

/// Memory of one task.
struct Memory<'a> {
    /// `[K + 1, padded key]` twice and `[K + 1, padded value]` for each head: the taps.
    query_taps: &'a mut [f32],
    key_taps: &'a mut [f32],
    value_taps: &'a mut [f32],
    window: &'a mut [f32],
    /// `[CHUNK, padded key]`.
    q: &'a mut [f32],
    k: &'a mut [f32],
    /// `[CHUNK, padded value]`.
    v: &'a mut [f32],
    y: &'a mut [f32],
    /// `[padded key, (keys, queries), CHUNK]`.
    across: &'a mut [f32],
    /// `[CHUNK / width, padded key, width]`.
    columns: &'a mut [f32],
    /// `[(keys, queries), CHUNK, CHUNK]`: their products with the keys.
    gram: &'a mut [f32],
    system: &'a mut [f32],
    attention: &'a mut [f32],
    /// `[(keys, queries), CHUNK, width]`: their products with a panel of the state.
    products: &'a mut [f32],
    /// `[heads, panels, padded key, width]`.
    states: &'a mut [f32],
}

/// Sizes of one task.
#[derive(Clone, Copy)]
struct Sizes {
    kernel: usize,
    /// Width of a key, padded.
    keys: usize,
    /// Width of a value, padded to whole panels.
    values: usize,
    heads: usize,
    /// Rows and columns of a GEMM tile.
    tile: usize,
    width: usize,
}

impl<'a> Memory<'a> {
    fn new(buffer: &'a mut scratch::Buffer, sizes: Sizes) -> Self {
        let Sizes {
            kernel,
            keys,
            values,
            heads,
            width,
            ..
        } = sizes;
        let columns = CHUNK.next_multiple_of(width) * keys;
        let taps = kernel + 1;
        let total = taps * (2 * keys + heads * values)
            + (CHUNK + kernel) * keys.max(values)
            + 2 * CHUNK * (keys + values)
            + 2 * CHUNK * keys
            + columns
            + 4 * CHUNK * CHUNK
            + 2 * CHUNK * width
            + heads * values * keys;
        let mut memory = &mut buffer.floats(total)[..total];
        let mut cut = |count: usize| cut(&mut memory, count);
        Self {
            query_taps: cut(taps * keys),
            key_taps: cut(taps * keys),
            value_taps: cut(taps * heads * values),
            window: cut((CHUNK + kernel) * keys.max(values)),
            q: cut(CHUNK * keys),
            k: cut(CHUNK * keys),
            v: cut(CHUNK * values),
            y: cut(CHUNK * values),
            across: cut(2 * CHUNK * keys),
            columns: cut(columns),
            gram: cut(2 * CHUNK * CHUNK),
            system: cut(CHUNK * CHUNK),
            attention: cut(CHUNK * CHUNK),
            products: cut(2 * CHUNK * width),
            states: cut(heads * values * keys),
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
        let (batch, dim) = (tile.plane, shape.value_dim);
        let (first, heads) = (tile.column / dim, tile.columns / dim);
        let key_head = first / shape.group();
        let (rows, width) = self.level.dispatch(TileShape);
        let sizes = Sizes {
            kernel: shape.kernel,
            keys: shape.key_dim.next_multiple_of(16),
            values: dim.next_multiple_of(width.max(16)),
            heads,
            tile: rows,
            width,
        };
        let memory = &mut Memory::new(buffer, sizes);
        let (query, key) = (self.query(key_head), self.key(key_head));
        self.conv.taps(query, memory.query_taps);
        self.conv.taps(key, memory.key_taps);
        let per_head = self.conv.taps_len(sizes.values);
        for (index, taps) in memory.value_taps.chunks_exact_mut(per_head).enumerate() {
            self.conv
                .taps(self.value(first + index, sizes.values), taps);
        }
        let taken: Vec<&mut [f32]> = (first..first + heads)
            .map(|head| self.states.take(batch * shape.value_heads + head))
            .collect();
        let layout = Panels {
            dim: shape.key_dim,
            rows: sizes.keys,
            width,
        };
        let state_len = sizes.values * sizes.keys;
        for (state, panels) in taken.iter().zip(memory.states.chunks_exact_mut(state_len)) {
            layout.unpack(self.level, state, panels);
        }
        for position in (start..shape.length).step_by(CHUNK) {
            let span = [position, CHUNK.min(shape.length - position)];
            self.keys(memory, sizes, batch, key_head, span);
            for head in first..first + heads {
                self.chunk(memory, sizes, batch, head, head - first, span);
                for (i, y) in memory
                    .y
                    .chunks_exact(sizes.values)
                    .enumerate()
                    .take(span[1])
                {
                    let row = tile.row_mut(position + i);
                    let out = &mut row[(head - first) * dim..][..dim];
                    self.finish(&y[..dim], batch, position + i, head, out);
                }
            }
        }
        for (state, panels) in taken.into_iter().zip(memory.states.chunks_exact(state_len)) {
            layout.pack(self.level, state, panels);
        }
    }

    /// Queries and keys of a chunk, in both orders, and their products with the keys.
    fn keys(
        &self,
        memory: &mut Memory<'_>,
        sizes: Sizes,
        batch: usize,
        key_head: usize,
        span: [usize; 2],
    ) {
        let n = span[1];
        let (query_scale, key_scale) = self.scales();
        let (query, key) = (self.query(key_head), self.key(key_head));
        let (window, keys) = (&mut *memory.window, sizes.keys);
        let next = [span[0] + n, CHUNK];
        self.conv.prefetch(query, batch, next);
        self.conv.prefetch(key, batch, next);
        self.conv
            .run(query, batch, span, memory.query_taps, window, memory.q);
        self.normalize(&mut memory.q[..n * keys], query_scale);
        self.conv
            .run(key, batch, span, memory.key_taps, window, memory.k);
        self.normalize(&mut memory.k[..n * keys], key_scale);
        for (from, at) in [(&*memory.k, 0), (&*memory.q, CHUNK)] {
            self.level.dispatch(Transpose {
                from,
                rows: n,
                columns: keys,
                to: &mut memory.across[at..],
                to_stride: 2 * CHUNK,
            });
        }
        let width = sizes.width;
        for panel in 0..n.div_ceil(width) {
            let columns = &mut memory.columns[panel * keys * width..][..keys * width];
            let first = panel * width;
            let rows = width.min(n - first);
            if rows < width {
                // What is left from before counts for nothing, but is not to be infinite.
                columns.fill(0.0);
            }
            self.level.dispatch(Transpose {
                from: &memory.k[first * keys..],
                rows,
                columns: keys,
                to: columns,
                to_stride: width,
            });
            for half in [0, CHUNK] {
                let product = Product {
                    k: keys,
                    rows: n,
                    a: &memory.across[half..],
                    a_stride: 2 * CHUNK,
                    b: columns,
                    c: &mut memory.gram[half * CHUNK + first..],
                    c_stride: CHUNK,
                    accumulate: false,
                };
                product.run(self.level, sizes.tile);
            }
        }
    }

    /// A chunk of one value head: its outputs into `memory.y`, its state goes on.
    fn chunk(
        &self,
        memory: &mut Memory<'_>,
        sizes: Sizes,
        batch: usize,
        head: usize,
        index: usize,
        span: [usize; 2],
    ) {
        let Sizes {
            keys,
            values,
            tile,
            width,
            ..
        } = sizes;
        let n = span[1];
        let per_head = self.conv.taps_len(values);
        let taps = &memory.value_taps[index * per_head..][..per_head];
        let value = self.value(head, values);
        self.conv.prefetch(value, batch, [span[0] + n, CHUNK]);
        let dim = self.shape.value_dim;
        for position in span[0]..span[0] + n {
            let row = batch * self.shape.length + position;
            let gate = self.inputs.gate.row(row, self.shape.value_heads * dim);
            prefetch(&gate[head * dim..(head + 1) * dim]);
        }
        self.conv
            .run(value, batch, span, taps, memory.window, memory.v);

        let (mut decay, mut beta) = ([0.0; CHUNK], [0.0; CHUNK]);
        for i in 0..n {
            (decay[i], beta[i]) = self.gates(batch, span[0] + i, head);
        }
        let (mut to_end, mut from_start) = ([0.0; CHUNK], [0.0; CHUNK]);
        let (key_gram, query_gram) = memory.gram.split_at(CHUNK * CHUNK);
        self.level.dispatch(Decays {
            decay: &decay[..n],
            beta: &beta,
            keys: key_gram,
            queries: query_gram,
            system: memory.system,
            attention: memory.attention,
            stride: CHUNK,
            to_end: &mut to_end,
            from_start: &mut from_start,
        });

        let state = &mut memory.states[index * values * keys..][..values * keys];
        for (panel, state) in state.chunks_exact_mut(keys * width).enumerate() {
            let (seen, asked) = memory.products.split_at_mut(CHUNK * width);
            for (half, c) in [(0, &mut *seen), (CHUNK, &mut *asked)] {
                let product = Product {
                    k: keys,
                    rows: n,
                    a: &memory.across[half..],
                    a_stride: 2 * CHUNK,
                    b: state,
                    c,
                    c_stride: width,
                    accumulate: false,
                };
                product.run(self.level, tile);
            }
            self.level.dispatch(Substitute {
                n,
                system: memory.system,
                attention: memory.attention,
                stride: CHUNK,
                beta: &beta,
                from_start: &from_start,
                to_end: &to_end,
                values: &memory.v[panel * width..],
                value_stride: values,
                keys: seen,
                queries: asked,
                out: &mut memory.y[panel * width..],
            });
            self.level.dispatch(Scale {
                x: state,
                factor: from_start[n - 1],
            });
            let product = Product {
                k: n,
                rows: keys,
                a: memory.k,
                a_stride: keys,
                b: seen,
                c: state,
                c_stride: width,
                accumulate: true,
            };
            product.run(self.level, tile);
        }
    }
}
