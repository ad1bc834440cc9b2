//! Prints how fast the kernels are on this machine: medians, with one thread and with all.
//!
//! `cargo run --release -p mlex-kernels --example kernel_speed [filter] [--best]`
//!
//! `--best` prints the best time in place of the median, for a machine that is busy.
#![allow(clippy::print_stdout, reason = "this is what it is for")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use mlex_kernels::{
    Activation, AttentionOptions, AttentionShape, Element, FloatType, Heads, Level, Linear, Mask,
    Mode, OutputOrder, PackedHeads, PackedRow, Precision, Projection, QuantizedWeight, Scales,
    attention, attention_packed, linear, pack_rows, project, project_gated, quantized_matmul,
    threads,
};

/// The median time of a call, in seconds.
fn median(mut call: impl FnMut()) -> f64 {
    call();
    let mut times = Vec::new();
    let start = Instant::now();
    while times.len() < 5 || (start.elapsed() < Duration::from_millis(400) && times.len() < 2000) {
        let start = Instant::now();
        call();
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    if std::env::args().any(|arg| arg == "--best") {
        times[0]
    } else {
        times[times.len() / 2]
    }
}

/// Measures `call` with one thread and with all, and prints `amount / time` of both.
fn row(filter: &str, name: &str, amount: f64, unit: &str, mut call: impl FnMut()) {
    if !name.contains(filter) {
        return;
    }
    print!("{name:48}");
    let all = threads::physical_cores();
    for count in [1, all] {
        threads::set_threads(count);
        let time = median(&mut call);
        print!(" {:9.1}", amount / time / 1e9);
    }
    println!("  {unit}");
}

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

/// Quantized weights of random codes, of about `bytes` bytes in all: matrices that are used in
/// turn, so that they come from memory and not from the cache.
struct Weights {
    packed: Vec<u32>,
    scales: Vec<f16>,
    mode: Mode,
    n: usize,
    k: usize,
    copies: usize,
}

impl Weights {
    fn new(bits: u8, group_size: usize, n: usize, k: usize, bytes: usize) -> Self {
        let words = n * k * usize::from(bits) / 32;
        let copies = (bytes / (words * 4)).max(1);
        let packed = noise(words * copies)
            .iter()
            .map(|v| v.to_bits().rotate_left(9))
            .collect();
        let scales = noise(n * k / group_size * copies)
            .into_iter()
            .map(f16::from_f32);
        let mode = Mode::Affine { bits, group_size };
        Self {
            packed,
            scales: scales.collect(),
            mode,
            n,
            k,
            copies,
        }
    }

    fn copy(&self, i: usize) -> QuantizedWeight<'_> {
        let i = i % self.copies;
        let (words, groups) = (
            self.packed.len() / self.copies,
            self.scales.len() / self.copies,
        );
        let scales = self.scales[i * groups..(i + 1) * groups].into();
        let packed = &self.packed[i * words..(i + 1) * words];
        let scales = Scales::Affine {
            scales,
            biases: scales,
        };
        QuantizedWeight::new(self.mode, self.n, self.k, packed, scales).expect("lengths match")
    }
}

