//! Attention of a few queries: every key and value is read once for all queries that share
//! it, and the positions are split over the threads.

#[cfg(target_arch = "x86_64")]
use half::bf16;

use super::packed::Vectors;
use super::{Heads, Job};
use crate::Element;
use crate::simd::attention::NO_SCORE;
#[cfg(target_arch = "x86_64")]
use crate::simd::decode::brain_scores;
use crate::simd::decode::{DECODE_KEYS, Merge, Scores, Weigh};
use crate::simd::rows::Widen;
use crate::simd::scratch::{self, Buffer};
use crate::simd::{Kind, Level, Vector};
use crate::threads::{Expectation, Rows, Upcoming, parallel_chunks, threads};

/// The least keys of a piece.
const PIECE: usize = 64;

/// Pieces are whole multiples of this.
const STEP: usize = 16;

pub(super) fn run<T: Element, S: Vectors>(job: &Job<'_, T, S>, out: &Rows<'_, T>) {
    let level = Level::current();
    let shape = job.shape;
    let (batch, kv_heads, kv_len) = (shape.batch, shape.kv_heads, shape.kv_len);
    let group = job.group();
    let rows = group * shape.q_len;
    let (d, v) = (shape.head_dim, shape.value_dim);

    // The keys that any query sees; with a window that is not all of them.
    let start = job.visible(0).0;
    let end = job.visible(shape.q_len - 1).1.max(start);
    let heads = batch * kv_heads;
    let (splits, per_split) = pieces(end - start, heads);

    let part = rows * (2 + v);
    scratch::with(0, |[buffer, _, _, _]| {
        let parts = &mut buffer.floats(heads * splits * part)[..heads * splits * part];
        parallel_chunks(parts, part, |first, part| {
            let index = first / part.len();
            let (head, split) = (index / splits, index % splits);
            let (b, h) = (head / kv_heads, head % kv_heads);
            let (state, output) = part.split_at_mut(2 * rows);
            output.fill(0.0);
            for (r, state) in state.chunks_exact_mut(2).enumerate() {
                // The sink is one more key, of the first piece only.
                let sink = job.options.sinks.filter(|_| split == 0);
                let head = h * group + r % group;
                state.copy_from_slice(&sink.map_or([NO_SCORE, 0.0], |sinks| [sinks[head], 1.0]));
            }
            scratch::with(1, |[queries, scores, keys, values]| {
                let queries = Queries::new(job, level, [b, h], queries);
                let scores = scores.floats(rows * DECODE_KEYS);
                let end = end.min(start + (split + 1) * per_split);
                for key in (start + split * per_split..end).step_by(DECODE_KEYS) {
                    let count = DECODE_KEYS.min(end - key);
                    fill_biases(job, scores, b, h, key, count);
                    let (keys, stride) = job.k.block(level, [b, h, key], count, d, keys);
                    queries.score([rows, d, count], (keys, stride), job.options.scale, scores);
                    let (values, stride) = job.v.block(level, [b, h, key], count, v, values);
                    level.dispatch(Weigh {
                        rows,
                        value_dim: v,
                        values,
                        stride,
                        count,
                        scores,
                        state,
                        output,
                    });
                }
            });
        });
        debug_assert!(end <= kv_len);
        for head in 0..heads {
            let pieces = &parts[head * splits * part..][..splits * part];
            for row in 0..rows {
                let (query, q_head) = (row / group, head % kv_heads * group + row % group);
                level.dispatch(Merge {
                    pieces,
                    piece: part,
                    rows,
                    row,
                    to: out.take(job.output_row(head / kv_heads, q_head, query)),
                });
            }
        }
    });
}

/// In how many pieces the keys of each head are cut, and of how many keys: such that all threads
/// have as much to do.
fn pieces(keys: usize, heads: usize) -> (usize, usize) {
    let threads = threads();
    let most = keys.div_ceil(PIECE).max(1);
    let least = (2 * threads).div_ceil(heads.max(1)).min(most);
    // The same number of pieces for each thread, where a few more give that.
    let even = (least..least + threads).find(|pieces| (pieces * heads).is_multiple_of(threads));
    let pieces = match threads {
        1 => 1,
        _ => even.map_or(least, |pieces| pieces.min(most)),
    };
    (
        pieces,
        keys.div_ceil(pieces).next_multiple_of(STEP).max(STEP),
    )
}

