//! The gated delta rule in chunks against the recurrence position by position in f64, and the
//! layer's cache.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use mlex_core::{Array, Device, Stream};
use mlex_nn::gated_delta::{DeltaInputs, gated_delta_rule};
use mlex_nn::{
    GatedDeltaConfig, GatedDeltaNet, LazyTensor, QuantizationConfig, RecurrentCache, Weights,
};

/// A repeatable source of numbers (Knuth's MMIX constants).
struct Random(u64);

impl Random {
    /// From 0 to 1.
    fn unit(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    fn signed(&mut self) -> f64 {
        2.0 * self.unit() - 1.0
    }
}

/// What the decays and keys are like.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Decays from 1e-4 to 1, evenly in their logarithm, and some of exactly 1.
    Mixed,
    /// No decay at all and full steps.
    None,
    /// Almost none, and keys that are nearly the same: what breaks powers of the system.
    Alike,
    /// Everything is forgotten at once, now and then.
    Gone,
}

/// Inputs, and the truth.
struct Problem {
    batch: usize,
    length: usize,
    key_heads: usize,
    heads: usize,
    key_dim: usize,
    value_dim: usize,
    queries: Vec<f64>,
    keys: Vec<f64>,
    values: Vec<f64>,
    log_decay: Vec<f64>,
    beta: Vec<f64>,
    state: Vec<f64>,
}

impl Problem {
    fn new(
        kind: Kind,
        [batch, length]: [usize; 2],
        [key_heads, heads]: [usize; 2],
        [key_dim, value_dim]: [usize; 2],
    ) -> Self {
        let mut random = Random((length * 31 + key_dim * 7 + heads) as u64);
        let common: Vec<f64> = (0..key_dim).map(|_| random.signed()).collect();
        let rows = |random: &mut Random, alike: f64| {
            let mut all = Vec::new();
            for _ in 0..batch * length * key_heads {
                let row: Vec<f64> = common
                    .iter()
                    .map(|x| alike * x + (1.0 - alike) * random.signed())
                    .collect();
                let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt().max(1e-9);
                // Rounded, so that both sides start from the same numbers.
                all.extend(row.iter().map(|x| f64::from((x / norm) as f32)));
            }
            all
        };
        let alike = if kind == Kind::Alike { 0.98 } else { 0.0 };
        let (queries, keys) = (rows(&mut random, 0.0), rows(&mut random, alike));
        let gates = batch * length * heads;
        let log_decay = (0..gates).map(|_| match kind {
            Kind::Mixed if random.unit() < 0.2 => 0.0,
            Kind::Mixed => -random.unit() * 1e4f64.ln(),
            Kind::None => 0.0,
            Kind::Alike => -0.01 * random.unit(),
            Kind::Gone if random.unit() < 0.05 => f64::NEG_INFINITY,
            Kind::Gone => -random.unit(),
        });
        let log_decay: Vec<f64> = log_decay.map(|x| f64::from(x as f32)).collect();
        let full = matches!(kind, Kind::None | Kind::Alike);
        let beta = (0..gates).map(|_| if full { 1.0 } else { random.unit() });
        let beta: Vec<f64> = beta.map(|x| f64::from(x as f32)).collect();
        let mut floats = |count: usize| -> Vec<f64> {
            (0..count)
                .map(|_| f64::from(random.signed() as f32))
                .collect()
        };
        Self {
            values: floats(gates * value_dim),
            state: floats(batch * heads * value_dim * key_dim),
            batch,
            length,
            key_heads,
            heads,
            key_dim,
            value_dim,
            queries,
            keys,
            log_decay,
            beta,
        }
    }

    /// The outputs and the last state, position by position. Of row `b` the first `padding[b]`
    /// positions do not count.
    fn truth(&self, padding: &[usize]) -> (Vec<f64>, Vec<f64>) {
        let mut state = self.state.clone();
        let mut out = vec![0.0; self.values.len()];
        let (dk, dv) = (self.key_dim, self.value_dim);
        for b in 0..self.batch {
            for h in 0..self.heads {
                let group = self.heads / self.key_heads;
                let state = &mut state[(b * self.heads + h) * dv * dk..][..dv * dk];
                for t in padding[b]..self.length {
                    let at = b * self.length + t;
                    let key = (at * self.key_heads + h / group) * dk;
                    let (q, k) = (&self.queries[key..][..dk], &self.keys[key..][..dk]);
                    let gate = at * self.heads + h;
                    let decay = self.log_decay[gate].exp();
                    for row in 0..dv {
                        let s = &mut state[row * dk..][..dk];
                        s.iter_mut().for_each(|s| *s *= decay);
                        let known: f64 = s.iter().zip(k).map(|(s, k)| s * k).sum();
                        let u = self.beta[gate] * (self.values[gate * dv + row] - known);
                        s.iter_mut().zip(k).for_each(|(s, k)| *s += u * k);
                        out[gate * dv + row] = s.iter().zip(q).map(|(s, q)| s * q).sum();
                    }
                }
            }
        }
        (out, state)
    }

