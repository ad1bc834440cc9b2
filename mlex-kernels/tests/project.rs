//! Several projections of the same activations, plain and gated: against `linear`,
//! `quantized_matmul` and `gated` one by one, and against plain f64 products.

mod common;

use common::weights::{BRAIN, COARSE, EXACT, Fixture, modes};
use common::{ACTIVATIONS, Random, Values, activation, at_every_level, epsilon};
use half::{bf16, f16};
use mlex_kernels::{
    Activation, Element, KernelError, Linear, Mode, Precision, Projection, gated, linear, project,
    project_gated, quantized_matmul,
};
use proptest::prelude::*;

const PRECISIONS: [Precision; 2] = [Precision::F32, Precision::Bf16];

/// Numbers of rows: none, few, and many.
const ROWS: [usize; 6] = [0, 1, 3, 4, 5, 64];

/// What a weight is.
#[derive(Debug, Clone, Copy)]
enum Kind {
    /// By the number of its element type.
    Dense(usize),
    Quantized(Mode),
}

fn kinds() -> Vec<Kind> {
    let dense = (0..3).map(Kind::Dense);
    dense
        .chain(modes().into_iter().map(Kind::Quantized))
        .collect()
}

enum Weight {
    Dense {
        n: usize,
        k: usize,
        values: Values,
        bias: Option<Values>,
    },
    Quantized(Fixture, Option<Values>),
}

impl Weight {
    fn new(kind: Kind, n: usize, k: usize, biased: bool, r: &mut Random) -> Self {
        let type_of_bias = r.below(3);
        let bias = biased.then(|| Values::new(type_of_bias, &r.floats::<f32>(n)));
        match kind {
            Kind::Dense(of) => Self::Dense {
                n,
                k,
                values: Values::new(of, &r.floats::<f32>(n * k)),
                bias,
            },
            Kind::Quantized(mode) => {
                let type_of_scales = r.below(3);
                Self::Quantized(Fixture::new(mode, 1, n, k, type_of_scales, r), bias)
            }
        }
    }

    fn view(&self) -> Projection<'_> {
        match self {
            Self::Dense { n, k, values, bias } => {
                let bias = bias.as_ref().map(Values::view);
                Projection::Dense(Linear::new(*n, *k, values.view(), bias).expect("valid"))
            }
            Self::Quantized(w, bias) => {
                Projection::Quantized(w.view(), bias.as_ref().map(Values::view))
            }
        }
    }

    fn n(&self) -> usize {
        self.view().n()
    }

    fn bias(&self) -> Option<&Values> {
        match self {
            Self::Dense { bias, .. } | Self::Quantized(_, bias) => bias.as_ref(),
        }
    }

    fn value(&self, i: usize) -> f64 {
        match self {
            Self::Dense { values, .. } => f64::from(values.view().get(i)),
            Self::Quantized(w, _) => w.values[i],
        }
    }

    /// For each output the exact sum, and the sum of the sizes.
    fn truth<T: Element>(&self, x: &[T], m: usize) -> Vec<(f64, f64)> {
        let k = self.view().k();
        let place = |i: usize| (i / self.n(), i % self.n());
        let sums = (0..m * self.n()).map(|i| {
            let (m, n) = place(i);
            let bias = self.bias().map_or(0.0, |b| f64::from(b.view().get(n)));
            (0..k).fold((bias, bias.abs()), |(sum, size), l| {
                let product = f64::from(x[m * k + l].to_f32()) * self.value(n * k + l);
                (sum + product, size + product.abs())
            })
        });
        sums.collect()
    }

    /// What a product of `m` rows may be off by, relative to the sum of the sizes.
    fn bound<T: Element>(&self, m: usize, precision: Precision) -> f64 {
        let fine = epsilon::<T>() < 1e-3;
        match self {
            Self::Dense { .. } if m <= 4 => 1e-6,
            Self::Dense { .. } if precision == Precision::F32 && fine => 1e-6,
            Self::Dense { .. } => 4e-3,
            Self::Quantized(..) if m <= 4 => {
                if fine {
                    EXACT
                } else {
                    COARSE
                }
            }
            Self::Quantized(..) => match precision {
                Precision::F32 if fine => EXACT,
                Precision::F32 => COARSE,
                Precision::Bf16 => BRAIN,
            },
        }
    }

    /// The same product by the function for one matrix; none where that has no bias and rounds
    /// before one can be added.
    fn alone<T: Element>(&self, x: &[T], m: usize, precision: Precision) -> Option<Vec<T>> {
        let mut y = vec![T::from_f32(f32::NAN); m * self.n()];
        match self.view() {
            Projection::Dense(w) => linear(&mut y, x, &w, precision).expect("valid"),
            Projection::Quantized(w, bias) => {
                quantized_matmul(&mut y, x, &w, precision).expect("valid");
                if let Some(bias) = bias {
                    if size_of::<T>() < 4 {
                        return None;
                    }
                    for (i, y) in y.iter_mut().enumerate() {
                        *y = T::from_f32(y.to_f32() + bias.get(i % w.n()));
                    }
                }
            }
            _ => unreachable!("no other weights are made"),
        }
        Some(y)
    }
}

