//! Recorded sequences: each layer gives what its `forward` gives, and what MLX's own operations
//! give; nodes of several steps; caches in them; failures.
#![allow(clippy::unwrap_used, reason = "a helper fails as its test would")]

mod caches;
mod held;
mod layers;
mod nodes;

use std::collections::BTreeMap;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use mlex_core::{Array, Device, Dtype, Quantized, QuantizedWeight, Stream, random};
use mlex_nn::dispatch::set_kernels;
use mlex_nn::{LazyTensor, QuantizationConfig, Result, Sequence, Value, Weights};

const DTYPES: [Dtype; 3] = [Dtype::Float32, Dtype::Float16, Dtype::Bfloat16];

/// Runs a test on the CPU, with the kernels on. They are switched for the whole process, so
/// these tests run one by one.
fn on_cpu<T>(test: impl FnOnce() -> T) -> T {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    Stream::default_of(Device::Cpu).unwrap().scope(test)
}

/// As [`on_cpu`] on a thread of its own; fails if the test gets stuck.
fn ends(test: impl FnOnce() + Send + 'static) {
    let (done, result) = channel();
    let thread = std::thread::spawn(move || {
        on_cpu(test);
        // Nobody listens when it took too long.
        let _ = done.send(());
    });
    match result.recv_timeout(Duration::from_secs(120)) {
        Err(RecvTimeoutError::Timeout) => panic!("the test is stuck"),
        _ => thread.join().unwrap(),
    }
}

/// What MLX's own operations give.
fn plain<T>(compute: impl FnOnce() -> T) -> T {
    struct On;
    impl Drop for On {
        fn drop(&mut self) {
            set_kernels(true);
        }
    }
    let _on = On;
    set_kernels(false);
    compute()
}

fn normal(seed: u64, shape: &[i32], dtype: Dtype) -> Array {
    let key = random::key(seed).unwrap();
    let array = random::normal(0.0, 0.4, shape, Dtype::Float32, &key).unwrap();
    array.as_type(dtype).unwrap()
}

/// The tensors of a checkpoint, some of them quantized.
struct Tensors {
    tensors: BTreeMap<String, Array>,
    dtype: Dtype,
    layout: Option<Quantized>,
}

impl Tensors {
    fn new(dtype: Dtype, layout: Option<Quantized>) -> Self {
        Self {
            tensors: BTreeMap::new(),
            dtype,
            layout,
        }
    }

    /// A vector of random values.
    fn vector(mut self, name: &str, length: i32) -> Self {
        let seed = self.tensors.len() as u64;
        let array = normal(seed, &[length], self.dtype);
        self.tensors.insert(name.to_owned(), array);
        self
    }

    /// `name.weight` `[rows, columns]` or its packed form, and `name.bias` if there is one.
    fn matrix(mut self, name: &str, rows: i32, columns: i32, bias: bool) -> Self {
        let prefix = if name.is_empty() {
            String::new()
        } else {
            format!("{name}.")
        };
        let seed = self.tensors.len() as u64;
        let weight = normal(seed, &[rows, columns], self.dtype);
        let mut insert = |of: &str, array| self.tensors.insert(format!("{prefix}{of}"), array);
        match self.layout {
            None => {
                insert("weight", weight);
            }
            Some(layout) => {
                let packed = QuantizedWeight::quantize(&weight, layout).unwrap();
                insert("weight", packed.weight);
                insert("scales", packed.scales);
                if let Some(biases) = packed.biases {
                    insert("biases", biases);
                }
            }
        }
        if bias {
            insert("bias", normal(seed + 100, &[rows], self.dtype));
        }
        self
    }

    /// A layer that takes all of it.
    fn load<T>(&self, layer: impl FnOnce(&Weights) -> Result<T>) -> T {
        let tensor =
            |(name, array): (&String, &Array)| (name.clone(), LazyTensor::ready(array.clone()));
        let config = match self.layout {
            Some(layout) => QuantizationConfig::uniform(layout),
            None => QuantizationConfig::default(),
        };
        let weights = Weights::new(self.tensors.iter().map(tensor).collect(), config);
        let layer = layer(&weights).unwrap();
        weights.finish().unwrap();
        layer
    }
}

/// The array of what is recorded on `x`.
#[track_caller]
fn recorded(
    x: &Array,
    record: impl FnOnce(&mut Sequence, Value) -> Result<Option<Value>>,
) -> Array {
    let (mut sequence, value) = Sequence::start(x).unwrap().unwrap();
    let output = record(&mut sequence, value).unwrap().unwrap();
    assert_eq!(sequence.dtype(value), x.dtype());
    sequence.finish(&[output]).unwrap().remove(0)
}

/// Bit by bit.
#[track_caller]
fn assert_same(found: &Array, expected: &Array) {
    assert_eq!(found.shape(), expected.shape());
    assert_eq!(found.dtype(), expected.dtype());
    let bytes = |array: &Array| array.contiguous().unwrap().as_bytes().unwrap().to_vec();
    assert!(bytes(found) == bytes(expected), "the bits differ");
}

fn floats(array: &Array) -> Vec<f32> {
    array.as_type(Dtype::Float32).unwrap().to_vec().unwrap()
}

/// Relative to the largest element: what some rounded operations one after another may be off by.
#[track_caller]
fn assert_close(found: &Array, expected: &Array) {
    assert_eq!(found.shape(), expected.shape());
    assert_eq!(found.dtype(), expected.dtype());
    let tolerance = match found.dtype() {
        Dtype::Float32 => 2e-5,
        Dtype::Float16 => 4e-3,
        _ => 3e-2,
    };
    let (found, expected) = (floats(found), floats(expected));
    let largest = expected.iter().fold(1e-3f32, |max, x| max.max(x.abs()));
    for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
        let error = (a - b).abs();
        assert!(
            error <= tolerance * largest,
            "[{i}]: {a} where {b} is expected, the largest is {largest}"
        );
    }
}
