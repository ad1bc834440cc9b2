//! The audio tower of Gemma 4: two convolutions that make a fourth of the frames, and Conformer
//! blocks whose attention looks back a few frames.
//!
//! Reference: mlx-vlm `models/gemma4/audio.py`. Frames of silence that fill up a batch are cut
//! off before; there they are masked, with the same outcome.

use std::f32::consts::{E, LN_2};

use mlex_audio::MelFeatures;
use mlex_core::{Array, Dtype};
use mlex_nn::activation::silu;
use mlex_nn::{Activation, LayerNorm, Linear, RmsNorm, Weights, clip};
use serde::Deserialize;

use super::interrupt::Blocks;
use super::layers::{ClippedLinear, Projector};
use crate::config::{ModelConfig, check, check_layers, check_positive, check_size};
use crate::{Error, Result};

/// Of the norms that are not given the config's.
const EPS: f32 = 1e-6;
/// The mel bins that the projection behind the convolutions is made for.
const BINS: i32 = 128;

/// The fields of `audio_config`; defaults as in mlx-vlm.
#[derive(Debug, Deserialize)]
#[serde(default)]
struct Config {
    hidden_size: i32,
    num_hidden_layers: i32,
    num_attention_heads: i32,
    hidden_act: String,
    subsampling_conv_channels: [i32; 2],
    conv_kernel_size: i32,
    residual_weight: f32,
    attention_chunk_size: i32,
    attention_context_left: i32,
    attention_context_right: i32,
    attention_logit_cap: f32,
    attention_invalid_logits_value: f32,
    use_clipped_linears: bool,
    rms_norm_eps: f32,
    gradient_clipping: f32,
    output_proj_dims: Option<i32>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            hidden_size: 1024,
            num_hidden_layers: 12,
            num_attention_heads: 8,
            hidden_act: "silu".to_owned(),
            subsampling_conv_channels: [128, 32],
            conv_kernel_size: 5,
            residual_weight: 0.5,
            attention_chunk_size: 12,
            attention_context_left: 13,
            attention_context_right: 0,
            attention_logit_cap: 50.0,
            attention_invalid_logits_value: -1e9,
            use_clipped_linears: true,
            rms_norm_eps: EPS,
            gradient_clipping: 1e10,
            output_proj_dims: Some(1536),
        }
    }
}

impl Config {
    fn validate(&self) -> Result<()> {
        const MOST: i32 = 1 << 12;
        let (hidden, heads) = (self.hidden_size, self.num_attention_heads);
        check_layers("num_hidden_layers", self.num_hidden_layers)?;
        check_size("hidden_size", hidden)?;
        check("num_attention_heads", heads, 1..=hidden)?;
        for channels in self.subsampling_conv_channels {
            check("subsampling_conv_channels", channels, 1..=1 << 16)?;
        }
        check("conv_kernel_size", self.conv_kernel_size, 1..=256)?;
        check("attention_chunk_size", self.attention_chunk_size, 1..=MOST)?;
        check(
            "attention_context_left",
            self.attention_context_left,
            0..=MOST,
        )?;
        check(
            "attention_context_right",
            self.attention_context_right,
            0..=MOST,
        )?;
        check_positive("attention_logit_cap", self.attention_logit_cap)?;
        check_positive("rms_norm_eps", self.rms_norm_eps)?;
        check_positive("gradient_clipping", self.gradient_clipping)?;
        if let Some(width) = self.output_proj_dims {
            check_size("output_proj_dims", width)?;
        }
        if hidden % heads != 0 || hidden % 2 != 0 {
            let expected = format!("an even multiple of {heads} heads");
            return Err(Error::field("hidden_size", expected, hidden.to_string()));
        }
        if self.hidden_act != "silu" {
            return Err(Error::unsupported("hidden_act", self.hidden_act.as_str()));
        }
        Ok(())
    }

    /// How many frames back a frame may look.
    fn past(&self) -> i32 {
        (self.attention_context_left - 1).max(0)
    }

    fn future(&self) -> i32 {
        self.attention_context_right
    }

    /// How many frames the queries of a chunk look at.
    fn context(&self) -> i32 {
        self.attention_chunk_size + self.past() + self.future()
    }
}