/// The products of one decode step of SmolLM2-135M, in their order: 30 layers and the head.
fn step<T: Element>(filter: &str, dtype: &str) {
    let name = format!("smollm2 decode step {dtype}");
    if !name.contains(filter) {
        return;
    }
    let layers = 30;
    let bytes = |n: usize, k: usize| n * k / 2 * layers;
    let weights = |n, k| Weights::new(4, 32, n, k, bytes(n, k));
    let (q, k, v, o) = (
        weights(576, 576),
        weights(192, 576),
        weights(192, 576),
        weights(576, 576),
    );
    let (gate, up, down) = (weights(1536, 576), weights(1536, 576), weights(576, 1536));
    let head = Weights::new(8, 32, 49152, 576, 0);
    let layer = [&q, &k, &v, &o, &gate, &up, &down];
    let size = |w: &Weights| w.copy(0).size_in_bytes();
    let total = layer.into_iter().map(size).sum::<usize>() * layers + size(&head);
    let values = |n: usize| -> Vec<T> { noise(n).into_iter().map(T::from_f32).collect() };
    let (x, mut hidden) = (values(576), values(1536));
    let mut y = [values(576), values(192), values(192)];
    let (mut out, mut logits) = (values(576), values(49152));
    let of = |w| Projection::Quantized(w, None);
    row(filter, &name, total as f64, "GB/s", || {
        for i in 0..layers {
            let [a, b, c] = &mut y;
            let weights = [of(q.copy(i)), of(k.copy(i)), of(v.copy(i))];
            project(&mut [a, b, c], &x, &weights, Precision::F32).expect("lengths match");
            project(&mut [&mut out], &x, &[of(o.copy(i))], Precision::F32).expect("lengths match");
            let gates = [&of(gate.copy(i)), &of(up.copy(i))];
            project_gated(&mut hidden, &x, gates, Activation::Silu, Precision::F32)
                .expect("lengths match");
            project(
                &mut [&mut out],
                &hidden,
                &[of(down.copy(i))],
                Precision::F32,
            )
            .expect("lengths match");
        }
        project(&mut [&mut logits], &x, &[of(head.copy(0))], Precision::F32)
            .expect("lengths match");
    });
}

/// A few rows of activations against weights from memory.
fn few<T: Element>(filter: &str, name: &str, [m, n, k]: [usize; 3], bits: u8, group: usize) {
    if !name.contains(filter) {
        return;
    }
    let w = Weights::new(bits, group, n, k, if m == 1 { 200 << 20 } else { 60 << 20 });
    let values = |n: usize| -> Vec<T> { noise(n).into_iter().map(T::from_f32).collect() };
    let (x, mut y) = (values(m * k), values(m * n));
    let bytes = w.copy(0).size_in_bytes() as f64;
    let mut i = 0;
    row(filter, name, bytes, "GB/s", || {
        quantized_matmul(&mut y, &x, &w.copy(i), Precision::F32).expect("lengths match");
        i += 1;
    });
}

/// Attention of one query over some positions, at the heads of SmolLM2-135M.
fn attention_step(filter: &str) {
    let (q_heads, kv_heads, dim) = (9, 3, 64);
    for length in [16, 128, 640, 4096] {
        // More than a cache holds: between two steps of a layer the weights are read.
        let copies = (96 << 20) / (kv_heads * length * dim * 4);
        let brain = |n: usize| -> Vec<bf16> { noise(n).into_iter().map(bf16::from_f32).collect() };
        let (q, each) = (brain(q_heads * dim), kv_heads * length * dim);
        let (k, v) = (brain(each * copies), brain(each * copies));
        let mut out = brain(q_heads * dim);
        let shape = AttentionShape {
            batch: 1,
            q_heads,
            kv_heads,
            q_len: 1,
            kv_len: length,
            head_dim: dim,
            value_dim: dim,
        };
        let options = AttentionOptions {
            scale: 0.125,
            mask: Mask::None,
            sinks: None,
            output: OutputOrder::LengthFirst,
        };
        let bytes = (each * 4 * copies) as f64;
        row(
            filter,
            &format!("smollm2 attention step bf16 {length}"),
            bytes,
            "GB/s",
            || {
                for i in 0..copies {
                    let part = |data| Heads::contiguous(data, kv_heads, length, dim);
                    let (k, v) = (part(&k[i * each..]), part(&v[i * each..]));
                    let q = Heads::contiguous(&q, q_heads, 1, dim);
                    attention(&mut out, q, k, v, shape, options).expect("lengths match");
                }
            },
        );
    }
}

