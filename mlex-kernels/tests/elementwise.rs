//! Norms, rotary embeddings and gated activations against their definitions in f64.

mod common;

use common::{ACTIVATIONS, Random, Values, activation, at_every_level, epsilon};
use half::{bf16, f16};
use mlex_kernels::{
    Activation, Element, Frequencies, Heads, RopeOptions, Turns, activate, add_rms_norm, clip,
    gated, layer_norm, rms_norm, rope, rotate,
};
use proptest::prelude::*;

fn close<T: Element>(found: T, expected: f64, absolute: f64, roundings: f64, what: &str) {
    let error = (f64::from(found.to_f32()) - expected).abs();
    let allowed = absolute + roundings * epsilon::<T>() * expected.abs();
    assert!(error <= allowed, "{what}: {} != {expected}", found.to_f32());
}

fn check_norms<T: Element>(rows: usize, size: usize, weighted: bool, seed: u64) {
    let mut r = Random::new(seed);
    let x: Vec<T> = (0..rows * size)
        .map(|_| T::from_f32(r.float() * 3.0 + 1.0))
        .collect();
    let weight = Values::new(seed as usize % 3, &r.floats::<f32>(size));
    let bias = Values::new(seed as usize % 3, &r.floats::<f32>(size));
    let (w, b) = if weighted {
        (Some(weight.view()), Some(bias.view()))
    } else {
        (None, None)
    };
    let eps = 1e-5;
    at_every_level(|level| {
        let mut rms = vec![T::from_f32(f32::NAN); x.len()];
        let mut layer = rms.clone();
        rms_norm(&mut rms, &x, size, w, eps).expect("valid");
        layer_norm(&mut layer, &x, size, w, b, eps).expect("valid");
        for row in 0..rows {
            let x: Vec<f64> = x[row * size..][..size]
                .iter()
                .map(|x| f64::from(x.to_f32()))
                .collect();
            let n = size as f64;
            let square = x.iter().map(|x| x * x).sum::<f64>() / n;
            let mean = x.iter().sum::<f64>() / n;
            let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
            for i in 0..size {
                let weight = w.map_or(1.0, |w| f64::from(w.get(i)));
                let bias = b.map_or(0.0, |b| f64::from(b.get(i)));
                let what = format!("{level:?} {rows}x{size} [{row}, {i}]");
                let expected = x[i] / (square + f64::from(eps)).sqrt() * weight;
                close(rms[row * size + i], expected, 1e-6, 2.2, &what);
                let normal = (x[i] - mean) / (variance + f64::from(eps)).sqrt() * weight;
                // A bias may cancel what was rounded; with little variance the mean's own
                // rounding shows.
                let slack = 4e-5 + 2.2 * epsilon::<T>() * normal.abs();
                close(layer[row * size + i], normal + bias, slack, 2.2, &what);
            }
        }
    });
}

/// Sums are exact; the scale, products and sums are rounded to the element type: as MLX computes
/// `x + scale * residual` in two operations. The norm is that of the sum.
fn check_sums<T: Element>(rows: usize, size: usize, scale: f32, seed: u64) {
    let mut r = Random::new(seed);
    let draw = |r: &mut Random| -> Vec<T> {
        let values = (0..rows * size).map(|_| T::from_f32(r.float() * 3.0 + 1.0));
        values.collect()
    };
    let (x, residual) = (draw(&mut r), draw(&mut r));
    let weight = Values::new(seed as usize % 3, &r.floats::<f32>(size));
    let rounded = |value: f32| T::from_f32(value).to_f32();
    let expected: Vec<f32> = x
        .iter()
        .zip(&residual)
        .map(|(x, r)| rounded(x.to_f32() + rounded(r.to_f32() * rounded(scale))))
        .collect();
    let eps = 1e-5;
    at_every_level(|level| {
        let mut sum = vec![T::from_f32(f32::NAN); x.len()];
        let mut normed = sum.clone();
        add_rms_norm(
            [&mut sum, &mut normed],
            [&x, &residual],
            scale,
            size,
            weight.view(),
            eps,
        )
        .expect("valid");
        let what = format!("{level:?} {rows}x{size} scale {scale}");
        let found: Vec<f32> = sum.iter().map(|x| x.to_f32()).collect();
        assert_eq!(found, expected, "{what}");

        let mut alone = vec![T::from_f32(f32::NAN); x.len()];
        rms_norm(&mut alone, &sum, size, Some(weight.view()), eps).expect("valid");
        let bits = |x: &[T]| -> Vec<u32> { x.iter().map(|x| x.to_f32().to_bits()).collect() };
        assert_eq!(bits(&normed), bits(&alone), "{what}");
        for (i, normed) in normed.iter().enumerate() {
            let row = &expected[i / size * size..][..size];
            let squares = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
            let root = (squares / size as f64 + f64::from(eps)).sqrt();
            let weight = f64::from(weight.view().get(i % size));
            let expected = f64::from(expected[i]) / root * weight;
            close(*normed, expected, 1e-6, 2.2, &what);
        }
    });
}

