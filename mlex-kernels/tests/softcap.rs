//! `softcap` against the definition in f64.

mod common;

use common::{Random, at_every_level, epsilon};
use half::{bf16, f16};
use mlex_kernels::{Element, softcap};

fn check<T: Element>(x: &[f32], cap: f32) {
    let x: Vec<T> = x.iter().map(|&x| T::from_f32(x)).collect();
    at_every_level(|level| {
        let mut out = vec![T::from_f32(f32::NAN); x.len()];
        softcap(&mut out, &x, cap).expect("lengths fit");
        for (x, found) in x.iter().zip(&out) {
            let expected = f64::from(cap) * (f64::from(x.to_f32()) / f64::from(cap)).tanh();
            let error = (f64::from(found.to_f32()) - expected).abs();
            let allowed = expected.abs() * (5e-7 + epsilon::<T>()) + 1e-38;
            assert!(
                error <= allowed,
                "{level:?}: {} gives {}, not {expected}",
                x.to_f32(),
                found.to_f32()
            );
        }
    });
}

#[test]
fn small_and_large_values() {
    let mut r = Random::new(3);
    for count in [1, 15, 16, 17, 1000, 20_000] {
        for scale in [1e-6, 0.1, 1.0, 14.0, 100.0, 1e6] {
            let x: Vec<f32> = (0..count).map(|_| r.float() * scale).collect();
            check::<f32>(&x, 30.0);
            check::<f32>(&x, 0.7);
            if scale < 1e4 && scale > 1e-3 {
                check::<f16>(&x, 30.0);
                check::<bf16>(&x, 30.0);
            }
        }
    }
}

#[test]
fn limits_zeros_and_what_is_no_number() {
    at_every_level(|_| {
        let x = [f32::INFINITY, f32::NEG_INFINITY, 0.0, f32::NAN, f32::MAX];
        let mut out = [1.0; 5];
        softcap(&mut out, &x, 30.0).expect("lengths fit");
        assert_eq!(&out[..3], &[30.0, -30.0, 0.0]);
        assert!(out[3].is_nan());
        assert_eq!(out[4], 30.0);
    });
    assert!(softcap(&mut [0.0f32; 2], &[0.0; 3], 30.0).is_err());
    assert!(softcap::<f32>(&mut [], &[], 30.0).is_ok());
}
