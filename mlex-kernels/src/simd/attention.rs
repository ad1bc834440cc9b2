//! The inner loops of attention. In the blocked form a tile of scores has keys as rows and
//! queries as lanes, so that softmax over the keys needs no sums across lanes.

use super::math::exp;
use super::rows::prefetch;
use super::{Kernel, Simd, Vector};

/// Less than any score, but finite: the largest score "before the first key".
pub(crate) const NO_SCORE: f32 = -1e30;

/// `to[j * to_stride + i] = from[i * columns + j]`.
pub(crate) struct Transpose<'a> {
    pub(crate) from: &'a [f32],
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) to: &'a mut [f32],
    pub(crate) to_stride: usize,
}

impl Kernel for Transpose<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Transpose {
            from,
            rows,
            columns,
            to,
            to_stride,
        } = self;
        assert!(from.len() >= rows * columns && to_stride >= rows);
        assert!(columns == 0 || to.len() >= (columns - 1) * to_stride + rows);
        let whole = (rows - rows % S::LANES, columns - columns % S::LANES);
        for i in (0..whole.0).step_by(S::LANES) {
            for j in (0..whole.1).step_by(S::LANES) {
                // SAFETY: the square is inside of both.
                unsafe {
                    let from = from.as_ptr().add(i * columns + j);
                    let to = to.as_mut_ptr().add(j * to_stride + i);
                    s.transpose(from, columns, to, to_stride);
                }
            }
        }
        for i in 0..rows {
            for j in if i < whole.0 { whole.1 } else { 0 }..columns {
                to[j * to_stride + i] = from[i * columns + j];
            }
        }
    }
}

/// One step of the online softmax over a tile of scores, `[keys, 2 * LANES]`.
pub(crate) struct Softmax<'a> {
    /// Scores; becomes the weights `e^(score - largest)`.
    pub(crate) scores: &'a mut [f32],
    pub(crate) keys: usize,
    /// The largest score of each lane so far.
    pub(crate) largest: &'a mut [f32],
    /// The sum of the weights of each lane so far.
    pub(crate) total: &'a mut [f32],
    /// What each lane has so far, `[values, 2 * LANES]`: scaled to the new largest score.
    pub(crate) output: &'a mut [f32],
    /// For each lane the first and the last key (of this tile) that it sees.
    pub(crate) visible: Option<(&'a [f32], &'a [f32])>,
}

impl Kernel for Softmax<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = 2 * S::LANES;
        let Softmax {
            scores,
            keys,
            largest,
            total,
            output,
            visible,
        } = self;
        assert!(scores.len() >= keys * width && largest.len() >= width && total.len() >= width);
        assert!(visible.is_none_or(|(first, last)| first.len() >= width && last.len() >= width));
        assert!(output.len().is_multiple_of(width));
        for half in 0..2 {
            let at = half * S::LANES;
            // SAFETY: `at + LANES <= width`, and each row has `width` values.
            unsafe {
                let scores = scores.as_mut_ptr().add(at);
                let before = s.load(largest.as_ptr().add(at));
                let mut max = before;
                if let Some((first, last)) = visible {
                    let first = s.load(first.as_ptr().add(at));
                    let last = s.load(last.as_ptr().add(at));
                    let hidden = s.splat(f32::NEG_INFINITY);
                    for key in 0..keys {
                        let position = s.splat(key as f32);
                        let v = s.load(scores.add(key * width));
                        let v = s.select_ge(position, first, v, hidden);
                        let v = s.select_ge(last, position, v, hidden);
                        s.store(scores.add(key * width), v);
                        max = s.max(v, max);
                    }
                } else {
                    for key in 0..keys {
                        max = s.max(s.load(scores.add(key * width)), max);
                    }
                }
                let mut sum = s.splat(0.0);
                for key in 0..keys {
                    let weight = exp(s, s.sub(s.load(scores.add(key * width)), max));
                    s.store(scores.add(key * width), weight);
                    sum = s.add(sum, weight);
                }
                let shrink = exp(s, s.sub(before, max));
                let old = s.load(total.as_ptr().add(at));
                s.store(total.as_mut_ptr().add(at), s.fma(old, shrink, sum));
                s.store(largest.as_mut_ptr().add(at), max);
                for row in output.chunks_exact_mut(width) {
                    let to = row.as_mut_ptr().add(at);
                    s.store(to, s.mul(s.load(to), shrink));
                }
            }
        }
    }
}

