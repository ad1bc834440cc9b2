//! Attention of a few queries: every key and value is read once for all queries that share
//! it, and the positions are split over the threads.

use super::Job;
use super::packed::Vectors;
use crate::Element;
use crate::simd::attention::{DECODE_KEYS, Decode, NO_SCORE};
use crate::simd::rows::{Narrow, Widen};
use crate::simd::{Level, scratch};
use crate::threads::{Rows, parallel_chunks, threads};

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
    let blocks = (end - start).div_ceil(DECODE_KEYS);
    let heads = batch * kv_heads;
    // Enough pieces for all threads, of at least one block.
    let splits = (2 * threads()).div_ceil(heads).min(blocks).max(1);
    let splits = if threads() == 1 { 1 } else { splits };
    let per_split = blocks.div_ceil(splits).max(1);
    let splits = blocks.div_ceil(per_split).max(1);

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
                let queries = &mut queries.floats(rows * d)[..rows * d];
                for (r, to) in queries.chunks_exact_mut(d).enumerate() {
                    let (query, head) = (r / group, h * group + r % group);
                    level.dispatch(Widen {
                        from: &job.q.at(b, head, query)[..d],
                        to,
                    });
                    to.iter_mut().for_each(|x| *x *= job.options.scale);
                }
                let scores = scores.floats(rows * DECODE_KEYS);
                for block in split * per_split..((split + 1) * per_split).min(blocks) {
                    let key = start + block * DECODE_KEYS;
                    let count = DECODE_KEYS.min(end - key);
                    fill_biases(job, scores, b, h, key, count);
                    let (keys, key_stride) = job.k.block(level, [b, h, key], count, d, keys);
                    let (values, value_stride) = job.v.block(level, [b, h, key], count, v, values);
                    level.dispatch(Decode {
                        queries,
                        rows,
                        head_dim: d,
                        value_dim: v,
                        keys,
                        key_stride,
                        values,
                        value_stride,
                        count,
                        scores,
                        state,
                        output,
                    });
                }
            });
        });
        debug_assert!(end <= kv_len);
        let mut sum = vec![0.0; v];
        for head in 0..heads {
            let parts = &parts[head * splits * part..][..splits * part];
            for r in 0..rows {
                merge(parts.chunks_exact(part), rows, r, &mut sum);
                let (query, q_head) = (r / group, head % kv_heads * group + r % group);
                let to = out.take(job.output_row(head / kv_heads, q_head, query));
                level.dispatch(Narrow {
                    from: &sum,
                    bias: &[],
                    to,
                });
            }
        }
    });
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

/// The result of row `r` from its pieces: each its largest score, sum of weights, and sum.
fn merge<'a>(
    parts: impl Iterator<Item = &'a [f32]> + Clone,
    rows: usize,
    r: usize,
    out: &mut [f32],
) {
    let v = out.len();
    let largest = parts
        .clone()
        .map(|part| part[2 * r])
        .fold(NO_SCORE, f32::max);
    out.fill(0.0);
    let mut total = 0.0;
    for part in parts {
        let factor = (part[2 * r] - largest).exp();
        total += factor * part[2 * r + 1];
        for (out, x) in out.iter_mut().zip(&part[2 * rows + r * v..]) {
            *out += factor * x;
        }
    }
    let factor = if total > 0.0 { 1.0 / total } else { 0.0 };
    // A NaN score makes the total NaN, and so the output.
    let factor = if total.is_nan() { f32::NAN } else { factor };
    out.iter_mut().for_each(|x| *x *= factor);
}
