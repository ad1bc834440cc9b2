//! The register-blocked inner product of a packed block of rows and a packed panel of
//! columns, in f32.

use super::{Kernel, MAX_MR, Simd};

/// `c[i, j] (+)= sum_k a[k, i] * b[k, j]` for one panel of `2 * LANES` columns `j`.
///
/// `a` holds `k` rows of `a_stride` values, of which the first `rows` are used; `b` holds
/// `k` rows of `2 * LANES`; `c` holds `rows` rows of `c_stride`.
pub(crate) struct Panel<'a> {
    pub(crate) k: usize,
    pub(crate) rows: usize,
    pub(crate) a: &'a [f32],
    pub(crate) a_stride: usize,
    pub(crate) b: &'a [f32],
    pub(crate) c: &'a mut [f32],
    pub(crate) c_stride: usize,
    pub(crate) accumulate: bool,
}

impl Kernel for Panel<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Panel {
            k,
            rows,
            a,
            a_stride,
            b,
            c,
            c_stride,
            accumulate,
        } = self;
        let width = 2 * S::LANES;
        if rows == 0 {
            return;
        }
        assert!(rows <= S::MR && b.len() >= k * width);
        assert!(k == 0 || (a_stride >= 1 && a.len() >= (k - 1) * a_stride + rows));
        assert!(c_stride >= width && c.len() >= (rows - 1) * c_stride + width);
        let (a, b, c) = (a.as_ptr(), b.as_ptr(), c.as_mut_ptr());
        macro_rules! tiles {
            ($($rows:literal)*) => {
                match rows {
                    // SAFETY: the lengths were checked above.
                    $($rows => unsafe {
                        tile::<S, $rows>(s, k, a, a_stride, b, c, c_stride, accumulate)
                    },)*
                    _ => unreachable!("at most {MAX_MR} rows"),
                }
            };
        }
        tiles!(1 2 3 4 5 6 7 8 9 10 11 12 13 14)
    }
}

/// # Safety
/// `a`, `b` and `c` have what [`Panel`] says.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "the registers of one loop")]
unsafe fn tile<S: Simd, const R: usize>(
    s: S,
    k: usize,
    mut a: *const f32,
    a_stride: usize,
    mut b: *const f32,
    c: *mut f32,
    c_stride: usize,
    accumulate: bool,
) {
    if R > S::MR {
        // Never called; keeps code that would spill from being made.
        return;
    }
    let mut acc = [[s.splat(0.0); 2]; R];
    for _ in 0..k {
        // SAFETY: row `k` of `a` has `R` values and of `b` two vectors.
        unsafe {
            let b0 = s.load(b);
            let b1 = s.load(b.add(S::LANES));
            for (i, acc) in acc.iter_mut().enumerate() {
                let x = s.splat(*a.add(i));
                acc[0] = s.fma(x, b0, acc[0]);
                acc[1] = s.fma(x, b1, acc[1]);
            }
        }
        a = a.wrapping_add(a_stride);
        b = b.wrapping_add(2 * S::LANES);
    }
    for (i, acc) in acc.iter().enumerate() {
        for (j, &value) in acc.iter().enumerate() {
            // SAFETY: row `i` of `c` has two vectors.
            unsafe {
                let to = c.add(i * c_stride + j * S::LANES);
                let value = if accumulate {
                    s.add(s.load(to), value)
                } else {
                    value
                };
                s.store(to, value);
            }
        }
    }
}
