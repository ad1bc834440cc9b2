//! Dense products against a plain f64 one.

mod common;

use common::{Random, Values, at_every_level, epsilon};
use half::{bf16, f16};
use mlex_kernels::{Element, Linear, Precision, linear};
use proptest::prelude::*;

#[allow(clippy::too_many_arguments)]
fn check<T: Element>(m: usize, n: usize, k: usize, kind: usize, biased: bool, seed: u64) {
    let mut r = Random::new(seed);
    let weight = Values::new(kind, &r.floats::<f32>(n * k));
    let bias = Values::new(kind + 1, &r.floats::<f32>(n));
    let x: Vec<T> = r.floats(m * k);
    let w = Linear::new(n, k, weight.view(), biased.then(|| bias.view())).expect("valid");
    at_every_level(|level| {
        for precision in [Precision::F32, Precision::Bf16] {
            let mut y = vec![T::from_f32(f32::NAN); m * n];
            linear(&mut y, &x, &w, precision).expect("valid");
            let exact = precision == Precision::F32 && epsilon::<T>() < 1e-3;
            let bound = if exact { 1e-6 } else { 4e-3 };
            for i in 0..m {
                for j in 0..n {
                    let mut sum = if biased {
                        f64::from(bias.view().get(j))
                    } else {
                        0.0
                    };
                    let mut size = sum.abs();
                    for l in 0..k {
                        let p = f64::from(x[i * k + l].to_f32())
                            * f64::from(weight.view().get(j * k + l));
                        sum += p;
                        size += p.abs();
                    }
                    let found = f64::from(y[i * n + j].to_f32());
                    let allowed = bound * size + epsilon::<T>() * sum.abs() + 1e-30;
                    assert!(
                        (found - sum).abs() <= allowed,
                        "{level:?} {precision:?} kind {kind} {m}x{n}x{k}: {found} != {sum}"
                    );
                }
            }
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_shape_and_type(
        m in 0usize..35,
        n in 0usize..70,
        k in 0usize..150,
        kind in 0usize..3,
        biased: bool,
        seed: u64,
    ) {
        match seed % 3 {
            0 => check::<f32>(m, n, k, kind, biased, seed),
            1 => check::<f16>(m, n, k, kind, biased, seed),
            _ => check::<bf16>(m, n, k, kind, biased, seed),
        }
    }
}

#[test]
fn larger_than_a_tile_and_a_chunk() {
    check::<f32>(1, 600, 515, 2, true, 1);
    check::<f32>(130, 40, 4100, 0, true, 2);
    check::<bf16>(70, 130, 257, 2, false, 3);
}

#[test]
fn wrong_lengths_are_refused() {
    let w = [0f32; 6];
    assert!(Linear::new(2, 4, &w[..], None).is_err());
    assert!(Linear::new(2, 3, &w[..], Some((&w[..3]).into())).is_err());
    assert!(Linear::new(usize::MAX, 3, &w[..], None).is_err());
    let l = Linear::new(2, 3, &w[..], None).expect("valid");
    assert!(linear(&mut [0f32; 2], &[0f32; 4], &l, Precision::F32).is_err());
    assert!(linear(&mut [0f32; 3], &[0f32; 3], &l, Precision::F32).is_err());
}
