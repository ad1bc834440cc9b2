//! A gated delta net between its projections, with the heads of Qwen3.5-0.8B and 4B: prompts of
//! several lengths (the rule has three products of a state and a row per position and head), and
//! a decode step.

mod common;

use common::{Recurrent, noise, rows};
use criterion::{Criterion, criterion_group, criterion_main};
use mlex_kernels::{DeltaInputs, DeltaLayer, DeltaShape, Floats, gated_delta};

fn delta(c: &mut Criterion) {
    for (name, value_heads) in [("qwen3.5-0.8b", 16), ("qwen3.5-4b", 32)] {
        let state = value_heads * 128 * 128;
        let mut group = Recurrent::new(c, &format!("gated_delta/{name}"), state, 3);
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
            let inputs = DeltaInputs {
                qkv: rows(&qkv, channels),
                gate: rows(&gate, values),
                beta: rows(&beta, value_heads),
                decay: rows(&decay, value_heads),
                before: &before,
                padding: &[],
            };
            let mut out = vec![0.0f32; length * values];
            group.bench(length, |state| {
                gated_delta(&mut out, state, &inputs, &layer, &shape).expect("valid");
            });
        }
    }
}

criterion_group!(benches, delta);
criterion_main!(benches);
