//! The inner loop of short causal convolutions.

use super::math::sigmoid;
use super::{Kernel, Simd};

/// `out[i] = bias + sum_j taps[j] * window[i + j]` for each channel, activated (`x sigmoid(x)`) and
/// with its input, `window[i + kernel - 1]`, added where that is said.
pub(crate) struct Convolve<'a> {
    /// `[rows + kernel - 1, dim]`.
    pub(crate) window: &'a [f32],
    /// `[kernel + 1, dim]`, the bias last.
    pub(crate) taps: &'a [f32],
    /// `[rows, dim]`.
    pub(crate) out: &'a mut [f32],
    pub(crate) rows: usize,
    pub(crate) kernel: usize,
    /// A multiple of 16.
    pub(crate) dim: usize,
    pub(crate) activate: bool,
    pub(crate) residual: bool,
}

impl Kernel for Convolve<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Convolve {
            window,
            taps,
            out,
            rows,
            kernel,
            dim,
            activate,
            residual,
        } = self;
        assert!(dim.is_multiple_of(16) && kernel > 0);
        assert!(window.len() >= (rows + kernel - 1) * dim && taps.len() >= (kernel + 1) * dim);
        assert!(out.len() >= rows * dim);
        for row in 0..rows {
            for c in (0..dim).step_by(S::LANES) {
                // SAFETY: row `row + j` of the window, `j` and `kernel` of the taps and `row` of
                // the output have whole vectors.
                unsafe {
                    let mut y = s.load(taps.as_ptr().add(kernel * dim + c));
                    for j in 0..kernel {
                        let x = s.load(window.as_ptr().add((row + j) * dim + c));
                        y = s.fma(x, s.load(taps.as_ptr().add(j * dim + c)), y);
                    }
                    if activate {
                        y = s.mul(y, sigmoid(s, y));
                    }
                    if residual {
                        let x = window.as_ptr().add((row + kernel - 1) * dim + c);
                        y = s.add(y, s.load(x));
                    }
                    s.store(out.as_mut_ptr().add(row * dim + c), y);
                }
            }
        }
    }
}
