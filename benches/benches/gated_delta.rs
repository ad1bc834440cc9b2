//! A gated delta net of Qwen3.5-0.8B and 4B, projections in 4 bits: prompts and a decode step in
//! tokens per second, with mlex's kernels, with MLX's operations in chunks, and as a graph that
//! goes from token to token, which is how the layer is usually ported (the rule alone, without
//! projections; `between-projections` is the kernel without them, which does the convolution and
//! the norms too).

use std::collections::BTreeMap;
use std::time::Duration;

use criterion::{
    BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main,
};
use mlex_benches::{Backend, normal, short};
use mlex_core::{Array, Dtype, QuantizationMode, Quantized, QuantizedWeight, Result, eval};
use mlex_kernels::{DeltaInputs, DeltaLayer, DeltaShape, Floats, Strided, gated_delta};
use mlex_nn::{
    GatedDeltaConfig, GatedDeltaNet, LazyTensor, QuantizationConfig, RecurrentCache, Weights,
};

const LAYOUT: Quantized = Quantized {
    bits: 4,
    group_size: 64,
    mode: QuantizationMode::Affine,
};

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

/// A layer with random weights, projections quantized, the rest in `dtype`.
fn layer(config: &GatedDeltaConfig, dtype: Dtype) -> mlex_nn::Result<GatedDeltaNet> {
    let (hidden, heads) = (config.hidden_size, config.num_value_heads);
    let (channels, values) = (config.conv_dim(), config.value_dim());
    let mut tensors = BTreeMap::new();
    let mut put = |name: String, array: Array| {
        tensors.insert(name, LazyTensor::ready(array));
    };
    for (seed, (name, rows, columns)) in [
        ("in_proj_qkv", channels, hidden),
        ("in_proj_z", values, hidden),
        ("in_proj_b", heads, hidden),
        ("in_proj_a", heads, hidden),
        ("out_proj", hidden, values),
    ]
    .into_iter()
    .enumerate()
    {
        let scale = (columns as f32).powf(-0.5);
        let weight = normal(&[rows, columns], dtype, seed as u64)?.multiply(scale)?;
        let QuantizedWeight {
            weight,
            scales,
            biases,
            ..
        } = QuantizedWeight::quantize(&weight, LAYOUT)?;
        put(format!("{name}.weight"), weight);
        put(format!("{name}.scales"), scales);
        if let Some(biases) = biases {
            put(format!("{name}.biases"), biases);
        }
    }
    put(
        "conv1d.weight".into(),
        normal(&[channels, 4, 1], dtype, 11)?,
    );
    put("A_log".into(), normal(&[heads], Dtype::Float32, 12)?);
    put("dt_bias".into(), normal(&[heads], dtype, 13)?);
    put(
        "norm.weight".into(),
        normal(&[config.value_head_dim], dtype, 14)?,
    );
    let weights = Weights::new(tensors, QuantizationConfig::uniform(LAYOUT));
    let layer = GatedDeltaNet::load(&weights, config)?;
    weights.finish()?;
    Ok(layer)
}

/// Runs the layer once over `x` and computes the output and the state.
fn run(layer: &GatedDeltaNet, x: &Array, cache: &mut RecurrentCache) -> mlex_nn::Result<()> {
    let y = layer.forward(x, cache)?;
    Ok(eval(std::iter::once(&y).chain(cache.arrays()))?)
}

/// The rule by a few operations for each of `length` tokens.
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
        let random = |count: usize, seed| normal(&[count as i32], Dtype::Float32, seed)?.to_vec();
        let (heads, values) = (shape.value_heads, shape.value_heads * shape.value_dim);
        Ok(Self {
            projected: [
                random(length * shape.channels(), 1)?,
                random(length * values, 2)?,
                random(length * heads, 3)?,
                random(length * heads, 4)?,
            ],
            conv: random(shape.channels() * shape.kernel, 5)?,
            per_head: random(heads, 6)?,
            norm: random(shape.value_dim, 7)?,
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
        fn strided(data: &[f32], stride: usize) -> Strided<'_, f32> {
            Strided { data, stride }
        }
        let inputs = DeltaInputs {
            qkv: strided(qkv, self.shape.channels()),
            gate: strided(gate, values),
            beta: strided(beta, heads),
            decay: strided(decay, heads),
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
        let mut group = c.benchmark_group(format!("gated_delta/{name}"));
        group
            .sample_size(10)
            .sampling_mode(SamplingMode::Flat)
            .warm_up_time(Duration::from_millis(300))
            .measurement_time(Duration::from_secs(1));
        for dtype in [Dtype::Float32, Dtype::Bfloat16] {
            let layer = layer(&config, dtype).expect("valid shapes");
            for (backend, length) in [
                (Backend::Kernels, 1),
                (Backend::Kernels, 512),
                (Backend::Kernels, 2048),
                (Backend::Kernels, 8192),
                (Backend::Mlx, 512),
            ] {
                let dims = [1, length, config.hidden_size];
                let x = normal(&dims, dtype, 0).expect("a valid shape");
                backend.select();
                group.throughput(Throughput::Elements(length as u64));
                let id = BenchmarkId::new(format!("{backend}-{}", short(dtype)), length);
                // A step goes on from a state, a prompt starts without one.
                let mut state = RecurrentCache::default();
                run(&layer, &x, &mut state).expect("valid");
                group.bench_function(id, |b| {
                    b.iter(|| {
                        if length > 1 {
                            state = RecurrentCache::default();
                        }
                        run(&layer, &x, &mut state).expect("valid");
                    });
                });
            }
        }
        let length = 2048;
        let mut between = Between::new(&config, length).expect("valid shapes");
        group.throughput(Throughput::Elements(length as u64));
        group.bench_function(BenchmarkId::new("between-projections", length), |b| {
            b.iter(|| between.run());
        });
        let length = 256;
        group.throughput(Throughput::Elements(length as u64));
        group.bench_function(BenchmarkId::new("token-by-token", length), |b| {
            b.iter(|| token_by_token(&config, length).expect("valid"));
        });
        group.finish();
    }
}

criterion_group!(benches, layers);
criterion_main!(benches);
