//! The hyperbolic tangent over elements.

use super::math::exp;
use super::{Kernel, Simd, Vector, load_part, store_part};

/// `out = cap * tanh(x / cap)`
pub(crate) struct Softcap<'a, T> {
    pub(crate) x: &'a [T],
    pub(crate) out: &'a mut [T],
    pub(crate) cap: f32,
}

impl<T: Vector> Kernel for Softcap<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { x, out, cap } = self;
        let length = out.len();
        assert!(x.len() == length);
        let cap = s.splat(cap);
        let mut i = 0;
        while i < length {
            let n = (length - i).min(S::LANES);
            // SAFETY: `i + n <= length`, the length of both; a part of a vector is `n` elements.
            unsafe {
                let (from, to) = (x.as_ptr().add(i), out.as_mut_ptr().add(i));
                if n == S::LANES {
                    let x = T::load(s, from);
                    T::store(s, to, s.mul(cap, tanh(s, s.div(x, cap))));
                } else {
                    let x = load_part(s, from, n);
                    store_part(s, to, n, s.mul(cap, tanh(s, s.div(x, cap))));
                }
            }
            i += S::LANES;
        }
    }
}

/// The hyperbolic tangent, with a relative error below 4e-7; NaN for NaN.
#[inline(always)]
fn tanh<S: Simd>(s: S, x: S::F) -> S::F {
    let one = s.splat(1.0);
    let e = exp(s, s.add(x, x));
    let far = s.sub(one, s.div(s.splat(2.0), s.add(e, one)));
    // Near zero that loses digits. Taylor up to x^13: the remainder is below 1e-7 of x.
    let square = s.mul(x, x);
    let mut p = s.splat(21844.0 / 6_081_075.0);
    for c in [
        -1382.0 / 155_925.0,
        62.0 / 2835.0,
        -17.0 / 315.0,
        2.0 / 15.0,
        -1.0 / 3.0,
    ] {
        p = s.fma(p, square, s.splat(c));
    }
    let near = s.fma(s.mul(x, square), p, x);
    s.select_ge(s.abs(x), s.splat(0.45), far, near)
}
