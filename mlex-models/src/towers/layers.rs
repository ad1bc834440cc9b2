//! Layers that several towers have.

use mlex_core::{Array, AttentionMask, Dtype};
use mlex_nn::attention::attention;
use mlex_nn::{Linear, Weights, clip};

use crate::Result;

/// The kernels take heads whose width is a multiple of this.
const WHOLE: i32 = 16;

/// Attention of `[B, H, L, D]` in which every position sees every other one: `[B, H, L, D]`.
/// Zeros fill heads up to a width that the kernels take, and change nothing.
pub(super) fn attend(queries: &Array, keys: &Array, values: &Array, scale: f32) -> Result<Array> {
    let (head_dim, mask) = (queries.dim(-1)?, AttentionMask::None);
    let rest = (WHOLE - head_dim % WHOLE) % WHOLE;
    if rest == 0 {
        return Ok(attention(queries, keys, values, scale, mask, None)?);
    }
    let filled = |x: &Array| x.pad(&[-1], &[(0, rest)], 0.0);
    let (queries, keys, values) = (filled(queries)?, filled(keys)?, filled(values)?);
    let output = attention(&queries, &keys, &values, scale, mask, None)?;
    Ok(output.slice_axis(-1, 0, head_dim)?)
}

/// A linear layer whose input and output are clipped to what the checkpoint says.
///
/// Reference: mlx-vlm `models/gemma4/vision.py`, `ClippableLinear`.
#[derive(Debug)]
pub(super) struct ClippedLinear {
    linear: Linear,
    input: Bounds,
    output: Bounds,
}

/// The least and the largest number, where there are some.
type Bounds = Option<[f32; 2]>;

impl ClippedLinear {
    /// Takes `linear.weight` `[output, input]`, and with `clipped` the bounds where there are
    /// some, from `weights`.
    pub(super) fn load(weights: &Weights, input: i32, output: i32, clipped: bool) -> Result<Self> {
        let bounds = |least: &str, largest: &str| -> Result<Bounds> {
            if !clipped || !weights.contains(least) || !weights.contains(largest) {
                return Ok(None);
            }
            Ok(Some([scalar(weights, least)?, scalar(weights, largest)?]))
        };
        Ok(Self {
            input: bounds("input_min", "input_max")?,
            output: bounds("output_min", "output_max")?,
            linear: Linear::load(&weights.pp("linear"), input, output, false)?,
        })
    }

    /// `[.., input]` to `[.., output]`.
    pub(super) fn forward(&self, x: &Array) -> Result<Array> {
        let y = match self.input {
            Some(bounds) => self.linear.forward(&clip(x, bounds)?)?,
            None => self.linear.forward(x)?,
        };
        match self.output {
            Some(bounds) => Ok(clip(&y, bounds)?),
            None => Ok(y),
        }
    }
}

/// A number, stored without dimensions or with one.
fn scalar(weights: &Weights, name: &str) -> Result<f32> {
    let shape: &[i32] = match weights.shape(name) {
        Some(shape) if shape == [1] => &[1],
        _ => &[],
    };
    let number = weights.get_float(name, shape)?.as_type(Dtype::Float32)?;
    Ok(number.reshape(&[])?.item()?)
}

/// What brings the output of a tower into the language model: a norm without weights and a
/// projection.
///
/// Reference: mlx-vlm `models/gemma4/gemma4.py`, `MultimodalEmbedder`.
#[derive(Debug)]
pub(super) struct Projector {
    projection: Linear,
    eps: f32,
}

impl Projector {
    /// Takes `embedding_projection.weight` `[output, input]` from `weights`.
    pub(super) fn load(weights: &Weights, input: i32, output: i32, eps: f32) -> Result<Self> {
        let projection = weights.pp("embedding_projection");
        Ok(Self {
            projection: Linear::load(&projection, input, output, false)?,
            eps,
        })
    }

    /// `[.., input]` to `[.., output]`.
    pub(super) fn forward(&self, x: &Array) -> Result<Array> {
        Ok(self.projection.forward(&x.rms_norm(None, self.eps)?)?)
    }
}
