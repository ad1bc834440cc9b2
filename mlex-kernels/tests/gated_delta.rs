//! The gated delta net against its definition in f64, position by position.
#![allow(clippy::unwrap_used)]

mod common;

use common::conv::{ConvProblem, rows, silu};
use common::recurrent::{Decay, close};
use common::{Random, Values, at_every_level, epsilon};
use half::{bf16, f16};
use mlex_kernels::{
    ConvShape, DeltaInputs, DeltaLayer, DeltaShape, Element, KernelError, gated_delta,
    gated_delta_tail,
};
use proptest::prelude::*;

/// A layer, its inputs and the state before them.
struct Problem<T> {
    shape: DeltaShape,
    conv: ConvProblem<T>,
    gate: Vec<T>,
    beta: Vec<T>,
    decay: Vec<T>,
    a_log: Values,
    dt_bias: Values,
    norm: Values,
    state: Vec<f32>,
}

impl<T: Element> Problem<T> {
    /// Without decay, the keys are nearly the same.
    fn new(shape: DeltaShape, decay: Decay, gap: usize, seed: u64) -> Self {
        let mut r = Random::new(seed);
        let (heads, kind) = (shape.value_heads, r.below(3));
        let rows = shape.batch * shape.length;
        let conv = ConvShape {
            batch: shape.batch,
            length: shape.length,
            channels: shape.channels(),
            kernel: shape.kernel,
        };
        let mut conv = ConvProblem::<T>::new(conv, gap, 0, kind, &mut r);
        conv.bias = None;
        if matches!(decay, Decay::None) {
            for x in &mut conv.x {
                *x = T::from_f32(1.0 + 0.02 * x.to_f32());
            }
        }
        let beta = (0..rows * (heads + gap)).map(|_| match decay {
            Decay::None => T::from_f32(20.0),
            _ => T::from_f32(4.0 * r.float()),
        });
        let beta: Vec<T> = beta.collect();
        Self {
            gate: r.floats(rows * (heads * shape.value_dim + gap)),
            decay: r.floats(rows * (heads + gap)),
            a_log: Values::new(0, &decay.rates(heads, &mut r)),
            dt_bias: Values::new(kind, &r.floats::<f32>(heads)),
            norm: Values::new(kind, &r.floats::<f32>(shape.value_dim)),
            state: r.floats(shape.batch * heads * shape.value_dim * shape.key_dim),
            shape,
            conv,
            beta,
        }
    }

    fn inputs(&self) -> DeltaInputs<'_, T> {
        let (heads, gap) = (self.shape.value_heads, self.conv.gap);
        DeltaInputs {
            qkv: rows(&self.conv.x, self.shape.channels() + gap),
            gate: rows(&self.gate, heads * self.shape.value_dim + gap),
            beta: rows(&self.beta, heads + gap),
            decay: rows(&self.decay, heads + gap),
            before: &self.conv.before,
            padding: &self.conv.padding,
        }
    }

    fn layer(&self) -> DeltaLayer<'_> {
        DeltaLayer {
            conv: self.conv.taps.view(),
            a_log: self.a_log.view(),
            dt_bias: self.dt_bias.view(),
            norm: self.norm.view(),
            norm_eps: 1e-5,
        }
    }

    /// The output and the state after it.
    fn truth(&self) -> (Vec<f64>, Vec<f64>) {
        let DeltaShape {
            batch,
            length,
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            ..
        } = self.shape;
        let mut state: Vec<f64> = self.state.iter().map(|&x| f64::from(x)).collect();
        let mut out = vec![0.0; batch * length * value_heads * value_dim];
        let gap = self.conv.gap;
        for b in 0..batch {
            for t in self.conv.start(b)..length {
                let channel = |c: usize| silu(self.conv.output(b, t, c));
                let unit = |first: usize, scale: f64| -> Vec<f64> {
                    let x: Vec<f64> = (first..first + key_dim).map(channel).collect();
                    let mean = x.iter().map(|x| x * x).sum::<f64>() / key_dim as f64;
                    x.iter().map(|x| x * scale / (mean + 1e-6).sqrt()).collect()
                };
                let at = b * length + t;
                for h in 0..value_heads {
                    let key_head = h / (value_heads / key_heads);
                    let scale = (key_dim as f64).sqrt().recip();
                    let q = unit(key_head * key_dim, scale * scale);
                    let k = unit((key_heads + key_head) * key_dim, scale);
                    let first = 2 * key_heads * key_dim + h * value_dim;
                    let v: Vec<f64> = (first..first + value_dim).map(channel).collect();
                    let gate = |x: &[T]| f64::from(x[at * (value_heads + gap) + h].to_f32());
                    let x = gate(&self.decay) + f64::from(self.dt_bias.view().get(h));
                    let rate = f64::from(self.a_log.view().get(h)).exp();
                    let decay = (-rate * x.exp().ln_1p()).exp();
                    let beta = 1.0 / (1.0 + (-gate(&self.beta)).exp());
                    let size = value_dim * key_dim;
                    let state = &mut state[(b * value_heads + h) * size..][..size];
                    let mut y = vec![0.0; value_dim];
                    for row in 0..value_dim {
                        let s = &mut state[row * key_dim..][..key_dim];
                        s.iter_mut().for_each(|s| *s *= decay);
                        let known: f64 = s.iter().zip(&k).map(|(s, k)| s * k).sum();
                        let u = beta * (v[row] - known);
                        s.iter_mut().zip(&k).for_each(|(s, k)| *s += u * k);
                        y[row] = s.iter().zip(&q).map(|(s, q)| s * q).sum();
                    }
                    let mean = y.iter().map(|y| y * y).sum::<f64>() / value_dim as f64;
                    for (i, y) in y.iter().enumerate() {
                        let columns = value_heads * value_dim;
                        let z = self.gate[at * (columns + gap) + h * value_dim + i];
                        let weight = f64::from(self.norm.view().get(i));
                        let normed = y / (mean + 1e-5).sqrt() * weight;
                        out[at * columns + h * value_dim + i] =
                            normed * silu(f64::from(z.to_f32()));
                    }
                }
            }
        }
        (out, state)
    }

    fn check(&self) {
        let (expected, last) = self.truth();
        at_every_level(|level| {
            let mut state = self.state.clone();
            let mut out = vec![T::from_f32(f32::NAN); expected.len()];
            gated_delta(
                &mut out,
                &mut state,
                &self.inputs(),
                &self.layer(),
                &self.shape,
            )
            .unwrap();
            let padding = &self.conv.padding;
            let what = format!("{level:?} {:?} padding {padding:?}", self.shape);
            let found = out.iter().map(|x| f64::from(x.to_f32()));
            let rounding = 1.1 * epsilon::<T>();
            close(&format!("{what}: out"), found, &expected, 5e-5, rounding);
            let found = state.iter().map(|&x| f64::from(x));
            close(&format!("{what}: state"), found, &last, 5e-5, 0.0);

            let kept = self.shape.batch * (self.shape.kernel - 1);
            let mut tail = vec![T::from_f32(f32::NAN); kept * self.shape.channels()];
            gated_delta_tail(&mut tail, &self.inputs(), &self.shape).unwrap();
            self.conv.check_tail(&tail, &what);
        });
    }
}

