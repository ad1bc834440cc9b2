//! A gated delta net between its projections, with the heads of Qwen3.5-0.8B and 4B: prompts of
//! several lengths in FLOP/s of the rule (as elements: three products of a state and a row per
//! position and head), and a decode step in GB/s of the state, read and written.

use std::time::Duration;

use criterion::{
    BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main,
};
use mlex_kernels::{DeltaInputs, DeltaLayer, DeltaShape, Floats, Strided, gated_delta};

/// Numbers that look like noise, the same each time.
fn noise(n: usize) -> Vec<f32> {
    let mut state = 1u64;
    (0..n)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

fn delta(c: &mut Criterion) {
    for (name, value_heads) in [("qwen3.5-0.8b", 16), ("qwen3.5-4b", 32)] {
        let mut group = c.benchmark_group(format!("gated_delta/{name}"));
        group
            .sample_size(10)
            .sampling_mode(SamplingMode::Flat)
            .warm_up_time(Duration::from_millis(300))
            .measurement_time(Duration::from_secs(1));
        for length in [1, 4, 512, 2048, 8192] {
            let shape = DeltaShape {
                batch: 1,
                length,
                key_heads: 16,
                value_heads,
                key_dim: 128,
                value_dim: 128,
                kernel: 4,
            };
            let (channels, values) = (shape.channels(), value_heads * 128);
            let (conv, norm) = (noise(4 * channels), noise(128));
            let (a_log, dt_bias) = (noise(value_heads), noise(value_heads));
            let layer = DeltaLayer {
                conv: Floats::F32(&conv),
                a_log: Floats::F32(&a_log),
                dt_bias: Floats::F32(&dt_bias),
                norm: Floats::F32(&norm),
                norm_eps: 1e-6,
            };
            let (qkv, gate) = (noise(length * channels), noise(length * values));
            let (beta, decay) = (noise(length * value_heads), noise(length * value_heads));
            let before = noise(3 * channels);
            fn strided(data: &[f32], stride: usize) -> Strided<'_, f32> {
                Strided { data, stride }
            }
            let inputs = DeltaInputs {
                qkv: strided(&qkv, channels),
                gate: strided(&gate, values),
                beta: strided(&beta, value_heads),
                decay: strided(&decay, value_heads),
                before: &before,
                padding: &[],
            };
            // As a step has them: the states of all layers, more than fits in a cache.
            let layers = if length == 1 { 18 } else { 1 };
            let mut states = vec![vec![0.1f32; value_heads * 128 * 128]; layers];
            let mut out = vec![0.0f32; length * values];
            let numbers = layers * length * value_heads * 128 * 128;
            group.throughput(if length == 1 {
                Throughput::Bytes(8 * numbers as u64)
            } else {
                Throughput::Elements(6 * numbers as u64)
            });
            group.bench_function(BenchmarkId::from_parameter(length), |b| {
                b.iter(|| {
                    for state in &mut states {
                        gated_delta(&mut out, state, &inputs, &layer, &shape).expect("valid");
                    }
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, delta);
criterion_main!(benches);
