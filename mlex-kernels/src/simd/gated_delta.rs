//! The inner loops of the gated delta rule. Rows are padded to whole vectors by the caller,
//! except for those of [`Step`] and [`GatedNorm`].

use super::math::sigmoid;
use super::{Kernel, Simd, Vector, load_part, store_part};

/// Each row times `scale / sqrt(mean of squares + eps)`, the mean over `count` of them.
pub(crate) struct Normalize<'a> {
    /// Rows of `dim`.
    pub(crate) rows: &'a mut [f32],
    /// A multiple of 16.
    pub(crate) dim: usize,
    pub(crate) count: usize,
    pub(crate) scale: f32,
    pub(crate) eps: f32,
}

impl Kernel for Normalize<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        assert!(self.dim.is_multiple_of(16));
        for row in self.rows.chunks_exact_mut(self.dim) {
            let square = dot(s, row, row);
            let factor = self.scale / (square / self.count as f32 + self.eps).sqrt();
            scale(s, row, factor);
        }
    }
}

/// The product of two rows of whole vectors.
#[inline(always)]
fn dot<S: Simd>(s: S, a: &[f32], b: &[f32]) -> f32 {
    assert!(a.len() == b.len() && a.len().is_multiple_of(S::LANES));
    let mut sum = s.splat(0.0);
    for c in (0..a.len()).step_by(S::LANES) {
        // SAFETY: a whole vector of both is left.
        unsafe { sum = s.fma(s.load(a.as_ptr().add(c)), s.load(b.as_ptr().add(c)), sum) };
    }
    s.sum(sum)
}

#[inline(always)]
fn scale<S: Simd>(s: S, x: &mut [f32], factor: f32) {
    assert!(x.len().is_multiple_of(S::LANES));
    let factor = s.splat(factor);
    for c in (0..x.len()).step_by(S::LANES) {
        // SAFETY: a whole vector is left.
        unsafe {
            let at = x.as_mut_ptr().add(c);
            s.store(at, s.mul(s.load(at), factor));
        }
    }
}

/// `x *= factor`, of whole vectors.
pub(crate) struct Scale<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) factor: f32,
}

impl Kernel for Scale<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        scale(s, self.x, self.factor);
    }
}

/// The triangular matrices of a chunk, from the products of its keys and queries with its keys.
///
/// With `E_ij` the product of the decays after `j` up to `i`: `system_ij = beta_i E_ij k_i.k_j`
/// for `j < i`, `attention_ij = E_ij q_i.k_j` for `j <= i`, 0 for later `j`. `E` goes from row
/// to row by one factor, so it needs no quotient of small numbers.
pub(crate) struct Decays<'a> {
    /// One per position.
    pub(crate) decay: &'a [f32],
    pub(crate) beta: &'a [f32],
    /// `[rows, stride]` each, where rows are as many as positions.
    pub(crate) keys: &'a [f32],
    pub(crate) queries: &'a [f32],
    pub(crate) system: &'a mut [f32],
    pub(crate) attention: &'a mut [f32],
    /// A multiple of 16, not less than the positions.
    pub(crate) stride: usize,
    /// `[stride]`: `E` of the last row.
    pub(crate) to_end: &'a mut [f32],
    /// The product of the decays up to each position.
    pub(crate) from_start: &'a mut [f32],
}

impl Kernel for Decays<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (n, stride) = (self.decay.len(), self.stride);
        assert!(stride.is_multiple_of(16) && stride >= n);
        assert!(self.beta.len() >= n && self.from_start.len() >= n && self.to_end.len() >= stride);
        for matrix in [self.keys, self.queries, self.system, self.attention] {
            assert!(matrix.len() >= n * stride);
        }
        let quotients = self.to_end;
        quotients.fill(0.0);
        let mut product = 1.0;
        for i in 0..n {
            product *= self.decay[i];
            self.from_start[i] = product;
            let (decay, beta) = (s.splat(self.decay[i]), s.splat(self.beta[i]));
            for c in (0..stride).step_by(S::LANES) {
                // SAFETY: row `i < n` of the matrices, and the quotients, have `stride` values.
                unsafe {
                    let e = quotients.as_mut_ptr().add(c);
                    let moved = s.mul(s.load(e), decay);
                    s.store(e, moved);
                    let keys = s.load(self.keys.as_ptr().add(i * stride + c));
                    let to = self.system.as_mut_ptr().add(i * stride + c);
                    s.store(to, s.mul(s.mul(moved, beta), keys));
                }
            }
            quotients[i] = 1.0;
            for c in (0..stride).step_by(S::LANES) {
                // SAFETY: as above.
                unsafe {
                    let e = s.load(quotients.as_ptr().add(c));
                    let queries = s.load(self.queries.as_ptr().add(i * stride + c));
                    let to = self.attention.as_mut_ptr().add(i * stride + c);
                    s.store(to, s.mul(e, queries));
                }
            }
        }
    }
}

