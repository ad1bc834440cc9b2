//! Throughput of the kernels at the shapes of SmolLM2-135M, Qwen3-0.6B and Qwen3-8B: GB/s of
//! weights for few rows, FLOP/s (as elements) for many.

mod common;

use std::hint::black_box;

use common::noise;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::{bf16, f16};
use mlex_kernels::{
    Activation, AttentionOptions, AttentionShape, Heads, Linear, Mask, Mode, OutputOrder,
    Precision, Projection, QuantizedWeight, Scales, attention, gated, linear, project_gated,
    quantized_matmul, rms_norm,
};

/// Bytes of weights for few rows; operations otherwise.
fn throughput(m: usize, n: usize, k: usize, bytes: usize) -> Throughput {
    if m <= 8 {
        Throughput::Bytes(bytes as u64)
    } else {
        Throughput::Elements(2 * (m * n * k) as u64)
    }
}

fn quantized(c: &mut Criterion) {
    let mut group = c.benchmark_group("quantized_matmul");
    group.sample_size(10);
    for (name, bits, group_size, n, k) in [
        ("smollm2-up-4bit", 4u8, 32, 1536, 576),
        ("smollm2-down-4bit", 4, 32, 576, 1536),
        ("smollm2-head-8bit", 8, 32, 49152, 576),
        ("qwen3-0.6b-up-4bit", 4, 64, 3072, 1024),
        ("qwen3-8b-up-4bit", 4, 64, 12288, 4096),
    ] {
        let words = noise(n * k * usize::from(bits) / 32);
        let packed: Vec<u32> = words.iter().map(|v| v.to_bits().rotate_left(9)).collect();
        let scales: Vec<f16> = noise(n * k / group_size)
            .into_iter()
            .map(f16::from_f32)
            .collect();
        let floats = scales[..].into();
        let mode = Mode::Affine { bits, group_size };
        let scales = Scales::Affine {
            scales: floats,
            biases: floats,
        };
        let w = QuantizedWeight::new(mode, n, k, &packed, scales).expect("lengths match");
        for m in [1, 8, 64, 512] {
            let x = noise(m * k);
            let mut y = vec![0f32; m * n];
            group.throughput(throughput(m, n, k, w.size_in_bytes()));
            for precision in [Precision::F32, Precision::Bf16] {
                if m <= 8 && precision == Precision::Bf16 {
                    continue;
                }
                let id = BenchmarkId::new(name, format!("m{m}-{precision:?}"));
                group.bench_function(id, |b| {
                    b.iter(|| {
                        quantized_matmul(&mut y, black_box(&x), &w, precision).expect("valid");
                    });
                });
            }
        }
    }
    group.finish();
}

/// A gate and what it multiplies: two matrices of 4 bits, one after the other in memory.
fn gates(c: &mut Criterion) {
    let mut group = c.benchmark_group("project_gated");
    group.sample_size(10);
    for (name, group_size, n, k) in [
        ("smollm2-4bit", 32, 1536, 576),
        ("qwen3-0.6b-4bit", 64, 3072, 1024),
    ] {
        let words = noise(2 * n * k / 8);
        let packed: Vec<u32> = words.iter().map(|v| v.to_bits().rotate_left(9)).collect();
        let scales: Vec<f16> = noise(n * k / group_size)
            .into_iter()
            .map(f16::from_f32)
            .collect();
        let mode = Mode::Affine {
            bits: 4,
            group_size,
        };
        let floats = scales[..].into();
        let scales = Scales::Affine {
            scales: floats,
            biases: floats,
        };
        let (first, second) = packed.split_at(packed.len() / 2);
        let [gate, up] = [first, second].map(|packed| {
            let w = QuantizedWeight::new(mode, n, k, packed, scales).expect("lengths match");
            Projection::Quantized(w, None)
        });
        let bytes = 4 * packed.len() + 4 * n * k / group_size * 2;
        for m in [1, 512] {
            let x = noise(m * k);
            let mut y = vec![0f32; m * n];
            group.throughput(throughput(m, 2 * n, k, bytes));
            for precision in [Precision::F32, Precision::Bf16] {
                if m <= 8 && precision == Precision::Bf16 {
                    continue;
                }
                let id = BenchmarkId::new(name, format!("m{m}-{precision:?}"));
                let weights = [&gate, &up];
                group.bench_function(id, |b| {
                    b.iter(|| {
                        project_gated(&mut y, black_box(&x), weights, Activation::Silu, precision)
                            .expect("valid");
                    });
                });
            }
        }
    }
    group.finish();
}

