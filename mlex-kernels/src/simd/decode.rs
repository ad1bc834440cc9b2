//! The inner loops of attention of a few queries: keys and values are read once, from memory,
//! for up to four rows of queries at a time.

use super::math::exp;
use super::rows::prefetch;
use super::{Kernel, MAX_LANES, Simd, Vector};

#[cfg(target_arch = "x86_64")]
mod brain;

#[cfg(target_arch = "x86_64")]
pub(crate) use brain::brain_scores;

use super::attention::NO_SCORE;

/// The most keys that are taken at a time.
pub(crate) const DECODE_KEYS: usize = 128;

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

/// Adds `scale * (q . k)` to the scores of a few queries and a range of keys.
pub(crate) struct Scores<'a, T> {
    /// `[rows, head_dim]`
    pub(crate) queries: &'a [f32],
    pub(crate) rows: usize,
    pub(crate) head_dim: usize,
    pub(crate) scale: f32,
    /// From the first key on.
    pub(crate) keys: &'a [T],
    pub(crate) stride: usize,
    /// At most [`DECODE_KEYS`].
    pub(crate) count: usize,
    /// `[rows, DECODE_KEYS]`
    pub(crate) scores: &'a mut [f32],
}

impl<T: Vector> Kernel for Scores<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (d, rows) = (self.head_dim, self.rows);
        assert!(d.is_multiple_of(16) && (1..=DECODE_KEYS).contains(&self.count));
        assert!(self.keys.len() >= (self.count - 1) * self.stride + d);
        assert!(self.queries.len() >= rows * d && self.scores.len() >= rows * DECODE_KEYS);
        let mut row = 0;
        while row < rows {
            match rows - row {
                1 => self.four::<S, 1>(s, row),
                2 => self.four::<S, 2>(s, row),
                3 => self.four::<S, 3>(s, row),
                _ => self.four::<S, 4>(s, row),
            }
            row += 4;
        }
    }
}

impl<T: Vector> Scores<'_, T> {
    /// `R` rows from `row` on; the lengths were checked.
    #[inline(always)]
    fn four<S: Simd, const R: usize>(&mut self, s: S, row: usize) {
        let d = self.head_dim;
        let queries = self.queries[row * d..(row + R) * d].as_ptr();
        let scores = self.scores[row * DECODE_KEYS..(row + R) * DECODE_KEYS].as_mut_ptr();
        let scale = s.splat(self.scale);
        // Per row a product of each key, lane by lane.
        let mut parts = [[0.0f32; MAX_LANES * MAX_LANES]; R];
        for first in (0..self.count).step_by(S::LANES) {
            let n = (self.count - first).min(S::LANES);
            let mut c = 0;
            while c < d {
                // Four vectors of the queries at a time stay in registers.
                // SAFETY: the columns are inside of every query and key, and keys `first ..
                // first + n` are there.
                unsafe {
                    let keys = self.keys.as_ptr().add(first * self.stride + c);
                    let queries = queries.add(c);
                    if c + 4 * S::LANES <= d {
                        self.columns::<S, R, 4>(s, queries, keys, n, c == 0, &mut parts);
                        c += 4 * S::LANES;
                    } else {
                        self.columns::<S, R, 1>(s, queries, keys, n, c == 0, &mut parts);
                        c += S::LANES;
                    }
                }
            }
            for (r, parts) in parts.iter().enumerate() {
                // SAFETY: `LANES` rows of `LANES` are as many as there are; `first` is a
                // multiple of `LANES` below `DECODE_KEYS`, itself a multiple.
                unsafe {
                    let to = scores.add(r * DECODE_KEYS + first);
                    let sums = s.sum_rows(parts.as_ptr());
                    s.store(to, s.fma(sums, scale, s.load(to)));
                }
            }
        }
    }

    /// The products of `C` vectors of columns, added to `parts` or in its place.
    ///
    /// # Safety
    /// From the pointers on, `R` queries and `n` keys have these columns; `n <= LANES`.
    #[inline(always)]
    unsafe fn columns<S: Simd, const R: usize, const C: usize>(
        &self,
        s: S,
        queries: *const f32,
        keys: *const T,
        n: usize,
        begin: bool,
        parts: &mut [[f32; MAX_LANES * MAX_LANES]; R],
    ) {
        let mut q = [[s.splat(0.0); C]; R];
        // SAFETY: the caller's promise.
        unsafe {
            for (r, q) in q.iter_mut().enumerate() {
                for (j, q) in q.iter_mut().enumerate() {
                    *q = s.load(queries.add(r * self.head_dim + j * S::LANES));
                }
            }
            for i in 0..n {
                let key = keys.add(i * self.stride);
                prefetch_row(key, C * S::LANES);
                let mut acc = [s.splat(0.0); R];
                if !begin {
                    for (acc, parts) in acc.iter_mut().zip(&*parts) {
                        *acc = s.load(parts.as_ptr().add(i * S::LANES));
                    }
                }
                for j in 0..C {
                    let key = T::load(s, key.add(j * S::LANES));
                    for (acc, q) in acc.iter_mut().zip(&q) {
                        *acc = s.fma(q[j], key, *acc);
                    }
                }
                for (acc, parts) in acc.into_iter().zip(&mut *parts) {
                    s.store(parts.as_mut_ptr().add(i * S::LANES), acc);
                }
            }
        }
    }
}

