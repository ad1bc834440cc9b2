//! Mamba 2 against its definition in f64, position by position.
#![allow(clippy::unwrap_used)]

mod common;

use common::conv::{ConvProblem, rows, silu};
use common::recurrent::{Decay, close};
use common::{Random, Values, at_every_level, epsilon};
use half::{bf16, f16};
use mlex_kernels::{
    ConvShape, Element, KernelError, Mamba2Inputs, Mamba2Layer, Mamba2Shape, mamba2, mamba2_tail,
};
use proptest::prelude::*;

/// A layer, its inputs and the state before them.
struct Problem<T> {
    shape: Mamba2Shape,
    conv: ConvProblem<T>,
    gate: Vec<T>,
    dt: Vec<T>,
    a_log: Values,
    dt_bias: Values,
    dt_limit: (f32, f32),
    d: Values,
    norm: Values,
    norm_eps: f32,
    state: Vec<f32>,
}

impl<T: Element> Problem<T> {
    fn new(shape: Mamba2Shape, decay: Decay, gap: usize, seed: u64) -> Self {
        let mut r = Random::new(seed);
        let (heads, kind) = (shape.heads, r.below(3));
        let rows = shape.batch * shape.length;
        let conv = ConvShape {
            batch: shape.batch,
            length: shape.length,
            channels: shape.channels(),
            kernel: shape.kernel,
        };
        Self {
            conv: ConvProblem::new(conv, gap, 0, kind, &mut r),
            gate: r.floats(rows * (shape.inner() + gap)),
            dt: r.floats(rows * (heads + gap)),
            a_log: Values::new(0, &decay.rates(heads, &mut r)),
            dt_bias: Values::new(kind, &r.floats::<f32>(heads)),
            dt_limit: [(0.0, f32::INFINITY), (0.3, 1.1)][r.below(2)],
            d: Values::new(kind, &r.floats::<f32>(heads)),
            norm: Values::new(kind, &r.floats::<f32>(shape.inner())),
            norm_eps: 1e-5,
            state: r.floats(shape.batch * shape.inner() * shape.state),
            shape,
        }
    }