/// Substitution in a chunk, for one panel of `2 * LANES` entries of the values.
///
/// `u_i = beta_i (v_i - G_i S k_i) - sum_(j < i) system_ij u_j`, and
/// `y_i = G_i S q_i + sum_(j <= i) attention_ij u_j`.
pub(crate) struct Substitute<'a> {
    /// Positions.
    pub(crate) n: usize,
    /// `[n, stride]` each.
    pub(crate) system: &'a [f32],
    pub(crate) attention: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) beta: &'a [f32],
    pub(crate) from_start: &'a [f32],
    pub(crate) to_end: &'a [f32],
    /// Row `i` at `i * value_stride`.
    pub(crate) values: &'a [f32],
    pub(crate) value_stride: usize,
    /// `[n, 2 * LANES]`: `S k_i`; becomes `u_i` times the decays after it.
    pub(crate) keys: &'a mut [f32],
    /// `[n, 2 * LANES]`: `S q_i`.
    pub(crate) queries: &'a [f32],
    /// Row `i` at `i * value_stride`: `y_i`.
    pub(crate) out: &'a mut [f32],
}

impl Kernel for Substitute<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (n, width) = (self.n, 2 * S::LANES);
        if n == 0 {
            return;
        }
        assert!(self.keys.len() >= n * width && self.queries.len() >= n * width);
        assert!(self.stride >= n && self.value_stride >= width);
        assert!(self.system.len() >= n * self.stride && self.attention.len() >= n * self.stride);
        let last = (n - 1) * self.value_stride + width;
        assert!(self.values.len() >= last && self.out.len() >= last);
        assert!(self.beta.len() >= n && self.from_start.len() >= n && self.to_end.len() >= n);
        let u = self.keys.as_mut_ptr();
        for i in 0..n {
            // Sums apart for even and odd `j`, so that none waits for the one before.
            let zero = s.splat(0.0);
            let mut even = [[zero; 2]; 2];
            let mut odd = [[zero; 2]; 2];
            // SAFETY: rows up to `i < n` of matrices and panels, whose lengths were checked.
            unsafe {
                let system = self.system.as_ptr().add(i * self.stride);
                let attention = self.attention.as_ptr().add(i * self.stride);
                let add = |j: usize, [known, seen]: &mut [[S::F; 2]; 2]| {
                    let (l, a) = (s.splat(*system.add(j)), s.splat(*attention.add(j)));
                    let first = s.load(u.add(j * width));
                    let second = s.load(u.add(j * width + S::LANES));
                    known[0] = s.fma(l, first, known[0]);
                    known[1] = s.fma(l, second, known[1]);
                    seen[0] = s.fma(a, first, seen[0]);
                    seen[1] = s.fma(a, second, seen[1]);
                };
                let mut j = 0;
                while j + 1 < i {
                    add(j, &mut even);
                    add(j + 1, &mut odd);
                    j += 2;
                }
                if j < i {
                    add(j, &mut even);
                }
                let (beta, decay) = (s.splat(self.beta[i]), s.splat(self.from_start[i]));
                let a = s.splat(*attention.add(i));
                for half in 0..2 {
                    let at = half * S::LANES;
                    let v = s.load(self.values.as_ptr().add(i * self.value_stride + at));
                    let old = s.mul(decay, s.load(u.add(i * width + at)));
                    let others = s.add(even[0][half], odd[0][half]);
                    let new = s.sub(s.mul(beta, s.sub(v, old)), others);
                    s.store(u.add(i * width + at), new);
                    let query = s.load(self.queries.as_ptr().add(i * width + at));
                    let y = s.fma(decay, query, s.add(even[1][half], odd[1][half]));
                    let to = self.out.as_mut_ptr().add(i * self.value_stride + at);
                    s.store(to, s.fma(a, new, y));
                }
            }
        }
        for i in 0..n {
            scale(s, &mut self.keys[i * width..][..width], self.to_end[i]);
        }
    }
}

/// One position for one head, in one pass over the state.
pub(crate) struct Step<'a> {
    /// `[values, keys]`.
    pub(crate) state: &'a mut [f32],
    pub(crate) query: &'a [f32],
    pub(crate) key: &'a [f32],
    pub(crate) value: &'a [f32],
    pub(crate) decay: f32,
    pub(crate) beta: f32,
    /// As long as `value`.
    pub(crate) out: &'a mut [f32],
}

