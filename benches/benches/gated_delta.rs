//! A gated delta net of Qwen3.5-0.8B and 4B, projections in 4 bits: prompts and a decode step in
//! tokens per second, with mlex's kernels, with MLX's operations in chunks, and as a graph that
//! goes from token to token, which is how the layer is usually ported (the rule alone, without
//! projections; `between-projections` is the kernel without them, which does the convolution and
//! the norms too; `projections` are the projections alone).

use criterion::{Criterion, criterion_group, criterion_main};
use mlex_benches::normal;
use mlex_benches::recurrent::{Projection, Subject, bench, numbers, rows};
use mlex_core::{Array, Dtype, Result, eval};
use mlex_kernels::{DeltaInputs, DeltaLayer, DeltaShape, Floats, gated_delta};
use mlex_nn::{GatedDeltaConfig, GatedDeltaNet, RecurrentCache, Weights};

const SHAPES: [(&str, GatedDeltaConfig); 2] = [
    ("qwen3.5-0.8b", shape(1024, 16)),
    ("qwen3.5-4b", shape(2560, 32)),
];

const fn shape(hidden_size: i32, num_value_heads: i32) -> GatedDeltaConfig {
    GatedDeltaConfig {
        hidden_size,
        num_key_heads: 16,
        num_value_heads,
        key_head_dim: 128,
        value_head_dim: 128,
        conv_kernel: 4,
        norm_eps: 1e-6,
    }
}

struct Delta(GatedDeltaNet);

impl Subject for Delta {
    type Config = GatedDeltaConfig;

    fn hidden_size(config: &GatedDeltaConfig) -> i32 {
        config.hidden_size
    }

    fn projections(config: &GatedDeltaConfig) -> Vec<Projection> {
        let (hidden, values) = (config.hidden_size, config.value_dim());
        let inputs = [
            ("in_proj_qkv", config.conv_dim()),
            ("in_proj_z", values),
            ("in_proj_b", config.num_value_heads),
            ("in_proj_a", config.num_value_heads),
        ];
        let inputs = inputs.map(|(name, output)| Projection {
            name,
            input: hidden,
            output,
        });
        let output = Projection {
            name: "out_proj",
            input: values,
            output: hidden,
        };
        inputs.into_iter().chain([output]).collect()
    }

    fn tensors(config: &GatedDeltaConfig, dtype: Dtype) -> Result<Vec<(&'static str, Array)>> {
        let heads = config.num_value_heads;
        let taps = [config.conv_dim(), config.conv_kernel, 1];
        Ok(vec![
            ("conv1d.weight", normal(&taps, dtype, 11)?),
            ("A_log", normal(&[heads], Dtype::Float32, 12)?),
            ("dt_bias", normal(&[heads], dtype, 13)?),
            ("norm.weight", normal(&[config.value_head_dim], dtype, 14)?),
        ])
    }

    fn load(weights: &Weights, config: &GatedDeltaConfig) -> mlex_nn::Result<Self> {
        GatedDeltaNet::load(weights, config).map(Self)
    }

    fn forward(&self, x: &Array, cache: &mut RecurrentCache) -> mlex_nn::Result<Array> {
        self.0.forward(x, cache)
    }

    fn between(config: &GatedDeltaConfig, length: usize) -> Result<impl FnMut()> {
        let mut between = Between::new(config, length)?;
        Ok(move || between.run())
    }

    fn token_by_token(config: &GatedDeltaConfig, length: i32) -> Result<()> {
        let (heads, dim) = (config.num_value_heads, config.key_head_dim);
        let row = |seed| normal(&[length, heads, 1, dim], Dtype::Float32, seed)?.multiply(0.1);
        let (q, k) = (row(1)?, row(2)?);
        let v = normal(&[length, heads, dim, 1], Dtype::Float32, 3)?;
        let gate = normal(&[length, heads, 1, 1], Dtype::Float32, 4)?.sigmoid()?;
        let mut state = Array::zeros(&[heads, dim, dim], Dtype::Float32)?;
        let mut outputs = Vec::new();
        for t in 0..length {
            let at = |x: &Array| x.at(0, t);
            let (q, k, v, gate) = (at(&q)?, at(&k)?, at(&v)?, at(&gate)?);
            state = state.multiply(&gate)?;
            let known = state.multiply(&k)?.sum(&[-1], true)?;
            let u = v.subtract(&known)?.multiply(&gate)?;
            state = state.add(&u.multiply(&k)?)?;
            outputs.push(state.multiply(&q)?.sum(&[-1], false)?);
        }
        let y = Array::stack(&outputs, 0)?;
        eval([&y, &state])
    }
}

/// What the kernel computes between the projections, of random ones.
struct Between {
    shape: DeltaShape,
    projected: [Vec<f32>; 4],
    conv: Vec<f32>,
    per_head: Vec<f32>,
    norm: Vec<f32>,
    out: Vec<f32>,
    state: Vec<f32>,
}

impl Between {
    fn new(config: &GatedDeltaConfig, length: usize) -> Result<Self> {
        let size = |n: i32| n as usize;
        let shape = DeltaShape {
            batch: 1,
            length,
            key_heads: size(config.num_key_heads),
            value_heads: size(config.num_value_heads),
            key_dim: size(config.key_head_dim),
            value_dim: size(config.value_head_dim),
            kernel: size(config.conv_kernel),
        };
        let (heads, values) = (shape.value_heads, shape.value_heads * shape.value_dim);
        Ok(Self {
            projected: [
                numbers(length * shape.channels(), 1)?,
                numbers(length * values, 2)?,
                numbers(length * heads, 3)?,
                numbers(length * heads, 4)?,
            ],
            conv: numbers(shape.channels() * shape.kernel, 5)?,
            per_head: numbers(heads, 6)?,
            norm: numbers(shape.value_dim, 7)?,
            out: vec![0.0; length * values],
            state: vec![0.0; values * shape.key_dim],
            shape,
        })
    }

    fn run(&mut self) {
        let [qkv, gate, beta, decay] = self.projected.each_ref();
        let (heads, values) = (
            self.shape.value_heads,
            self.shape.value_heads * self.shape.value_dim,
        );
        let inputs = DeltaInputs {
            qkv: rows(qkv, self.shape.channels()),
            gate: rows(gate, values),
            beta: rows(beta, heads),
            decay: rows(decay, heads),
            before: &[],
            padding: &[],
        };
        let layer = DeltaLayer {
            conv: Floats::F32(&self.conv),
            a_log: Floats::F32(&self.per_head),
            dt_bias: Floats::F32(&self.per_head),
            norm: Floats::F32(&self.norm),
            norm_eps: 1e-6,
        };
        self.state.fill(0.0);
        gated_delta(&mut self.out, &mut self.state, &inputs, &layer, &self.shape)
            .expect("valid shapes");
    }
}

fn layers(c: &mut Criterion) {
    for (name, config) in SHAPES {
        bench::<Delta>(c, &format!("gated_delta/{name}"), &config);
    }
}

criterion_group!(benches, layers);
criterion_main!(benches);
