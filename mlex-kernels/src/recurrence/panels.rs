//! States as panels of `2 * LANES` columns, so that all products with them
//! have the shape of the GEMM's micro-tile.

use crate::simd::attention::Transpose;
use crate::simd::gemm::Panel;
use crate::simd::{Kernel, Level, Simd};

/// Rows and columns of a GEMM tile.
pub(crate) struct TileShape;

impl Kernel for TileShape {
    type Output = (usize, usize);
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> (usize, usize) {
        (S::MR, 2 * S::LANES)
    }
}

/// `c (+)= a b` with a tile of `a`'s rows at a time.
pub(crate) struct Product<'a> {
    pub(crate) k: usize,
    pub(crate) rows: usize,
    /// `[k, a_stride]`.
    pub(crate) a: &'a [f32],
    pub(crate) a_stride: usize,
    /// `[k, width]`.
    pub(crate) b: &'a [f32],
    /// `[rows, c_stride]`.
    pub(crate) c: &'a mut [f32],
    pub(crate) c_stride: usize,
    pub(crate) accumulate: bool,
}

impl Product<'_> {
    /// With a tile of so many rows.
    pub(crate) fn run(self, level: Level, tile: usize) {
        let tiles = self.rows.div_ceil(tile);
        for index in 0..tiles {
            let first = self.rows * index / tiles;
            let rows = self.rows * (index + 1) / tiles - first;
            level.dispatch(Panel {
                k: self.k,
                rows,
                a: &self.a[first..],
                a_stride: self.a_stride,
                b: self.b,
                c: &mut self.c[first * self.c_stride..],
                c_stride: self.c_stride,
                accumulate: self.accumulate,
            });
        }
    }
}

/// How a state lies in panels.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Panels {
    /// The length of the state's rows, which are the columns of the panels.
    pub(crate) dim: usize,
    /// Rows of a panel, not less than `dim`.
    pub(crate) rows: usize,
    /// Columns of a panel.
    pub(crate) width: usize,
}

impl Panels {
    /// A state `[.., dim]` as panels `[rows, width]`.
    pub(crate) fn unpack(self, level: Level, state: &[f32], panels: &mut [f32]) {
        let Self { dim, rows, width } = self;
        panels.fill(0.0);
        let parts = state.chunks(width * dim);
        for (from, to) in parts.zip(panels.chunks_exact_mut(rows * width)) {
            level.dispatch(Transpose {
                from,
                from_stride: dim,
                rows: from.len() / dim,
                columns: dim,
                to,
                to_stride: width,
            });
        }
    }

    /// Panels as a state `[.., dim]`.
    pub(crate) fn pack(self, level: Level, state: &mut [f32], panels: &[f32]) {
        let Self { dim, rows, width } = self;
        let parts = state.chunks_mut(width * dim);
        for (to, from) in parts.zip(panels.chunks_exact(rows * width)) {
            if to.len() == width * dim {
                level.dispatch(Transpose {
                    from,
                    from_stride: width,
                    rows: dim,
                    columns: width,
                    to,
                    to_stride: dim,
                });
                continue;
            }
            for (lane, row) in to.chunks_exact_mut(dim).enumerate() {
                for (d, value) in row.iter_mut().enumerate() {
                    *value = from[d * width + lane];
                }
            }
        }
    }
}

/// The first `count` floats of what is left.
pub(crate) fn cut<'a>(memory: &mut &'a mut [f32], count: usize) -> &'a mut [f32] {
    let (first, rest) = std::mem::take(memory).split_at_mut(count);
    *memory = rest;
    first
}
