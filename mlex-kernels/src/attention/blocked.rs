//! Attention of many queries, in blocks of keys with an online softmax.
//!
//! The queries of all heads that share keys are packed side by side as GEMM columns (lanes);
//! keys, and then values, are the rows. So scores of one key are next to each other, and
//! neither scores nor values are ever transposed.

use super::Job;
use super::packed::Vectors;
use super::scores::{Keys, Queries, floats};
use crate::Element;
use crate::simd::attention::{NO_SCORE, Softmax, Transpose};
use crate::simd::gemm::Panel;
use crate::simd::rows::Narrow;
use crate::simd::scratch::{self, Buffers};
use crate::simd::{Kernel, Level, Simd};
use crate::threads::{Rows, parallel_for, threads};

/// Keys of a block: whole tiles of 14 and of 16 rows.
const KEYS: usize = 112;
/// Queries times heads that share a block of keys, at most about: the work on the block (it is
/// widened or transposed) is done once for them.
const LANES: usize = 192;
/// The least, where there are many threads.
const FEW_LANES: usize = 32;
/// Tasks for each thread, so that all have as much to do.
const TASKS: usize = 4;

/// Rows and columns of a GEMM tile.
struct Shape;

impl Kernel for Shape {
    type Output = (usize, usize);
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> (usize, usize) {
        (S::MR, 2 * S::LANES)
    }
}

pub(super) fn run<T: Element, S: Vectors>(job: &Job<'_, T, S>, out: &Rows<'_, T>) {
    let level = Level::current();
    let shape = job.shape;
    let heads = shape.batch * shape.kv_heads;
    let wanted = (TASKS * threads()).div_ceil(heads.max(1));
    let queries = shape.q_len.div_ceil(wanted);
    let (few, many) = (FEW_LANES / job.group(), LANES / job.group());
    let queries = queries.clamp(few, many).clamp(1, shape.q_len);
    let chunks = shape.q_len.div_ceil(queries);
    parallel_for(heads * chunks, |index| {
        // The last queries of a causal mask see the most keys: first things first.
        let chunk = chunks - 1 - index / heads;
        let head = index % heads;
        let first = chunk * queries;
        let task = Task {
            job,
            level,
            batch: head / shape.kv_heads,
            kv_head: head % shape.kv_heads,
            first,
            queries: queries.min(shape.q_len - first),
        };
        scratch::with(1, |buffers| task.run(buffers, out));
    });
}

/// Some queries of the heads that share one head of keys. Lane `l` is query `l / group` of
/// head `l % group`.
struct Task<'a, T, S> {
    job: &'a Job<'a, T, S>,
    level: Level,
    batch: usize,
    kv_head: usize,
    first: usize,
    queries: usize,
}