/// A few queries against a range of keys and values, each of which is read once.
pub(crate) struct Decode<'a, T> {
    /// `[rows, head_dim]`, with the scale applied.
    pub(crate) queries: &'a [f32],
    pub(crate) rows: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    /// From the first key on.
    pub(crate) keys: &'a [T],
    pub(crate) key_stride: usize,
    pub(crate) values: &'a [T],
    pub(crate) value_stride: usize,
    /// At most [`DECODE_KEYS`].
    pub(crate) count: usize,
    /// `[rows, DECODE_KEYS]`: what is added to the scores.
    pub(crate) scores: &'a mut [f32],
    /// `[rows, 2]`: the largest score and the sum of weights so far.
    pub(crate) state: &'a mut [f32],
    /// `[rows, value_dim]`: the weighted sum so far.
    pub(crate) output: &'a mut [f32],
}

/// How far ahead keys and values are asked for, in bytes: those of neighbouring positions
/// follow each other in memory.
const AHEAD: usize = 3072;

/// Asks for the memory ahead of `count` elements.
#[inline(always)]
fn prefetch_row<T>(from: *const T, count: usize) {
    for line in 0..(count * size_of::<T>()).div_ceil(64) {
        prefetch(from.wrapping_byte_add(AHEAD + line * 64));
    }
}

/// The most keys that [`Decode`] takes.
pub(crate) const DECODE_KEYS: usize = 128;

impl<T: Vector> Kernel for Decode<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (dims, rows) = ((self.head_dim, self.value_dim), self.rows);
        assert!(dims.0.is_multiple_of(16) && dims.1.is_multiple_of(16));
        assert!((1..=DECODE_KEYS).contains(&self.count));
        let last = self.count - 1;
        assert!(self.keys.len() >= last * self.key_stride + dims.0);
        assert!(self.values.len() >= last * self.value_stride + dims.1);
        assert!(self.queries.len() >= rows * dims.0 && self.output.len() >= rows * dims.1);
        assert!(self.scores.len() >= rows * DECODE_KEYS && self.state.len() >= rows * 2);
        let mut row = 0;
        while row < rows {
            match rows - row {
                1 => four::<S, T, 1>(s, &mut self, row),
                2 => four::<S, T, 2>(s, &mut self, row),
                3 => four::<S, T, 3>(s, &mut self, row),
                _ => four::<S, T, 4>(s, &mut self, row),
            }
            row += 4;
        }
    }
}