/// Half a unit of f16's smallest numbers: what rounding does to them.
fn floor<T: Element>() -> f64 {
    match epsilon::<T>() {
        e if (1e-6..1e-3).contains(&e) => 3e-8,
        _ => 1e-30,
    }
}

/// Activations with which no sum of products is larger than 8, as f16 needs it for `mxfp8`.
fn activations<T: Element>(weights: &[Weight], m: usize, k: usize, r: &mut Random) -> Vec<T> {
    let rows = weights.iter().flat_map(|w| {
        (0..w.n()).map(move |n| (0..k).map(|l| w.value(n * k + l).abs()).sum::<f64>())
    });
    let largest = rows.fold(8.0, f64::max);
    let scale = (8.0 / largest) as f32;
    let random = (0..m * k).map(|_| T::from_f32(r.float() * scale));
    random.collect()
}

fn bits<T: Element>(x: &[T]) -> Vec<u32> {
    x.iter().map(|x| x.to_f32().to_bits()).collect()
}

/// All projections of `m` rows at once.
fn run<T: Element>(weights: &[Weight], x: &[T], m: usize, precision: Precision) -> Vec<Vec<T>> {
    let views: Vec<_> = weights.iter().map(Weight::view).collect();
    let nan = T::from_f32(f32::NAN);
    let mut outputs: Vec<_> = weights.iter().map(|w| vec![nan; m * w.n()]).collect();
    let mut slices: Vec<_> = outputs.iter_mut().map(|y| &mut y[..]).collect();
    project(&mut slices, x, &views, precision).expect("valid");
    outputs
}

fn check_project<T: Element>(weights: &[Weight], m: usize, k: usize, r: &mut Random, what: &str) {
    let x: Vec<T> = activations(weights, m, k, r);
    let truths: Vec<_> = weights.iter().map(|w| w.truth(&x, m)).collect();
    at_every_level(|level| {
        for precision in PRECISIONS {
            let outputs = run(weights, &x, m, precision);
            for (i, (w, y)) in weights.iter().zip(&outputs).enumerate() {
                let what = format!("{level:?} {precision:?} {what} m={m} k={k} output {i}");
                let bound = w.bound::<T>(m, precision);
                for (j, (y, (sum, size))) in y.iter().zip(&truths[i]).enumerate() {
                    let error = (f64::from(y.to_f32()) - sum).abs();
                    let allowed = bound * size + epsilon::<T>() * sum.abs() + floor::<T>();
                    assert!(
                        error <= allowed,
                        "{what}[{j}]: {} where {sum} is expected, off by {error:e} > {allowed:e}",
                        y.to_f32()
                    );
                }
                if let Some(alone) = w.alone(&x, m, precision) {
                    assert_eq!(bits(y), bits(&alone), "{what}");
                }
            }
        }
    });
}

/// As the element type that a seed picks.
fn check_any(weights: &[Weight], m: usize, k: usize, seed: u64, what: &str) {
    let mut r = Random::new(seed ^ 0x55);
    match seed % 3 {
        0 => check_project::<f32>(weights, m, k, &mut r, what),
        1 => check_project::<f16>(weights, m, k, &mut r, what),
        _ => check_project::<bf16>(weights, m, k, &mut r, what),
    }
}

#[test]
fn every_kind_and_number_of_rows() {
    for (i, kind) in kinds().into_iter().enumerate() {
        for (j, m) in ROWS.into_iter().enumerate() {
            let seed = (i + j) as u64;
            let mut r = Random::new(seed);
            let k = match kind {
                Kind::Dense(_) => 131,
                Kind::Quantized(mode) => mode.group_size() * (1 + r.below(3)),
            };
            let shapes = [(37, false), (9, true), (1, true), (0, false)];
            let weights = shapes.map(|(n, biased)| Weight::new(kind, n, k, biased, &mut r));
            check_any(&weights, m, k, seed, &format!("{kind:?}"));
        }
    }
}

#[test]
fn larger_than_a_task() {
    let mode = |bits, group_size| Kind::Quantized(Mode::Affine { bits, group_size });
    let mut r = Random::new(1);
    for (m, k) in [(1, 4352), (4, 640), (130, 384)] {
        let kinds = [mode(4, 64), mode(4, 64), mode(8, 64), Kind::Dense(2)];
        let sizes = [701, 300, 3, 601];
        let weights: Vec<_> = kinds
            .into_iter()
            .zip(sizes)
            .map(|(kind, n)| Weight::new(kind, n, k, n % 2 == 0, &mut r))
            .collect();
        check_any(&weights, m, k, m as u64, "large");
    }
}

