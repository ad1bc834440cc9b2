//! The bench of a layer that has a recurrent state between projections in 4 bits: prompts and a
//! decode step, whole and in parts.

use std::cell::LazyCell;
use std::collections::BTreeMap;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput};
use mlex_core::{Array, Dtype, QuantizationMode, Quantized, QuantizedWeight, Result, eval};
use mlex_kernels::Strided;
use mlex_nn::{LazyTensor, Linear, QuantizationConfig, RecurrentCache, Weights};

use crate::{Backend, normal, short};

const LAYOUT: Quantized = Quantized {
    bits: 4,
    group_size: 64,
    mode: QuantizationMode::Affine,
};

/// Positions of the prompts, and a step.
const LENGTHS: [i32; 4] = [1, 512, 2048, 8192];
/// Positions of the prompt that MLX's operations get.
const MLX_LENGTH: i32 = 512;
/// Positions of the prompt of which parts are measured.
const PARTS_LENGTH: i32 = 2048;
/// Positions of the prompt that goes from token to token.
const TOKENS: i32 = 256;

/// A linear layer without bias.
#[derive(Clone, Copy, Debug)]
pub struct Projection {
    /// Its name in the checkpoint.
    pub name: &'static str,
    /// The width of its input.
    pub input: i32,
    /// The width of its output.
    pub output: i32,
}

/// A kind of layer.
pub trait Subject: Sized {
    /// Its settings.
    type Config;

    /// The width of the layer's input.
    fn hidden_size(config: &Self::Config) -> i32;

    /// The projections, those of the output last.
    fn projections(config: &Self::Config) -> Vec<Projection>;

    /// All other tensors, random.
    ///
    /// # Errors
    /// When MLX is out of memory.
    fn tensors(config: &Self::Config, dtype: Dtype) -> Result<Vec<(&'static str, Array)>>;

    /// The layer.
    ///
    /// # Errors
    /// When a tensor does not fit.
    fn load(weights: &Weights, config: &Self::Config) -> mlex_nn::Result<Self>;

    /// `x` `[1, L, hidden_size]` to the same shape.
    ///
    /// # Errors
    /// When the shapes do not fit.
    fn forward(&self, x: &Array, cache: &mut RecurrentCache) -> mlex_nn::Result<Array>;

    /// The kernel alone, of random projections of `length` positions in f32.
    ///
    /// # Errors
    /// When MLX is out of memory.
    fn between(config: &Self::Config, length: usize) -> Result<impl FnMut()>;

    /// The recurrence alone by a few of MLX's operations for each of `length` positions.
    ///
    /// # Errors
    /// When MLX is out of memory.
    fn token_by_token(config: &Self::Config, length: i32) -> Result<()>;
}

/// `count` random numbers.
///
/// # Errors
/// When MLX is out of memory.
pub fn numbers(count: usize, seed: u64) -> Result<Vec<f32>> {
    normal(&[count as i32], Dtype::Float32, seed)?.to_vec()
}

/// Rows that follow each other.
pub fn rows(data: &[f32], stride: usize) -> Strided<'_, f32> {
    Strided { data, stride }
}

/// A layer with random weights, and its projections once more.
struct Loaded<S> {
    layer: S,
    projections: Vec<(Projection, Linear)>,
}

fn load<S: Subject>(config: &S::Config, dtype: Dtype) -> mlex_nn::Result<Loaded<S>> {
    let projections = S::projections(config);
    let mut packed = BTreeMap::new();
    for (seed, projection) in projections.iter().enumerate() {
        let &Projection {
            name,
            input,
            output,
        } = projection;
        let scale = (input as f32).powf(-0.5);
        let weight = normal(&[output, input], dtype, seed as u64)?.multiply(scale)?;
        let QuantizedWeight {
            weight,
            scales,
            biases,
            ..
        } = QuantizedWeight::quantize(&weight, LAYOUT)?;
        let parts = [
            ("weight", Some(weight)),
            ("scales", Some(scales)),
            ("biases", biases),
        ];
        for (part, array) in parts {
            if let Some(array) = array {
                array.eval()?;
                packed.insert(format!("{name}.{part}"), array);
            }
        }
    }
    let others = S::tensors(config, dtype)?;
    let others = others
        .into_iter()
        .map(|(name, array)| (name.to_owned(), array));
    let all = packed.clone().into_iter().chain(others);
    Ok(Loaded {
        layer: with_weights(all, |weights| S::load(weights, config))?,
        projections: with_weights(packed, |weights| {
            let linears = projections.into_iter().map(|projection| {
                let &Projection {
                    name,
                    input,
                    output,
                } = &projection;
                let linear = Linear::load(&weights.pp(name), input, output, false)?;
                Ok((projection, linear))
            });
            linears.collect()
        })?,
    })
}

