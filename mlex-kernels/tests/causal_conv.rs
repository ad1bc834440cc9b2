//! The short causal convolution against its definition in f64.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Random, Values, at_every_level, epsilon};
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
    let (mut r, kept) = (Random::new(seed), kernel - 1);
    let gap = r.below(4);
    let x: Vec<T> = r.floats(batch * length * (channels + gap));
    let before: Vec<T> = match r.below(4) {
        0 => vec![],
        extra => r.floats(batch * (kept + extra) * channels),
    };
    let held = before.len() / (batch * channels);
    let padding: Vec<usize> = match r.below(2) {
        0 => vec![],
        _ => (0..batch).map(|_| r.below(length + 2)).collect(),
    };
    let kind = r.below(3);
    let taps = Values::new(kind, &r.floats::<f32>(kernel * channels));
    let bias = (r.below(2) == 0).then(|| Values::new(kind, &r.floats::<f32>(channels)));
    let inputs = ConvInputs {
        x: Strided {
            data: &x,
            stride: channels + gap,
        },
        before: &before,
        padding: &padding,
    };
    let layer = ConvLayer {
        taps: taps.view(),
        bias: bias.as_ref().map(Values::view),
        activate,
        residual,
    };
    let input = |b: usize, t: isize, c: usize| {
        let pad = padding.get(b).copied().unwrap_or(0);
        match usize::try_from(t) {
            Ok(t) if t < pad => 0.0,
            Ok(t) => f64::from(x[(b * length + t) * (channels + gap) + c].to_f32()),
            Err(_) if held as isize + t < 0 => 0.0,
            Err(_) => {
                let row = b * held + (held as isize + t) as usize;
                f64::from(before[row * channels + c].to_f32())
            }
        }
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
            let mut y = bias
                .as_ref()
                .map_or(0.0, |bias| f64::from(bias.view().get(c)));
            for j in 0..kernel {
                let tap = f64::from(taps.view().get(j * channels + c));
                y += tap * input(b, (t + j) as isize - kept as isize, c);
            }
            if activate {
                y /= 1.0 + (-y).exp();
            }
            if residual {
                y += input(b, t as isize, c);
            }
            let error = (f64::from(found.to_f32()) - y).abs();
            let tolerance = 2e-6 * kernel as f64 + epsilon::<T>() * y.abs().max(1.0);
            assert!(error <= tolerance, "{level:?}: {} for {y}", found.to_f32());
        }
    });
    // What the next call needs, or more.
    let kept = kept + r.below(4);
    let mut tail = vec![T::from_f32(f32::NAN); batch * kept * channels];
    causal_conv_tail(&mut tail, &inputs, &shape).unwrap();
    for (index, found) in tail.iter().enumerate() {
        let (b, row, c) = (
            index / (kept * channels),
            index / channels % kept,
            index % channels,
        );
        let expected = input(b, (length + row) as isize - kept as isize, c);
        assert_eq!(f64::from(found.to_f32()), expected);
    }
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
