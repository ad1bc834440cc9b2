//! What the benches share.
#![allow(dead_code, reason = "each bench uses some of it")]

use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, SamplingMode, Throughput};
use mlex_kernels::Strided;

/// Numbers that look like noise, the same each time.
pub(crate) fn noise(n: usize) -> Vec<f32> {
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

/// Rows that are `stride` apart.
pub(crate) fn rows(data: &[f32], stride: usize) -> Strided<'_, f32> {
    Strided { data, stride }
}

/// The benches of a recurrent layer: prompts in FLOP/s of the recurrence (as elements), a decode
/// step in GB/s of the state, read and written.
pub(crate) struct Recurrent<'a> {
    group: BenchmarkGroup<'a, WallTime>,
    state: usize,
    products: usize,
}

impl<'a> Recurrent<'a> {
    /// `state` numbers, which each position multiplies `products` times.
    pub(crate) fn new(c: &'a mut Criterion, name: &str, state: usize, products: usize) -> Self {
        let mut group = c.benchmark_group(name);
        group
            .sample_size(10)
            .sampling_mode(SamplingMode::Flat)
            .warm_up_time(Duration::from_millis(300))
            .measurement_time(Duration::from_secs(1));
        Self {
            group,
            state,
            products,
        }
    }

    /// Measures `length` positions of a layer with the state that `run` is given.
    pub(crate) fn bench(&mut self, length: usize, mut run: impl FnMut(&mut [f32])) {
        // As a step has them: the states of all layers, more than fits in a cache.
        let layers = if length == 1 { 18 } else { 1 };
        let mut states = vec![vec![0.1f32; self.state]; layers];
        let numbers = (layers * length * self.state) as u64;
        self.group.throughput(if length == 1 {
            Throughput::Bytes(8 * numbers)
        } else {
            Throughput::Elements(2 * self.products as u64 * numbers)
        });
        let id = BenchmarkId::from_parameter(length);
        self.group.bench_function(id, |b| {
            b.iter(|| states.iter_mut().for_each(|state| run(state)));
        });
    }
}
