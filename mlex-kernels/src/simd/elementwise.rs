//! Loops over rows of elements: norms, rotary embeddings and gated activations.

use super::math::{normal_cdf, sigmoid};
use super::{Kernel, Kind, MAX_LANES, Simd, Vector, load_part, store_part};

/// Calls `body(index, n)` for each vector of `n <= LANES` elements of `length`.
macro_rules! vectors {
    ($s:ty, $length:expr, |$i:ident, $n:ident| $body:block) => {
        let mut $i = 0;
        while $i < $length {
            let $n = ($length - $i).min(<$s>::LANES);
            $body
            $i += <$s>::LANES;
        }
    };
}

/// Loads `n <= LANES` elements.
///
/// # Safety
/// `n` values can be read at `from`.
#[inline(always)]
unsafe fn load<S: Simd, T: Vector>(s: S, from: *const T, n: usize) -> S::F {
    // SAFETY: the caller's promise.
    unsafe {
        if n == S::LANES {
            T::load(s, from)
        } else {
            load_part(s, from, n)
        }
    }
}

/// Stores `n <= LANES` elements.
///
/// # Safety
/// `n` values can be written at `to`.
#[inline(always)]
unsafe fn store<S: Simd, T: Vector>(s: S, to: *mut T, n: usize, value: S::F) {
    // SAFETY: the caller's promise.
    unsafe {
        if n == S::LANES {
            T::store(s, to, value)
        } else {
            store_part(s, to, n, value)
        }
    }
}

/// The value rounded to `T`.
#[inline(always)]
fn round_to<S: Simd, T: Vector>(s: S, value: S::F) -> S::F {
    if T::KIND == Kind::F32 {
        return value;
    }
    let mut lanes = [std::mem::MaybeUninit::<T>::uninit(); MAX_LANES];
    // SAFETY: the array has `LANES` elements, which the store initializes.
    unsafe {
        T::store(s, lanes.as_mut_ptr().cast(), value);
        T::load(s, lanes.as_ptr().cast())
    }
}

/// `sum = gain * (x + factor * residual)`
pub(crate) struct Add<'a, T> {
    pub(crate) x: &'a [T],
    pub(crate) residual: &'a [T],
    /// The product is rounded to the element type, as MLX does it in two operations.
    pub(crate) factor: f32,
    /// So is the sum.
    pub(crate) gain: f32,
    pub(crate) sum: &'a mut [T],
}

impl<T: Vector> Kernel for Add<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Add {
            x,
            residual,
            factor,
            gain,
            sum,
        } = self;
        let length = sum.len();
        assert!(x.len() == length && residual.len() == length);
        let (scaled, gained) = (factor != 1.0, gain != 1.0);
        let (factor, gain) = (s.splat(factor), s.splat(gain));
        // SAFETY: `i + n <= length`.
        unsafe {
            vectors!(S, length, |i, n| {
                let mut r = load(s, residual.as_ptr().add(i), n);
                if scaled {
                    r = round_to::<S, T>(s, s.mul(r, factor));
                }
                let mut v = s.add(load(s, x.as_ptr().add(i), n), r);
                if gained {
                    v = s.mul(round_to::<S, T>(s, v), gain);
                }
                store(s, sum.as_mut_ptr().add(i), n, v);
            });
        }
    }
}

/// `out = factor * x`
pub(crate) struct Scale<'a, T> {
    pub(crate) x: &'a [T],
    pub(crate) factor: f32,
    pub(crate) out: &'a mut [T],
}

impl<T: Vector> Kernel for Scale<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Scale { x, factor, out } = self;
        let length = out.len();
        assert!(x.len() == length);
        let factor = s.splat(factor);
        // SAFETY: `i + n <= length`.
        unsafe {
            vectors!(S, length, |i, n| {
                let v = s.mul(load(s, x.as_ptr().add(i), n), factor);
                store(s, out.as_mut_ptr().add(i), n, v);
            });
        }
    }
}

/// `out = min(max(x, least), largest)`
pub(crate) struct Clip<'a, T> {
    pub(crate) x: &'a [T],
    /// The least and the largest.
    pub(crate) bounds: [f32; 2],
    pub(crate) out: &'a mut [T],
}

