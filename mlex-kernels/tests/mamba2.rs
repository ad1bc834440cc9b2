//! Mamba 2 against its definition in f64, position by position.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Random, Values, at_every_level, epsilon};
use half::{bf16, f16};
use mlex_kernels::{
    Element, KernelError, Mamba2Inputs, Mamba2Layer, Mamba2Shape, Strided, mamba2, mamba2_tail,
};
use proptest::prelude::*;

/// A layer, its inputs and the state before them.
struct Problem<T> {
    shape: Mamba2Shape,
    /// Each row of the inputs has so many elements more than are used.
    gap: usize,
    gate: Vec<T>,
    channels: Vec<T>,
    dt: Vec<T>,
    before: Vec<T>,
    padding: Vec<usize>,
    conv: Values,
    conv_bias: Option<Values>,
    a_log: Values,
    dt_bias: Values,
    dt_limit: (f32, f32),
    d: Values,
    norm: Values,
    state: Vec<f32>,
}

/// What decays are like.
#[derive(Debug, Clone, Copy)]
enum Decay {
    /// From almost none to all.
    Any,
    None,
    /// Of everything, in f32 too.
    All,
}

fn strided<T>(data: &[T], stride: usize) -> Strided<'_, T> {
    Strided { data, stride }
}

impl<T: Element> Problem<T> {
    fn new(shape: Mamba2Shape, decay: Decay, gap: usize, seed: u64) -> Self {
        let mut r = Random::new(seed);
        let (channels, heads) = (shape.channels(), shape.heads);
        let rows = shape.batch * shape.length;
        let a_log: Vec<f32> = (0..heads)
            .map(|_| match decay {
                Decay::Any => 4.0 * r.float() - 2.0,
                Decay::None => -40.0,
                Decay::All => 6.0,
            })
            .collect();
        let before = match r.below(3) {
            0 => vec![],
            _ => r.floats(shape.batch * (shape.kernel - 1) * channels),
        };
        let padding = match r.below(2) {
            0 => vec![],
            _ => (0..shape.batch)
                .map(|_| r.below(shape.length + 2))
                .collect(),
        };
        let kind = r.below(3);
        let has_bias = r.below(2) == 0;
        Self {
            gate: r.floats(rows * (shape.inner() + gap)),
            channels: r.floats(rows * (channels + gap)),
            dt: r.floats(rows * (heads + gap)),
            conv: Values::new(kind, &r.floats::<f32>(channels * shape.kernel)),
            conv_bias: has_bias.then(|| Values::new(kind, &r.floats::<f32>(channels))),
            a_log: Values::new(0, &a_log),
            dt_bias: Values::new(kind, &r.floats::<f32>(heads)),
            dt_limit: [(0.0, f32::INFINITY), (0.3, 1.1)][r.below(2)],
            d: Values::new(kind, &r.floats::<f32>(heads)),
            norm: Values::new(kind, &r.floats::<f32>(shape.inner())),
            state: r.floats(shape.batch * shape.inner() * shape.state),
            shape,
            gap,
            before,
            padding,
        }
    }