/// The audio tower of Gemma 4, and what brings its tokens into the language model.
#[derive(Debug)]
pub(super) struct GemmaAudio {
    convolutions: [Convolution; 2],
    input_proj_linear: Linear,
    blocks: Vec<Block>,
    output_proj: Option<Linear>,
    projector: Projector,
    config: Config,
}

impl GemmaAudio {
    /// Takes the tower from `tower` and the projection to `width` from `projector`, as
    /// `audio_config` describes them.
    pub(super) fn load(
        config: &ModelConfig,
        tower: &Weights,
        projector: &Weights,
        width: i32,
    ) -> Result<Self> {
        // A width that is `null` is none.
        let config: Config = config.parse_with_nulls()?;
        config.validate()?;
        let [first, second] = config.subsampling_conv_channels;
        let input = tower.pp("subsample_conv_projection");
        let convolution = |name, channels, out| {
            Convolution::load(&input.pp(name), channels, out, config.rms_norm_eps)
        };
        let hidden = config.hidden_size;
        let layers = tower.pp("layers");
        let blocks = (0..config.num_hidden_layers).map(|n| Block::load(&layers.pp(n), &config));
        let output_proj = config
            .output_proj_dims
            .map(|width| Linear::load(&tower.pp("output_proj"), hidden, width, true))
            .transpose()?;
        let output = config.output_proj_dims.unwrap_or(hidden);
        Ok(Self {
            convolutions: [
                convolution("layer0", 1, first)?,
                convolution("layer1", first, second)?,
            ],
            input_proj_linear: Linear::load(
                &input.pp("input_proj_linear"),
                BINS / 4 * second,
                hidden,
                false,
            )?,
            blocks: blocks.collect::<Result<_>>()?,
            output_proj,
            projector: Projector::load(projector, output, width, config.rms_norm_eps)?,
            config,
        })
    }

    /// A sound to `[tokens, width]`.
    pub(super) fn forward(&self, input: &MelFeatures) -> Result<Array> {
        if input.bins as i32 != BINS {
            let found = input.bins.to_string();
            return Err(Error::field("mel bins", BINS.to_string(), found));
        }
        let values = input.values.get(..input.valid * input.bins);
        let values = values.filter(|values| !values.is_empty());
        let values = values.ok_or_else(|| {
            let found = format!("{} values", input.values.len());
            Error::field("mel frames", input.valid.to_string(), found)
        })?;
        let shape = [1, input.valid as i32, BINS, 1];
        let mut x = Array::from_slice(values, &shape)?;
        for convolution in &self.convolutions {
            x = convolution.forward(&x)?;
        }
        let mut x = self.input_proj_linear.forward(&x.flatten(2, 3)?)?;
        let places = Places::new(x.dim(1)?, x.dtype(), &self.config)?;
        let mut blocks = Blocks::default();
        for block in &self.blocks {
            x = block.forward(&x, &places, &self.config)?;
            blocks.done(&x)?;
        }
        if let Some(output_proj) = &self.output_proj {
            x = output_proj.forward(&x)?;
        }
        Ok(self.projector.forward(&x)?.squeeze(0)?)
    }
}

/// Halves frames and bins.
#[derive(Debug)]
struct Convolution {
    /// `[out, 3, 3, in]`
    weight: Array,
    norm: LayerNorm,
}

impl Convolution {
    /// MLX's checkpoints have the channels last, the published ones before the sides.
    fn load(weights: &Weights, channels: i32, out: i32, eps: f32) -> Result<Self> {
        let conv = weights.pp("conv");
        let last = [out, 3, 3, channels];
        let weight = if conv.shape("weight").as_deref() == Some(&last) {
            conv.get_float("weight", &last)?
        } else {
            let weight = conv.get_float("weight", &[out, channels, 3, 3])?;
            weight.transpose(&[0, 2, 3, 1])?
        };
        Ok(Self {
            weight,
            norm: LayerNorm::load(&weights.pp("norm"), out, eps)?,
        })
    }

    /// `[1, T, F, in]` to `[1, T / 2, F / 2, out]`, rounded up.
    fn forward(&self, x: &Array) -> Result<Array> {
        let x = x.as_type(self.weight.dtype())?;
        let x = x.conv2d(&self.weight, (2, 2), (1, 1), (1, 1), 1)?;
        Ok(self.norm.forward(&x)?.maximum(0.0)?)
    }
}

