//! RMSNorm at the widths of SmolLM2-135M, Qwen3-0.6B and Qwen3-8B, with mlex's kernels and with
//! MLX's operations: GB/s read and written. For one row it is the cost of a node.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::Duration;

use criterion::{
    BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main,
};
use mlex_benches::{Backend, normal, run, short};
use mlex_core::Dtype;
use mlex_nn::{LazyTensor, QuantizationConfig, Result, RmsNorm, Weights};

/// As many norms as SmolLM2 has layers.
const CALLS: usize = 30;

fn norm(width: i32, dtype: Dtype) -> Result<RmsNorm> {
    let weight = LazyTensor::ready(normal(&[width], dtype, 1)?);
    let tensors = BTreeMap::from([("weight".to_owned(), weight)]);
    let weights = Weights::new(tensors, QuantizationConfig::default());
    RmsNorm::load(&weights, width, 1e-5)
}

fn norms(c: &mut Criterion) {
    for width in [576, 1024, 4096] {
        let mut group = c.benchmark_group(format!("rms_norm/{width}"));
        group
            .sample_size(10)
            .sampling_mode(SamplingMode::Flat)
            .warm_up_time(Duration::from_millis(300))
            .measurement_time(Duration::from_secs(1));
        for dtype in [Dtype::Float32, Dtype::Bfloat16] {
            let norm = norm(width, dtype).expect("a valid width");
            for rows in [1, 512] {
                let x = normal(&[1, rows, width], dtype, 2).expect("a valid shape");
                let count = if rows == 1 { CALLS } else { 1 };
                group.throughput(Throughput::Bytes((2 * count * x.nbytes()) as u64));
                for backend in [Backend::Kernels, Backend::Mlx] {
                    backend.select();
                    let name = format!("{backend}-{}", short(dtype));
                    group.bench_function(BenchmarkId::new(name, rows), |b| {
                        b.iter(|| {
                            let call = |_| norm.forward(black_box(&x));
                            run((0..count).map(call)).expect("valid");
                        });
                    });
                }
            }
        }
        group.finish();
    }
}

criterion_group!(benches, norms);
criterion_main!(benches);