/// The next step of the online softmax of a few queries, and of their sums of values.
pub(crate) struct Weigh<'a, T> {
    pub(crate) rows: usize,
    pub(crate) value_dim: usize,
    /// From the first value on.
    pub(crate) values: &'a [T],
    pub(crate) stride: usize,
    /// At most [`DECODE_KEYS`].
    pub(crate) count: usize,
    /// `[rows, DECODE_KEYS]`; becomes the weights.
    pub(crate) scores: &'a mut [f32],
    /// `[rows, 2]`: the largest score and the sum of weights so far.
    pub(crate) state: &'a mut [f32],
    /// `[rows, value_dim]`: the weighted sum so far.
    pub(crate) output: &'a mut [f32],
}

impl<T: Vector> Kernel for Weigh<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (v, rows) = (self.value_dim, self.rows);
        assert!(v.is_multiple_of(16) && (1..=DECODE_KEYS).contains(&self.count));
        assert!(self.values.len() >= (self.count - 1) * self.stride + v);
        assert!(self.scores.len() >= rows * DECODE_KEYS && self.state.len() >= rows * 2);
        assert!(self.output.len() >= rows * v);
        for row in 0..rows {
            self.softmax(s, row);
        }
        let mut row = 0;
        while row < rows {
            match rows - row {
                1 => self.four::<S, 1>(s, row),
                2 => self.four::<S, 2>(s, row),
                3 => self.four::<S, 3>(s, row),
                _ => self.four::<S, 4>(s, row),
            }
            row += 4;
        }
    }
}