fn check_rope<T: Element>(shape: [usize; 4], dims: usize, seed: u64) {
    let mut r = Random::new(seed);
    let [batch, heads, length, dim] = shape;
    let x: Vec<T> = r.floats(batch * heads * length * dim);
    let swapped = seed & 1 == 0;
    // `[batch, heads, length, dim]`, or `[batch, length, heads, dim]`.
    let strides = if swapped {
        [length * heads * dim, dim, heads * dim]
    } else {
        [heads * length * dim, length * dim, dim]
    };
    let inverse: Vec<f32> = (0..dims / 2).map(|i| 0.7f32.powi(i as i32)).collect();
    let offsets: Vec<i32> = (0..if seed & 2 == 0 { 1 } else { batch })
        .map(|_| r.below(50) as i32)
        .collect();
    let options = RopeOptions {
        dims,
        traditional: seed & 4 == 0,
        frequencies: Frequencies::Inverse(&inverse),
        scale: 0.5,
        offsets: &offsets,
    };
    at_every_level(|level| {
        let mut out = vec![T::from_f32(f32::NAN); x.len()];
        rope(&mut out, Heads { data: &x, strides }, shape, options).expect("valid");
        for row in 0..batch * heads * length {
            let (b, h, l) = (row / (heads * length), row / length % heads, row % length);
            let from = &x[b * strides[0] + h * strides[1] + l * strides[2]..][..dim];
            let offset = offsets[if offsets.len() == 1 { 0 } else { b }];
            for i in 0..dim {
                let get = |i: usize| f64::from(from[i].to_f32());
                let expected = if i >= dims {
                    get(i)
                } else {
                    let (pair, first, a, b) = if options.traditional {
                        (i / 2, i % 2 == 0, i / 2 * 2, i / 2 * 2 + 1)
                    } else {
                        let half = dims / 2;
                        (i % half, i < half, i % half, i % half + half)
                    };
                    let angle = (l as f64 + f64::from(offset)) * 0.5 * f64::from(inverse[pair]);
                    if first {
                        get(a) * angle.cos() - get(b) * angle.sin()
                    } else {
                        get(a) * angle.sin() + get(b) * angle.cos()
                    }
                };
                close(
                    out[row * dim + i],
                    expected,
                    4e-6,
                    1.1,
                    &format!("{level:?} {shape:?} {row} {i}"),
                );
            }
        }
    });
}

