//! Products of rows of activations with rows of weights: what the dense and the quantized
//! form share.

mod dense;
mod engine;
mod few;
mod project;
mod quantized;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

pub use dense::{Linear, linear};
pub use project::{Projection, expect_projections, project, project_gated};
pub use quantized::{Mode, QuantizedWeight, Scales, gather_quantized_matmul, quantized_matmul};

use crate::Element;
use crate::simd::elementwise::{Gate, NarrowGated};
use crate::simd::rows::{MAX_ROWS, Narrow, Widen};
use crate::simd::{Level, scratch};
use crate::threads::{RowBlock, parallel_blocks, parallel_chunks, threads};
use engine::Engine;

/// How exact a product of many rows is. (Few rows are bound by reading the weights, and always
/// as in [`Precision::F32`].)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// As if in f32: errors are those of f32 rounding, or well below those of the elements'
    /// own type.
    #[default]
    F32,
    /// Activations and weights may be rounded to bfloat16 where that is faster. Sums are still
    /// in f32. This is what MLX does on a GPU for bfloat16 activations.
    Bf16,
}

/// Rows of `x` that are multiplied with the weights of one expert.
#[derive(Debug, Clone)]
struct Block {
    rows: Range<usize>,
    expert: usize,
}

/// The most rows that share an unpacked panel.
const MAX_BLOCK_ROWS: usize = 1024;

/// Whether rows are so few that weights are best read straight from their packed form.
fn is_few(block: &Block) -> bool {
    block.rows.len() <= MAX_ROWS
}

/// What becomes of the products of many rows.
struct Finish<'a, E> {
    /// Added to them, if not empty.
    bias: &'a [f32],
    /// Another matrix, its bias, and what becomes of the first product: `gate(first) * second`.
    second: Option<(&'a E, &'a [f32], Gate)>,
}

impl<'a, E> Finish<'a, E> {
    /// The products, plus a bias if it is not empty.
    fn plain(bias: &'a [f32]) -> Self {
        Self { bias, second: None }
    }
}

/// Multiplies the blocks, all of them of many rows, with an engine. False (and `y` is
/// undefined) if the engine cannot take the values of `x`.
#[allow(
    clippy::too_many_arguments,
    reason = "two matrices, their sizes, and how"
)]
fn many<T: Element, E: Engine>(
    level: Level,
    engine: &E,
    x: &[T],
    y: &mut [T],
    k: usize,
    n: usize,
    finish: &Finish<'_, E>,
    blocks: &[Block],
) -> bool {
    let mut tiles: Vec<Range<usize>> = Vec::new();
    let mut pieces: Vec<(Block, usize)> = Vec::new();
    let panels = n.div_ceil(engine.columns());
    for block in blocks {
        // Enough tasks for all threads, but no more unpacking than that needs.
        let wanted = (4 * threads()).div_ceil(panels.max(1) * blocks.len());
        let size = block.rows.len().div_ceil(wanted).clamp(64, MAX_BLOCK_ROWS);
        let count = block.rows.len().div_ceil(size);
        for rows in even(block.rows.clone(), count) {
            pieces.push((
                Block {
                    rows: rows.clone(),
                    expert: block.expert,
                },
                tiles.len(),
            ));
            let count = rows.len().div_ceil(engine.rows());
            tiles.extend(even(rows, count));
        }
    }
    let length = engine.tile_len().next_multiple_of(16);
    let fits = AtomicBool::new(true);
    scratch::with(0, |[buffer, ..]| {
        let packed = &mut buffer.floats(tiles.len() * length)[..tiles.len() * length];
        parallel_chunks(packed, length, |first, chunk| {
            let rows = tiles[first / length].clone();
            scratch::with(1, |[wide, ..]| {
                let size = rows.len() * k;
                let wide = &mut wide.floats(size)[..size];
                level.dispatch(Widen {
                    from: &x[rows.start * k..rows.end * k],
                    to: wide,
                });
                if !engine.write_tile(wide, chunk) {
                    fits.store(false, Ordering::Relaxed);
                }
            });
        });
        if !fits.load(Ordering::Relaxed) {
            return;
        }
        let packed = &*packed;
        let columns = engine.columns();
        let row_blocks: Vec<_> = pieces
            .iter()
            .map(|(block, _)| RowBlock {
                rows: block.rows.clone(),
                tile_columns: columns,
            })
            .collect();
        parallel_blocks(y, n, &row_blocks, |mut tile| {
            let (block, first_tile) = &pieces[tile.plane];
            scratch::with(1, |[panel, c, more, _]| {
                let panel = panel.floats(engine.panel_len());
                let mut product = |engine: &E, c: &mut [f32]| {
                    for chunk in 0..engine.chunks() {
                        engine.fill_panel(block.expert, tile.column, tile.columns, chunk, panel);
                        let mut done = 0;
                        for at in *first_tile.. {
                            let rows = tiles[at].len();
                            let packed = &packed[at * length..][..length];
                            engine.multiply(rows, packed, panel, chunk, &mut c[done * columns..]);
                            done += rows;
                            if done >= tile.rows {
                                break;
                            }
                        }
                    }
                };
                let c = c.floats(tile.rows * columns);
                product(engine, c);
                let (first, width) = (tile.column, tile.columns);
                let part = |bias: &'_ [f32]| match bias {
                    [] => 0..0,
                    _ => first..first + width,
                };
                let rows = c.chunks_exact(columns).enumerate().take(tile.rows);
                let Some((second, up_bias, function)) = finish.second else {
                    for (i, from) in rows {
                        level.dispatch(Narrow {
                            from,
                            bias: &finish.bias[part(finish.bias)],
                            to: tile.row_mut(i),
                        });
                    }
                    return;
                };
                let more = more.floats(tile.rows * columns);
                product(second, more);
                for ((i, gate), up) in rows.zip(more.chunks_exact(columns)) {
                    level.dispatch(NarrowGated {
                        gate,
                        up,
                        biases: [&finish.bias[part(finish.bias)], &up_bias[part(up_bias)]],
                        function,
                        to: tile.row_mut(i),
                    });
                }
            });
        });
    });
    fits.into_inner()
}

/// Cuts a range into `count` pieces that differ by at most one.
fn even(range: Range<usize>, count: usize) -> impl Iterator<Item = Range<usize>> {
    let length = range.len();
    let start = range.start;
    (0..count).map(move |i| start + length * i / count..start + length * (i + 1) / count)
}