    fn inputs(&self) -> Mamba2Inputs<'_, T> {
        let gap = self.conv.gap;
        Mamba2Inputs {
            gate: rows(&self.gate, self.shape.inner() + gap),
            channels: rows(&self.conv.x, self.shape.channels() + gap),
            dt: rows(&self.dt, self.shape.heads + gap),
            before: &self.conv.before,
            padding: &self.conv.padding,
        }
    }

    fn layer(&self) -> Mamba2Layer<'_> {
        Mamba2Layer {
            conv: self.conv.taps.view(),
            conv_bias: self.conv.bias(),
            a_log: self.a_log.view(),
            dt_bias: self.dt_bias.view(),
            dt_limit: self.dt_limit,
            d: self.d.view(),
            norm: self.norm.view(),
            norm_eps: self.norm_eps,
        }
    }

    /// The output, without and with the gate and norm, and the state after it.
    fn truth(&self) -> (Vec<f64>, Vec<f64>) {
        let Mamba2Shape {
            batch,
            length,
            heads,
            head_dim,
            groups,
            state: n,
            ..
        } = self.shape;
        let inner = heads * head_dim;
        let mut states: Vec<f64> = self.state.iter().map(|&x| f64::from(x)).collect();
        let mut out = vec![0.0; batch * length * inner];
        let gap = self.conv.gap;
        for b in 0..batch {
            for t in self.conv.start(b)..length {
                let channel = |c: usize| silu(self.conv.output(b, t, c));
                let row = b * length + t;
                let mut y = vec![0.0; inner];
                for h in 0..heads {
                    let group = h / (heads / groups);
                    let at = row * (heads + gap) + h;
                    let x = f64::from(self.dt[at].to_f32()) + f64::from(self.dt_bias.view().get(h));
                    let (least, most) = self.dt_limit;
                    let dt = x.exp().ln_1p().clamp(f64::from(least), f64::from(most));
                    let decay = (-f64::from(self.a_log.view().get(h)).exp() * dt).exp();
                    for p in 0..head_dim {
                        let x = channel(h * head_dim + p);
                        let state = &mut states[((b * heads + h) * head_dim + p) * n..][..n];
                        let mut sum = f64::from(self.d.view().get(h)) * x;
                        for (i, state) in state.iter_mut().enumerate() {
                            let written = channel(inner + group * n + i);
                            *state = decay * *state + dt * x * written;
                            sum += *state * channel(inner + (groups + group) * n + i);
                        }
                        y[h * head_dim + p] = sum;
                    }
                }
                let width = inner / groups;
                for (group, y) in y.chunks(width).enumerate() {
                    let gated: Vec<f64> = y
                        .iter()
                        .enumerate()
                        .map(|(i, y)| {
                            let z = self.gate[row * (inner + gap) + group * width + i];
                            // The kernel keeps the recurrence's output in the element type.
                            f64::from(T::from_f32(*y as f32).to_f32()) * silu(z.to_f32().into())
                        })
                        .collect();
                    let mean = gated.iter().map(|x| x * x).sum::<f64>() / width as f64;
                    for (i, gated) in gated.into_iter().enumerate() {
                        let weight = f64::from(self.norm.view().get(group * width + i));
                        out[row * inner + group * width + i] =
                            gated / (mean + f64::from(self.norm_eps)).sqrt() * weight;
                    }
                }
            }
        }
        (out, states)
    }

    fn run(&self) -> (Vec<T>, Vec<f32>) {
        let rows = self.shape.batch * self.shape.length;
        let mut out = vec![T::from_f32(f32::NAN); rows * self.shape.inner()];
        let mut state = self.state.clone();
        mamba2(
            &mut out,
            &mut state,
            &self.inputs(),
            &self.layer(),
            &self.shape,
        )
        .unwrap();
        (out, state)
    }

    fn check(&self, what: &str) {
        let (expected, expected_state) = self.truth();
        at_every_level(|level| {
            let (out, state) = self.run();
            let tolerance = 1e-4 + 4.0 * epsilon::<T>();
            let found = out.iter().map(|x| f64::from(x.to_f32()));
            let name = format!("{what}, {level:?}, output");
            close(&name, found, &expected, tolerance, 0.0);
            let found = state.iter().map(|&x| f64::from(x));
            let name = format!("{what}, {level:?}, state");
            close(&name, found, &expected_state, 1e-4, 0.0);

            let kept = self.shape.batch * (self.shape.kernel - 1);
            let mut tail = vec![T::from_f32(f32::NAN); kept * self.shape.channels()];
            mamba2_tail(&mut tail, &self.inputs(), &self.shape).unwrap();
            self.conv.check_tail(&tail, what);
        });
    }

    /// Compares one call with calls for the positions up to each of `ends`.
    fn check_pieces(&self, ends: &[usize]) {
        let (expected, expected_state) = self.run();
        let whole = self.shape;
        let mut state = self.state.clone();
        let mut before = self.conv.before.clone();
        let mut out = vec![vec![]; whole.batch];
        let (mut first, gap) = (0, self.conv.gap);
        for &end in ends {
            let shape = Mamba2Shape {
                length: end - first,
                ..whole
            };
            let part = |data: &[T], width: usize| -> Vec<T> {
                let batches = data.chunks(whole.length * (width + gap));
                let parts = batches.flat_map(|rows| {
                    let rows = rows.chunks(width + gap).skip(first).take(end - first);
                    rows.flat_map(|row| row[..width].to_vec())
                });
                parts.collect()
            };
            let (gate, channels, dt) = (
                part(&self.gate, shape.inner()),
                part(&self.conv.x, shape.channels()),
                part(&self.dt, shape.heads),
            );
            let left = |&count: &usize| count.min(end).saturating_sub(first);
            let padding: Vec<usize> = self.conv.padding.iter().map(left).collect();
            let inputs = Mamba2Inputs {
                gate: rows(&gate, shape.inner()),
                channels: rows(&channels, shape.channels()),
                dt: rows(&dt, shape.heads),
                before: &before,
                padding: &padding,
            };
            let outputs = shape.batch * shape.length * shape.inner();
            let mut y = vec![T::from_f32(f32::NAN); outputs];
            mamba2(&mut y, &mut state, &inputs, &self.layer(), &shape).unwrap();
            let kept = shape.batch * (shape.kernel - 1);
            let mut tail = vec![T::from_f32(f32::NAN); kept * shape.channels()];
            mamba2_tail(&mut tail, &inputs, &shape).unwrap();
            before = tail;
            if shape.length > 0 {
                for (out, y) in out.iter_mut().zip(y.chunks(shape.length * shape.inner())) {
                    out.extend_from_slice(y);
                }
            }
            first = end;
        }
        let wide = |x: &T| f64::from(x.to_f32());
        let expected: Vec<f64> = expected.iter().map(wide).collect();
        close(
            "output",
            out.concat().iter().map(wide),
            &expected,
            1e-4,
            0.0,
        );
        let expected: Vec<f64> = expected_state.into_iter().map(f64::from).collect();
        close(
            "state",
            state.into_iter().map(f64::from),
            &expected,
            1e-4,
            0.0,
        );
    }
}

