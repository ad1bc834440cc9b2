//! Attention of SmolLM2-135M and Qwen3-0.6B, with mlex's kernels and with MLX's operations: a
//! prompt of 512 tokens in FLOP/s (as elements; half of the pairs count, for the mask), a
//! decode step at 512 and 4096 keys in GB/s of keys and values.

use std::hint::black_box;
use std::time::Duration;

use criterion::{
    BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main,
};
use mlex_benches::{Backend, calls, normal, run, short};
use mlex_core::{Array, AttentionMask, Dtype};
use mlex_nn::attention::attention;

struct Shape {
    name: &'static str,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
}

const SHAPES: &[Shape] = &[
    Shape {
        name: "smollm2",
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
    },
    Shape {
        name: "qwen3-0.6b",
        heads: 16,
        kv_heads: 8,
        head_dim: 128,
    },
];

/// The keys and values of some layers, as a cache holds them.
fn caches(
    shape: &Shape,
    keys: i32,
    dtype: Dtype,
    count: usize,
) -> mlex_core::Result<Vec<[Array; 2]>> {
    let dims = [1, shape.kv_heads, keys, shape.head_dim];
    let layer = |seed| Ok([normal(&dims, dtype, seed)?, normal(&dims, dtype, seed + 1)?]);
    (0..count as u64)
        .map(|index| layer(2 * index + 1))
        .collect()
}

fn attentions(c: &mut Criterion) {
    for shape in SHAPES {
        let mut group = c.benchmark_group(format!("attention/{}", shape.name));
        group
            .sample_size(10)
            .sampling_mode(SamplingMode::Flat)
            .warm_up_time(Duration::from_millis(300))
            .measurement_time(Duration::from_secs(1));
        for (what, queries, keys) in [
            ("prefill", 512, 512),
            ("decode", 1, 512),
            ("decode", 1, 4096),
        ] {
            for dtype in [Dtype::Float32, Dtype::Bfloat16] {
                let elements = (shape.kv_heads * keys * shape.head_dim) as usize;
                let bytes = 2 * elements * dtype.size_in_bytes();
                let count = if queries == 1 { calls(bytes) } else { 1 };
                let layers = caches(shape, keys, dtype, count).expect("valid shapes");
                let dims = [1, shape.heads, queries, shape.head_dim];
                let q = normal(&dims, dtype, 0).expect("a valid shape");
                let scale = (shape.head_dim as f32).powf(-0.5);
                for backend in [Backend::Kernels, Backend::Mlx] {
                    // MLX takes too long for all layers, and does not keep up with the memory.
                    let count = match backend {
                        Backend::Kernels => count,
                        Backend::Mlx => 1,
                    };
                    group.throughput(if queries == 1 {
                        Throughput::Bytes((count * bytes) as u64)
                    } else {
                        // Two products, two operations each, half of the pairs.
                        let pairs = (shape.heads * queries * keys) as u64;
                        Throughput::Elements(2 * pairs * shape.head_dim as u64)
                    });
                    backend.select();
                    let name = format!("{what}-{backend}-{}", short(dtype));
                    group.bench_function(BenchmarkId::new(name, keys), |b| {
                        b.iter(|| {
                            let q = black_box(&q);
                            let call = |[k, v]: &[Array; 2]| {
                                attention(q, k, v, scale, AttentionMask::Causal, None)
                            };
                            run(layers[..count].iter().map(call)).expect("valid");
                        });
                    });
                }
            }
        }
        group.finish();
    }
}

criterion_group!(benches, attentions);
criterion_main!(benches);