fn dense(c: &mut Criterion) {
    let mut group = c.benchmark_group("linear");
    group.sample_size(10);
    let (n, k) = (3072, 1024);
    let weight: Vec<bf16> = noise(n * k).into_iter().map(bf16::from_f32).collect();
    let w = Linear::new(n, k, &weight[..], None).expect("lengths match");
    for m in [1, 8, 64, 512] {
        let x = noise(m * k);
        let mut y = vec![0f32; m * n];
        group.throughput(throughput(m, n, k, 2 * n * k));
        for precision in [Precision::F32, Precision::Bf16] {
            let id = BenchmarkId::new("qwen3-0.6b-up-bf16", format!("m{m}-{precision:?}"));
            group.bench_function(id, |b| {
                b.iter(|| linear(&mut y, black_box(&x), &w, precision).expect("valid"));
            });
        }
    }
    group.finish();
}

fn attentions(c: &mut Criterion) {
    let mut group = c.benchmark_group("attention");
    group.sample_size(10);
    for (name, q_heads, kv_heads, dim) in [("smollm2", 9, 3, 64), ("qwen3-0.6b", 16, 8, 128)] {
        for (q_len, kv_len) in [(512, 512), (1, 512), (1, 4096)] {
            let shape = AttentionShape {
                batch: 1,
                q_heads,
                kv_heads,
                q_len,
                kv_len,
                head_dim: dim,
                value_dim: dim,
            };
            let options = AttentionOptions {
                scale: 0.1,
                mask: Mask::Causal { window: None },
                sinks: None,
                output: OutputOrder::HeadsFirst,
            };
            let q = noise(q_heads * q_len * dim);
            let kv = noise(kv_heads * kv_len * dim);
            let mut out = vec![0f32; q.len()];
            group.throughput(if q_len == 1 {
                Throughput::Bytes(8 * kv.len() as u64)
            } else {
                Throughput::Elements((2 * q_heads * q_len * kv_len * dim) as u64)
            });
            group.bench_function(BenchmarkId::new(name, format!("{q_len}x{kv_len}")), |b| {
                let q = Heads::contiguous(&q[..], q_heads, q_len, dim);
                let kv = Heads::contiguous(&kv[..], kv_heads, kv_len, dim);
                b.iter(|| {
                    attention(&mut out, black_box(q), kv, kv, shape, options).expect("valid");
                });
            });
        }
    }
    group.finish();
}

fn rows(c: &mut Criterion) {
    let mut group = c.benchmark_group("rows");
    for rows in [1, 512] {
        let x = noise(rows * 1024);
        let weight = noise(1024);
        let mut out = x.clone();
        group.throughput(Throughput::Bytes(8 * x.len() as u64));
        group.bench_function(BenchmarkId::new("rms_norm", rows), |b| {
            let weight = Some(weight[..].into());
            b.iter(|| rms_norm(&mut out, black_box(&x), 1024, weight, 1e-6).expect("valid"));
        });
        group.throughput(Throughput::Bytes(12 * x.len() as u64));
        group.bench_function(BenchmarkId::new("swiglu", rows), |b| {
            b.iter(|| gated(&mut out, black_box(&x), &x, Activation::Silu).expect("valid"));
        });
    }
    group.finish();
}

criterion_group!(benches, quantized, gates, dense, attentions, rows);
criterion_main!(benches);
