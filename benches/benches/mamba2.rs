//! A Mamba 2 layer of Nemotron Nano 2 (9B) and of a small model, projections in 4 bits: prompts
//! and a decode step in tokens per second, with mlex's kernels, with MLX's operations in chunks,
//! and as a graph that goes from token to token (the recurrence alone, without projections;
//! `between-projections` is the kernel without them, which does the convolution and the norm too;
//! `projections` are the projections alone).

use criterion::{Criterion, criterion_group, criterion_main};
use mlex_benches::normal;
use mlex_benches::recurrent::{Projection, Subject, bench, numbers, rows};
use mlex_core::{Array, Dtype, Result, eval};
use mlex_kernels::{Floats, Mamba2Inputs, Mamba2Layer, Mamba2Shape, mamba2};
use mlex_nn::{Mamba2, Mamba2Config, RecurrentCache, Weights};

const SHAPES: [(&str, Mamba2Config); 2] = [
    ("nemotron-nano-9b", shape(4480, 128, 80)),
    ("small", shape(1024, 32, 64)),
];

const fn shape(hidden_size: i32, num_heads: i32, head_dim: i32) -> Mamba2Config {
    Mamba2Config {
        hidden_size,
        num_heads,
        head_dim,
        state_size: 128,
        num_groups: 8,
        conv_kernel: 4,
        proj_bias: false,
        conv_bias: true,
        time_step_limit: (0.0, f32::INFINITY),
        norm_eps: 1e-5,
    }
}

struct Layer(Mamba2);

impl Subject for Layer {
    type Config = Mamba2Config;

    fn hidden_size(config: &Mamba2Config) -> i32 {
        config.hidden_size
    }

    fn projections(config: &Mamba2Config) -> Vec<Projection> {
        let (hidden, inner) = (config.hidden_size, config.inner_size());
        vec![
            Projection {
                name: "in_proj",
                input: hidden,
                output: inner + config.conv_dim() + config.num_heads,
            },
            Projection {
                name: "out_proj",
                input: inner,
                output: hidden,
            },
        ]
    }

    fn tensors(config: &Mamba2Config, dtype: Dtype) -> Result<Vec<(&'static str, Array)>> {
        let (heads, channels) = (config.num_heads, config.conv_dim());
        let taps = [channels, config.conv_kernel, 1];
        Ok(vec![
            ("conv1d.weight", normal(&taps, dtype, 11)?),
            ("conv1d.bias", normal(&[channels], dtype, 12)?),
            ("A_log", normal(&[heads], Dtype::Float32, 13)?),
            ("dt_bias", normal(&[heads], dtype, 14)?),
            ("D", normal(&[heads], dtype, 15)?),
            ("norm.weight", normal(&[config.inner_size()], dtype, 16)?),
        ])
    }

    fn load(weights: &Weights, config: &Mamba2Config) -> mlex_nn::Result<Self> {
        Mamba2::load(weights, config).map(Self)
    }

    fn forward(&self, x: &Array, cache: &mut RecurrentCache) -> mlex_nn::Result<Array> {
        self.0.forward(x, cache)
    }

    fn between(config: &Mamba2Config, length: usize) -> Result<impl FnMut()> {
        let mut between = Between::new(config, length)?;
        Ok(move || between.run())
    }

    fn token_by_token(config: &Mamba2Config, length: i32) -> Result<()> {
        let (heads, dim, n) = (config.num_heads, config.head_dim, config.state_size);
        let groups = config.num_groups;
        let x = normal(&[length, groups, heads / groups, dim, 1], Dtype::Float32, 1)?;
        let row = |seed| normal(&[length, groups, 1, 1, n], Dtype::Float32, seed);
        let (b, c) = (row(2)?, row(3)?);
        let dt = normal(&[length, groups, heads / groups, 1, 1], Dtype::Float32, 4)?.sigmoid()?;
        let decay = dt.negative()?.exp()?;
        let x = x.multiply(&dt)?;
        let mut state = Array::zeros(&[groups, heads / groups, dim, n], Dtype::Float32)?;
        let mut outputs = Vec::new();
        for t in 0..length {
            let at = |x: &Array| x.at(0, t);
            let (x, b, c, decay) = (at(&x)?, at(&b)?, at(&c)?, at(&decay)?);
            state = state.multiply(&decay)?.add(&x.multiply(&b)?)?;
            outputs.push(state.multiply(&c)?.sum(&[-1], false)?);
        }
        let y = Array::stack(&outputs, 0)?;
        eval([&y, &state])
    }
}

/// What the kernel computes between the projections, of random ones.
struct Between {
    shape: Mamba2Shape,
    gate: Vec<f32>,
    channels: Vec<f32>,
    dt: Vec<f32>,
    conv: [Vec<f32>; 2],
    per_head: Vec<f32>,
    norm: Vec<f32>,
    out: Vec<f32>,
    state: Vec<f32>,
}

impl Between {
    fn new(config: &Mamba2Config, length: usize) -> Result<Self> {
        let size = |n: i32| n as usize;
        let shape = Mamba2Shape {
            batch: 1,
            length,
            heads: size(config.num_heads),
            head_dim: size(config.head_dim),
            groups: size(config.num_groups),
            state: size(config.state_size),
            kernel: size(config.conv_kernel),
        };
        let (inner, channels) = (shape.inner(), shape.channels());
        Ok(Self {
            gate: numbers(length * inner, 1)?,
            channels: numbers(length * channels, 2)?,
            dt: numbers(length * shape.heads, 3)?,
            conv: [numbers(shape.kernel * channels, 4)?, numbers(channels, 5)?],
            per_head: numbers(shape.heads, 6)?,
            norm: numbers(inner, 7)?,
            out: vec![0.0; length * inner],
            state: vec![0.0; inner * shape.state],
            shape,
        })
    }

    fn run(&mut self) {
        let inputs = Mamba2Inputs {
            gate: rows(&self.gate, self.shape.inner()),
            channels: rows(&self.channels, self.shape.channels()),
            dt: rows(&self.dt, self.shape.heads),
            before: &[],
            padding: &[],
        };
        let [taps, bias] = &self.conv;
        let layer = Mamba2Layer {
            conv: Floats::F32(taps),
            conv_bias: Some(Floats::F32(bias)),
            a_log: Floats::F32(&self.per_head),
            dt_bias: Floats::F32(&self.per_head),
            dt_limit: (0.0, f32::INFINITY),
            d: Floats::F32(&self.per_head),
            norm: Floats::F32(&self.norm),
            norm_eps: 1e-5,
        };
        self.state.fill(0.0);
        mamba2(&mut self.out, &mut self.state, &inputs, &layer, &self.shape).expect("valid shapes");
    }
}

fn layers(c: &mut Criterion) {
    for (name, config) in SHAPES {
        bench::<Layer>(c, &format!("mamba2/{name}"), &config);
    }
}

criterion_group!(benches, layers);
criterion_main!(benches);
