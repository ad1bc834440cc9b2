//! The chunked scan of Mamba 2 against the recurrence step by step in f64, and the layer in
//! pieces against itself in one.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Mutex;

use mlex_core::{Array, Dtype, random};
use mlex_nn::mamba2::{ScanInputs, mamba2_scan};
use mlex_nn::{
    LazyTensor, Mamba2, Mamba2Config, QuantizationConfig, RecurrentCache, Weights, dispatch,
};

fn normal(seed: u64, shape: &[i32]) -> Array {
    let key = random::key(seed).unwrap();
    random::normal(0.0, 1.0, shape, Dtype::Float32, &key).unwrap()
}

fn uniform(seed: u64, low: f32, high: f32, shape: &[i32]) -> Array {
    let key = random::key(seed).unwrap();
    random::uniform(low, high, shape, Dtype::Float32, &key).unwrap()
}

fn f64s(array: &Array) -> Vec<f64> {
    let values = array.as_type(Dtype::Float32).unwrap().to_vec::<f32>();
    values.unwrap().into_iter().map(f64::from).collect()
}

#[track_caller]
fn assert_close(found: &Array, expected: &[f64], tolerance: f64) {
    let found = f64s(found);
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(1.0f64, |max, x| max.max(x.abs()));
    for (index, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!(
            (a - b).abs() <= tolerance * largest,
            "{a} where {b} is expected at {index}, the largest is {largest}"
        );
    }
}

/// Held by tests that turn the kernels off, which is for the whole process.
static KERNELS: Mutex<()> = Mutex::new(());

/// Inputs of a scan.
struct Case {
    /// Rows, positions, heads, their width, groups, entries of the state.
    sizes: [usize; 6],
    x: Array,
    dt: Array,
    a: Array,
    b: Array,
    c: Array,
    d: Array,
}

impl Case {
    fn new(sizes: [usize; 6], seed: u64) -> Self {
        let [rows, length, heads, dim, groups, state] = sizes.map(|size| size as i32);
        Self {
            sizes,
            x: normal(seed, &[rows, length, heads, dim]),
            dt: uniform(seed + 1, 0.0, 0.9, &[rows, length, heads]),
            a: uniform(seed + 2, -4.0, -0.01, &[heads]),
            b: normal(seed + 3, &[rows, length, groups, state]),
            c: normal(seed + 4, &[rows, length, groups, state]),
            d: normal(seed + 5, &[heads]),
        }
    }

    /// The positions from `start` to `end`.
    fn scan(&self, start: i32, end: i32, state: Option<&Array>) -> (Array, Array) {
        let part = |array: &Array| array.slice_axis(1, start, end).unwrap();
        let inputs = ScanInputs {
            x: &part(&self.x),
            dt: &part(&self.dt),
            a: &self.a,
            b: &part(&self.b),
            c: &part(&self.c),
            d: &self.d,
        };
        mamba2_scan(&inputs, state).unwrap()
    }

    /// Outputs and the last state, by the definition.
    fn expected(&self) -> (Vec<f64>, Vec<f64>) {
        let [rows, length, heads, dim, groups, n] = self.sizes;
        let [x, dt, a, b, c, d] = [&self.x, &self.dt, &self.a, &self.b, &self.c, &self.d].map(f64s);
        let mut state = vec![0.0; rows * heads * dim * n];
        let mut y = vec![0.0; rows * length * heads * dim];
        for row in 0..rows {
            for t in 0..length {
                for head in 0..heads {
                    let at = (row * length + t) * heads + head;
                    let shared = ((row * length + t) * groups + head / (heads / groups)) * n;
                    for p in 0..dim {
                        let x = x[at * dim + p];
                        let mut sum = d[head] * x;
                        for i in 0..n {
                            let s = &mut state[((row * heads + head) * dim + p) * n + i];
                            *s = (dt[at] * a[head]).exp() * *s + dt[at] * x * b[shared + i];
                            sum += *s * c[shared + i];
                        }
                        y[at * dim + p] = sum;
                    }
                }
            }
        }
        (y, state)
    }
}

#[test]
fn chunks_give_what_single_steps_give() {
    for (index, sizes) in [
        [1, 1, 2, 4, 1, 8],
        [2, 5, 4, 6, 2, 8],
        [1, 63, 2, 4, 2, 4],
        [1, 64, 2, 4, 1, 4],
        [2, 65, 6, 3, 3, 5],
        [1, 200, 4, 4, 2, 16],
        [1, 4096, 2, 2, 1, 4],
    ]
    .into_iter()
    .enumerate()
    {
        let case = Case::new(sizes, 10 * index as u64);
        let (y, state) = case.expected();
        let (found, last) = case.scan(0, sizes[1] as i32, None);
        assert_close(&found, &y, 1e-5);
        assert_close(&last, &state, 1e-5);
    }
}