fn decay(kind: usize) -> Decay {
    [Decay::Any, Decay::Any, Decay::None, Decay::All][kind % 4]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn any_shape(
        (batch, length) in (0usize..4, 0usize..80),
        (key_heads, group) in (1usize..4, 1usize..4),
        (key_dim, value_dim) in (1usize..40, 1usize..40),
        kernel in 1usize..6,
        kind: usize,
        gap in 0usize..3,
        seed: u64,
    ) {
        let shape = DeltaShape {
            batch,
            length,
            key_heads,
            value_heads: key_heads * group,
            key_dim,
            value_dim,
            kernel,
        };
        match kind / 4 % 3 {
            0 => Problem::<f32>::new(shape, decay(kind), gap, seed).check(),
            1 => Problem::<f16>::new(shape, decay(kind), gap, seed).check(),
            _ => Problem::<bf16>::new(shape, decay(kind), gap, seed).check(),
        }
    }
}

const REAL: DeltaShape = DeltaShape {
    batch: 1,
    length: 200,
    key_heads: 2,
    value_heads: 4,
    key_dim: 128,
    value_dim: 128,
    kernel: 4,
};

#[test]
fn sizes_of_real_heads() {
    for (index, length) in [1, 2, 3, 4, 31, 32, 33, 200].into_iter().enumerate() {
        for kind in [Decay::Any, Decay::None] {
            let shape = DeltaShape { length, ..REAL };
            Problem::<f32>::new(shape, kind, 0, index as u64).check();
        }
    }
}

#[test]
fn long_sequences_stay_exact() {
    let shape = DeltaShape {
        length: 4096,
        key_heads: 1,
        value_heads: 2,
        key_dim: 16,
        value_dim: 8,
        ..REAL
    };
    for kind in [Decay::Any, Decay::None, Decay::All] {
        Problem::<f32>::new(shape, kind, 0, 5).check();
    }
}

#[test]
fn wrong_lengths_are_refused() {
    let shape = DeltaShape { length: 2, ..REAL };
    let problem = Problem::<f32>::new(shape, Decay::Any, 0, 1);
    let run = |out: usize, state: usize, shape: &DeltaShape| {
        let (mut out, mut state) = (vec![0.0; out], vec![0.0; state]);
        gated_delta(
            &mut out,
            &mut state,
            &problem.inputs(),
            &problem.layer(),
            shape,
        )
        .unwrap_err()
        .to_string()
    };
    let states = 4 * 128 * 128;
    assert_eq!(
        run(1, states, &shape),
        "gated_delta: out: expected 1024 elements, found 1"
    );
    assert_eq!(
        run(1024, 1, &shape),
        "gated_delta: state: expected 65536 elements, found 1"
    );
    let uneven = DeltaShape {
        key_heads: 3,
        ..shape
    };
    assert_eq!(
        run(1024, states, &uneven),
        "gated_delta: value heads: expected a multiple of the key heads, found 4"
    );
    let huge = DeltaShape {
        batch: usize::MAX / 2,
        ..shape
    };
    assert_eq!(
        run(1024, states, &huge),
        KernelError::Overflow {
            what: "gated_delta: shape"
        }
        .to_string()
    );
    let longer = DeltaShape { length: 3, ..shape };
    assert_eq!(
        run(1024, states, &longer),
        "gated_delta: qkv: expected a row for each position, found 2048"
    );
}
