//! Towers at their real sizes, with a usual image or thirty seconds of sound, in FLOP/s (as
//! elements) of their products.
//!
//! MLX's own operations run in float32 alone, and where one run takes less than half a minute: in
//! bfloat16 one image takes minutes on a CPU.

use std::hint::black_box;
use std::time::Duration;

use criterion::{
    BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main,
};
use mlex_benches::towers::Tower;
use mlex_benches::{Backend, short};
use mlex_core::Dtype;

/// Those that MLX's operations compute too.
const BY_MLX: [Tower; 2] = [Tower::Qwen3Vl, Tower::GemmaAudio];

fn towers(c: &mut Criterion) {
    let mut group = c.benchmark_group("towers");
    group
        .sample_size(10)
        .sampling_mode(SamplingMode::Flat)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(2));
    for (name, tower) in Tower::ALL {
        group.throughput(Throughput::Elements(tower.flop()));
        let input = tower.input();
        for (backend, dtype) in [
            (Backend::Kernels, Dtype::Float32),
            (Backend::Kernels, Dtype::Bfloat16),
            (Backend::Mlx, Dtype::Float32),
        ] {
            if backend == Backend::Mlx && !BY_MLX.contains(&tower) {
                continue;
            }
            let id = BenchmarkId::new(format!("{name}/{backend}"), short(dtype));
            // Loaded when it runs: a filter may leave it out.
            let mut loaded = None;
            group.bench_function(id, |b| {
                backend.select();
                // The first run puts weights in order and into huge pages.
                let towers = loaded.get_or_insert_with(|| {
                    let towers = tower.load(dtype).expect("valid");
                    input.run(&towers).expect("valid");
                    towers
                });
                b.iter(|| black_box(&input).run(towers).expect("valid"));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, towers);
criterion_main!(benches);
