//! The inner loops of Mamba 2. Rows are padded to whole vectors by the caller, except for those of
//! [`Step`] and [`GroupNorm`].

use super::math::sigmoid;
use super::{Kernel, Simd, load_part, store_part};

/// The matrix of a chunk, from the products of what its positions read with what they write.
///
/// With `E_ij` the product of the decays after `j` up to `i`: `matrix_ij = E_ij dt_j gram_ij` for
/// `j <= i`, and `d` more for `j = i`; 0 for later `j`. `E` goes from row to row by one factor, so
/// it needs no quotient of small numbers.
pub(crate) struct ChunkMatrix<'a> {
    /// One per position.
    pub(crate) decay: &'a [f32],
    /// `[stride]`.
    pub(crate) dt: &'a [f32],
    pub(crate) d: f32,
    /// `[rows, stride]` each, where rows are as many as positions.
    pub(crate) gram: &'a [f32],
    pub(crate) matrix: &'a mut [f32],
    /// A multiple of 16, not less than the positions.
    pub(crate) stride: usize,
    /// `[stride]`: `E_j dt_j` of the last row.
    pub(crate) to_end: &'a mut [f32],
    /// The product of the decays up to each position.
    pub(crate) from_start: &'a mut [f32],
}

impl Kernel for ChunkMatrix<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (n, stride) = (self.decay.len(), self.stride);
        assert!(stride.is_multiple_of(16) && stride >= n);
        assert!(self.dt.len() >= stride && self.to_end.len() >= stride);
        assert!(self.from_start.len() >= n);
        assert!(self.gram.len() >= n * stride && self.matrix.len() >= n * stride);
        let factors = self.to_end;
        factors.fill(0.0);
        let mut product = 1.0;
        for i in 0..n {
            product *= self.decay[i];
            self.from_start[i] = product;
            let decay = s.splat(self.decay[i]);
            for c in (0..stride).step_by(S::LANES) {
                // SAFETY: the factors have `stride` values.
                unsafe {
                    let at = factors.as_mut_ptr().add(c);
                    s.store(at, s.mul(s.load(at), decay));
                }
            }
            factors[i] = self.dt[i];
            for c in (0..stride).step_by(S::LANES) {
                // SAFETY: row `i < n` of the matrices, and the factors, have `stride` values.
                unsafe {
                    let factor = s.load(factors.as_ptr().add(c));
                    let gram = s.load(self.gram.as_ptr().add(i * stride + c));
                    let to = self.matrix.as_mut_ptr().add(i * stride + c);
                    s.store(to, s.mul(factor, gram));
                }
            }
            self.matrix[i * stride + i] += self.d;
        }
    }
}

/// The outputs of a chunk for one panel of `2 * LANES` entries of a head, and what goes into the
/// state: `y_i = G_i S c_i + sum_(j <= i) matrix_ij x_j`, and `to_end_j x_j`.
pub(crate) struct Mix<'a> {
    /// Positions.
    pub(crate) n: usize,
    /// `[n, stride]`.
    pub(crate) matrix: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) from_start: &'a [f32],
    pub(crate) to_end: &'a [f32],
    /// Row `i` at `i * x_stride`; so is `out`.
    pub(crate) x: &'a [f32],
    pub(crate) x_stride: usize,
    /// `[n, 2 * LANES]`: `S c_i`; becomes what goes into the state.
    pub(crate) seen: &'a mut [f32],
    pub(crate) out: &'a mut [f32],
}

impl Kernel for Mix<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (n, width) = (self.n, 2 * S::LANES);
        if n == 0 {
            return;
        }
        assert!(self.seen.len() >= n * width && self.matrix.len() >= n * self.stride);
        assert!(self.stride >= n && self.x_stride >= width);
        let last = (n - 1) * self.x_stride + width;
        assert!(self.x.len() >= last && self.out.len() >= last);
        assert!(self.from_start.len() >= n && self.to_end.len() >= n);
        let (x, seen) = (self.x.as_ptr(), self.seen.as_mut_ptr());
        for i in 0..n {
            // Sums apart for even and odd `j`, so that none waits for the one before.
            let mut sums = [[s.splat(0.0); 2]; 2];
            // SAFETY: rows up to `i < n` of matrix, inputs and panel, whose lengths were checked.
            unsafe {
                let matrix = self.matrix.as_ptr().add(i * self.stride);
                for j in 0..=i {
                    let factor = s.splat(*matrix.add(j));
                    let row = x.add(j * self.x_stride);
                    let sum = &mut sums[j % 2];
                    sum[0] = s.fma(factor, s.load(row), sum[0]);
                    sum[1] = s.fma(factor, s.load(row.add(S::LANES)), sum[1]);
                }
                let decay = s.splat(self.from_start[i]);
                let to_end = s.splat(self.to_end[i]);
                let [even, odd] = sums;
                for (half, (even, odd)) in even.into_iter().zip(odd).enumerate() {
                    let at = half * S::LANES;
                    let old = seen.add(i * width + at);
                    let y = s.fma(decay, s.load(old), s.add(even, odd));
                    let to = self.out.as_mut_ptr().add(i * self.x_stride + at);
                    s.store(to, y);
                    let x = s.load(x.add(i * self.x_stride + at));
                    s.store(old, s.mul(to_end, x));
                }
            }
        }
    }
}