/// What the attention of every block needs to know of the frames.
struct Places {
    /// How many frames there are.
    length: i32,
    chunks: i32,
    /// int32 `[chunks * context]`: the frames that the queries of a chunk look at, counted from
    /// the frames that are put before the first one.
    context: Array,
    /// bool `[chunks, 1, chunk, context]`: true where a query sees a frame.
    mask: Array,
    /// `[1, distances, D]`: sines and cosines of the distances, the farthest back first.
    distances: Array,
}

impl Places {
    fn new(length: i32, dtype: Dtype, config: &Config) -> Result<Self> {
        let (chunk, context) = (config.attention_chunk_size, config.context());
        let (past, future) = (config.past(), config.future());
        let chunks = length.div_euclid(chunk) + i32::from(length % chunk != 0);
        let mut indices = Vec::new();
        let mut mask = Vec::new();
        for start in (0..chunks).map(|n| n * chunk) {
            indices.extend((0..context).map(|n| start + n));
            for query in 0..chunk {
                mask.extend((0..context).map(|n| {
                    let distance = query + past - n;
                    let near = (0..past).contains(&distance) || (1..future).contains(&-distance);
                    near && (0..length).contains(&(start + n - past))
                }));
            }
        }
        let width = config.hidden_size / 2;
        let step = 10_000_f32.ln() / (width - 1).max(1) as f32;
        let mut distances = Vec::new();
        for distance in (-future..=past).rev() {
            let angle = |n: i32| distance as f32 * (n as f32 * -step).exp();
            distances.extend((0..width).map(|n| angle(n).sin()));
            distances.extend((0..width).map(|n| angle(n).cos()));
        }
        Ok(Self {
            length,
            chunks,
            context: Array::from_slice(&indices, &[chunks * context])?,
            mask: Array::from_slice(&mask, &[chunks, 1, chunk, context])?,
            distances: Array::from_slice(&distances, &[1, past + future + 1, 2 * width])?
                .as_type(dtype)?,
        })
    }
}

#[derive(Debug)]
struct Block {
    feed_forward1: FeedForward,
    self_attn: Attention,
    lconv1d: LightConvolution,
    feed_forward2: FeedForward,
    norm_pre_attn: RmsNorm,
    norm_post_attn: RmsNorm,
    norm_out: RmsNorm,
}

impl Block {
    fn load(weights: &Weights, config: &Config) -> Result<Self> {
        let norm = |name| RmsNorm::load(&weights.pp(name), config.hidden_size, EPS);
        Ok(Self {
            feed_forward1: FeedForward::load(&weights.pp("feed_forward1"), config)?,
            self_attn: Attention::load(&weights.pp("self_attn"), config)?,
            lconv1d: LightConvolution::load(&weights.pp("lconv1d"), config)?,
            feed_forward2: FeedForward::load(&weights.pp("feed_forward2"), config)?,
            norm_pre_attn: norm("norm_pre_attn")?,
            norm_post_attn: norm("norm_post_attn")?,
            norm_out: norm("norm_out")?,
        })
    }

    fn forward(&self, x: &Array, places: &Places, config: &Config) -> Result<Array> {
        let x = self.feed_forward1.forward(x, config)?;
        let normed = self.norm_pre_attn.forward(&limited(&x, config)?)?;
        let attended = limited(&self.self_attn.forward(&normed, places, config)?, config)?;
        let x = x.add(&self.norm_post_attn.forward(&attended)?)?;
        let x = self.lconv1d.forward(&x, config)?;
        let x = self.feed_forward2.forward(&x, config)?;
        Ok(self.norm_out.forward(&limited(&x, config)?)?)
    }
}

/// Within the bounds that gradients were clipped to.
fn limited(x: &Array, config: &Config) -> Result<Array> {
    let most = config.gradient_clipping;
    Ok(clip(x, [-most, most])?)
}

#[derive(Debug)]
struct FeedForward {
    pre_layer_norm: RmsNorm,
    ffw_layer_1: ClippedLinear,
    ffw_layer_2: ClippedLinear,
    post_layer_norm: RmsNorm,
}

