//! Quantized products against a plain f64 one whose codes are read bit by bit.

mod common;

use common::weights::{BRAIN, COARSE, EXACT, Fixture, modes};
use common::{Random, Values, at_every_level, epsilon};
use half::{bf16, f16};
use mlex_kernels::{
    Element, KernelError, Level, Mode, Precision, QuantizedWeight, Scales, gather_quantized_matmul,
    quantized_matmul,
};
use proptest::prelude::*;

fn check_matmul<T: Element>(mode: Mode, m: usize, n: usize, k: usize, kind: usize, seed: u64) {
    let mut r = Random::new(seed);
    let fixture = Fixture::new(mode, 1, n, k, kind, &mut r);
    let x: Vec<T> = r.floats(m * k);
    let experts = vec![0; m];
    at_every_level(|level| {
        for precision in [Precision::F32, Precision::Bf16] {
            let mut y = vec![T::from_f32(f32::NAN); m * n];
            quantized_matmul(&mut y, &x, &fixture.view(), precision).expect("valid arguments");
            let bound = match precision {
                Precision::F32 if epsilon::<T>() < 1e-3 => EXACT,
                Precision::F32 => COARSE,
                Precision::Bf16 => BRAIN,
            };
            let what = format!("{level:?} {mode:?} {precision:?} m={m} n={n} k={k}");
            fixture.check(&y, &x, &experts, bound, &what);
        }
    });
}

#[test]
fn every_mode_and_number_of_rows() {
    for (i, mode) in modes().into_iter().enumerate() {
        for (m, n, k) in [
            (1, 37, 256),
            (2, 5, 384),
            (3, 33, 128),
            (4, 9, 640),
            (5, 31, 128),
            (33, 65, 256),
        ] {
            check_matmul::<f32>(mode, m, n, k, i, i as u64);
        }
    }
}

#[test]
fn larger_than_a_task() {
    check_matmul::<f32>(
        Mode::Affine {
            bits: 4,
            group_size: 32,
        },
        1,
        700,
        576,
        1,
        1,
    );
    check_matmul::<f32>(
        Mode::Affine {
            bits: 4,
            group_size: 64,
        },
        150,
        100,
        4224,
        0,
        2,
    );
    check_matmul::<f32>(
        Mode::Affine {
            bits: 8,
            group_size: 32,
        },
        4,
        300,
        4608,
        2,
        3,
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_shape_and_type(
        mode in prop::sample::select(modes()),
        m in 0usize..20,
        n in 0usize..70,
        groups in 0usize..7,
        kind in 0usize..3,
        seed: u64,
    ) {
        let k = groups * mode.group_size();
        match seed % 3 {
            0 => check_matmul::<f32>(mode, m, n, k, kind, seed),
            1 => check_matmul::<f16>(mode, m, n, k, kind, seed),
            _ => check_matmul::<bf16>(mode, m, n, k, kind, seed),
        }
    }

    #[test]
    fn gathered_rows_use_their_expert(
        mode in prop::sample::select(modes()),
        experts in 1usize..6,
        m in 0usize..40,
        sorted: bool,
        seed: u64,
    ) {
        let mut r = Random::new(seed);
        let (n, k) = (1 + r.below(40), (1 + r.below(4)) * mode.group_size());
        let fixture = Fixture::new(mode, experts, n, k, 0, &mut r);
        let x: Vec<f32> = r.floats(m * k);
        let mut chosen: Vec<u32> = (0..m).map(|_| r.below(experts) as u32).collect();
        if sorted {
            chosen.sort_unstable();
        }
        at_every_level(|level| {
            let mut y = vec![f32::NAN; m * n];
            gather_quantized_matmul(&mut y, &x, &chosen, &fixture.view(), Precision::F32)
                .expect("valid arguments");
            fixture.check(&y, &x, &chosen, EXACT, &format!("{level:?} {mode:?}"));
        });
    }

    #[test]
    fn outliers_do_not_swamp_other_groups(seed: u64, m in 1usize..8) {
        // One value is a million times the others: only its own block may lose bits.
        let mut r = Random::new(seed);
        let mode = Mode::Affine { bits: 4, group_size: 32 };
        let (n, k) = (5, 320);
        let mut fixture = Fixture::new(mode, 1, n, k, 0, &mut r);
        // The outlier's own group has no weight.
        let (Values::F32(scales), Values::F32(biases)) = (&mut fixture.scales, &mut fixture.biases)
        else { unreachable!() };
        for row in 0..n {
            scales[row * 10 + 3] = 0.0;
            biases[row * 10 + 3] = 0.0;
            fixture.values[row * k + 96..row * k + 128].fill(0.0);
        }
        let mut x: Vec<f32> = r.floats(m * k);
        x.iter_mut().skip(100).step_by(k).for_each(|v| *v *= 1e6);
        at_every_level(|level| {
            let mut y = vec![f32::NAN; m * n];
            quantized_matmul(&mut y, &x, &fixture.view(), Precision::F32).expect("valid");
            fixture.check(&y, &x, &vec![0; m], EXACT, &format!("{level:?}"));
        });
    }
}

#[test]
fn tiny_and_huge_values_keep_their_scale() {
    let mut r = Random::new(7);
    for mode in [
        Mode::Affine {
            bits: 4,
            group_size: 64,
        },
        Mode::Affine {
            bits: 8,
            group_size: 32,
        },
    ] {
        let fixture = Fixture::new(mode, 1, 9, 128, 0, &mut r);
        for m in [1, 6] {
            for factor in [1e-25f32, 1e-10, 1e10, 1e30] {
                let x: Vec<f32> = r
                    .floats::<f32>(m * 128)
                    .iter()
                    .map(|v| v * factor)
                    .collect();
                at_every_level(|level| {
                    let mut y = vec![f32::NAN; m * 9];
                    quantized_matmul(&mut y, &x, &fixture.view(), Precision::F32).expect("valid");
                    fixture.check(&y, &x, &vec![0; m], EXACT, &format!("{level:?} {factor}"));
                });
            }
        }
    }
}

#[test]
fn values_that_are_not_finite_stay_in_their_row() {
    let mut r = Random::new(3);
    let fixture = Fixture::new(
        Mode::Affine {
            bits: 4,
            group_size: 32,
        },
        1,
        40,
        64,
        0,
        &mut r,
    );
    for m in [2, 20] {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut x: Vec<f32> = r.floats(m * 64);
            x[64 + 5] = bad;
            at_every_level(|level| {
                let mut y = vec![0.0; m * 40];
                quantized_matmul(&mut y, &x, &fixture.view(), Precision::F32).expect("valid");
                let (first, rest) = y.split_at(40);
                assert!(first.iter().all(|v| v.is_finite()), "{level:?}");
                assert!(rest[..40].iter().all(|v| !v.is_finite()), "{level:?}");
                assert!(rest[40..].iter().all(|v| v.is_finite()), "{level:?}");
            });
        }
    }
}