impl<T: Element, S: Vectors> Task<'_, T, S> {
    fn lane(&self, lane: usize) -> (usize, usize) {
        let group = self.job.group();
        (
            self.kv_head * group + lane % group,
            self.first + lane / group,
        )
    }

    fn run(&self, buffers: &mut Buffers, out: &Rows<'_, T>) {
        let (job, level) = (self.job, self.level);
        let (d, v) = (job.shape.head_dim, job.shape.value_dim);
        let (tile, width) = level.dispatch(Shape);
        let lanes = self.queries * job.group();
        let panels = lanes.div_ceil(width);
        let [query_buffer, key_buffer, value_buffer, buffer] = buffers;
        let sizes = [lanes, width];
        let lane = |l| self.lane(l);
        let queries = Queries::new(job, level, self.batch, sizes, lane, query_buffer);

        let work = (KEYS * (width + d)).max(width * v);
        let (outputs, rest) = buffer
            .floats(panels * width * v + work)
            .split_at_mut(panels * width * v);
        outputs.fill(0.0);
        let mut largest = vec![NO_SCORE; panels * width];
        let mut total = vec![0.0; panels * width];
        if let Some(sinks) = job.options.sinks {
            for lane in 0..lanes {
                largest[lane] = sinks[self.lane(lane).0];
                total[lane] = 1.0;
            }
        }

        let (scores, transposed) = rest[..KEYS * (width + d)].split_at_mut(KEYS * width);
        let start = job.visible(self.first).0;
        let end = job.visible(self.first + self.queries - 1).1;
        for key in (start..end).step_by(KEYS) {
            let count = KEYS.min(end - key);
            let at = [self.batch, self.kv_head, key];
            let keys = Keys::new(&job.k, level, at, [count, d], key_buffer, transposed);
            let (values, stride) = floats(&job.v, level, at, [count, v], value_buffer);
            for p in 0..panels {
                let at = p * width;
                let used = width.min(lanes - at);
                let seen = self.panel_visible(at, used);
                if key >= seen.1 || key + count <= seen.0 {
                    continue;
                }
                // Keys after the last that any lane sees need no work.
                let count = count.min(seen.1 - key);
                for (from, rows) in tiles(count, tile) {
                    let scores = &mut scores[from * width..];
                    queries.score(level, &keys, (from, rows), d, (p, width), scores);
                }
                let output = &mut outputs[at * v..][..width * v];
                self.softmax(
                    scores,
                    (key, count),
                    (at, used),
                    &mut largest[at..at + width],
                    &mut total[at..at + width],
                    output,
                );
                for (from, rows) in tiles(v, tile) {
                    level.dispatch(Panel {
                        k: count,
                        rows,
                        a: &values[from..],
                        a_stride: stride,
                        b: scores,
                        c: &mut output[from * width..],
                        c_stride: width,
                        accumulate: true,
                    });
                }
            }
        }
        let rows = &mut rest[..width * v];
        for p in 0..panels {
            let at = p * width;
            let from = &outputs[at * v..][..width * v];
            let to = &mut *rows;
            level.dispatch(Transpose {
                from,
                from_stride: width,
                rows: v,
                columns: width,
                to,
                to_stride: v,
            });
            for lane in 0..width.min(lanes - at) {
                let row = &mut rows[lane * v..][..v];
                let total = total[at + lane];
                let factor = if total == 0.0 { 0.0 } else { 1.0 / total };
                row.iter_mut().for_each(|x| *x *= factor);
                let (head, query) = self.lane(at + lane);
                let to = out.take(job.output_row(self.batch, head, query));
                level.dispatch(Narrow {
                    from: row,
                    bias: &[],
                    to,
                });
            }
        }
    }

    /// The keys that any of the lanes sees.
    fn panel_visible(&self, at: usize, used: usize) -> (usize, usize) {
        let first = self.job.visible(self.lane(at).1).0;
        (first, self.job.visible(self.lane(at + used - 1).1).1)
    }

    /// Masks a tile of scores of `keys` (first, count) and `lanes` (first, count), and takes
    /// the step of the softmax.
    fn softmax(
        &self,
        scores: &mut [f32],
        keys: (usize, usize),
        lanes: (usize, usize),
        largest: &mut [f32],
        total: &mut [f32],
        output: &mut [f32],
    ) {
        let job = self.job;
        let width = largest.len();
        let mut bounds = [vec![], vec![]];
        let mut visible = None;
        let mut scale = job.options.scale;
        if job.has_bias() {
            for (i, scores) in scores.chunks_exact_mut(width).enumerate().take(keys.1) {
                for (lane, score) in scores.iter_mut().enumerate().take(lanes.1) {
                    let (head, query) = self.lane(lanes.0 + lane);
                    let bias = job.bias(self.batch, head, query, keys.0 + i);
                    *score = *score * scale + bias;
                }
            }
            scale = 1.0;
        } else {
            let first = job.visible(self.lane(lanes.0 + lanes.1 - 1).1).0;
            let end = job.visible(self.lane(lanes.0).1).1;
            // Unless all lanes see all of these keys.
            if first > keys.0 || end < keys.0 + keys.1 {
                for lane in 0..width {
                    let lane = lanes.0 + lane.min(lanes.1 - 1);
                    let (first, end) = job.visible(self.lane(lane).1);
                    bounds[0].push(first as f32 - keys.0 as f32);
                    bounds[1].push(end as f32 - 1.0 - keys.0 as f32);
                }
                visible = Some((&bounds[0][..], &bounds[1][..]));
            }
        }
        let keys = keys.1;
        self.level.dispatch(Softmax {
            scores,
            scale,
            keys,
            largest,
            total,
            output,
            visible,
        });
    }
}

/// Cuts `count` rows into tiles of at most `most` that differ by at most one: their first
/// rows and sizes.
fn tiles(count: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let tiles = count.div_ceil(most);
    (0..tiles).map(move |i| {
        let first = count * i / tiles;
        (first, count * (i + 1) / tiles - first)
    })
}