fn shapes() -> impl Strategy<Value = Mamba2Shape> {
    let sizes = (1usize..3, 1usize..70, 1usize..4, 1usize..4);
    let widths = (1usize..40, 1usize..40, 1usize..6);
    (sizes, widths).prop_map(
        |((batch, length, groups, per_group), (head_dim, state, kernel))| Mamba2Shape {
            batch,
            length,
            heads: groups * per_group,
            head_dim,
            groups,
            state,
            kernel,
        },
    )
}

fn decays() -> impl Strategy<Value = Decay> {
    prop_oneof![Just(Decay::Any), Just(Decay::None), Just(Decay::All)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn f32_is_the_definition(shape in shapes(), decay in decays(), gap in 0usize..5, seed: u64) {
        Problem::<f32>::new(shape, decay, gap, seed).check("f32");
    }

    #[test]
    fn halves_are_near(shape in shapes(), decay in decays(), seed: u64) {
        Problem::<f16>::new(shape, decay, 0, seed).check("f16");
        Problem::<bf16>::new(shape, decay, 0, seed).check("bf16");
    }

    #[test]
    fn calls_that_follow_each_other_are_one(
        shape in shapes(),
        cut in 0usize..70,
        seed: u64,
    ) {
        let problem = Problem::<f32>::new(shape, Decay::Any, 0, seed);
        problem.check_pieces(&[cut.min(shape.length), shape.length]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn chunks_are_single_steps(
        length in 1usize..=4096,
        (groups, per_group) in (1usize..3, 1usize..3),
        (head_dim, state) in (1usize..20, 1usize..20),
        decay in decays(),
        seed: u64,
    ) {
        let heads = groups * per_group;
        let shape = Mamba2Shape { batch: 1, length, heads, head_dim, groups, state, kernel: 4 };
        let mut problem = Problem::<f32>::new(shape, decay, 0, seed);
        // The norm of a group of one value near zero multiplies its error by 1 / sqrt(eps).
        problem.norm_eps = 1.0;
        problem.check("chunks");
        if matches!(decay, Decay::None) {
            // Single steps in f32 are off from the definition by more than chunks are: sums over
            // thousands of positions grow to a thousand.
            return Ok(());
        }
        let steps: Vec<usize> = (1..=length).collect();
        problem.check_pieces(&steps);
    }
}

#[test]
fn long_prompts() {
    for (length, decay) in [(4096, Decay::Any), (4096, Decay::None), (4096, Decay::All)] {
        let shape = Mamba2Shape {
            batch: 1,
            length,
            heads: 2,
            head_dim: 8,
            groups: 1,
            state: 16,
            kernel: 4,
        };
        let mut problem = Problem::<f32>::new(shape, decay, 3, length as u64);
        problem.conv.padding.clear();
        problem.check(&format!("{length} positions, {decay:?}"));
    }
}

#[test]
fn wrong_lengths_are_refused() {
    let shape = Mamba2Shape {
        batch: 1,
        length: 2,
        heads: 4,
        head_dim: 8,
        groups: 2,
        state: 16,
        kernel: 4,
    };
    let mut problem = Problem::<f32>::new(shape, Decay::Any, 0, 1);
    problem.conv.before.clear();
    problem.conv.padding.clear();
    let run = |out: usize, states: usize, shape: &Mamba2Shape| {
        mamba2(
            &mut vec![0.0f32; out],
            &mut vec![0.0; states],
            &problem.inputs(),
            &problem.layer(),
            shape,
        )
        .unwrap_err()
        .to_string()
    };
    assert_eq!(
        run(1, 512, &shape),
        "mamba2: out: expected 64 elements, found 1"
    );
    assert_eq!(
        run(64, 1, &shape),
        "mamba2: state: expected 512 elements, found 1"
    );
    let uneven = Mamba2Shape { groups: 3, ..shape };
    assert_eq!(
        run(64, 512, &uneven),
        "mamba2: heads: expected a multiple of the groups, found 4"
    );
    let huge = Mamba2Shape {
        batch: usize::MAX / 2,
        ..shape
    };
    let overflow = KernelError::Overflow {
        what: "mamba2: shape",
    };
    assert_eq!(run(64, 512, &huge), overflow.to_string());
    let longer = Mamba2Shape { length: 3, ..shape };
    assert_eq!(
        run(96, 512, &longer),
        "mamba2: gate: expected a row for each position, found 64"
    );
}