impl FeedForward {
    fn load(weights: &Weights, config: &Config) -> Result<Self> {
        let (hidden, clipped) = (config.hidden_size, config.use_clipped_linears);
        let inner = hidden.saturating_mul(4);
        let norm = |name| RmsNorm::load(&weights.pp(name), hidden, EPS);
        let linear =
            |name, input, output| ClippedLinear::load(&weights.pp(name), input, output, clipped);
        Ok(Self {
            pre_layer_norm: norm("pre_layer_norm")?,
            ffw_layer_1: linear("ffw_layer_1", hidden, inner)?,
            ffw_layer_2: linear("ffw_layer_2", inner, hidden)?,
            post_layer_norm: norm("post_layer_norm")?,
        })
    }

    fn forward(&self, x: &Array, config: &Config) -> Result<Array> {
        let normed = self.pre_layer_norm.forward(&limited(x, config)?)?;
        let inner = silu(&self.ffw_layer_1.forward(&normed)?)?;
        let fed = limited(&self.ffw_layer_2.forward(&inner)?, config)?;
        let fed = self.post_layer_norm.forward(&fed)?;
        Ok(x.add(&fed.multiply(config.residual_weight)?)?)
    }
}

/// Attention of chunks over the frames around them, with scores of the distance ("Transformer-XL")
/// under a cap.
#[derive(Debug)]
struct Attention {
    q_proj: ClippedLinear,
    k_proj: ClippedLinear,
    v_proj: ClippedLinear,
    post: ClippedLinear,
    relative_k_proj: Linear,
    /// f32 `[head_dim]`: the factor of the queries.
    query_scale: Array,
}

impl Attention {
    fn load(weights: &Weights, config: &Config) -> Result<Self> {
        let hidden = config.hidden_size;
        let head_dim = hidden / config.num_attention_heads;
        let linear = |name| {
            let weights = weights.pp(name);
            ClippedLinear::load(&weights, hidden, hidden, config.use_clipped_linears)
        };
        let scale = weights.get_float("per_dim_scale", &[head_dim])?;
        let softplus = scale.as_type(Dtype::Float32)?.logaddexp(0.0)?;
        Ok(Self {
            q_proj: linear("q_proj")?,
            k_proj: linear("k_proj")?,
            v_proj: linear("v_proj")?,
            post: linear("post")?,
            relative_k_proj: Linear::load(&weights.pp("relative_k_proj"), hidden, hidden, false)?,
            query_scale: softplus.multiply((head_dim as f32).powf(-0.5) / LN_2)?,
        })
    }

    fn forward(&self, x: &Array, places: &Places, config: &Config) -> Result<Array> {
        let (chunk, context) = (config.attention_chunk_size, config.context());
        let (heads, chunks) = (config.num_attention_heads, places.chunks);
        // [1, T, D] to f32 [T, H, head_dim]
        let split = |x: Array| -> Result<Array> {
            let x = x.as_type(Dtype::Float32)?.squeeze(0)?;
            Ok(x.unflatten(-1, &[heads, -1])?)
        };
        let queries = split(self.q_proj.forward(x)?)?.multiply(&self.query_scale)?;
        let keys = split(self.k_proj.forward(x)?)?.multiply((1.0 + E).ln() / LN_2)?;
        let values = split(self.v_proj.forward(x)?)?;

        // [chunks, H, chunk, head_dim]
        let rest = chunks * chunk - places.length;
        let queries = queries.pad(&[0], &[(0, rest)], 0.0)?;
        let queries = queries.unflatten(0, &[chunks, chunk])?;
        let queries = queries.transpose(&[0, 2, 1, 3])?;
        // [chunks, H, context, head_dim]
        let around = |x: &Array| -> Result<Array> {
            let behind = config.future() + chunk - 1;
            let padded = x.pad(&[0], &[(config.past(), behind)], 0.0)?;
            let taken = padded.take(&places.context, 0)?;
            let taken = taken.unflatten(0, &[chunks, context])?;
            Ok(taken.transpose(&[0, 2, 1, 3])?)
        };
        let (keys, values) = (around(&keys)?, around(&values)?);

        let scores = queries.matmul(&keys.swap_axes(-1, -2)?)?;
        let scores = scores.add(&self.distance_scores(&queries, places, config)?)?;
        let cap = config.attention_logit_cap;
        let scores = scores.divide(cap)?.tanh()?.multiply(cap)?;
        let hidden = Array::scalar(config.attention_invalid_logits_value)?;
        let scores = places.mask.where_(&scores, &hidden)?;
        let output = scores.softmax(&[-1], true)?.matmul(&values)?;

        let output = output.transpose(&[0, 2, 1, 3])?.flatten(0, 1)?;
        let output = output.slice_axis(0, 0, places.length)?.flatten(1, 2)?;
        let output = output.as_type(x.dtype())?.expand_dims(0)?;
        self.post.forward(&output)
    }