/// One position for one head, in one pass over the state: `S = decay S + dt x b^T`, and
/// `out = S c + d x`.
pub(crate) struct Step<'a> {
    /// `[x, b]`.
    pub(crate) state: &'a mut [f32],
    pub(crate) x: &'a [f32],
    pub(crate) b: &'a [f32],
    pub(crate) c: &'a [f32],
    pub(crate) decay: f32,
    pub(crate) dt: f32,
    pub(crate) d: f32,
    /// As long as `x`.
    pub(crate) out: &'a mut [f32],
}

impl Kernel for Step<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (dim, rows) = (self.b.len(), self.x.len());
        assert!(self.c.len() == dim && self.out.len() == rows);
        assert!(self.state.len() == rows * dim);
        let mut row = 0;
        while row < rows {
            if rows - row >= 4 && dim.is_multiple_of(S::LANES) {
                step::<S, 4, true>(s, &mut self, row);
                row += 4;
            } else {
                step::<S, 1, false>(s, &mut self, row);
                row += 1;
            }
        }
    }
}

/// `R` rows of [`Step`], whose lengths were checked; `WHOLE` says that they are whole vectors.
#[inline(always)]
fn step<S: Simd, const R: usize, const WHOLE: bool>(s: S, job: &mut Step<'_>, row: usize) {
    let dim = job.b.len();
    let (b, c) = (job.b.as_ptr(), job.c.as_ptr());
    let rows = job.state[row * dim..(row + R) * dim].as_mut_ptr();
    let decay = s.splat(job.decay);
    let mut new = [s.splat(0.0); R];
    for (r, new) in new.iter_mut().enumerate() {
        *new = s.splat(job.dt * job.x[row + r]);
    }
    let mut sums = [s.splat(0.0); R];
    for at in (0..dim).step_by(S::LANES) {
        let left = dim - at;
        let left = if WHOLE { S::LANES } else { left };
        // SAFETY: `R` rows of `dim` values, of which `left` are left, or whole vectors.
        unsafe {
            let (written, read) = (part(s, b.add(at), left), part(s, c.add(at), left));
            for r in 0..R {
                let to = rows.add(r * dim + at);
                let before = s.mul(decay, part(s, to, left));
                let state = s.fma(new[r], written, before);
                sums[r] = s.fma(state, read, sums[r]);
                store(s, to, left, state);
            }
        }
    }
    for (r, sum) in sums.into_iter().enumerate() {
        job.out[row + r] = s.sum(sum) + job.d * job.x[row + r];
    }
}

/// `x = g / sqrt(mean(g^2) + eps) * weight` for `g = x * silu(gate)`.
pub(crate) struct GroupNorm<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) gate: &'a [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) eps: f32,
}

impl Kernel for GroupNorm<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n = self.x.len();
        assert!(self.weight.len() == n && self.gate.len() == n);
        let x = self.x.as_mut_ptr();
        let mut square = s.splat(0.0);
        // SAFETY: `left` values of each are left, as many as a vector has in the first case.
        unsafe {
            for at in (0..n).step_by(S::LANES) {
                let left = n - at;
                let gate = part(s, self.gate.as_ptr().add(at), left);
                let gated = s.mul(part(s, x.add(at), left), s.mul(gate, sigmoid(s, gate)));
                square = s.fma(gated, gated, square);
                store(s, x.add(at), left, gated);
            }
            let factor = s.splat(1.0 / (s.sum(square) / n as f32 + self.eps).sqrt());
            for at in (0..n).step_by(S::LANES) {
                let left = n - at;
                let weight = part(s, self.weight.as_ptr().add(at), left);
                let y = s.mul(s.mul(part(s, x.add(at), left), factor), weight);
                store(s, x.add(at), left, y);
            }
        }
    }
}

/// A vector of which `left` numbers are there.
///
/// # Safety
/// `left` numbers, or `LANES` if that is less, can be read at `from`.
#[inline(always)]
unsafe fn part<S: Simd>(s: S, from: *const f32, left: usize) -> S::F {
    // SAFETY: the caller's promise.
    unsafe {
        if left >= S::LANES {
            s.load(from)
        } else {
            load_part(s, from, left)
        }
    }
}

/// Stores what of a vector there is room for.
///
/// # Safety
/// `left` numbers, or `LANES` if that is less, can be written at `to`.
#[inline(always)]
unsafe fn store<S: Simd>(s: S, to: *mut f32, left: usize, value: S::F) {
    // SAFETY: the caller's promise.
    unsafe {
        if left >= S::LANES {
            s.store(to, value);
        } else {
            store_part(s, to, left, value);
        }
    }
}