    fn array(&self, from: &[f64], heads: usize, dim: Option<usize>) -> Array {
        let values: Vec<f32> = from.iter().map(|&x| x as f32).collect();
        let mut shape = vec![self.batch as i32, self.length as i32, heads as i32];
        shape.extend(dim.map(|dim| dim as i32));
        Array::from_slice(&values, &shape).unwrap()
    }

    /// Runs the rule over pieces that end at `ends`.
    fn run(&self, ends: &[usize], padding: Option<&[usize]>) -> (Vec<f32>, Vec<f32>) {
        let arrays = [
            self.array(&self.queries, self.key_heads, Some(self.key_dim)),
            self.array(&self.keys, self.key_heads, Some(self.key_dim)),
            self.array(&self.values, self.heads, Some(self.value_dim)),
            self.array(&self.log_decay, self.heads, None),
            self.array(&self.beta, self.heads, None),
        ];
        let mask = padding.map(|padding| {
            let inside = padding
                .iter()
                .flat_map(|&count| (0..self.length).map(move |t| t >= count));
            let inside: Vec<bool> = inside.collect();
            Array::from_slice(&inside, &[self.batch as i32, self.length as i32]).unwrap()
        });
        let state: Vec<f32> = self.state.iter().map(|&x| x as f32).collect();
        let sizes = [self.batch, self.heads, self.value_dim, self.key_dim];
        let mut state = Array::from_slice(&state, &sizes.map(|size| size as i32)).unwrap();
        let mut outputs = Vec::new();
        let mut start = 0;
        for &end in ends {
            let cut = |x: &Array| x.slice_axis(1, start as i32, end as i32).unwrap();
            let [queries, keys, values, log_decay, beta] = arrays.each_ref().map(cut);
            let inputs = DeltaInputs {
                queries: &queries,
                keys: &keys,
                values: &values,
                log_decay: &log_decay,
                beta: &beta,
            };
            let mask = mask.as_ref().map(cut);
            let (y, after) = gated_delta_rule(&inputs, Some(&state), mask.as_ref()).unwrap();
            outputs.push(y);
            state = after;
            start = end;
        }
        let y = Array::concatenate(&outputs, 1).unwrap();
        (y.to_vec().unwrap(), state.to_vec().unwrap())
    }
}

fn check(what: &str, found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(0.0f64, |max, x| max.max(x.abs()));
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(found) - expected).abs();
        assert!(
            error <= 1e-4 * scale,
            "{what}: [{i}]: {found} != {expected}, the largest is {scale}"
        );
    }
}

const KINDS: [Kind; 4] = [Kind::Mixed, Kind::None, Kind::Alike, Kind::Gone];

#[test]
fn chunks_are_the_recurrence() {
    for kind in KINDS {
        for length in [1, 2, 3, 5, 31, 63, 64, 65, 127, 129, 300, 1000, 4096] {
            let problem = Problem::new(kind, [1, length], [1, 2], [16, 8]);
            let what = format!("{kind:?}, {length} positions");
            let (y, state) = problem.run(&[length], None);
            let (expected, last) = problem.truth(&[0]);
            check(&what, &y, &expected);
            check(&format!("{what}: state"), &state, &last);
        }
    }
}

#[test]
fn sizes_of_real_heads() {
    for kind in KINDS {
        let problem = Problem::new(kind, [1, 150], [2, 4], [128, 128]);
        let (y, state) = problem.run(&[150], None);
        let (expected, last) = problem.truth(&[0]);
        check(&format!("{kind:?}"), &y, &expected);
        check(&format!("{kind:?}: state"), &state, &last);
    }
}

