//! What the benches of the layers share: random arrays, and which implementation runs.
//!
//! Each bench evaluates some calls in one graph, on weights or keys that are together larger
//! than a CPU's cache, as a step of a model does. So its figure has MLX's own work for a node
//! in it, but not that of starting an evaluation.
#![forbid(unsafe_code)]

pub mod recurrent;
pub mod towers;

use std::fmt;

use mlex_core::{Array, Dtype, Result, eval, random};
use mlex_nn::dispatch::set_kernels;

/// Data of one graph: more than the last cache of most CPUs.
const WORKING_SET: usize = 64 << 20;
/// A step of a model has some hundreds of nodes.
const MOST_CALLS: usize = 128;

/// Who computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// mlex's kernels.
    Kernels,
    /// MLX's operations, as the layers use them without kernels.
    Mlx,
}

impl Backend {
    /// Switches the layers to it.
    pub fn select(self) {
        set_kernels(self == Self::Kernels);
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kernels => "mlex",
            Self::Mlx => "mlx",
        })
    }
}

/// The short name of a dtype.
pub fn short(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Float16 => "f16",
        Dtype::Bfloat16 => "bf16",
        _ => "f32",
    }
}

/// How many copies of `bytes` make a working set.
pub fn calls(bytes: usize) -> usize {
    (WORKING_SET / bytes.max(1)).clamp(1, MOST_CALLS)
}

/// Normally distributed numbers, computed; another `seed` gives others.
///
/// # Errors
/// When MLX is out of memory.
pub fn normal(shape: &[i32], dtype: Dtype, seed: u64) -> Result<Array> {
    let array = random::normal(0.0, 1.0, shape, Dtype::Float32, &random::key(seed)?)?;
    let array = array.as_type(dtype)?;
    array.eval()?;
    Ok(array)
}

/// Computes one graph of all `outputs`.
///
/// # Errors
/// When one of them could not be built, or MLX fails.
pub fn run<E: From<mlex_core::Error>>(
    outputs: impl Iterator<Item = Result<Array, E>>,
) -> Result<(), E> {
    let outputs = outputs.collect::<Result<Vec<_>, E>>()?;
    Ok(eval(&outputs)?)
}
