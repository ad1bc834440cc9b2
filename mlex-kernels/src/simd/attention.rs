//! The inner loops of attention in blocks. A tile of scores has keys as rows and
//! queries as lanes, so that softmax over the keys needs no sums across lanes.

use super::math::exp;
use super::{Kernel, Simd};

/// Less than any score, but finite: the largest score "before the first key".
pub(crate) const NO_SCORE: f32 = -1e30;

/// `to[j * to_stride + i] = from[i * from_stride + j]`.
pub(crate) struct Transpose<'a> {
    pub(crate) from: &'a [f32],
    pub(crate) from_stride: usize,
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
            from_stride,
            rows,
            columns,
            to,
            to_stride,
        } = self;
        assert!(rows == 0 || from.len() >= (rows - 1) * from_stride + columns);
        assert!(to_stride >= rows);
        assert!(columns == 0 || to.len() >= (columns - 1) * to_stride + rows);
        let whole = (rows - rows % S::LANES, columns - columns % S::LANES);
        for i in (0..whole.0).step_by(S::LANES) {
            for j in (0..whole.1).step_by(S::LANES) {
                // SAFETY: the square is inside of both.
                unsafe {
                    let from = from.as_ptr().add(i * from_stride + j);
                    let to = to.as_mut_ptr().add(j * to_stride + i);
                    s.transpose(from, from_stride, to, to_stride);
                }
            }
        }
        for i in 0..rows {
            for j in if i < whole.0 { whole.1 } else { 0 }..columns {
                to[j * to_stride + i] = from[i * from_stride + j];
            }
        }
    }
}

/// One step of the online softmax over a tile of scores, `[keys, 2 * LANES]`.
pub(crate) struct Softmax<'a> {
    /// Scores; becomes the weights `e^(scale * score - largest)`.
    pub(crate) scores: &'a mut [f32],
    pub(crate) scale: f32,
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
            scale,
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
                let mut factor = s.splat(scale);
                if let Some((first, last)) = visible {
                    let first = s.load(first.as_ptr().add(at));
                    let last = s.load(last.as_ptr().add(at));
                    let hidden = s.splat(f32::NEG_INFINITY);
                    for key in 0..keys {
                        let position = s.splat(key as f32);
                        let v = s.mul(s.load(scores.add(key * width)), factor);
                        let v = s.select_ge(position, first, v, hidden);
                        let v = s.select_ge(last, position, v, hidden);
                        s.store(scores.add(key * width), v);
                        max = s.max(v, max);
                    }
                    factor = s.splat(1.0);
                } else {
                    for key in 0..keys {
                        max = s.max(s.mul(s.load(scores.add(key * width)), factor), max);
                    }
                }
                let less = s.sub(s.splat(0.0), max);
                let mut sum = s.splat(0.0);
                for key in 0..keys {
                    let weight = exp(s, s.fma(s.load(scores.add(key * width)), factor, less));
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