/// On a GPU these sizes are done by a kernel, which must have no other result.
#[test]
fn on_every_device() {
    for device in [Device::Cpu, Device::Gpu(0)] {
        if !device.is_available().unwrap() {
            continue;
        }
        let stream = Stream::default_of(device).unwrap();
        stream.scope(|| {
            for kind in KINDS {
                for (dims, length) in [([64, 12], 5), ([128, 128], 70), ([32, 4], 600)] {
                    let problem = Problem::new(kind, [2, length], [2, 4], dims);
                    for padding in [[0, 0], [3, 0]] {
                        let (expected, last) = problem.truth(&padding);
                        let padding = (padding != [0, 0]).then_some(&padding[..]);
                        for ends in [vec![length], vec![1, 4, length]] {
                            let (y, state) = problem.run(&ends, padding);
                            let what = format!("{device} {kind:?} {dims:?} {padding:?}");
                            check(&what, &y, &expected);
                            check(&format!("{what}: state"), &state, &last);
                        }
                    }
                }
            }
        });
    }
}

#[test]
fn the_state_goes_on_over_calls() {
    let problem = Problem::new(Kind::Mixed, [2, 200], [2, 2], [8, 24]);
    let (expected, last) = problem.truth(&[0, 0]);
    for ends in [
        vec![1, 2, 3, 200],
        vec![64, 128, 200],
        vec![70, 71, 135, 200],
        (1..=200).collect(),
    ] {
        let (y, state) = problem.run(&ends, None);
        check(&format!("{} calls", ends.len()), &y, &expected);
        check("state", &state, &last);
    }
}

#[test]
fn padding_leaves_no_trace() {
    let problem = Problem::new(Kind::Mixed, [3, 90], [1, 3], [8, 8]);
    let padding = [0, 17, 70];
    let (expected, last) = problem.truth(&padding);
    for ends in [vec![90], vec![1, 16, 40, 90]] {
        let (y, state) = problem.run(&ends, Some(&padding));
        check("padded", &y, &expected);
        check("state", &state, &last);
    }
}

const CONFIG: GatedDeltaConfig = GatedDeltaConfig {
    hidden_size: 24,
    num_key_heads: 2,
    num_value_heads: 4,
    key_head_dim: 16,
    value_head_dim: 16,
    conv_kernel: 4,
    norm_eps: 1e-6,
};

fn tensors() -> BTreeMap<String, LazyTensor> {
    let mut random = Random(9);
    let mut tensor = |name: &str, shape: &[i32]| {
        let count: i32 = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|_| random.signed() as f32).collect();
        let array = Array::from_slice(&values, shape).unwrap();
        (name.to_owned(), LazyTensor::ready(array))
    };
    BTreeMap::from([
        tensor("in_proj_qkv.weight", &[128, 24]),
        tensor("in_proj_z.weight", &[64, 24]),
        tensor("in_proj_b.weight", &[4, 24]),
        tensor("in_proj_a.weight", &[4, 24]),
        tensor("conv1d.weight", &[128, 4, 1]),
        tensor("A_log", &[4]),
        tensor("dt_bias", &[4]),
        tensor("norm.weight", &[16]),
        tensor("out_proj.weight", &[24, 64]),
    ])
}

fn load(tensors: BTreeMap<String, LazyTensor>) -> (Weights, mlex_nn::Result<GatedDeltaNet>) {
    let weights = Weights::new(tensors, QuantizationConfig::default());
    let layer = GatedDeltaNet::load(&weights, &CONFIG);
    (weights, layer)
}

fn input(length: i32) -> Array {
    let mut random = Random(length as u64);
    let values: Vec<f32> = (0..2 * length * 24)
        .map(|_| random.signed() as f32)
        .collect();
    Array::from_slice(&values, &[2, length, 24]).unwrap()
}

#[test]
fn a_clone_of_the_cache_is_a_snapshot() {
    let (weights, layer) = load(tensors());
    weights.finish().unwrap();
    let layer = layer.unwrap();
    let mut cache = RecurrentCache::default();
    layer
        .forward(&input(5), &mut cache)
        .unwrap()
        .eval()
        .unwrap();
    let snapshot = cache.clone();
    let go_on = |mut cache: RecurrentCache| -> Vec<f32> {
        let mut found = Vec::new();
        for length in [3, 1, 1, 80] {
            let y = layer.forward(&input(length), &mut cache).unwrap();
            found.extend(y.to_vec::<f32>().unwrap());
        }
        assert_eq!(cache.len(), 90);
        found
    };
    // Twice from the same state, and once without having gone on from a clone before.
    let first = go_on(snapshot.clone());
    assert_eq!(go_on(snapshot), first);
    assert_eq!(go_on(cache), first);
}