fn check_rotate<T: Element>(shape: [usize; 4], [parts, pairs]: [usize; 2], seed: u64) {
    let mut r = Random::new(seed);
    let [batch, heads, length, part] = shape;
    let dim = part * parts;
    let x: Vec<T> = r.floats(batch * heads * length * dim);
    // `[batch, length, heads, dim]`, as a projection has them.
    let strides = [length * heads * dim, dim, heads * dim];
    let angles: Vec<f64> = (0..length * parts * pairs)
        .map(|_| f64::from(r.float()) * 9.0)
        .collect();
    let table = |of: fn(f64) -> f64| -> Vec<f32> { angles.iter().map(|&x| of(x) as f32).collect() };
    let (cos, sin) = (table(f64::cos), table(f64::sin));
    let turns = Turns {
        cos: &cos,
        sin: &sin,
        parts,
        pairs,
    };
    let shape = [batch, heads, length, dim];
    at_every_level(|level| {
        let mut out = vec![T::from_f32(f32::NAN); x.len()];
        rotate(&mut out, Heads { data: &x, strides }, shape, turns).expect("valid");
        for (n, &found) in out.iter().enumerate() {
            let (row, i) = (n / dim, n % dim);
            let (b, h, l) = (row / (heads * length), row / length % heads, row % length);
            let from = &x[b * strides[0] + h * strides[1] + l * strides[2]..][..dim];
            let get = |i: usize| f64::from(from[i].to_f32());
            let (p, within) = (i / part, i % part);
            let angle = |pair: usize| angles[(l * parts + p) * pairs + pair];
            let expected = if within < pairs {
                let angle = angle(within);
                get(i) * angle.cos() - get(i + pairs) * angle.sin()
            } else if within < 2 * pairs {
                let angle = angle(within - pairs);
                get(i - pairs) * angle.sin() + get(i) * angle.cos()
            } else {
                get(i)
            };
            close(
                found,
                expected,
                4e-6,
                1.1,
                &format!("{level:?} {shape:?} {n}"),
            );
        }
    });
}

#[test]
fn activations_are_accurate() {
    // GeluTanh's exponent is a cubic of x, whose rounding is 1e-6 and more of the result where
    // that is below 1e-3.
    for (kind, low) in ACTIVATIONS.into_iter().zip([-80.0, -3.0, -12.5]) {
        let gate: Vec<f32> = (0..40_001)
            .map(|i| low + (30.0 - low) * i as f32 / 40_000.0)
            .collect();
        let up = vec![1.0; gate.len()];
        at_every_level(|level| {
            let mut out = vec![f32::NAN; gate.len()];
            gated(&mut out, &gate, &up, kind).expect("valid");
            for (&x, &y) in gate.iter().zip(&out) {
                let expected = activation(kind, f64::from(x));
                let error = (f64::from(y) - expected).abs();
                let allowed = 1e-6 * expected.abs() + 1e-37;
                assert!(
                    error <= allowed,
                    "{level:?} {kind:?}({x}) = {y}, expected {expected}"
                );
            }
            let special = [f32::NAN, f32::INFINITY, -1000.0, 1000.0, 0.0];
            let mut out = [0.0; 5];
            gated(&mut out, &special, &[1.0; 5], kind).expect("valid");
            assert!(out[0].is_nan(), "{level:?} {kind:?}");
            assert_eq!(
                out[1..],
                [f32::INFINITY, 0.0, 1000.0, 0.0],
                "{level:?} {kind:?}"
            );
        });
    }
}

fn check_clip<T: Element>(length: usize, seed: u64) {
    let mut r = Random::new(seed);
    let mut x: Vec<T> = r.floats(length);
    for (n, special) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY]
        .into_iter()
        .enumerate()
    {
        if let Some(x) = x.get_mut(n * 19) {
            *x = T::from_f32(special);
        }
    }
    // Numbers that no half type has.
    let bounds = [-0.3 - r.float().abs(), 0.3 + r.float().abs()];
    for bounds in [bounds, [f32::NEG_INFINITY, f32::INFINITY], [0.0, 0.0]] {
        let [least, largest] = bounds.map(|bound| T::from_f32(bound).to_f32());
        at_every_level(|level| {
            let mut out = vec![T::from_f32(0.5); length];
            clip(&mut out, &x, bounds).expect("valid");
            for (found, x) in out.iter().zip(&x) {
                let (found, x) = (found.to_f32(), x.to_f32());
                let expected = if x < least {
                    least
                } else if x > largest {
                    largest
                } else {
                    x
                };
                let both_none = found.is_nan() && expected.is_nan();
                assert!(
                    found == expected || both_none,
                    "{level:?}: {x} in {bounds:?}: {found}"
                );
            }
        });
    }
}