impl<T: Vector> Kernel for Clip<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Clip { x, bounds, out } = self;
        let length = out.len();
        assert!(x.len() == length);
        let [least, largest] = bounds.map(|bound| s.splat(bound));
        // SAFETY: `i + n <= length`.
        unsafe {
            vectors!(S, length, |i, n| {
                // The second operand is kept where one is not a number.
                let v = s.max(least, load(s, x.as_ptr().add(i), n));
                store(s, out.as_mut_ptr().add(i), n, s.min(largest, v));
            });
        }
    }
}

/// Rows normalized by their root mean square, or by mean and variance.
pub(crate) struct Norm<'a, T> {
    pub(crate) x: &'a [T],
    pub(crate) out: &'a mut [T],
    pub(crate) size: usize,
    /// Empty, or one for each element of a row.
    pub(crate) weight: &'a [f32],
    /// As `weight`.
    pub(crate) bias: &'a [f32],
    pub(crate) eps: f32,
    /// Subtract the mean first.
    pub(crate) centered: bool,
}

impl<T: Vector> Kernel for Norm<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Norm {
            x,
            out,
            size,
            weight,
            bias,
            eps,
            centered,
        } = self;
        assert!(x.len() == out.len() && size > 0);
        assert!(weight.is_empty() || weight.len() == size);
        assert!(bias.is_empty() || bias.len() == size);
        for (x, out) in x.chunks_exact(size).zip(out.chunks_exact_mut(size)) {
            // SAFETY: `i + n <= size`, the length of all slices that are used.
            unsafe {
                let mut mean = 0.0;
                if centered {
                    let mut sum = s.splat(0.0);
                    vectors!(S, size, |i, n| {
                        sum = s.add(sum, load(s, x.as_ptr().add(i), n));
                    });
                    mean = s.sum(sum) / size as f32;
                }
                let mean = s.splat(mean);
                let mut squares = [s.splat(0.0); 2];
                vectors!(S, size, |i, n| {
                    let mut v = s.sub(load(s, x.as_ptr().add(i), n), mean);
                    if centered && n < S::LANES {
                        // The lanes after the row would count as minus the mean.
                        let mut lanes = [0.0; MAX_LANES];
                        s.store(lanes.as_mut_ptr(), v);
                        v = load_part(s, lanes.as_ptr(), n);
                    }
                    let j = i / S::LANES % 2;
                    squares[j] = s.fma(v, v, squares[j]);
                });
                let mean_square = s.sum(s.add(squares[0], squares[1])) / size as f32;
                let factor = s.splat(1.0 / (mean_square + eps).sqrt());
                vectors!(S, size, |i, n| {
                    let v = s.sub(load(s, x.as_ptr().add(i), n), mean);
                    // MLX rounds to the element type before it applies the weight.
                    let mut v = round_to::<S, T>(s, s.mul(v, factor));
                    if !weight.is_empty() {
                        v = s.mul(v, load(s, weight.as_ptr().add(i), n));
                    }
                    if !bias.is_empty() {
                        v = s.add(v, load(s, bias.as_ptr().add(i), n));
                    }
                    store(s, out.as_mut_ptr().add(i), n, v);
                });
            }
        }
    }
}

/// The largest element that is a number; minus infinity for none.
pub(crate) struct Largest<'a, T> {
    pub(crate) x: &'a [T],
}

impl<T: Vector> Kernel for Largest<'_, T> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let x = self.x;
        let none = s.splat(f32::NEG_INFINITY);
        let mut largest = none;
        let mut i = 0;
        // SAFETY: `i + LANES <= x.len()`, then the rest.
        unsafe {
            while i + S::LANES <= x.len() {
                // `max` gives its second argument for NaN.
                largest = s.max(T::load(s, x.as_ptr().add(i)), largest);
                i += S::LANES;
            }
            let mut rest = [f32::NEG_INFINITY; MAX_LANES];
            let n = x.len() - i;
            let mut lanes = [0.0; MAX_LANES];
            s.store(lanes.as_mut_ptr(), load_part(s, x.as_ptr().add(i), n));
            rest[..n].copy_from_slice(&lanes[..n]);
            largest = s.max(s.load(rest.as_ptr()), largest);
        }
        s.largest(s.max(largest, none))
    }
}