#[test]
fn long_scans_are_single_steps() {
    let lengths = uniform(90, 100.0, 4096.0, &[4]).to_vec::<f32>().unwrap();
    let lengths = lengths.into_iter().map(|length| length as usize);
    for (index, length) in lengths.chain([4096]).enumerate() {
        // What decays fast, hardly and not at all.
        for (low, high) in [(-40.0, -1.0), (-0.01, -0.001), (0.0, 0.0)] {
            let mut case = Case::new([1, length, 4, 3, 2, 5], 100 + 10 * index as u64);
            case.a = uniform(index as u64, low, high, &[4]);
            let (y, state) = case.expected();
            let (found, last) = case.scan(0, length as i32, None);
            assert_close(&found, &y, 2e-5);
            assert_close(&last, &state, 2e-5);
        }
    }
}

#[test]
fn a_scan_goes_on_from_its_state() {
    let sizes = [2, 150, 4, 3, 2, 6];
    let case = Case::new(sizes, 7);
    let (y, state) = case.expected();
    for pieces in [&[1, 149][..], &[64, 64, 22], &[1, 1, 1, 100, 47], &[70, 80]] {
        let (mut outputs, mut last, mut start) = (Vec::new(), None, 0);
        for &length in pieces {
            let (y, state) = case.scan(start, start + length, last.as_ref());
            outputs.push(y);
            last = Some(state);
            start += length;
        }
        let found = Array::concatenate(&outputs, 1).unwrap();
        assert_close(&found, &y, 1e-5);
        assert_close(&last.unwrap(), &state, 1e-5);
    }
}

#[test]
fn strong_decay_and_none_at_all() {
    for (a, high) in [(-400.0f32, 1.0), (-1e-6, 1.0), (-50.0, 1e-6)] {
        let mut case = Case::new([1, 130, 2, 4, 1, 4], 3);
        case.a = Array::from_slice(&[a, a / 2.0], &[2]).unwrap();
        case.dt = uniform(9, 0.0, high, &[1, 130, 2]);
        let (y, state) = case.expected();
        let (found, last) = case.scan(0, 130, None);
        assert_close(&found, &y, 2e-5);
        assert_close(&last, &state, 2e-5);
    }
}

#[test]
fn a_step_of_zero_leaves_no_trace() {
    let mut case = Case::new([1, 70, 2, 4, 1, 4], 5);
    let padding = 30;
    let zeros = Array::zeros(&[1, padding, 2], Dtype::Float32).unwrap();
    let rest = case.dt.slice_axis(1, padding, 70).unwrap();
    case.dt = Array::concatenate([&zeros, &rest], 1).unwrap();
    let (y, state) = case.scan(0, 70, None);
    let (alone, alone_state) = case.scan(padding, 70, None);
    assert_close(&y.slice_axis(1, padding, 70).unwrap(), &f64s(&alone), 1e-6);
    assert_close(&state, &f64s(&alone_state), 1e-6);
}

const CONFIG: Mamba2Config = Mamba2Config {
    hidden_size: 12,
    num_heads: 4,
    head_dim: 6,
    state_size: 8,
    num_groups: 2,
    conv_kernel: 4,
    proj_bias: true,
    conv_bias: true,
    time_step_limit: (0.0, f32::INFINITY),
    norm_eps: 1e-5,
};

fn layer(torch: bool) -> Mamba2 {
    let conv = if torch { [56, 1, 4] } else { [56, 4, 1] };
    let tensors = [
        ("in_proj.weight", &[84, 12][..]),
        ("in_proj.bias", &[84]),
        ("conv1d.weight", &conv),
        ("conv1d.bias", &[56]),
        ("A_log", &[4]),
        ("dt_bias", &[4]),
        ("D", &[4]),
        ("norm.weight", &[24]),
        ("out_proj.weight", &[12, 24]),
        ("out_proj.bias", &[12]),
    ];
    let tensors = tensors.iter().enumerate().map(|(index, (name, shape))| {
        let array = normal(index as u64, shape).multiply(0.4).unwrap();
        ((*name).to_owned(), LazyTensor::ready(array))
    });
    let tensors: BTreeMap<_, _> = tensors.collect();
    let weights = Weights::new(tensors, QuantizationConfig::default());
    let layer = Mamba2::load(&weights, &CONFIG).unwrap();
    weights.finish().unwrap();
    layer
}

#[test]
fn pieces_and_padded_rows_give_what_the_whole_gives() {
    let layer = layer(false);
    let x = normal(50, &[3, 20, 12]);
    let mut cache = RecurrentCache::default();
    let whole = layer.forward(&x, &mut cache).unwrap();
    for pieces in [&[1, 19][..], &[7, 1, 1, 11], &[1; 20]] {
        let mut cache = RecurrentCache::default();
        let outputs: Vec<Array> = pieces
            .iter()
            .map(|&length| {
                let start = cache.len();
                let part = x.slice_axis(1, start, start + length).unwrap();
                layer.forward(&part, &mut cache).unwrap()
            })
            .collect();
        let found = Array::concatenate(&outputs, 1).unwrap();
        assert_close(&found, &f64s(&whole), 1e-5);
    }
    // The same weights in PyTorch's order of the axes.
    let other = self::layer(true);
    let mut cache = RecurrentCache::default();
    assert_close(&other.forward(&x, &mut cache).unwrap(), &f64s(&whole), 1e-6);

    let padding = [0, 6, 2];
    for pieces in [&[20][..], &[4, 16], &[1; 20]] {
        let mut cache = RecurrentCache::default();
        cache.set_left_padding(&padding).unwrap();
        let outputs: Vec<Array> = pieces
            .iter()
            .map(|&length| {
                let start = cache.len();
                let part = x.slice_axis(1, start, start + length).unwrap();
                layer.forward(&part, &mut cache).unwrap()
            })
            .collect();
        let found = Array::concatenate(&outputs, 1).unwrap();
        for (row, &padding) in padding.iter().enumerate() {
            let real = |array: &Array| {
                let row = array.slice_axis(0, row as i32, row as i32 + 1).unwrap();
                row.slice_axis(1, padding, 20).unwrap()
            };
            let mut alone = RecurrentCache::default();
            let expected = layer.forward(&real(&x), &mut alone).unwrap();
            assert_close(&real(&found), &f64s(&expected), 1e-5);
        }
    }
}

