//! The short causal convolution against its definition in f64.
#![allow(clippy::unwrap_used)]

mod common;

use common::conv::{ConvProblem, silu};
use common::{Random, at_every_level, epsilon};
use half::bf16;
use mlex_kernels::{
    ConvInputs, ConvLayer, ConvShape, Element, Strided, causal_conv, causal_conv_tail,
};
use proptest::prelude::*;

fn check<T: Element>(shape: ConvShape, activate: bool, residual: bool, seed: u64) {
    let ConvShape {
        batch,
        length,
        channels,
        kernel,
    } = shape;
    let mut r = Random::new(seed);
    let (gap, kind) = (r.below(4), r.below(3));
    let problem = ConvProblem::<T>::new(shape, gap, 3, kind, &mut r);
    let inputs = problem.inputs();
    let layer = ConvLayer {
        taps: problem.taps.view(),
        bias: problem.bias(),
        activate,
        residual,
    };
    let mut out = vec![T::from_f32(f32::NAN); batch * length * channels];
    at_every_level(|level| {
        causal_conv(&mut out, &inputs, &layer, &shape).unwrap();
        for (index, found) in out.iter().enumerate() {
            let (b, t, c) = (
                index / (length * channels),
                index / channels % length,
                index % channels,
            );
            let mut y = problem.output(b, t, c);
            if activate {
                y = silu(y);
            }
            if residual {
                y += problem.input(b, t as isize, c);
            }
            let error = (f64::from(found.to_f32()) - y).abs();
            let tolerance = 2e-6 * kernel as f64 + epsilon::<T>() * y.abs().max(1.0);
            assert!(error <= tolerance, "{level:?}: {} for {y}", found.to_f32());
        }
    });
    // What the next call needs, or more.
    let kept = kernel - 1 + r.below(4);
    let mut tail = vec![T::from_f32(f32::NAN); batch * kept * channels];
    causal_conv_tail(&mut tail, &inputs, &shape).unwrap();
    problem.check_tail(&tail, "causal_conv");
}

proptest! {
    #[test]
    fn it_is_the_definition(
        batch in 1usize..3,
        length in 1usize..140,
        channels in 1usize..200,
        kernel in 1usize..7,
        activate: bool,
        residual: bool,
        seed: u64,
    ) {
        let shape = ConvShape { batch, length, channels, kernel };
        check::<f32>(shape, activate, residual, seed);
        check::<bf16>(shape, activate, residual, seed);
    }
}

#[test]
fn wrong_lengths_are_refused() {
    let shape = ConvShape {
        batch: 1,
        length: 2,
        channels: 3,
        kernel: 4,
    };
    let run = |x: usize, before: usize, taps: usize, out: usize| {
        let inputs = ConvInputs {
            x: Strided {
                data: &vec![0.0f32; x][..],
                stride: 3,
            },
            before: &vec![0.0; before],
            padding: &[],
        };
        let taps = vec![0.0f32; taps];
        let layer = ConvLayer {
            taps: taps[..].into(),
            bias: None,
            activate: false,
            residual: false,
        };
        let result = causal_conv(&mut vec![0.0f32; out], &inputs, &layer, &shape);
        result.unwrap_err().to_string()
    };
    assert_eq!(
        run(5, 0, 12, 6),
        "causal_conv: x: expected a row for each position, found 5"
    );
    assert_eq!(
        run(6, 8, 12, 6),
        "causal_conv: before: expected rows for each position that is seen, found 8"
    );
    assert_eq!(
        run(6, 0, 11, 6),
        "causal_conv: taps: expected 12 elements, found 11"
    );
    assert_eq!(
        run(6, 9, 12, 5),
        "causal_conv: out: expected 6 elements, found 5"
    );
}
