//! A Mamba 2 layer between its projections, with the sizes of Nemotron Nano 2 (9B) and of a small
//! hybrid: prompts of several lengths in FLOP/s of the recurrence (as elements: two products of a
//! state and a row per position and head), and a decode step in GB/s of the state, read and
//! written.

use std::time::Duration;

use criterion::{
    BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main,
};
use mlex_kernels::{Floats, Mamba2Inputs, Mamba2Layer, Mamba2Shape, Strided, mamba2};

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

fn scan(c: &mut Criterion) {
    for (name, heads, head_dim) in [("nemotron-nano-9b", 128, 80), ("small", 32, 64)] {
        let mut group = c.benchmark_group(format!("mamba2/{name}"));
        group
            .sample_size(10)
            .sampling_mode(SamplingMode::Flat)
            .warm_up_time(Duration::from_millis(300))
            .measurement_time(Duration::from_secs(1));
        for length in [1, 4, 512, 2048] {
            let shape = Mamba2Shape {
                batch: 1,
                length,
                heads,
                head_dim,
                groups: 8,
                state: 128,
                kernel: 4,
            };
            let (channels, inner) = (shape.channels(), shape.inner());
            let (conv, per_head, norm) = (noise(4 * channels), noise(heads), noise(inner));
            let layer = Mamba2Layer {
                conv: Floats::F32(&conv),
                conv_bias: None,
                a_log: Floats::F32(&per_head),
                dt_bias: Floats::F32(&per_head),
                dt_limit: (0.0, f32::INFINITY),
                d: Floats::F32(&per_head),
                norm: Floats::F32(&norm),
                norm_eps: 1e-5,
            };
            let (gate, x) = (noise(length * inner), noise(length * channels));
            let (dt, before) = (noise(length * heads), noise(3 * channels));
            fn strided(data: &[f32], stride: usize) -> Strided<'_, f32> {
                Strided { data, stride }
            }
            let inputs = Mamba2Inputs {
                gate: strided(&gate, inner),
                channels: strided(&x, channels),
                dt: strided(&dt, heads),
                before: &before,
                padding: &[],
            };
            // As a step has them: the states of all layers, more than fits in a cache.
            let layers = if length == 1 { 18 } else { 1 };
            let mut states = vec![vec![0.1f32; inner * 128]; layers];
            let mut out = vec![0.0f32; length * inner];
            let numbers = layers * length * inner * 128;
            group.throughput(if length == 1 {
                Throughput::Bytes(8 * numbers as u64)
            } else {
                Throughput::Elements(4 * numbers as u64)
            });
            group.bench_function(BenchmarkId::from_parameter(length), |b| {
                b.iter(|| {
                    for state in &mut states {
                        mamba2(&mut out, state, &inputs, &layer, &shape).expect("valid");
                    }
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, scan);
criterion_main!(benches);