/// Attention of a prompt of 512 positions, and of the last 512 of a longer one.
fn attention_prompt<T: Element>(
    filter: &str,
    model: &str,
    [q_heads, kv_heads, dim]: [usize; 3],
    dtype: &str,
) {
    for (q_len, kv_len) in [(512, 512), (512, 4096)] {
        let name = format!("{model} attention prompt {dtype} {q_len} of {kv_len}");
        if !name.contains(filter) {
            continue;
        }
        let values = |n: usize| -> Vec<T> { noise(n).into_iter().map(T::from_f32).collect() };
        let q = values(q_heads * q_len * dim);
        let (k, v) = (
            values(kv_heads * kv_len * dim),
            values(kv_heads * kv_len * dim),
        );
        let mut out = values(q_heads * q_len * dim);
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
            scale: 0.125,
            mask: Mask::Causal { window: None },
            sinks: None,
            output: OutputOrder::LengthFirst,
        };
        // Query `i` sees the keys before the queries, and `i + 1`.
        let pairs = q_len * (kv_len - q_len) + q_len * (q_len + 1) / 2;
        let flops = (4 * dim * q_heads * pairs) as f64;
        row(filter, &name, flops, "GFLOP/s", || {
            let q = Heads::contiguous(&q, q_heads, q_len, dim);
            let part = |data| Heads::contiguous(data, kv_heads, kv_len, dim);
            attention(&mut out, q, part(&k), part(&v), shape, options).expect("lengths match");
        });
    }
}

/// The same in f32, plain and packed; what counts is keys in a second.
fn packed_attention_step(filter: &str) {
    let (q_heads, kv_heads, dim) = (9, 3, 64);
    for length in [640, 4096] {
        let copies = 30;
        let (q, each) = (noise(q_heads * dim), kv_heads * length);
        let kv = noise(each * dim * copies);
        let mut out = noise(q_heads * dim);
        let shape = AttentionShape {
            batch: 1,
            q_heads,
            kv_heads,
            q_len: 1,
            kv_len: length,
            head_dim: dim,
            value_dim: dim,
        };
        let options = AttentionOptions {
            scale: 0.125,
            mask: Mask::None,
            sinks: None,
            output: OutputOrder::LengthFirst,
        };
        let queries = Heads::contiguous(&q, q_heads, 1, dim);
        let keys = (each * copies) as f64 * 1e3;
        let name = format!("attention step f32 {length}");
        row(filter, &name, keys, "M keys/s", || {
            for i in 0..copies {
                let k = Heads::contiguous(&kv[i * each * dim..], kv_heads, length, dim);
                attention(&mut out, queries, k, k, shape, options).expect("lengths match");
            }
        });
        for bits in [8, 4] {
            let packed = PackedRow::new(dim, bits, 64, FloatType::F32).expect("a form");
            let words = packed.words();
            let mut all = vec![0; each * copies * words];
            pack_rows(&mut all, &kv, packed).expect("lengths match");
            let name = format!("attention step {bits} bit {length}");
            row(filter, &name, keys, "M keys/s", || {
                for i in 0..copies {
                    let k = PackedHeads {
                        words: Heads::contiguous(&all[i * each * words..], kv_heads, length, words),
                        row: packed,
                    };
                    attention_packed(&mut out, queries, k, k, shape, options)
                        .expect("lengths match");
                }
            });
        }
    }
}