impl<T: Vector> Weigh<'_, T> {
    /// Makes weights of the scores of a row.
    #[inline(always)]
    fn softmax<S: Simd>(&mut self, s: S, row: usize) {
        let padded = self.count.next_multiple_of(S::LANES);
        let scores = &mut self.scores[row * DECODE_KEYS..(row + 1) * DECODE_KEYS];
        scores[self.count..padded].fill(f32::NEG_INFINITY);
        let state = &mut self.state[row * 2..row * 2 + 2];
        let output = &mut self.output[row * self.value_dim..(row + 1) * self.value_dim];
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

    /// Adds the weighted values to `R` rows from `row` on; the lengths were checked.
    #[inline(always)]
    fn four<S: Simd, const R: usize>(&mut self, s: S, row: usize) {
        let v = self.value_dim;
        let weights = self.scores[row * DECODE_KEYS..(row + R) * DECODE_KEYS].as_ptr();
        let output = self.output[row * v..(row + R) * v].as_mut_ptr();
        let mut c = 0;
        while c < v {
            // SAFETY: the columns are inside of every row.
            unsafe {
                if c + 4 * S::LANES <= v {
                    self.columns::<S, R, 4>(s, weights, output, c);
                    c += 4 * S::LANES;
                } else {
                    self.columns::<S, R, 1>(s, weights, output, c);
                    c += S::LANES;
                }
            }
        }
    }

    /// Adds the weighted values in columns `c ..` to the output of `R` rows.
    ///
    /// # Safety
    /// The pointers are those of `R` checked rows; `C` vectors of columns from `c` on are
    /// inside of them.
    #[inline(always)]
    unsafe fn columns<S: Simd, const R: usize, const C: usize>(
        &self,
        s: S,
        weights: *const f32,
        output: *mut f32,
        c: usize,
    ) {
        let v = self.value_dim;
        let mut acc = [[s.splat(0.0); C]; R];
        // SAFETY: the caller's promise.
        unsafe {
            for (r, acc) in acc.iter_mut().enumerate() {
                for (j, acc) in acc.iter_mut().enumerate() {
                    *acc = s.load(output.add(r * v + c + j * S::LANES));
                }
            }
            for key in 0..self.count {
                let from = self.values.as_ptr().add(key * self.stride + c);
                prefetch_row(from, C * S::LANES);
                let mut values = [s.splat(0.0); C];
                for (j, value) in values.iter_mut().enumerate() {
                    *value = T::load(s, from.add(j * S::LANES));
                }
                for (r, acc) in acc.iter_mut().enumerate() {
                    let weight = s.splat(*weights.add(r * DECODE_KEYS + key));
                    for (acc, value) in acc.iter_mut().zip(values) {
                        *acc = s.fma(weight, value, *acc);
                    }
                }
            }
            for (r, acc) in acc.iter().enumerate() {
                for (j, &acc) in acc.iter().enumerate() {
                    s.store(output.add(r * v + c + j * S::LANES), acc);
                }
            }
        }
    }
}

/// The result of a row from pieces of the keys: each has a state and a weighted sum as
/// [`Weigh`] leaves them, `[pieces, rows, 2]` and `[pieces, rows, V]`.
pub(crate) struct Merge<'a, T> {
    /// The pieces, one after the other: states, then sums.
    pub(crate) pieces: &'a [f32],
    /// Floats of a piece.
    pub(crate) piece: usize,
    pub(crate) rows: usize,
    pub(crate) row: usize,
    pub(crate) to: &'a mut [T],
}

impl<T: Vector> Kernel for Merge<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Merge {
            pieces,
            piece,
            rows,
            row,
            to,
        } = self;
        let v = to.len();
        assert!(piece >= rows * (2 + v) && row < rows && v.is_multiple_of(16));
        let mut largest = NO_SCORE;
        for piece in pieces.chunks_exact(piece) {
            largest = largest.max(piece[2 * row]);
        }
        let zero = s.splat(0.0);
        let mut total = zero;
        for piece in pieces.chunks_exact(piece) {
            let shrink = exp(s, s.splat(piece[2 * row] - largest));
            total = s.fma(shrink, s.splat(piece[2 * row + 1]), total);
        }
        // A NaN score makes the total NaN, and so the output; a row that saw no key is zero.
        let total = s.select_ge(zero, total, s.splat(1.0), total);
        for c in (0..v).step_by(S::LANES) {
            let mut sum = zero;
            for piece in pieces.chunks_exact(piece) {
                let shrink = exp(s, s.splat(piece[2 * row] - largest));
                let sums = &piece[2 * rows + row * v..][..v];
                // SAFETY: `LANES` columns from `c` on.
                sum = s.fma(shrink, unsafe { s.load(sums.as_ptr().add(c)) }, sum);
            }
            // SAFETY: as above.
            unsafe { T::store(s, to.as_mut_ptr().add(c), s.div(sum, total)) };
        }
    }
}