#[test]
fn the_kernel_and_its_plain_twin_agree() {
    let _kernels = KERNELS.lock();
    let layer = layer(false);
    for dtype in [Dtype::Float32, Dtype::Bfloat16, Dtype::Float16] {
        // In one go, in chunks with a rest, and step by step.
        for pieces in [&[75][..], &[33, 40, 2], &[1, 3, 4, 67]] {
            let x = normal(60, &[2, 75, 12]).as_type(dtype).unwrap();
            let run = |kernels: bool| {
                dispatch::set_kernels(kernels);
                let mut cache = RecurrentCache::default();
                cache.set_left_padding(&[0, 5]).unwrap();
                let outputs: Vec<Array> = pieces
                    .iter()
                    .map(|&length| {
                        let start = cache.len();
                        let part = x.slice_axis(1, start, start + length).unwrap();
                        layer.forward(&part, &mut cache).unwrap()
                    })
                    .collect();
                let y = Array::concatenate(&outputs, 1).unwrap();
                y.eval().unwrap();
                dispatch::set_kernels(true);
                (y, cache)
            };
            let ((found, cache), (plain, plain_cache)) = (run(true), run(false));
            assert_eq!(found.dtype(), plain.dtype());
            let tolerance = if dtype == Dtype::Float32 { 1e-5 } else { 0.05 };
            let real = |y: &Array| y.slice_axis(1, 5, 75).unwrap();
            assert_close(&real(&found), &f64s(&real(&plain)), tolerance);
            for (found, plain) in cache.arrays().zip(plain_cache.arrays()) {
                assert_eq!(found.dtype(), plain.dtype());
                assert_close(found, &f64s(plain), tolerance);
            }
        }
    }
}

/// By the kernels and by MLX's operations, in one go and position by position.
#[test]
fn a_long_prompt_is_its_single_steps() {
    let _kernels = KERNELS.lock();
    let (layer, length) = (layer(false), 4096);
    let x = normal(61, &[1, length, 12]);
    let whole = |kernels: bool| {
        dispatch::set_kernels(kernels);
        let mut cache = RecurrentCache::default();
        let y = layer.forward(&x, &mut cache).unwrap();
        y.eval().unwrap();
        dispatch::set_kernels(true);
        (y, cache)
    };
    let mut cache = RecurrentCache::default();
    let steps = (0..length).map(|at| {
        let x = x.slice_axis(1, at, at + 1).unwrap();
        let y = layer.forward(&x, &mut cache).unwrap();
        y.eval().unwrap();
        y
    });
    let steps = Array::concatenate(&steps.collect::<Vec<_>>(), 1).unwrap();
    for (y, after) in [whole(true), whole(false)] {
        assert_close(&y, &f64s(&steps), 1e-4);
        for (found, expected) in after.arrays().zip(cache.arrays()) {
            assert_close(found, &f64s(expected), 1e-4);
        }
    }
}

#[test]
fn wrong_settings_are_named() {
    let weights = Weights::new(BTreeMap::new(), QuantizationConfig::default());
    let refused = |config: Mamba2Config| Mamba2::load(&weights, &config).unwrap_err().to_string();
    let cases = [
        (
            refused(Mamba2Config {
                num_heads: 0,
                ..CONFIG
            }),
            "mamba_num_heads: expected a positive number, found 0",
        ),
        (
            refused(Mamba2Config {
                num_groups: 3,
                ..CONFIG
            }),
            "n_groups: expected a divisor of the 4 heads, found 3",
        ),
        (
            refused(Mamba2Config {
                conv_kernel: 1,
                ..CONFIG
            }),
            "conv_kernel: expected a number from 2 to 64, found 1",
        ),
        (
            refused(Mamba2Config {
                head_dim: i32::MAX,
                ..CONFIG
            }),
            "mamba_num_heads: expected a smaller layer, found 4",
        ),
        (
            refused(Mamba2Config {
                time_step_limit: (1.0, 0.5),
                ..CONFIG
            }),
            "time_step_limit: expected a number and one that is not below it, found 1 and 0.5",
        ),
    ];
    for (found, expected) in cases {
        assert_eq!(found, expected);
    }
}