fn any_kind() -> impl Strategy<Value = Kind> {
    prop::sample::select(kinds())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn kinds_may_differ_in_one_call(
        kinds in prop::collection::vec((any_kind(), 0usize..40, any::<bool>()), 0..6),
        m in 0usize..9,
        groups in 0usize..4,
        seed: u64,
    ) {
        // Whole groups of any mode.
        let k = 128 * groups;
        let mut r = Random::new(seed);
        let weight = |&(kind, n, biased): &_| Weight::new(kind, n, k, biased, &mut r);
        let weights: Vec<_> = kinds.iter().map(weight).collect();
        check_any(&weights, m, k, seed, &format!("{kinds:?}"));
    }

    #[test]
    fn dense_weights_of_any_width(
        sizes in prop::collection::vec((0usize..3, 0usize..50, any::<bool>()), 1..4),
        m in 0usize..20,
        k in 0usize..150,
        seed: u64,
    ) {
        let mut r = Random::new(seed);
        let weight = |&(of, n, biased): &_| Weight::new(Kind::Dense(of), n, k, biased, &mut r);
        let weights: Vec<_> = sizes.iter().map(weight).collect();
        check_any(&weights, m, k, seed, &format!("{sizes:?}"));
    }

    #[test]
    fn gates_of_any_kinds(
        [first, second] in prop::array::uniform2(any_kind()),
        alike: bool,
        biased in prop::array::uniform2(any::<bool>()),
        m in prop::sample::select(&ROWS[..]),
        n in 0usize..50,
        groups in 0usize..4,
        seed: u64,
    ) {
        let second = if alike { first } else { second };
        let mut r = Random::new(seed);
        let k = 128 * groups;
        let mut index = 0;
        let weights = [first, second].map(|kind| {
            index += 1;
            Weight::new(kind, n, k, biased[index - 1], &mut r)
        });
        check_any_gated(&weights, m, k, seed, &format!("{first:?} {second:?}"));
    }
}

fn check_any_gated(weights: &[Weight; 2], m: usize, k: usize, seed: u64, what: &str) {
    let function = ACTIVATIONS[seed as usize / 3 % 3];
    let mut r = Random::new(seed ^ 0x77);
    match seed % 3 {
        0 => check_gated::<f32>(weights, m, k, function, &mut r, what),
        1 => check_gated::<f16>(weights, m, k, function, &mut r, what),
        _ => check_gated::<bf16>(weights, m, k, function, &mut r, what),
    }
}

fn check_gated<T: Element>(
    weights: &[Weight; 2],
    m: usize,
    k: usize,
    function: Activation,
    r: &mut Random,
    what: &str,
) {
    let x: Vec<T> = activations(weights, m, k, r);
    let [gates, ups] = [0, 1].map(|i| weights[i].truth(&x, m));
    let [gate, up] = [0, 1].map(|i| weights[i].view());
    at_every_level(|level| {
        for precision in PRECISIONS {
            let what = format!("{level:?} {precision:?} {function:?} {what} m={m} k={k}");
            let mut y = vec![T::from_f32(f32::NAN); m * gate.n()];
            project_gated(&mut y, &x, [&gate, &up], function, precision).expect("valid");

            let products = run(weights, &x, m, precision);
            let mut apart = vec![T::from_f32(f32::NAN); y.len()];
            gated(&mut apart, &products[0], &products[1], function).expect("valid");
            assert_eq!(bits(&y), bits(&apart), "{what}");

            let [gate_bound, up_bound] = [0, 1].map(|i| weights[i].bound::<T>(m, precision));
            let rounding = epsilon::<T>();
            for (j, y) in y.iter().enumerate() {
                let ((g, g_size), (u, u_size)) = (gates[j], ups[j]);
                let g_error = gate_bound * g_size + rounding * g.abs() + floor::<T>();
                let u_error = up_bound * u_size + rounding * u.abs() + floor::<T>();
                let a = activation(function, g);
                // No slope of an activation is above 1.13.
                let a_error = 1.13 * g_error + 1e-6 * a.abs() + 1e-7;
                let allowed = a_error * (u.abs() + u_error)
                    + a.abs() * u_error
                    + (rounding + 1.2e-7) * (a * u).abs()
                    + floor::<T>();
                let error = (f64::from(y.to_f32()) - a * u).abs();
                assert!(
                    error <= allowed,
                    "{what}[{j}]: {} where {} is expected, off by {error:e} > {allowed:e}",
                    y.to_f32(),
                    a * u
                );
            }
        }
    });
}

