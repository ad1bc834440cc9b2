use super::*;

struct Exp<'a>(&'a [f32], &'a mut [f32]);

impl Kernel for Exp<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (from, to) in self.0.chunks(S::LANES).zip(self.1.chunks_mut(S::LANES)) {
            // SAFETY: both chunks have the same number of values.
            unsafe {
                let x = load_part(s, from.as_ptr(), from.len().min(S::LANES));
                store_part(s, to.as_mut_ptr(), to.len(), math::exp(s, x));
            }
        }
    }
}

#[test]
fn exp_is_accurate_at_every_level() {
    let mut x: Vec<f32> = (-87_000..88_300).map(|i| i as f32 * 1e-3).collect();
    let finite = x.len();
    x.extend([f32::NEG_INFINITY, f32::INFINITY, f32::NAN, -1000.0, 1000.0]);
    for &level in Level::available() {
        let mut y = vec![0.0; x.len()];
        level.dispatch(Exp(&x, &mut y));
        for (&x, &y) in x.iter().zip(&y).take(finite) {
            let expected = f64::from(x).exp();
            let error = (f64::from(y) - expected).abs() / expected;
            assert!(
                error < 2e-7,
                "{level:?}: exp({x}) = {y}, expected {expected}"
            );
        }
        assert_eq!(y[finite], 0.0);
        assert_eq!(y[finite + 1], f32::INFINITY);
        assert!(y[finite + 2].is_nan(), "{level:?}");
        assert_eq!(y[finite + 3..], [0.0, f32::INFINITY]);
    }
}

struct Half<'a, T>(&'a [f32], &'a mut [T]);

impl<T: Vector> Kernel for Half<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (from, to) in self.0.chunks(S::LANES).zip(self.1.chunks_mut(S::LANES)) {
            // SAFETY: both chunks have the same number of values.
            unsafe {
                let x = load_part(s, from.as_ptr(), from.len());
                store_part(s, to.as_mut_ptr(), to.len(), x);
            }
        }
    }
}

struct Widen<'a, T>(&'a [T], &'a mut [f32]);

impl<T: Vector> Kernel for Widen<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (from, to) in self.0.chunks(S::LANES).zip(self.1.chunks_mut(S::LANES)) {
            // SAFETY: both chunks have the same number of values.
            unsafe {
                let x = load_part(s, from.as_ptr(), from.len());
                store_part(s, to.as_mut_ptr(), to.len(), x);
            }
        }
    }
}

#[test]
fn conversions_round_as_half_does() {
    let mut x: Vec<f32> = (0..20_000u32)
        .map(|i| f32::from_bits(i.wrapping_mul(2_654_435_761)))
        .filter(|v| !v.is_nan())
        .collect();
    x.extend((0..4096).map(|i| (i as f32 - 2048.0) * 1.000_488_3));
    x.extend([
        f32::INFINITY,
        f32::NEG_INFINITY,
        0.0,
        -0.0,
        65520.0,
        f32::MAX,
        1.0 + 1.0 / 256.0,
    ]);
    for &level in Level::available() {
        let mut f = vec![f16::ZERO; x.len()];
        let mut b = vec![bf16::ZERO; x.len()];
        level.dispatch(Half(&x, &mut f));
        level.dispatch(Half(&x, &mut b));
        for (i, &x) in x.iter().enumerate() {
            assert_eq!(f[i].to_bits(), f16::from_f32(x).to_bits(), "{level:?} {x}");
            assert_eq!(b[i].to_bits(), bf16::from_f32(x).to_bits(), "{level:?} {x}");
        }
        let mut nan = [bf16::ZERO];
        level.dispatch(Half(&[f32::from_bits(0x7fff_ffff)], &mut nan));
        assert!(nan[0].is_nan());

        let all: Vec<u16> = (0..=u16::MAX).collect();
        let halves: Vec<f16> = all.iter().map(|&b| f16::from_bits(b)).collect();
        let brains: Vec<bf16> = all.iter().map(|&b| bf16::from_bits(b)).collect();
        let mut wide = vec![0.0; all.len()];
        level.dispatch(Widen(&halves, &mut wide));
        assert!(
            halves
                .iter()
                .zip(&wide)
                .all(|(h, w)| h.to_f32() == *w || h.is_nan() && w.is_nan())
        );
        level.dispatch(Widen(&brains, &mut wide));
        assert!(
            brains
                .iter()
                .zip(&wide)
                .all(|(h, w)| h.to_f32() == *w || h.is_nan() && w.is_nan())
        );
    }
}

struct Transpose<'a>(&'a [f32], &'a mut [f32]);

impl Kernel for Transpose<'_> {
    type Output = usize;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> usize {
        assert!(self.0.len() >= 17 * S::LANES && self.1.len() >= 18 * S::LANES);
        // SAFETY: the lengths were checked.
        unsafe { s.transpose(self.0.as_ptr(), 17, self.1.as_mut_ptr(), 18) };
        S::LANES
    }
}

#[test]
fn transpose_swaps_rows_and_columns() {
    let from: Vec<f32> = (0..17 * 16).map(|i| i as f32).collect();
    for &level in Level::available() {
        let mut to = vec![-1.0; 18 * 16];
        let n = level.dispatch(Transpose(&from, &mut to));
        for i in 0..n {
            for j in 0..n {
                assert_eq!(to[j * 18 + i], from[i * 17 + j]);
            }
        }
    }
}

struct Reduce([f32; MAX_LANES]);

impl Kernel for Reduce {
    type Output = (f32, f32, usize);
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        // SAFETY: the array has at least `LANES` values.
        let x = unsafe { s.load(self.0.as_ptr()) };
        (s.sum(x), s.largest(x), S::LANES)
    }
}

#[test]
fn reductions_see_every_lane() {
    for &level in Level::available() {
        for lane in 0..MAX_LANES {
            let mut x = [0.0; MAX_LANES];
            x[lane] = 3.0;
            let (sum, largest, lanes) = level.dispatch(Reduce(x));
            let expected = if lane < lanes { 3.0 } else { 0.0 };
            assert_eq!((sum, largest), (expected, expected));
        }
    }
}

#[test]
fn with_resets_the_level() {
    let best = Level::current();
    Level::Portable.with(|| assert_eq!(Level::current(), Level::Portable));
    assert_eq!(Level::current(), best);
}
