//! Products of rows of activations with rows of weights: what the dense and the quantized
//! form share.

mod dense;
mod engine;
mod quantized;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

pub use dense::{Linear, linear};
pub use quantized::{Mode, QuantizedWeight, Scales, gather_quantized_matmul, quantized_matmul};

use crate::Element;
use crate::simd::rows::{MAX_ROWS, Narrow, Widen};
use crate::simd::{Level, scratch};
use crate::threads::{RowBlock, Tile, parallel_blocks, parallel_chunks, threads};
use engine::Engine;

/// How exact a product of many rows is. (Few rows are bound by reading the weights, and always
/// exact.)
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

/// Bytes of weights that one task of a product of few rows reads, about.
const FEW_ROWS_TASK: usize = 32 << 10;

/// The most columns of such a task.
const MAX_FEW_COLUMNS: usize = 256;

/// Whether rows are so few that weights are best read straight from their packed form.
fn is_few(block: &Block) -> bool {
    block.rows.len() <= MAX_ROWS
}

/// Columns of a task over few rows, when a row of weights has `row_bytes`.
fn few_columns(row_bytes: usize, n: usize) -> usize {
    let by_size = (FEW_ROWS_TASK / row_bytes.max(1)).max(8);
    let by_threads = n.div_ceil(4 * threads());
    by_size
        .min(by_threads)
        .next_multiple_of(8)
        .clamp(8, MAX_FEW_COLUMNS)
}

/// Writes a tile of few rows: `product(rows, first column, count, out, stride)` computes it.
fn few<T: Element>(
    level: Level,
    mut tile: Tile<'_, T>,
    bias: &[f32],
    product: impl FnOnce(Range<usize>, usize, usize, &mut [f32], usize),
) {
    let mut out = [0.0; MAX_ROWS * MAX_FEW_COLUMNS];
    let (row, column, columns) = (tile.row, tile.column, tile.columns);
    product(row..row + tile.rows, column, columns, &mut out, columns);
    let bias = if bias.is_empty() {
        bias
    } else {
        &bias[column..column + columns]
    };
    for (i, from) in out.chunks_exact(columns).enumerate().take(tile.rows) {
        level.dispatch(Narrow {
            from,
            bias,
            to: tile.row_mut(i),
        });
    }
}

/// Multiplies the blocks, all of them of many rows, with an engine. False (and `y` is
/// undefined) if the engine cannot take the values of `x`.
#[allow(
    clippy::too_many_arguments,
    reason = "two matrices, their sizes, and how"
)]
fn many<T: Element>(
    level: Level,
    engine: &impl Engine,
    x: &[T],
    y: &mut [T],
    k: usize,
    n: usize,
    bias: &[f32],
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
            scratch::with(1, |[panel, c, ..]| {
                let panel = panel.floats(engine.panel_len());
                let c = c.floats(tile.rows * columns);
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
                let (first, width) = (tile.column, tile.columns);
                let bias = if bias.is_empty() {
                    bias
                } else {
                    &bias[first..first + width]
                };
                for (i, from) in c.chunks_exact(columns).enumerate().take(tile.rows) {
                    level.dispatch(Narrow {
                        from,
                        bias,
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