#[test]
fn gates_of_every_kind_and_number_of_rows() {
    for (i, kind) in kinds().into_iter().enumerate() {
        for (j, m) in ROWS.into_iter().enumerate() {
            let seed = (i + 2 * j) as u64;
            let mut r = Random::new(seed);
            let k = match kind {
                Kind::Dense(_) => 67,
                Kind::Quantized(mode) => mode.group_size() * (1 + r.below(3)),
            };
            let n = [1, 33, 71][r.below(3)];
            let weights =
                [false, seed.is_multiple_of(2)].map(|b| Weight::new(kind, n, k, b, &mut r));
            check_any_gated(&weights, m, k, seed, &format!("{kind:?}"));
        }
    }
}

#[test]
fn values_that_are_not_finite_stay_in_their_row() {
    let mut r = Random::new(5);
    let k = 128;
    let kinds = [
        Kind::Quantized(Mode::Affine {
            bits: 4,
            group_size: 32,
        }),
        Kind::Quantized(Mode::Mxfp8),
        Kind::Dense(2),
        Kind::Quantized(Mode::Nvfp4),
    ];
    let weights = kinds.map(|kind| Weight::new(kind, 21, k, true, &mut r));
    for m in [2, 4, 20] {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x: Vec<f32> = r.floats(m * k);
            x[k + 5] = bad;
            at_every_level(|level| {
                for precision in PRECISIONS {
                    for (i, y) in run(&weights, &x, m, precision).iter().enumerate() {
                        for (row, y) in y.chunks_exact(21).enumerate() {
                            let found = y.iter().filter(|y| y.is_finite()).count();
                            // A weight of zero times infinity is not a number either.
                            let expected = if row == 1 { 0 } else { 21 };
                            assert_eq!(found, expected, "{level:?} {m} output {i} row {row}");
                        }
                    }
                }
            });
        }
    }
}

#[test]
fn wrong_arguments_are_refused() {
    let mut r = Random::new(1);
    let dense = |n, k, r: &mut Random| Weight::new(Kind::Dense(0), n, k, true, r);
    let (a, b, c) = (
        dense(2, 4, &mut r),
        dense(3, 4, &mut r),
        dense(3, 6, &mut r),
    );
    let sizes = |lengths: &[usize], x: usize, weights: &[Projection<'_>]| {
        let mut outputs: Vec<_> = lengths.iter().map(|&n| vec![0f32; n]).collect();
        let mut outputs: Vec<_> = outputs.iter_mut().map(|y| &mut y[..]).collect();
        project(&mut outputs, &vec![0f32; x], weights, Precision::F32)
    };
    let message = |result: Result<(), KernelError>| result.unwrap_err().to_string();
    assert_eq!(sizes(&[], 7, &[]), Ok(()));
    assert_eq!(sizes(&[6, 9], 12, &[a.view(), b.view()]), Ok(()));
    assert_eq!(
        message(sizes(&[6], 12, &[a.view(), b.view()])),
        "project: outputs: expected 2 elements, found 1"
    );
    assert_eq!(
        message(sizes(&[6, 9], 13, &[a.view(), b.view()])),
        "project: x: expected 12 elements, found 13"
    );
    assert!(sizes(&[6, 8], 12, &[a.view(), b.view()]).is_err());
    // Three rows of 4, or two of 6.
    for m in [1, 5] {
        let lengths = [3 * m * 2, 2 * m * 3];
        assert_eq!(
            message(sizes(&lengths, 12 * m, &[a.view(), c.view()])),
            "project: columns: expected 4 elements, found 6"
        );
    }

    let mode = Mode::Mxfp4;
    let experts = Fixture::new(mode, 2, 3, 32, 0, &mut r);
    let two = Projection::Quantized(experts.view(), None);
    assert_eq!(
        message(sizes(&[3], 32, &[two])),
        "project: weight: expected one expert, found 2"
    );
    let one = Fixture::new(mode, 1, 3, 32, 0, &mut r);
    let bias = [0f32; 2];
    let biased = Projection::Quantized(one.view(), Some(bias[..].into()));
    assert_eq!(
        message(sizes(&[3], 32, &[biased])),
        "project: bias: expected 3 elements, found 2"
    );

    let gates = |y: usize, x: usize, gate: &Weight, up: &Weight| {
        let weights = [&gate.view(), &up.view()];
        let (mut y, x) = (vec![0f32; y], vec![0f32; x]);
        project_gated(&mut y, &x, weights, Activation::Silu, Precision::F32)
    };
    assert_eq!(gates(6, 12, &a, &a), Ok(()));
    assert!(gates(6, 12, &a, &b).is_err());
    assert!(gates(6, 12, &b, &c).is_err());
    assert!(gates(5, 12, &a, &a).is_err());
    assert!(gates(6, 13, &a, &a).is_err());
}