/// The same layer with the projections that lie together in the checkpoint.
fn together() -> BTreeMap<String, LazyTensor> {
    let mut all = tensors();
    all.retain(|name, _| !name.starts_with("in_proj"));
    let mut random = Random(11);
    for (name, rows) in [("in_proj_qkvz.weight", 192), ("in_proj_ba.weight", 8)] {
        let values: Vec<f32> = (0..rows * 24).map(|_| random.signed() as f32).collect();
        let array = Array::from_slice(&values, &[rows, 24]).unwrap();
        all.insert(name.to_owned(), LazyTensor::ready(array));
    }
    all
}

/// On every device: on a GPU, three kernels stand for a graph of some forty nodes.
#[test]
fn kernels_and_operations_agree() {
    for device in [Device::Cpu, Device::Gpu(0)] {
        if !device.is_available().unwrap() {
            continue;
        }
        let stream = Stream::default_of(device).unwrap();
        stream.scope(|| {
            for tensors in [tensors(), together()] {
                compare_with_operations(tensors, device);
            }
        });
    }
}

fn compare_with_operations(tensors: BTreeMap<String, LazyTensor>, device: Device) {
    let (weights, layer) = load(tensors);
    weights.finish().unwrap();
    let layer = layer.unwrap();
    for padding in [[0, 0], [2, 9]] {
        let run = |kernels: bool| -> Vec<f32> {
            let mut cache = RecurrentCache::default();
            cache.set_left_padding(&padding).unwrap();
            let mut found = Vec::new();
            for length in [3, 5, 1, 40, 1, 2] {
                mlex_nn::dispatch::set_kernels(kernels);
                let y = layer.forward(&input(length), &mut cache).unwrap();
                found.extend(y.to_vec::<f32>().unwrap());
                mlex_nn::dispatch::set_kernels(true);
            }
            for array in cache.arrays() {
                found.extend(array.to_vec::<f32>().unwrap());
            }
            found
        };
        let expected: Vec<f64> = run(false).into_iter().map(f64::from).collect();
        check(
            &format!("{device}, padding {padding:?}"),
            &run(true),
            &expected,
        );
    }
}

#[test]
fn a_cache_forgets_everything_or_nothing() {
    let (_, layer) = load(tensors());
    let mut cache = RecurrentCache::default();
    let first: Vec<f32> = layer
        .as_ref()
        .unwrap()
        .forward(&input(4), &mut cache)
        .unwrap()
        .to_vec()
        .unwrap();
    assert!(!cache.can_trim(3) && cache.can_trim(0) && cache.can_trim(4));
    assert_eq!(
        cache.trim(3).unwrap_err().to_string(),
        "tokens to trim: expected 0 or all 4 of a recurrent layer, found 3"
    );
    assert_eq!(
        cache.set_left_padding(&[1, 0]).unwrap_err().to_string(),
        "left padding: expected an empty cache, found 4"
    );
    cache.trim(4).unwrap();
    assert!(cache.is_empty() && cache.arrays().next().is_none());
    let again = layer.unwrap().forward(&input(4), &mut cache).unwrap();
    assert_eq!(again.to_vec::<f32>().unwrap(), first);
    let mut padded = RecurrentCache::default();
    assert!(padded.set_left_padding(&[-1, 0]).is_err());
    padded.set_left_padding(&[0, 3]).unwrap();
    assert_eq!(padded.padding(2), Some(vec![0, 2]));
    assert_eq!(padded.padding(9), Some(vec![0, 3]));
}

#[test]
fn what_does_not_fit_is_named() {
    let mut less = tensors();
    less.remove("A_log");
    let (weights, layer) = load(less);
    layer.unwrap();
    assert_eq!(
        weights.finish().unwrap_err().to_string(),
        "the tensors do not fit the model: 1 missing (A_log)"
    );
    let weights = Weights::new(tensors(), QuantizationConfig::default());
    let config = GatedDeltaConfig {
        num_key_heads: 3,
        ..CONFIG
    };
    assert_eq!(
        GatedDeltaNet::load(&weights, &config)
            .unwrap_err()
            .to_string(),
        "linear_num_key_heads: expected a divisor of the 4 value heads, found 3"
    );
}
