//! The ways to multiply many rows: each cuts `x` into tiles and weights into panels, in an
//! order of its own.

use crate::simd::rows::{FillPanel, Source};
use crate::simd::{Kernel, Level, Simd, Vector, gemm};

/// Columns of `x` that an f32 panel covers at once, so that it stays in the L2 cache.
const F32_CHUNK: usize = 4096;

/// One way to multiply tiles of rows of `x` with panels of rows of weights. Sizes are in
/// f32, whatever is kept there.
pub(super) trait Engine: Sync {
    /// The most rows of a tile.
    fn rows(&self) -> usize;
    /// Columns of a panel.
    fn columns(&self) -> usize;
    /// Size of a tile of the most rows.
    fn tile_len(&self) -> usize;
    /// Size of a panel.
    fn panel_len(&self) -> usize;
    /// Number of pieces that the inner dimension is cut into.
    fn chunks(&self) -> usize {
        1
    }
    /// Writes rows of `x` as a tile. False if this way cannot take their values.
    fn write_tile(&self, x: &[f32], tile: &mut [f32]) -> bool;
    /// Writes rows of the weights of `expert` as a panel.
    fn fill_panel(
        &self,
        expert: usize,
        first: usize,
        count: usize,
        chunk: usize,
        panel: &mut [f32],
    );
    /// `c (+)= tile * panel`; adds for every chunk but the first.
    fn multiply(&self, rows: usize, tile: &[f32], panel: &[f32], chunk: usize, c: &mut [f32]);
}

/// The f32 way, at any level.
pub(super) struct F32Engine<F> {
    level: Level,
    k: usize,
    rows: usize,
    columns: usize,
    source: F,
}

struct Shape;

impl Kernel for Shape {
    type Output = (usize, usize);
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> (usize, usize) {
        (S::MR, 2 * S::LANES)
    }
}

impl<F> F32Engine<F> {
    /// `source` gives the weights of an expert.
    pub(super) fn new(level: Level, k: usize, source: F) -> Self {
        let (rows, columns) = level.dispatch(Shape);
        Self {
            level,
            k,
            rows,
            columns,
            source,
        }
    }

    fn chunk(&self, chunk: usize) -> (usize, usize) {
        let start = chunk * F32_CHUNK;
        (start, F32_CHUNK.min(self.k - start))
    }
}

impl<'a, T: Vector, F: Fn(usize) -> Source<'a, T> + Sync> Engine for F32Engine<F> {
    fn rows(&self) -> usize {
        self.rows
    }
    fn columns(&self) -> usize {
        self.columns
    }
    fn tile_len(&self) -> usize {
        self.k * self.rows
    }
    fn panel_len(&self) -> usize {
        self.k.min(F32_CHUNK) * self.columns
    }
    fn chunks(&self) -> usize {
        self.k.div_ceil(F32_CHUNK).max(1)
    }
    fn write_tile(&self, x: &[f32], tile: &mut [f32]) -> bool {
        let rows = x.len() / self.k;
        for (i, x) in x.chunks_exact(self.k).enumerate() {
            for (&x, to) in x.iter().zip(tile.chunks_exact_mut(rows)) {
                to[i] = x;
            }
        }
        true
    }
    fn fill_panel(
        &self,
        expert: usize,
        first: usize,
        count: usize,
        chunk: usize,
        panel: &mut [f32],
    ) {
        let (k0, size) = self.chunk(chunk);
        let source = (self.source)(expert);
        self.level.dispatch(FillPanel {
            source,
            k: self.k,
            first,
            count,
            k0,
            size,
            panel,
        });
    }
    fn multiply(&self, rows: usize, tile: &[f32], panel: &[f32], chunk: usize, c: &mut [f32]) {
        let (k0, size) = self.chunk(chunk);
        self.level.dispatch(gemm::Panel {
            k: size,
            rows,
            a: &tile[k0 * rows..],
            a_stride: rows,
            b: panel,
            c,
            c_stride: self.columns,
            accumulate: chunk > 0,
        });
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Bf16Engine, Brain, DotEngine};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use half::bf16;

    use super::Engine;
    use crate::simd::scratch::{as_bytes, as_bytes_mut};
    use crate::simd::weights::Weights;
    use crate::simd::{dot, pairs};

