//! Elementary functions on vectors.

use super::Simd;

/// e to the power of `x`, with a relative error below 2e-7; infinite above 88.37, zero below
/// -87.3 (where f32 has subnormal numbers only), NaN for NaN.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    // x = n ln 2 + r with |r| <= ln 2 / 2; ln 2 in two parts so that n times the first is exact.
    let low = s.splat(-87.3);
    let high = s.splat(88.37);
    // `min`/`max` give their second argument for NaN.
    let clamped = s.min(high, s.max(low, x));
    let n = s.round(s.mul(clamped, s.splat(std::f32::consts::LOG2_E)));
    let r = s.fma(n, s.splat(-0.693_359_4), clamped);
    let r = s.fma(n, s.splat(2.121_944_4e-4), r);
    // Taylor up to r^7: the remainder is below 1e-8.
    let mut p = s.splat(1.0 / 5040.0);
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = s.fma(p, r, s.splat(c));
    }
    // n is in -126 to 127.
    let e = s.scale(p, n);
    let e = s.select_ge(x, high, s.splat(f32::INFINITY), e);
    s.select_ge(low, x, s.splat(0.0), e)
}

/// `1 / (1 + e^-x)`
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(s: S, x: S::F) -> S::F {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.sub(s.splat(0.0), x))))
}