/// What attention of one query, over the last `kv_len` keys and values that begin here, reads.
pub(super) fn expectation<T>(
    [k, v]: [Heads<'_, T>; 2],
    [batch, kv_heads, kv_len]: [usize; 3],
) -> Expectation {
    let (pieces, per_piece) = pieces(kv_len, batch * kv_heads);
    let heads = (0..batch).flat_map(|b| (0..kv_heads).map(move |h| (b, h)));
    let upcoming = heads.map(|(b, h)| {
        let array = |heads: &Heads<'_, T>| {
            let [batch, head, position] = heads.strides;
            let start = heads.data.as_ptr().wrapping_add(b * batch + h * head);
            (start.addr(), per_piece * position * size_of::<T>())
        };
        Upcoming {
            tasks: pieces,
            arrays: [array(&k), array(&v)].into_iter().collect(),
        }
    });
    Expectation(upcoming.collect())
}

/// The queries of a head of keys, `[rows, D]`, as the scores read them.
enum Queries<'a> {
    Wide(Level, &'a [f32]),
    /// For keys in bfloat16, at a level that multiplies those.
    #[cfg(target_arch = "x86_64")]
    Brain(&'a [bf16]),
}

impl<'a> Queries<'a> {
    fn new<T: Element, S: Vectors>(
        job: &Job<'_, T, S>,
        level: Level,
        [batch, kv_head]: [usize; 2],
        memory: &'a mut Buffer,
    ) -> Self {
        let (group, d) = (job.group(), job.shape.head_dim);
        let count = group * job.shape.q_len * d;
        let row = |r: usize| &job.q.at(batch, kv_head * group + r % group, r / group)[..d];
        #[cfg(target_arch = "x86_64")]
        if level == Level::Avx512Dot && S::Element::KIND == Kind::Bf16 {
            let to = &mut memory.brains(count)[..count];
            for (r, to) in to.chunks_exact_mut(d).enumerate() {
                // Keys in bfloat16 are of queries in bfloat16.
                to.copy_from_slice(scratch::as_brains(row(r)));
            }
            return Self::Brain(to);
        }
        let to = &mut memory.floats(count)[..count];
        for (r, to) in to.chunks_exact_mut(d).enumerate() {
            level.dispatch(Widen { from: row(r), to });
        }
        Self::Wide(level, to)
    }

    /// Adds `scale * (q . k)` to the scores of `count` keys, which are `stride` apart.
    fn score<K: Vector>(
        &self,
        [rows, d, count]: [usize; 3],
        (keys, stride): (&[K], usize),
        scale: f32,
        scores: &mut [f32],
    ) {
        match self {
            Self::Wide(level, queries) => level.dispatch(Scores {
                queries,
                rows,
                head_dim: d,
                scale,
                keys,
                stride,
                count,
                scores,
            }),
            #[cfg(target_arch = "x86_64")]
            Self::Brain(queries) => {
                let keys = scratch::as_brains(keys);
                brain_scores(queries, [rows, d, count], scale, keys, stride, scores)
            }
        }
    }
}

/// What the mask adds to the scores of a block of keys.
fn fill_biases<T, S>(
    job: &Job<'_, T, S>,
    scores: &mut [f32],
    batch: usize,
    kv_head: usize,
    key: usize,
    count: usize,
) {
    let group = job.group();
    for (r, scores) in scores.chunks_exact_mut(DECODE_KEYS).enumerate() {
        if r >= group * job.shape.q_len {
            break;
        }
        let (query, head) = (r / group, kv_head * group + r % group);
        scores.fill(0.0);
        if job.has_bias() {
            for (i, score) in scores.iter_mut().enumerate().take(count) {
                *score = job.bias(batch, head, query, key + i);
            }
            continue;
        }
        let (first, end) = job.visible(query);
        let hidden = f32::NEG_INFINITY;
        scores[..first.saturating_sub(key).min(count)].fill(hidden);
        scores[end.saturating_sub(key).min(count)..count].fill(hidden);
    }
}