    /// Quantized weights in integers; see [`dot`].
    pub(in crate::matmul) struct DotEngine<F> {
        tile: dot::Tile,
        k: usize,
        groups: usize,
        source: F,
    }

    impl<F> DotEngine<F> {
        /// `source` gives the weights of an expert, all of the kind of `like`.
        pub(in crate::matmul) fn new(like: &Weights<'_>, digits: usize, source: F) -> Self {
            let groups = like.groups().next_multiple_of(16);
            Self {
                tile: dot::Tile::new(like, digits),
                k: like.k,
                groups,
                source,
            }
        }

        fn factors(&self) -> usize {
            self.tile.factors(dot::Tile::ROWS)
        }

        fn panel_factors(&self) -> usize {
            self.groups * dot::COLUMNS
        }
    }

    impl<'a, F: Fn(usize) -> Weights<'a> + Sync> Engine for DotEngine<F> {
        fn rows(&self) -> usize {
            dot::Tile::ROWS
        }
        fn columns(&self) -> usize {
            dot::COLUMNS
        }
        fn tile_len(&self) -> usize {
            self.factors() + self.tile.digit_bytes(dot::Tile::ROWS).div_ceil(4)
        }
        fn panel_len(&self) -> usize {
            2 * self.panel_factors() + self.k.next_multiple_of(64) * dot::COLUMNS / 4
        }
        fn write_tile(&self, x: &[f32], tile: &mut [f32]) -> bool {
            let (factors, digits) = tile.split_at_mut(self.factors());
            self.tile.write(x, as_bytes_mut(digits), factors)
        }
        fn fill_panel(&self, expert: usize, first: usize, count: usize, _: usize, to: &mut [f32]) {
            let (scales, rest) = to.split_at_mut(self.panel_factors());
            let (biases, bytes) = rest.split_at_mut(self.panel_factors());
            let w = (self.source)(expert);
            dot::fill_panel(&w, first, count, as_bytes_mut(bytes), scales, biases);
        }
        fn multiply(&self, rows: usize, tile: &[f32], panel: &[f32], _: usize, c: &mut [f32]) {
            let (factors, digits) = tile.split_at(self.factors());
            let (scales, rest) = panel.split_at(self.panel_factors());
            let (biases, bytes) = rest.split_at(self.panel_factors());
            let panel = dot::Panel {
                bytes: as_bytes(bytes),
                scales,
                biases,
            };
            dot::multiply(&self.tile, rows, as_bytes(digits), factors, &panel, c);
        }
    }

    /// Weights of [`Bf16Engine`]: dense ones, or quantized ones that it rounds.
    pub(in crate::matmul) enum Brain<'a> {
        Dense(&'a [bf16]),
        Quantized(Weights<'a>),
    }

    /// Weights in bfloat16 with `x` rounded to bfloat16.
    pub(in crate::matmul) struct Bf16Engine<F> {
        k: usize,
        source: F,
    }

    impl<F> Bf16Engine<F> {
        /// `source` gives the weights of an expert, of `k` columns.
        pub(in crate::matmul) fn new(k: usize, source: F) -> Self {
            Self { k, source }
        }
    }

    impl<'a, F: Fn(usize) -> Brain<'a> + Sync> Engine for Bf16Engine<F> {
        fn rows(&self) -> usize {
            pairs::ROWS
        }
        fn columns(&self) -> usize {
            pairs::COLUMNS
        }
        fn tile_len(&self) -> usize {
            pairs::packed_bytes(self.k, pairs::ROWS) / 4
        }
        fn panel_len(&self) -> usize {
            pairs::packed_bytes(self.k, pairs::COLUMNS) / 4
        }
        fn write_tile(&self, x: &[f32], tile: &mut [f32]) -> bool {
            pairs::write_tile(x, self.k, as_bytes_mut(tile));
            true
        }
        fn fill_panel(&self, expert: usize, first: usize, count: usize, _: usize, to: &mut [f32]) {
            let to = as_bytes_mut(to);
            match (self.source)(expert) {
                Brain::Dense(w) => pairs::fill_panel(w, self.k, first, count, to),
                Brain::Quantized(w) => dot::fill_brain_panel(&w, first, count, to),
            }
        }
        fn multiply(&self, rows: usize, tile: &[f32], panel: &[f32], _: usize, c: &mut [f32]) {
            pairs::multiply(self.k, rows, as_bytes(tile), as_bytes(panel), c);
        }
    }
}