fn check_gated<T: Element>(length: usize, seed: u64) {
    let mut r = Random::new(seed);
    let (gate, up): (Vec<T>, Vec<T>) = (r.floats(length), r.floats(length));
    for kind in ACTIVATIONS {
        at_every_level(|level| {
            let mut out = vec![T::from_f32(f32::NAN); length];
            gated(&mut out, &gate, &up, kind).expect("valid");
            let ones = vec![T::from_f32(1.0); length];
            let [mut alone, mut by_one] = [out.clone(), out.clone()];
            activate(&mut alone, &gate, kind).expect("valid");
            gated(&mut by_one, &gate, &ones, kind).expect("valid");
            let bits = |x: &[T]| -> Vec<u32> { x.iter().map(|x| x.to_f32().to_bits()).collect() };
            assert_eq!(bits(&alone), bits(&by_one), "{level:?} {kind:?}");
            for i in 0..length {
                let expected =
                    activation(kind, f64::from(gate[i].to_f32())) * f64::from(up[i].to_f32());
                close(
                    out[i],
                    expected,
                    1e-7,
                    17.0f64.min(1.1e-6 / epsilon::<T>() + 1.1),
                    &format!("{level:?} {kind:?} {i}"),
                );
            }
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn norms(rows in 0usize..5, size in 1usize..200, weighted: bool, seed: u64) {
        match seed % 3 {
            0 => check_norms::<f32>(rows, size, weighted, seed),
            1 => check_norms::<f16>(rows, size, weighted, seed),
            _ => check_norms::<bf16>(rows, size, weighted, seed),
        }
    }

    #[test]
    fn residual_sums_and_their_norms(
        rows in 0usize..5,
        size in 1usize..200,
        scale in prop::sample::select(vec![1.0f32, 0.22, -1.5]),
        seed: u64,
    ) {
        match seed % 3 {
            0 => check_sums::<f32>(rows, size, scale, seed),
            1 => check_sums::<f16>(rows, size, scale, seed),
            _ => check_sums::<bf16>(rows, size, scale, seed),
        }
    }

    #[test]
    fn rotations(
        shape in [0usize..3, 1usize..4, 0usize..6, 1usize..140],
        seed: u64,
    ) {
        let dims = 2 * (seed as usize / 16 % (shape[3] / 2 + 1));
        match seed / 8 % 3 {
            0 => check_rope::<f32>(shape, dims, seed),
            1 => check_rope::<f16>(shape, dims, seed),
            _ => check_rope::<bf16>(shape, dims, seed),
        }
    }

    #[test]
    fn rotations_by_given_angles(
        shape in [0usize..3, 1usize..4, 0usize..6, 1usize..80],
        parts in 1usize..4,
        seed: u64,
    ) {
        let sizes = [parts, seed as usize / 16 % (shape[3] / 2 + 1)];
        match seed % 3 {
            0 => check_rotate::<f32>(shape, sizes, seed),
            1 => check_rotate::<f16>(shape, sizes, seed),
            _ => check_rotate::<bf16>(shape, sizes, seed),
        }
    }

    #[test]
    fn bounds(length in 0usize..100, seed: u64) {
        match seed % 3 {
            0 => check_clip::<f32>(length, seed),
            1 => check_clip::<f16>(length, seed),
            _ => check_clip::<bf16>(length, seed),
        }
    }

    #[test]
    fn gates(length in 0usize..100, seed: u64) {
        match seed % 3 {
            0 => check_gated::<f32>(length, seed),
            1 => check_gated::<f16>(length, seed),
            _ => check_gated::<bf16>(length, seed),
        }
    }
}

#[test]
fn more_rows_than_a_task() {
    check_norms::<f32>(40, 576, true, 3);
    check_sums::<bf16>(40, 576, 0.22, 4);
    check_gated::<f32>(20_000, 1);
    check_clip::<bf16>(20_000, 7);
    check_rope::<f32>([2, 9, 30, 64], 64, 5);
    check_rotate::<bf16>([1, 12, 40, 32], [2, 16], 6);
}

#[test]
fn base_gives_the_usual_frequencies() {
    // The second pair of 8 dims at position 3: angle 3 * 10000^(-2/8) = 0.3.
    let mut x = [0f32; 8];
    x[1] = 1.0;
    let options = RopeOptions {
        dims: 8,
        traditional: false,
        frequencies: Frequencies::Base(10_000.0),
        scale: 1.0,
        offsets: &[3],
    };
    let mut out = [0f32; 8];
    rope(
        &mut out,
        Heads::contiguous(&x, 1, 1, 8),
        [1, 1, 1, 8],
        options,
    )
    .expect("valid");
    assert!((out[1] - 0.3f32.cos()).abs() < 1e-6 && (out[5] - 0.3f32.sin()).abs() < 1e-6);
}

#[test]
fn wrong_arguments_are_refused() {
    let x = [1f32; 12];
    let mut out = [0f32; 12];
    assert!(rms_norm(&mut out, &x, 5, None, 1e-5).is_err());
    assert!(rms_norm(&mut out, &x, 0, None, 1e-5).is_err());
    assert!(rms_norm(&mut out[1..], &x, 4, None, 1e-5).is_err());
    assert!(rms_norm(&mut out, &x, 4, Some((&x[..3]).into()), 1e-5).is_err());
    assert!(layer_norm(&mut out, &x, 4, None, Some((&x[..5]).into()), 1e-5).is_err());
    assert!(gated(&mut out, &x, &x[1..], Activation::Silu).is_err());
    assert!(activate(&mut out, &x[1..], Activation::Silu).is_err());
    assert!(clip(&mut out, &x[1..], [-1.0, 1.0]).is_err());
    let turn = |parts: usize, pairs: usize, [cos, sin]: [usize; 2], out: &mut [f32]| {
        let turns = Turns {
            cos: &x[..cos],
            sin: &x[..sin],
            parts,
            pairs,
        };
        rotate(out, Heads::contiguous(&x, 1, 1, 12), [1, 1, 1, 12], turns)
    };
    assert!(turn(2, 3, [6; 2], &mut out).is_ok() && turn(1, 0, [0; 2], &mut out).is_ok());
    assert!(turn(0, 3, [6; 2], &mut out).is_err() && turn(5, 1, [5; 2], &mut out).is_err());
    assert!(turn(2, 4, [8; 2], &mut out).is_err() && turn(2, 3, [6; 2], &mut out[1..]).is_err());
    assert!(turn(2, 3, [5, 6], &mut out).is_err() && turn(2, 3, [6, 5], &mut out).is_err());
    let sums = |sizes: [usize; 4], size: usize, weight: usize| {
        let [mut sum, mut normed] = [0, 1].map(|i| vec![0f32; sizes[i]]);
        let inputs = [&x[..sizes[2]], &x[..sizes[3]]];
        let weight = (&x[..weight]).into();
        add_rms_norm([&mut sum, &mut normed], inputs, 1.0, size, weight, 1e-5)
    };
    assert!(sums([12; 4], 4, 4).is_ok() && sums([0; 4], 0, 0).is_ok());
    assert!(sums([11, 12, 12, 12], 4, 4).is_err() && sums([12, 11, 12, 12], 4, 4).is_err());
    assert!(sums([12, 12, 11, 12], 4, 4).is_err() && sums([12, 12, 12, 11], 4, 4).is_err());
    assert!(sums([12; 4], 5, 5).is_err() && sums([12; 4], 0, 0).is_err());
    assert!(sums([12; 4], 4, 3).is_err());
    let options = RopeOptions {
        dims: 4,
        traditional: false,
        frequencies: Frequencies::Base(10_000.0),
        scale: 1.0,
        offsets: &[0],
    };
    let heads = Heads::contiguous(&x[..], 1, 3, 4);
    let mut run = |shape, options| rope(&mut out, heads, shape, options);
    assert!(run([1, 1, 3, 4], options).is_ok());
    assert!(run([1, 1, 4, 4], options).is_err());
    assert!(run([1, 1, 3, 4], RopeOptions { dims: 3, ..options }).is_err());
    assert!(run([1, 1, 3, 4], RopeOptions { dims: 6, ..options }).is_err());
    assert!(
        run(
            [1, 1, 3, 4],
            RopeOptions {
                offsets: &[0, 1],
                ..options
            }
        )
        .is_err()
    );
    let frequencies = Frequencies::Inverse(&[1.0]);
    assert!(
        run(
            [1, 1, 3, 4],
            RopeOptions {
                frequencies,
                ..options
            }
        )
        .is_err()
    );
}