#[test]
fn wrong_arguments_are_refused() {
    let f = Fixture::new(
        Mode::Affine {
            bits: 4,
            group_size: 32,
        },
        1,
        2,
        64,
        0,
        &mut Random::new(1),
    );
    let affine = Scales::Affine {
        scales: f.scales.view(),
        biases: f.biases.view(),
    };
    let new = |mode, n, k, packed: &[u32], scales| {
        QuantizedWeight::new(mode, n, k, packed, scales)
            .map(|_| ())
            .unwrap_err()
    };
    let error = new(
        Mode::Affine {
            bits: 7,
            group_size: 32,
        },
        2,
        64,
        &f.packed,
        affine,
    );
    assert_eq!(
        error.to_string(),
        "quantized weight: bits: expected 2, 3, 4, 5, 6 or 8, found 7"
    );
    let error = new(
        Mode::Affine {
            bits: 4,
            group_size: 16,
        },
        2,
        64,
        &f.packed,
        affine,
    );
    assert!(matches!(error, KernelError::Argument { .. }));
    let error = new(f.mode, 2, 65, &f.packed, affine);
    assert!(matches!(error, KernelError::Argument { .. }));
    let error = new(f.mode, 2, 64, &f.packed[1..], affine);
    assert_eq!(
        error.to_string(),
        "quantized weight: packed: expected 16 elements, found 15"
    );
    let error = new(f.mode, usize::MAX / 8, 64, &f.packed, affine);
    assert!(matches!(error, KernelError::Overflow { .. }));
    let error = new(f.mode, 2, 64, &f.packed, Scales::Bytes(&f.bytes));
    assert!(matches!(error, KernelError::Argument { .. }));
    let error = new(Mode::Mxfp4, 2, 64, &f.packed, Scales::Bytes(&f.bytes[1..]));
    assert!(matches!(error, KernelError::Length { .. }));
    let other = Values::new(1, &[0.0; 4]);
    let mixed = Scales::Affine {
        scales: f.scales.view(),
        biases: other.view(),
    };
    assert!(matches!(
        new(f.mode, 2, 64, &f.packed, mixed),
        KernelError::Argument { .. }
    ));

    let w = f.view();
    let matmul = |y: usize, x: usize| {
        quantized_matmul(&mut vec![0f32; y], &vec![0f32; x], &w, Precision::F32)
    };
    assert!(matmul(2, 63).is_err() && matmul(3, 64).is_err() && matmul(2, 128).is_err());
    assert!(matmul(4, 128).is_ok() && matmul(0, 0).is_ok());
    let gather = |y: usize, x: usize, experts: &[u32]| {
        gather_quantized_matmul(
            &mut vec![0f32; y],
            &vec![0f32; x],
            experts,
            &w,
            Precision::F32,
        )
    };
    assert!(gather(2, 64, &[0]).is_ok());
    assert!(gather(2, 64, &[1]).is_err() && gather(2, 64, &[0, 0]).is_err());
    assert_eq!(Level::available()[0], Level::Portable);
}