/// One row rotated: each pair of the first `2 * cos.len()` elements by its angle.
pub(crate) struct Rotate<'a, T> {
    pub(crate) x: &'a [T],
    pub(crate) out: &'a mut [T],
    pub(crate) cos: &'a [f32],
    pub(crate) sin: &'a [f32],
    /// Pairs are neighbours, not half of the elements apart.
    pub(crate) neighbours: bool,
}

impl<T: Vector> Kernel for Rotate<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Rotate {
            x,
            out,
            cos,
            sin,
            neighbours,
        } = self;
        let half = cos.len();
        assert!(sin.len() == half && x.len() >= 2 * half && out.len() == x.len());
        out[2 * half..].copy_from_slice(&x[2 * half..]);
        if neighbours {
            // Sixteen pairs at a time through a buffer; the compiler shuffles them.
            for first in (0..half).step_by(16) {
                let n = (half - first).min(16);
                let mut from = [0.0f32; 32];
                let mut to = [0.0f32; 32];
                // SAFETY: `2 * n` elements from `2 * first` on, in both rows and buffers.
                unsafe {
                    vectors!(S, 2 * n, |i, n| {
                        let v = load(s, x.as_ptr().add(2 * first + i), n);
                        store(s, from.as_mut_ptr().add(i), n, v);
                    });
                    for i in 0..n {
                        let (a, b) = (from[2 * i], from[2 * i + 1]);
                        let (cos, sin) = (cos[first + i], sin[first + i]);
                        to[2 * i] = a * cos - b * sin;
                        to[2 * i + 1] = a * sin + b * cos;
                    }
                    vectors!(S, 2 * n, |i, n| {
                        let v = load(s, to.as_ptr().add(i), n);
                        store(s, out.as_mut_ptr().add(2 * first + i), n, v);
                    });
                }
            }
            return;
        }
        // SAFETY: `i + n <= half`, and both rows have `2 * half` elements.
        unsafe {
            vectors!(S, half, |i, n| {
                let a = load(s, x.as_ptr().add(i), n);
                let b = load(s, x.as_ptr().add(half + i), n);
                let (cos, sin) = (
                    load(s, cos.as_ptr().add(i), n),
                    load(s, sin.as_ptr().add(i), n),
                );
                let first = s.sub(s.mul(a, cos), s.mul(b, sin));
                let second = s.add(s.mul(a, sin), s.mul(b, cos));
                store(s, out.as_mut_ptr().add(i), n, first);
                store(s, out.as_mut_ptr().add(half + i), n, second);
            });
        }
    }
}

/// The function of a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gate {
    Silu,
    GeluTanh,
    Gelu,
    Sigmoid,
}

/// `out = f(gate) * up`
pub(crate) struct Gated<'a, T> {
    pub(crate) gate: &'a [T],
    pub(crate) up: &'a [T],
    pub(crate) out: &'a mut [T],
    pub(crate) function: Gate,
}

impl<T: Vector> Kernel for Gated<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.function {
            Gate::Silu => each::<S, T, Silu>(s, self),
            Gate::GeluTanh => each::<S, T, GeluTanh>(s, self),
            Gate::Gelu => each::<S, T, Gelu>(s, self),
            Gate::Sigmoid => each::<S, T, Sigmoid>(s, self),
        }
    }
}

/// `out = f(x)`
pub(crate) struct Activate<'a, T> {
    pub(crate) x: &'a [T],
    pub(crate) out: &'a mut [T],
    pub(crate) function: Gate,
}

impl<T: Vector> Kernel for Activate<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.function {
            Gate::Silu => each_alone::<S, T, Silu>(s, self),
            Gate::GeluTanh => each_alone::<S, T, GeluTanh>(s, self),
            Gate::Gelu => each_alone::<S, T, Gelu>(s, self),
            Gate::Sigmoid => each_alone::<S, T, Sigmoid>(s, self),
        }
    }
}

#[inline(always)]
fn each_alone<S: Simd, T: Vector, F: Function>(s: S, job: Activate<'_, T>) {
    let Activate { x, out, .. } = job;
    let length = out.len();
    assert!(x.len() == length);
    // SAFETY: `i + n <= length`.
    unsafe {
        vectors!(S, length, |i, n| {
            let v = F::apply(s, load(s, x.as_ptr().add(i), n));
            store(s, out.as_mut_ptr().add(i), n, v);
        });
    }
}