/// What is loaded from all of the tensors.
fn with_weights<L>(
    tensors: impl IntoIterator<Item = (String, Array)>,
    load: impl FnOnce(&Weights) -> mlex_nn::Result<L>,
) -> mlex_nn::Result<L> {
    let tensors = tensors.into_iter();
    let tensors = tensors
        .map(|(name, array)| (name, LazyTensor::ready(array)))
        .collect();
    let weights = Weights::new(tensors, QuantizationConfig::uniform(LAYOUT));
    let loaded = load(&weights)?;
    weights.finish()?;
    Ok(loaded)
}

/// Runs the layer once over `x` and computes the output and the state.
fn run<S: Subject>(layer: &S, x: &Array, cache: &mut RecurrentCache) -> mlex_nn::Result<()> {
    let y = layer.forward(x, cache)?;
    Ok(eval(std::iter::once(&y).chain(cache.arrays()))?)
}

/// The benches of one layer; their names begin with `group`.
///
/// # Panics
/// When the layer fails.
pub fn bench<S: Subject>(c: &mut Criterion, group: &str, config: &S::Config) {
    let mut group = c.benchmark_group(group);
    group
        .sample_size(10)
        .sampling_mode(SamplingMode::Flat)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    // Criterion calls what it measures several times, or never: so things are made when needed.
    for dtype in [Dtype::Float32, Dtype::Bfloat16] {
        let loaded = LazyCell::new(|| load::<S>(config, dtype).expect("valid shapes"));
        let kernels = LENGTHS.map(|length| (Backend::Kernels, length));
        for (backend, length) in kernels.into_iter().chain([(Backend::Mlx, MLX_LENGTH)]) {
            let mut state = None;
            group.throughput(Throughput::Elements(length as u64));
            let id = BenchmarkId::new(format!("{backend}-{}", short(dtype)), length);
            group.bench_function(id, |b| {
                backend.select();
                let layer = &loaded.layer;
                let (x, cache) = state.get_or_insert_with(|| {
                    let shape = [1, length, S::hidden_size(config)];
                    let x = normal(&shape, dtype, 0).expect("a valid shape");
                    let mut cache = RecurrentCache::default();
                    // A step goes on from a state, a prompt starts without one.
                    if length == 1 {
                        run(layer, &x, &mut cache).expect("valid shapes");
                    }
                    (x, cache)
                });
                b.iter(|| {
                    if length > 1 {
                        *cache = RecurrentCache::default();
                    }
                    run(layer, x, cache).expect("valid shapes");
                });
            });
        }
        group.throughput(Throughput::Elements(PARTS_LENGTH as u64));
        let id = BenchmarkId::new(format!("projections-{}", short(dtype)), PARTS_LENGTH);
        let inputs = LazyCell::new(|| {
            let inputs = loaded.projections.iter().map(|(projection, _)| {
                let shape = [1, PARTS_LENGTH, projection.input];
                normal(&shape, dtype, 0).expect("a valid shape")
            });
            inputs.collect::<Vec<_>>()
        });
        group.bench_function(id, |b| {
            Backend::Kernels.select();
            let all: Vec<_> = loaded.projections.iter().zip(&*inputs).collect();
            b.iter(|| {
                let outputs = all.iter().map(|((_, linear), x)| linear.forward(x));
                crate::run(outputs).expect("valid shapes");
            });
        });
    }
    group.throughput(Throughput::Elements(PARTS_LENGTH as u64));
    let mut between = None;
    let id = BenchmarkId::new("between-projections", PARTS_LENGTH);
    group.bench_function(id, |b| {
        let run = between.get_or_insert_with(|| {
            S::between(config, PARTS_LENGTH as usize).expect("a valid shape")
        });
        b.iter(&mut *run);
    });
    group.throughput(Throughput::Elements(TOKENS as u64));
    group.bench_function(BenchmarkId::new("token-by-token", TOKENS), |b| {
        b.iter(|| S::token_by_token(config, TOKENS).expect("valid shapes"));
    });
    group.finish();
}