/// `R` rows of [`Decode`], whose lengths were checked.
#[inline(always)]
fn four<S: Simd, T: Vector, const R: usize>(s: S, job: &mut Decode<'_, T>, row: usize) {
    let (d, count) = (job.head_dim, job.count);
    let queries = &job.queries[row * d..(row + R) * d];
    let scores = &mut job.scores[row * DECODE_KEYS..(row + R) * DECODE_KEYS];
    let mut parts = [[0.0f32; 256]; R];
    for first in (0..count).step_by(S::LANES) {
        let n = (count - first).min(S::LANES);
        for i in 0..n {
            let mut acc = [s.splat(0.0); R];
            // SAFETY: key `first + i < count` has `d` values, a multiple of `LANES`.
            unsafe {
                let key = job.keys.as_ptr().add((first + i) * job.key_stride);
                prefetch_row(key, d);
                for c in (0..d).step_by(S::LANES) {
                    let key = T::load(s, key.add(c));
                    for (r, acc) in acc.iter_mut().enumerate() {
                        *acc = s.fma(s.load(queries.as_ptr().add(r * d + c)), key, *acc);
                    }
                }
                for (r, acc) in acc.into_iter().enumerate() {
                    s.store(parts[r].as_mut_ptr().add(i * S::LANES), acc);
                }
            }
        }
        for (r, parts) in parts.iter().enumerate() {
            // SAFETY: `LANES` rows of `LANES` are at most 256 values; `first` is a multiple
            // of `LANES` below `DECODE_KEYS`, itself a multiple.
            unsafe {
                let to = scores.as_mut_ptr().add(r * DECODE_KEYS + first);
                s.store(to, s.add(s.load(to), s.sum_rows(parts.as_ptr())));
            }
        }
    }
    let padded = count.next_multiple_of(S::LANES);
    for r in 0..R {
        let scores = &mut scores[r * DECODE_KEYS..(r + 1) * DECODE_KEYS];
        scores[count..padded].fill(f32::NEG_INFINITY);
        let state = &mut job.state[(row + r) * 2..(row + r) * 2 + 2];
        let output = &mut job.output[(row + r) * job.value_dim..(row + r + 1) * job.value_dim];
        // SAFETY: multiples of `LANES` inside of the slices.
        unsafe {
            let mut max = s.splat(state[0]);
            for i in (0..padded).step_by(S::LANES) {
                max = s.max(s.load(scores.as_ptr().add(i)), max);
            }
            let largest = s.largest(max);
            let max = s.splat(largest);
            let mut sum = s.splat(0.0);
            for i in (0..padded).step_by(S::LANES) {
                let weight = exp(s, s.sub(s.load(scores.as_ptr().add(i)), max));
                s.store(scores.as_mut_ptr().add(i), weight);
                sum = s.add(sum, weight);
            }
            let shrink = exp(s, s.sub(s.splat(state[0]), max));
            for i in (0..output.len()).step_by(S::LANES) {
                let to = output.as_mut_ptr().add(i);
                s.store(to, s.mul(s.load(to), shrink));
            }
            state[1] = state[1] * (s.sum(shrink) / S::LANES as f32) + s.sum(sum);
            state[0] = largest;
        }
    }
    let v = job.value_dim;
    let weigh = Weigh {
        values: job.values.as_ptr(),
        stride: job.value_stride,
        count,
        weights: scores.as_ptr(),
        output: job.output[row * v..(row + R) * v].as_mut_ptr(),
        columns: v,
    };
    let mut c = 0;
    while c < v {
        // Two vectors of columns at a time, or the last one alone.
        if c + 2 * S::LANES <= v {
            // SAFETY: the columns are inside of every row.
            unsafe { weigh.run::<S, R, 2>(s, c) };
            c += 2 * S::LANES;
        } else {
            // SAFETY: as above.
            unsafe { weigh.run::<S, R, 1>(s, c) };
            c += S::LANES;
        }
    }
}

/// The weighted sum of values, for rows of [`Decode`].
struct Weigh<T> {
    values: *const T,
    stride: usize,
    count: usize,
    weights: *const f32,
    output: *mut f32,
    columns: usize,
}

impl<T: Vector> Weigh<T> {
    /// Adds the weighted values in columns `c ..` to the output of `R` rows.
    ///
    /// # Safety
    /// The pointers are those of `R` checked rows; `C` vectors of columns from `c` on are
    /// inside of `columns`.
    #[inline(always)]
    unsafe fn run<S: Simd, const R: usize, const C: usize>(&self, s: S, c: usize) {
        let mut acc = [[s.splat(0.0); C]; R];
        // SAFETY: the caller's promise.
        unsafe {
            for (r, acc) in acc.iter_mut().enumerate() {
                for (j, acc) in acc.iter_mut().enumerate() {
                    *acc = s.load(self.output.add(r * self.columns + c + j * S::LANES));
                }
            }
            for key in 0..self.count {
                let from = self.values.add(key * self.stride + c);
                prefetch_row(from, C * S::LANES);
                let mut values = [s.splat(0.0); C];
                for (j, value) in values.iter_mut().enumerate() {
                    *value = T::load(s, from.add(j * S::LANES));
                }
                for (r, acc) in acc.iter_mut().enumerate() {
                    let weight = s.splat(*self.weights.add(r * DECODE_KEYS + key));
                    for (acc, value) in acc.iter_mut().zip(values) {
                        *acc = s.fma(weight, value, *acc);
                    }
                }
            }
            for (r, acc) in acc.iter().enumerate() {
                for (j, &acc) in acc.iter().enumerate() {
                    s.store(self.output.add(r * self.columns + c + j * S::LANES), acc);
                }
            }
        }
    }
}
