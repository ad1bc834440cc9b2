//! A gated delta net of Qwen3.5-0.8B and 4B, projections in 4 bits: prompts and a decode step in
//! tokens per second, with mlex's kernels, with MLX's operations in chunks, and as a graph that
//! goes from token to token, which is how the layer is usually ported (the rule alone, without
//! projections).

use std::collections::BTreeMap;
use std::time::Duration;

use criterion::{
    BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main,
};
use mlex_benches::{Backend, normal, short};
use mlex_core::{Array, Dtype, QuantizationMode, Quantized, QuantizedWeight, Result, eval};
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
