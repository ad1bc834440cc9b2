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
    for c in [
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ] {
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

/// The distribution function of the normal distribution, with a relative error below 1e-6
/// down to -13 (where it is 1e-38).
#[inline(always)]
pub(crate) fn normal_cdf<S: Simd>(s: S, x: S::F) -> S::F {
    // Half of erfc(z) with z = |x| / sqrt 2, which is e^(-z^2) times a polynomial in
    // t = 1 / (1 + 0.35 z), fitted to 1e-8 for z up to 14.
    const POLYNOMIAL: [f32; 10] = [
        0.041_847_013,
        -0.177_913_98,
        0.226_799_2,
        -0.089_172_72,
        0.139_048_23,
        0.117_588_27,
        0.161_218_51,
        0.185_707_67,
        0.197_408_23,
        0.197_469_58,
    ];
    let size = s.min(s.abs(x), s.splat(20.0));
    let one = s.splat(1.0);
    let t = s.div(
        one,
        s.fma(size, s.splat(0.35 * std::f32::consts::FRAC_1_SQRT_2), one),
    );
    let mut p = s.splat(POLYNOMIAL[0]);
    for c in &POLYNOMIAL[1..] {
        p = s.fma(p, t, s.splat(*c));
    }
    // x^2 = a^2 + (x - a)(x + a), where a has few bits and so an exact square: rounding x^2
    // would cost up to 1e-5 of the result.
    let a = s.mul(s.round(s.mul(size, s.splat(16.0))), s.splat(1.0 / 16.0));
    let minus_half = s.splat(-0.5);
    let rest = s.mul(s.sub(size, a), s.add(size, a));
    let e = s.mul(
        exp(s, s.mul(s.mul(a, a), minus_half)),
        exp(s, s.mul(rest, minus_half)),
    );
    let tail = s.mul(s.mul(s.splat(0.5), t), s.mul(p, e));
    let cdf = s.select_ge(x, s.splat(0.0), s.sub(one, tail), tail);
    // `min` has dropped a NaN: all comparisons with it are false.
    let known = s.select_ge(x, s.splat(0.0), s.splat(0.0), x);
    let known = s.select_ge(s.splat(0.0), x, s.splat(0.0), known);
    s.add(cdf, known)
}
