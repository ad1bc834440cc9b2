//! The layers of a tower.

use mlex_core::{Array, Dtype};
use mlex_nn::activation::{gelu, gelu_tanh};
use mlex_nn::{Activation, GatedMlp, LayerNorm, Linear, RmsNorm, Rotations, Weights};

use super::config::{Config, QwenKind};
use super::grid::Windows;
use crate::Result;
use crate::config::check_size;
use crate::towers::layers::attend;

/// Of the norms.
const EPS: f32 = 1e-6;

/// The projection of a patch: a convolution over patches that do not overlap, and what it
/// computes in. MLX's checkpoints have the channels last, the published ones first, as the patches
/// do.
pub(super) fn patch_embed(weights: &Weights, config: &Config) -> Result<(Linear, Dtype)> {
    let (out, channels) = (config.hidden_size, config.in_channels);
    let [t, side] = [config.temporal_patch_size, config.patch_size];
    let last = [out, t, side, side, channels];
    let weight = if weights.shape("weight").as_deref() == Some(&last) {
        let weight = weights.get_float("weight", &last)?;
        weight.transpose(&[0, 4, 1, 2, 3])?
    } else {
        weights.get_float("weight", &[out, channels, t, side, side])?
    };
    let weight = weight.reshape(&[out, config.patch_len()])?;
    weight.eval()?;
    let bias = (config.kind != QwenKind::Qwen2_5Vl).then(|| weights.get_float("bias", &[out]));
    let dtype = weight.dtype();
    Ok((Linear::of(weight, bias.transpose()?)?, dtype))
}

/// The norm that a kind of tower has.
#[derive(Debug)]
enum Norm {
    Layer(LayerNorm),
    Rms(RmsNorm),
}

impl Norm {
    fn load(weights: &Weights, width: i32, kind: QwenKind) -> Result<Self> {
        Ok(match kind {
            QwenKind::Qwen2_5Vl => Self::Rms(RmsNorm::load(weights, width, EPS)?),
            _ => Self::Layer(LayerNorm::load(weights, width, EPS)?),
        })
    }

    fn forward(&self, x: &Array) -> Result<Array> {
        Ok(match self {
            Self::Layer(norm) => norm.forward(x)?,
            Self::Rms(norm) => norm.forward(x)?,
        })
    }
}

/// The feed-forward layer of a block.
#[derive(Debug)]
enum Mlp {
    Plain(Box<[Linear; 2]>),
    Gated(Box<GatedMlp>),
}

impl Mlp {
    fn load(weights: &Weights, config: &Config) -> Result<Self> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        if config.kind == QwenKind::Qwen2_5Vl {
            let mlp = GatedMlp::load(weights, hidden, inner, true, Activation::Silu)?;
            return Ok(Self::Gated(mlp.into()));
        }
        let fc1 = Linear::load(&weights.pp("linear_fc1"), hidden, inner, true)?;
        let fc2 = Linear::load(&weights.pp("linear_fc2"), inner, hidden, true)?;
        Ok(Self::Plain([fc1, fc2].into()))
    }

    fn forward(&self, x: &Array) -> Result<Array> {
        Ok(match self {
            Self::Plain(layers) => {
                let [fc1, fc2] = &**layers;
                fc2.forward(&gelu_tanh(&fc1.forward(x)?)?)?
            }
            Self::Gated(mlp) => mlp.forward(x)?,
        })
    }
}

/// Attention and a feed-forward layer.
#[derive(Debug)]
pub(super) struct Block {
    norm1: Norm,
    norm2: Norm,
    qkv: Linear,
    proj: Linear,
    mlp: Mlp,
    num_heads: i32,
}

impl Block {
    pub(super) fn load(weights: &Weights, config: &Config) -> Result<Self> {
        let hidden = config.hidden_size;
        let attn = weights.pp("attn");
        let norm = |name| Norm::load(&weights.pp(name), hidden, config.kind);
        Ok(Self {
            norm1: norm("norm1")?,
            norm2: norm("norm2")?,
            qkv: Linear::load(&attn.pp("qkv"), hidden, 3 * hidden, true)?,
            proj: Linear::load(&attn.pp("proj"), hidden, hidden, true)?,
            mlp: Mlp::load(&weights.pp("mlp"), config)?,
            num_heads: config.num_heads,
        })
    }