fn main() {
    let filter = std::env::args()
        .skip(1)
        .find(|arg| arg != "--best")
        .unwrap_or_default();
    println!(
        "level {:?}, {} cores",
        Level::current(),
        threads::physical_cores()
    );
    println!("{:48} {:>9} {:>9}", "", "1 thread", "all");

    let memory = vec![1u64; 32 << 20];
    let parts: Vec<&[u64]> = memory.chunks(1 << 14).collect();
    row(
        &filter,
        "read of memory",
        (memory.len() * 8) as f64,
        "GB/s",
        || {
            threads::parallel_for(parts.len(), |i| {
                let mut sums = [0u64; 32];
                for chunk in parts[i].chunks_exact(32) {
                    for (sum, v) in sums.iter_mut().zip(chunk) {
                        *sum = sum.wrapping_add(*v);
                    }
                }
                black_box(sums);
            });
        },
    );
    row(&filter, "empty job (million / s)", 1e3, "M/s", || {
        threads::parallel_for(2, |_| {});
    });

    step::<f32>(&filter, "f32");
    step::<bf16>(&filter, "bf16");
    attention_step(&filter);
    packed_attention_step(&filter);
    for (model, heads) in [
        ("smollm2", [9, 3, 64]),
        ("qwen3-0.6b", [16, 8, 128]),
        ("qwen3.5-4b", [16, 4, 256]),
    ] {
        attention_prompt::<f32>(&filter, model, heads, "f32");
        attention_prompt::<bf16>(&filter, model, heads, "bf16");
    }

    for (name, bits, group, n, k) in [
        ("smollm2 up 4 bit", 4, 32, 1536, 576),
        ("smollm2 down 4 bit", 4, 32, 576, 1536),
        ("smollm2 head 8 bit", 8, 32, 49152, 576),
        ("qwen3-0.6b up 4 bit", 4, 64, 3072, 1024),
        ("qwen3-8b up 4 bit", 4, 64, 12288, 4096),
        ("2 bit", 2, 64, 4096, 4096),
        ("3 bit", 3, 64, 4096, 4096),
        ("5 bit", 5, 64, 4096, 4096),
        ("6 bit", 6, 64, 4096, 4096),
    ] {
        for m in [1, 2, 4, 8] {
            let name = format!("{name} {n}x{k} M={m}");
            few::<f32>(&filter, &format!("{name} f32"), [m, n, k], bits, group);
            few::<bf16>(&filter, &format!("{name} bf16"), [m, n, k], bits, group);
        }
        for m in [64, 512] {
            let w = Weights::new(bits, group, n, k, 0);
            let x = noise(m * k);
            let mut y = vec![0.0; m * n];
            let flops = (2 * m * n * k) as f64;
            for precision in [Precision::F32, Precision::Bf16] {
                let name = format!("{name} {n}x{k} M={m} {precision:?}");
                row(&filter, &name, flops, "GFLOP/s", || {
                    quantized_matmul(&mut y, &x, &w.copy(0), precision).expect("lengths match");
                });
            }
        }
    }
    for (n, k) in [(3072, 1024), (4096, 4096)] {
        let weight = noise(n * k);
        let brain: Vec<bf16> = weight.iter().map(|&v| bf16::from_f32(v)).collect();
        let half: Vec<f16> = weight.iter().map(|&v| f16::from_f32(v)).collect();
        for m in [1, 64, 512] {
            let x = noise(m * k);
            let mut y = vec![0.0; m * n];
            let amount = if m == 1 { n * k * 2 } else { 2 * m * n * k } as f64;
            let unit = if m == 1 { "GB/s" } else { "GFLOP/s" };
            let f32s = Linear::new(n, k, &weight[..], None).expect("lengths match");
            let bf16s = Linear::new(n, k, &brain[..], None).expect("lengths match");
            let f16s = Linear::new(n, k, &half[..], None).expect("lengths match");
            let f32_amount = if m == 1 { 2.0 * amount } else { amount };
            for (kind, w, precision, amount) in [
                ("f32", f32s, Precision::F32, f32_amount),
                ("f16", f16s, Precision::F32, amount),
                ("bf16", bf16s, Precision::F32, amount),
                ("bf16 dot", bf16s, Precision::Bf16, amount),
            ] {
                row(
                    &filter,
                    &format!("dense {kind} {n}x{k} M={m}"),
                    amount,
                    unit,
                    || {
                        linear(&mut y, &x, &w, precision).expect("lengths match");
                    },
                );
            }
        }
    }
}
