//! The quantized linear layer at the shapes of SmolLM2-135M, Qwen3-0.6B and Qwen3-8B, with
//! mlex's kernels and with MLX's operations: GB/s of packed weights for few rows, FLOP/s (as
//! elements) for many.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{
    BenchmarkGroup, BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group,
    criterion_main,
};
use mlex_benches::{Backend, calls, normal, run, short};
use mlex_core::{Array, Dtype, QuantizationMode, Quantized, QuantizedWeight};
use mlex_nn::{LazyTensor, Linear, QuantizationConfig, Result, Weights};

/// From how many rows on the arithmetic is the limit, not the memory.
const MANY_ROWS: i32 = 64;
/// MLX's own product is measured up to so many multiplications and additions: it needs a
/// second for a few of these.
const MLX_OP_LIMIT: u64 = 200_000_000;

struct Shape {
    name: &'static str,
    bits: i32,
    group_size: i32,
    input: i32,
    output: i32,
    rows: &'static [i32],
    /// Those that MLX can do in a bearable time.
    mlx_rows: &'static [i32],
}

const SHAPES: &[Shape] = &[
    Shape {
        name: "smollm2-up-4bit",
        bits: 4,
        group_size: 32,
        input: 576,
        output: 1536,
        rows: &[1, 8, 64, 512],
        mlx_rows: &[1, 8, 64, 512],
    },
    Shape {
        name: "smollm2-down-4bit",
        bits: 4,
        group_size: 32,
        input: 1536,
        output: 576,
        rows: &[1, 8, 64, 512],
        mlx_rows: &[1, 512],
    },
    // Of a prompt only the last row meets the head.
    Shape {
        name: "smollm2-head-8bit",
        bits: 8,
        group_size: 32,
        input: 576,
        output: 49152,
        rows: &[1, 8],
        mlx_rows: &[1],
    },
    Shape {
        name: "qwen3-0.6b-up-4bit",
        bits: 4,
        group_size: 64,
        input: 1024,
        output: 3072,
        rows: &[1, 8, 64, 512],
        mlx_rows: &[1, 8, 64, 512],
    },
    Shape {
        name: "qwen3-8b-up-4bit",
        bits: 4,
        group_size: 64,
        input: 4096,
        output: 12288,
        rows: &[1, 8, 64, 512],
        mlx_rows: &[1, 512],
    },
];

/// Layers of one shape, as a checkpoint gives them.
struct Layers {
    layers: Vec<Linear>,
    /// One of the weights, for MLX's own operation.
    weight: QuantizedWeight,
    /// Of the packed weight of one layer.
    bytes: u64,
}

impl Layers {
    fn new(shape: &Shape, dtype: Dtype) -> Result<Self> {
        let layout = Quantized {
            bits: shape.bits,
            group_size: shape.group_size,
            mode: QuantizationMode::Affine,
        };
        let dense = normal(&[shape.output, shape.input], dtype, 1)?;
        let weight = QuantizedWeight::quantize(&dense, layout)?;
        let parts = || {
            [
                Some(&weight.weight),
                Some(&weight.scales),
                weight.biases.as_ref(),
            ]
            .into_iter()
            .flatten()
        };
        mlex_core::eval(parts())?;
        let bytes: usize = parts().map(Array::nbytes).sum();
        let layer = |_| {
            let named = ["weight", "scales", "biases"].into_iter().zip(parts());
            let tensors = named.map(|(name, array)| {
                // A copy of its own: layers do not share their weights.
                let copy = Array::from_bytes(array.as_bytes()?, array.shape(), array.dtype())?;
                Ok((name.to_owned(), LazyTensor::ready(copy)))
            });
            let tensors = tensors.collect::<Result<BTreeMap<_, _>>>()?;
            let weights = Weights::new(tensors, QuantizationConfig::uniform(layout));
            Linear::load(&weights, shape.input, shape.output, false)
        };
        Ok(Self {
            layers: (0..calls(bytes)).map(layer).collect::<Result<_>>()?,
            weight,
            bytes: bytes as u64,
        })
    }
}

/// Multiplications and additions.
fn operations(shape: &Shape, rows: i32) -> u64 {
    [2, shape.input, shape.output, rows]
        .into_iter()
        .map(|n| u64::from(n.unsigned_abs()))
        .product()
}

fn bench(group: &mut BenchmarkGroup<'_, WallTime>, shape: &Shape, dtype: Dtype) -> Result<()> {
    let layers = Layers::new(shape, dtype)?;
    let dtype_name = short(dtype);
    for backend in [Backend::Kernels, Backend::Mlx] {
        let rows = match backend {
            Backend::Kernels => shape.rows,
            Backend::Mlx => shape.mlx_rows,
        };
        for &rows in rows {
            // Many rows reuse what they have fetched: one layer will do. MLX unpacks its
            // weights to f32, which leaves no cache warm either.
            let count = match backend {
                Backend::Kernels if rows < MANY_ROWS => layers.layers.len(),
                _ => 1,
            };
            let x = normal(&[1, rows, shape.input], dtype, 2)?;
            group.throughput(if rows < MANY_ROWS {
                Throughput::Bytes(count as u64 * layers.bytes)
            } else {
                Throughput::Elements(count as u64 * operations(shape, rows))
            });
            backend.select();
            let id = BenchmarkId::new(format!("{backend}-{dtype_name}"), rows);
            group.bench_function(id, |b| {
                b.iter(|| {
                    let used = layers.layers[..count].iter();
                    run(used.map(|layer| layer.forward(black_box(&x)))).expect("valid");
                });
            });
            if backend == Backend::Mlx && operations(shape, rows) <= MLX_OP_LIMIT {
                let id = BenchmarkId::new(format!("mlx-quantized_matmul-{dtype_name}"), rows);
                group.bench_function(id, |b| {
                    b.iter(|| {
                        let product = layers.weight.matmul(black_box(&x));
                        run([product].into_iter()).expect("valid");
                    });
                });
            }
        }
    }
    Ok(())
}

fn quantized(c: &mut Criterion) {
    for shape in SHAPES {
        let mut group = c.benchmark_group(format!("quantized_matmul/{}", shape.name));
        group
            .sample_size(10)
            .sampling_mode(SamplingMode::Flat)
            .warm_up_time(Duration::from_millis(300))
            .measurement_time(Duration::from_secs(1));
        for dtype in [Dtype::Float32, Dtype::Bfloat16] {
            bench(&mut group, shape, dtype).expect("layers of valid shapes");
        }
        group.finish();
    }
}

criterion_group!(benches, quantized);
criterion_main!(benches);