    /// The scores of the distance from each query to each frame of its context,
    /// `[chunks, H, chunk, context]`.
    fn distance_scores(&self, queries: &Array, places: &Places, config: &Config) -> Result<Array> {
        let (chunk, context) = (config.attention_chunk_size, config.context());
        let heads = config.num_attention_heads;
        let keys = self.relative_k_proj.forward(&places.distances)?;
        let keys = keys.as_type(Dtype::Float32)?.squeeze(0)?;
        // [H, head_dim, distances]
        let keys = keys.unflatten(-1, &[heads, -1])?.transpose(&[1, 2, 0])?;
        let scores = queries.matmul(&keys)?;
        // Each row one place farther to the right than the one before it.
        let distances = scores.dim(-1)?;
        let scores = scores.pad(&[-1], &[(0, context + 1 - distances)], 0.0)?;
        let scores = scores.flatten(2, 3)?.slice_axis(2, 0, chunk * context)?;
        Ok(scores.unflatten(2, &[chunk, context])?)
    }
}

/// A gated convolution of each channel over the frames before.
#[derive(Debug)]
struct LightConvolution {
    pre_layer_norm: RmsNorm,
    linear_start: ClippedLinear,
    /// `[kernel, D]`
    taps: Array,
    conv_norm: RmsNorm,
    linear_end: ClippedLinear,
}

impl LightConvolution {
    fn load(weights: &Weights, config: &Config) -> Result<Self> {
        let (hidden, kernel) = (config.hidden_size, config.conv_kernel_size);
        let norm = |name| RmsNorm::load(&weights.pp(name), hidden, config.rms_norm_eps);
        let linear = |name, output| {
            let weights = weights.pp(name);
            ClippedLinear::load(&weights, hidden, output, config.use_clipped_linears)
        };
        let conv = weights.pp("depthwise_conv1d");
        let last = [hidden, kernel, 1];
        let taps = if conv.shape("weight").as_deref() == Some(&last) {
            conv.get_float("weight", &last)?
        } else {
            conv.get_float("weight", &[hidden, 1, kernel])?
        };
        Ok(Self {
            pre_layer_norm: norm("pre_layer_norm")?,
            linear_start: linear("linear_start", hidden.saturating_mul(2))?,
            taps: taps.reshape(&[hidden, kernel])?.t()?,
            conv_norm: norm("conv_norm")?,
            linear_end: linear("linear_end", hidden)?,
        })
    }

    fn forward(&self, x: &Array, config: &Config) -> Result<Array> {
        let hidden = config.hidden_size;
        let started = self
            .linear_start
            .forward(&self.pre_layer_norm.forward(x)?)?;
        let gate = started.slice_axis(-1, hidden, 2 * hidden)?;
        let gated = Activation::Sigmoid.gated(&gate, &started.slice_axis(-1, 0, hidden)?)?;
        let (kernel, length) = (config.conv_kernel_size, x.dim(1)?);
        let padded = gated.pad(&[1], &[(kernel - 1, 0)], 0.0)?;
        let mut y: Option<Array> = None;
        for tap in 0..kernel {
            let shifted = padded.slice_axis(1, tap, tap + length)?;
            let part = shifted.multiply(&self.taps.at(0, tap)?)?;
            y = Some(match y {
                Some(sum) => sum.add(&part)?,
                None => part,
            });
        }
        let convolved = limited(&y.unwrap_or(padded), config)?;
        let normed = silu(&self.conv_norm.forward(&convolved)?)?;
        Ok(x.add(&self.linear_end.forward(&normed)?)?)
    }
}