/// `to = f(gate) * up`, of products in f32: each plus its bias is rounded to the element type
/// first, as a layer's output is.
pub(crate) struct NarrowGated<'a, T> {
    pub(crate) gate: &'a [f32],
    pub(crate) up: &'a [f32],
    /// Each empty, or one for each element.
    pub(crate) biases: [&'a [f32]; 2],
    pub(crate) function: Gate,
    pub(crate) to: &'a mut [T],
}

impl<T: Vector> Kernel for NarrowGated<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.function {
            Gate::Silu => each_narrow::<S, T, Silu>(s, self),
            Gate::GeluTanh => each_narrow::<S, T, GeluTanh>(s, self),
            Gate::Gelu => each_narrow::<S, T, Gelu>(s, self),
            Gate::Sigmoid => each_narrow::<S, T, Sigmoid>(s, self),
        }
    }
}

#[inline(always)]
fn each_narrow<S: Simd, T: Vector, F: Function>(s: S, job: NarrowGated<'_, T>) {
    let NarrowGated {
        gate,
        up,
        biases: [gate_bias, up_bias],
        to,
        ..
    } = job;
    let length = to.len();
    assert!(gate.len() >= length && up.len() >= length);
    assert!(gate_bias.is_empty() || gate_bias.len() >= length);
    assert!(up_bias.is_empty() || up_bias.len() >= length);
    // SAFETY: `i + n <= length`.
    unsafe {
        vectors!(S, length, |i, n| {
            let mut g = load(s, gate.as_ptr().add(i), n);
            let mut u = load(s, up.as_ptr().add(i), n);
            if !gate_bias.is_empty() {
                g = s.add(g, load(s, gate_bias.as_ptr().add(i), n));
            }
            if !up_bias.is_empty() {
                u = s.add(u, load(s, up_bias.as_ptr().add(i), n));
            }
            let (g, u) = (round_to::<S, T>(s, g), round_to::<S, T>(s, u));
            store(s, to.as_mut_ptr().add(i), n, s.mul(F::apply(s, g), u));
        });
    }
}

/// A function of a vector. A type and not a closure: closures are compiled apart, without the
/// instruction set of the loop that calls them, so that every operation in one is a call.
trait Function {
    fn apply<S: Simd>(s: S, x: S::F) -> S::F;
}

#[inline(always)]
fn each<S: Simd, T: Vector, F: Function>(s: S, job: Gated<'_, T>) {
    let Gated { gate, up, out, .. } = job;
    let length = out.len();
    assert!(gate.len() == length && up.len() == length);
    // SAFETY: `i + n <= length`.
    unsafe {
        vectors!(S, length, |i, n| {
            let (gate, up) = (
                load(s, gate.as_ptr().add(i), n),
                load(s, up.as_ptr().add(i), n),
            );
            store(s, out.as_mut_ptr().add(i), n, s.mul(F::apply(s, gate), up));
        });
    }
}

struct Silu;

impl Function for Silu {
    #[inline(always)]
    fn apply<S: Simd>(s: S, x: S::F) -> S::F {
        s.mul(x, sigmoid(s, x))
    }
}

/// `x (1 + tanh(u)) / 2` with `u = sqrt(2 / pi) (x + 0.044715 x^3)`, which is `x sigmoid(2 u)`.
struct GeluTanh;

impl Function for GeluTanh {
    #[inline(always)]
    fn apply<S: Simd>(s: S, x: S::F) -> S::F {
        let factor = s.splat(2.0 * 0.797_884_6);
        let u = s.mul(x, s.fma(s.mul(x, x), s.splat(0.044_715), s.splat(1.0)));
        s.mul(x, sigmoid(s, s.mul(factor, u)))
    }
}

struct Gelu;

impl Function for Gelu {
    #[inline(always)]
    fn apply<S: Simd>(s: S, x: S::F) -> S::F {
        s.mul(x, normal_cdf(s, x))
    }
}

struct Sigmoid;

impl Function for Sigmoid {
    #[inline(always)]
    fn apply<S: Simd>(s: S, x: S::F) -> S::F {
        sigmoid(s, x)
    }
}