    /// `[1, N, D]` of `frames`, whose patches see those of their own window of their own frame.
    pub(super) fn forward(
        &self,
        x: &Array,
        rotations: &Rotations,
        frames: i32,
        windows: &[Windows],
    ) -> Result<Array> {
        let attended = self.attend(&self.norm1.forward(x)?, rotations, frames, windows)?;
        let x = x.add(&attended)?;
        Ok(x.add(&self.mlp.forward(&self.norm2.forward(&x)?)?)?)
    }

    fn attend(
        &self,
        x: &Array,
        rotations: &Rotations,
        frames: i32,
        windows: &[Windows],
    ) -> Result<Array> {
        let qkv = self.qkv.forward(x)?;
        let qkv = qkv.unflatten(-1, &[3, self.num_heads, -1])?;
        let head_dim = qkv.dim(-1)?;
        let scale = (head_dim as f32).powf(-0.5);
        let heads = |index: i32| qkv.at(2, index)?.transpose(&[0, 2, 1, 3]);
        let inputs = [
            rotations.apply(&heads(0)?)?,
            rotations.apply(&heads(1)?)?,
            heads(2)?,
        ];
        // [1, H, N, D] -> [H, frames, N / frames, D]
        let frames_of = |x: &Array| x.reshape(&[self.num_heads, frames, -1, head_dim]);
        let [queries, keys, values] = inputs.each_ref().map(frames_of);
        let inputs = [queries?, keys?, values?];
        let (mut outputs, mut start) = (Vec::with_capacity(windows.len()), 0);
        for window in windows {
            let end = start + window.count * window.patches;
            // -> [frames * count, H, patches, D]
            let part = |x: &Array| -> Result<Array> {
                let x = x.slice_axis(2, start, end)?;
                let count = frames * window.count;
                let x = x.reshape(&[self.num_heads, count, window.patches, head_dim])?;
                Ok(x.transpose(&[1, 0, 2, 3])?)
            };
            let [queries, keys, values] = inputs.each_ref().map(part);
            let output = attend(&queries?, &keys?, &values?, scale)?;
            let output = output.transpose(&[0, 2, 1, 3])?;
            outputs.push(output.reshape(&[frames, end - start, self.num_heads * head_dim])?);
            start = end;
        }
        let output = match &outputs[..] {
            [one] => one.clone(),
            parts => Array::concatenate(parts, 1)?,
        };
        let output = output.reshape(&[1, -1, self.num_heads * head_dim])?;
        Ok(self.proj.forward(&output)?)
    }
}

/// Makes one token of the patches of a square.
#[derive(Debug)]
pub(super) struct Merger {
    norm: Norm,
    /// The norm is over the square, not over each patch.
    norm_last: bool,
    fc1: Linear,
    fc2: Linear,
    width: i32,
}

impl Merger {
    /// `norm_last`: the norm is over the square, not over each patch.
    pub(super) fn load(weights: &Weights, config: &Config, norm_last: bool) -> Result<Self> {
        let merge = config.spatial_merge_size;
        let width = config.hidden_size.saturating_mul(merge * merge);
        check_size("hidden_size * spatial_merge_size^2", width)?;
        let [norm, fc1, fc2] = match config.kind {
            QwenKind::Qwen2_5Vl => ["ln_q", "mlp.0", "mlp.2"],
            _ => ["norm", "linear_fc1", "linear_fc2"],
        };
        let normed = if norm_last { width } else { config.hidden_size };
        Ok(Self {
            norm: Norm::load(&weights.pp(norm), normed, config.kind)?,
            norm_last,
            fc1: Linear::load(&weights.pp(fc1), width, width, true)?,
            fc2: Linear::load(&weights.pp(fc2), width, config.out_hidden_size, true)?,
            width,
        })
    }

    /// `[1, N, D]` to `[tokens, out_hidden_size]`.
    pub(super) fn forward(&self, x: &Array) -> Result<Array> {
        let squares = |x: &Array| x.reshape(&[-1, self.width]);
        let x = if self.norm_last {
            self.norm.forward(&squares(x)?)?
        } else {
            squares(&self.norm.forward(x)?)?
        };
        Ok(self.fc2.forward(&gelu(&self.fc1.forward(&x)?)?)?)
    }
}