    fn inputs(&self) -> Mamba2Inputs<'_, T> {
        Mamba2Inputs {
            gate: strided(&self.gate, self.shape.inner() + self.gap),
            channels: strided(&self.channels, self.shape.channels() + self.gap),
            dt: strided(&self.dt, self.shape.heads + self.gap),
            before: &self.before,
            padding: &self.padding,
        }
    }

    fn layer(&self) -> Mamba2Layer<'_> {
        Mamba2Layer {
            conv: self.conv.view(),
            conv_bias: self.conv_bias.as_ref().map(Values::view),
            a_log: self.a_log.view(),
            dt_bias: self.dt_bias.view(),
            dt_limit: self.dt_limit,
            d: self.d.view(),
            norm: self.norm.view(),
            norm_eps: 1e-5,
        }
    }

    /// The input of the convolution at a position, which may lie before the first.
    fn input(&self, b: usize, position: isize, channel: usize) -> f64 {
        let channels = self.shape.channels();
        let value = if position >= 0 {
            let t = position as usize;
            if self.padding.get(b).is_some_and(|&count| t < count) {
                return 0.0;
            }
            self.channels[(b * self.shape.length + t) * (channels + self.gap) + channel]
        } else if self.before.is_empty() {
            return 0.0;
        } else {
            let kept = self.shape.kernel as isize - 1;
            let row = b as isize * kept + kept + position;
            self.before[row as usize * channels + channel]
        };
        f64::from(value.to_f32())
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
            kernel,
        } = self.shape;
        let inner = heads * head_dim;
        let mut states: Vec<f64> = self.state.iter().map(|&x| f64::from(x)).collect();
        let mut out = vec![0.0; batch * length * inner];
        let silu = |x: f64| x / (1.0 + (-x).exp());
        for b in 0..batch {
            let start = self.padding.get(b).copied().unwrap_or(0).min(length);
            for t in start..length {
                let channel = |c: usize| {
                    let taps = (0..kernel).map(|j| {
                        let position = (t + j) as isize - (kernel as isize - 1);
                        let tap = f64::from(self.conv.view().get(j * self.shape.channels() + c));
                        tap * self.input(b, position, c)
                    });
                    let bias = self.conv_bias.as_ref();
                    silu(taps.sum::<f64>() + bias.map_or(0.0, |bias| f64::from(bias.view().get(c))))
                };
                let row = b * length + t;
                let mut y = vec![0.0; inner];
                for h in 0..heads {
                    let group = h / (heads / groups);
                    let at = row * (heads + self.gap) + h;
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
                            let z = self.gate[row * (inner + self.gap) + group * width + i];
                            // The kernel keeps the recurrence's output in the element type.
                            f64::from(T::from_f32(*y as f32).to_f32()) * silu(z.to_f32().into())
                        })
                        .collect();
                    let mean = gated.iter().map(|x| x * x).sum::<f64>() / width as f64;
                    for (i, gated) in gated.into_iter().enumerate() {
                        let weight = f64::from(self.norm.view().get(group * width + i));
                        out[row * inner + group * width + i] =
                            gated / (mean + 1e-5).sqrt() * weight;
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
            close(
                &format!("{what}, {level:?}, output"),
                found,
                &expected,
                tolerance,
            );
            let found = state.iter().map(|&x| f64::from(x));
            close(
                &format!("{what}, {level:?}, state"),
                found,
                &expected_state,
                1e-4,
            );
        });
    }

    /// Compares one call with calls for the positions up to each of `ends`.
    fn check_pieces(&self, ends: &[usize]) {
        let (expected, expected_state) = self.run();
        let whole = self.shape;
        let mut state = self.state.clone();
        let mut before = self.before.clone();
        let mut out = vec![vec![]; whole.batch];
        let mut first = 0;
        for &end in ends {
            let shape = Mamba2Shape {
                length: end - first,
                ..whole
            };
            let rows = |data: &[T], width: usize| -> Vec<T> {
                let batches = data.chunks(whole.length * (width + self.gap));
                let parts = batches.flat_map(|rows| {
                    let rows = rows.chunks(width + self.gap).skip(first).take(end - first);
                    rows.flat_map(|row| row[..width].to_vec())
                });
                parts.collect()
            };
            let (gate, channels, dt) = (
                rows(&self.gate, shape.inner()),
                rows(&self.channels, shape.channels()),
                rows(&self.dt, shape.heads),
            );
            let left = |&count: &usize| count.min(end).saturating_sub(first);
            let padding: Vec<usize> = self.padding.iter().map(left).collect();
            let inputs = Mamba2Inputs {
                gate: strided(&gate, shape.inner()),
                channels: strided(&channels, shape.channels()),
                dt: strided(&dt, shape.heads),
                before: &before,
                padding: &padding,
            };
            let rows = shape.batch * shape.length;
            let mut y = vec![T::from_f32(f32::NAN); rows * shape.inner()];
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
        close("output", out.concat().iter().map(wide), &expected, 1e-4);
        let expected: Vec<f64> = expected_state.into_iter().map(f64::from).collect();
        close("state", state.into_iter().map(f64::from), &expected, 1e-4);
    }
}

#[track_caller]
fn close(what: &str, found: impl Iterator<Item = f64>, expected: &[f64], tolerance: f64) {
    let largest = expected.iter().fold(1.0f64, |max, x| max.max(x.abs()));
    let mut count = 0;
    for (found, expected) in found.zip(expected) {
        count += 1;
        assert!(
            (found - expected).abs() <= tolerance * largest,
            "{what}: {found} where {expected} is expected, the largest is {largest}"
        );
    }
    assert_eq!(count, expected.len());
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
        let problem = Problem::<f32>::new(shape, decay, 0, seed);
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
        problem.padding.clear();
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
    problem.before.clear();
    problem.padding.clear();
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