impl Kernel for Step<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (dim, rows) = (self.key.len(), self.value.len());
        assert!(self.query.len() == dim && self.out.len() == rows);
        assert!(self.state.len() == rows * dim);
        let overlap: f32 = self.query.iter().zip(self.key).map(|(q, k)| q * k).sum();
        let mut row = 0;
        while row < rows {
            if rows - row >= 4 && dim.is_multiple_of(S::LANES) {
                step::<S, 4, true>(s, &mut self, row, overlap);
                row += 4;
            } else {
                step::<S, 1, false>(s, &mut self, row, overlap);
                row += 1;
            }
        }
    }
}

/// `R` rows of [`Step`], whose lengths were checked; `WHOLE` says that they are whole vectors.
#[inline(always)]
fn step<S: Simd, const R: usize, const WHOLE: bool>(
    s: S,
    job: &mut Step<'_>,
    row: usize,
    overlap: f32,
) {
    let dim = job.key.len();
    let (q, k) = (job.query.as_ptr(), job.key.as_ptr());
    let rows = job.state[row * dim..(row + R) * dim].as_mut_ptr();
    let mut known = [s.splat(0.0); R];
    let mut seen = [s.splat(0.0); R];
    // SAFETY: `R` rows of `dim` values; `part` handles the last, incomplete vector.
    unsafe {
        let part = |from: *const f32, c: usize| {
            if WHOLE || dim - c >= S::LANES {
                s.load(from.add(c))
            } else {
                load_part(s, from.add(c), dim - c)
            }
        };
        for c in (0..dim).step_by(S::LANES) {
            let (query, key) = (part(q, c), part(k, c));
            for r in 0..R {
                let state = part(rows.add(r * dim), c);
                known[r] = s.fma(state, key, known[r]);
                seen[r] = s.fma(state, query, seen[r]);
            }
        }
        let mut change = [s.splat(0.0); R];
        for r in 0..R {
            let old = job.decay * s.sum(known[r]);
            let u = job.beta * (job.value[row + r] - old);
            job.out[row + r] = job.decay * s.sum(seen[r]) + u * overlap;
            change[r] = s.splat(u);
        }
        let decay = s.splat(job.decay);
        for c in (0..dim).step_by(S::LANES) {
            let key = part(k, c);
            for (r, &change) in change.iter().enumerate() {
                let to = rows.add(r * dim);
                let state = s.fma(change, key, s.mul(decay, part(to, c)));
                if WHOLE || dim - c >= S::LANES {
                    s.store(to.add(c), state);
                } else {
                    store_part(s, to.add(c), dim - c, state);
                }
            }
        }
    }
}

/// `out = x / sqrt(mean(x^2) + eps) * weight * silu(gate)`.
pub(crate) struct GatedNorm<'a, T> {
    pub(crate) x: &'a [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) gate: &'a [T],
    pub(crate) eps: f32,
    pub(crate) out: &'a mut [T],
}

impl<T: Vector> Kernel for GatedNorm<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n = self.out.len();
        assert!(self.x.len() == n && self.weight.len() == n && self.gate.len() == n);
        let (x, weight, gate) = (self.x.as_ptr(), self.weight.as_ptr(), self.gate.as_ptr());
        let mut square = s.splat(0.0);
        // SAFETY: `left` values of each are left, as many as a vector has in the first case.
        unsafe {
            for c in (0..n).step_by(S::LANES) {
                let left = n - c;
                let x = if left >= S::LANES {
                    s.load(x.add(c))
                } else {
                    load_part(s, x.add(c), left)
                };
                square = s.fma(x, x, square);
            }
            let factor = s.splat(1.0 / (s.sum(square) / n as f32 + self.eps).sqrt());
            for c in (0..n).step_by(S::LANES) {
                let left = n - c;
                let whole = left >= S::LANES;
                let (x, weight, gate) = if whole {
                    (
                        s.load(x.add(c)),
                        s.load(weight.add(c)),
                        T::load(s, gate.add(c)),
                    )
                } else {
                    (
                        load_part(s, x.add(c), left),
                        load_part(s, weight.add(c), left),
                        load_part(s, gate.add(c), left),
                    )
                };
                let normed = s.mul(s.mul(x, factor), weight);
                let y = s.mul(normed, s.mul(gate, sigmoid(s, gate)));
                let to = self.out.as_mut_ptr().add(c);
                if whole {
                    T::store(s, to, y);
                } else {
                    store_part(s, to, left, y);
                }
            }
        }
    }
}

/// Has a row brought near, into the second cache: rows of one head are far apart in memory.
pub(crate) fn prefetch<T>(row: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for at in row.chunks(64 / size_of::<T>()) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: SSE is part of x86-64, and the address is one of the row.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = row;
}
