//! A Mamba 2 layer between its projections, with the sizes of Nemotron Nano 2 (9B) and of a small
//! hybrid: prompts of several lengths (the recurrence has two products of a state and a row per
//! position and head), and a decode step.

mod common;

use common::{Recurrent, noise, rows};
use criterion::{Criterion, criterion_group, criterion_main};
use mlex_kernels::{Floats, Mamba2Inputs, Mamba2Layer, Mamba2Shape, mamba2};

fn scan(c: &mut Criterion) {
    for (name, heads, head_dim) in [("nemotron-nano-9b", 128, 80), ("small", 32, 64)] {
        let mut group = Recurrent::new(c, &format!("mamba2/{name}"), heads * head_dim * 128, 2);
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
            let inputs = Mamba2Inputs {
                gate: rows(&gate, inner),
                channels: rows(&x, channels),
                dt: rows(&dt, heads),
                before: &before,
                padding: &[],
            };
            let mut out = vec![0.0f32; length * inner];
            group.bench(length, |state| {
                mamba2(&mut out, state, &inputs, &layer, &shape).expect("valid");
            });
        }
    }
}

criterion_group!(benches, scan);
criterion_main!(benches);
