//! The vision tower of Gemma 4: a transformer over the patches of an image or of a frame, with
//! positions in two directions, whose neighbouring outputs are averaged into tokens.
//!
//! Reference: mlx-vlm `models/gemma4/vision.py`.

use mlex_core::Array;
use mlex_nn::{Activation, Linear, RmsNorm, Rotations, Weights};
use mlex_vision::GemmaInput;
use serde::Deserialize;

use super::interrupt::Blocks;
use super::layers::{ClippedLinear, Projector, attend};
use crate::config::{ModelConfig, check, check_layers, check_positive, check_size};
use crate::{Error, Result};

/// Of the norms of heads.
const HEAD_EPS: f32 = 1e-6;
const ACTIVATION: &str = "gelu_pytorch_tanh";

/// The fields of `vision_config`; defaults as in mlx-vlm.
#[derive(Debug, Deserialize)]
#[serde(default)]
struct Config {
    hidden_size: i32,
    intermediate_size: i32,
    num_hidden_layers: i32,
    num_attention_heads: i32,
    num_key_value_heads: i32,
    head_dim: i32,
    hidden_activation: String,
    rms_norm_eps: f32,
    rope_parameters: Rope,
    patch_size: i32,
    position_embedding_size: i32,
    pooling_kernel_size: i32,
    use_clipped_linears: bool,
    standardize: bool,
}

#[derive(Debug, Deserialize)]
#[serde(default)]
struct Rope {
    rope_theta: f32,
}

impl Default for Rope {
    fn default() -> Self {
        Self { rope_theta: 100.0 }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            hidden_size: 768,
            intermediate_size: 3072,
            num_hidden_layers: 16,
            num_attention_heads: 12,
            num_key_value_heads: 12,
            head_dim: 64,
            hidden_activation: ACTIVATION.to_owned(),
            rms_norm_eps: 1e-6,
            rope_parameters: Rope::default(),
            patch_size: 16,
            position_embedding_size: 10_240,
            pooling_kernel_size: 3,
            use_clipped_linears: false,
            standardize: false,
        }
    }
}

impl Config {
    fn validate(&self) -> Result<()> {
        let heads = self.num_attention_heads;
        check_layers("num_hidden_layers", self.num_hidden_layers)?;
        check_size("hidden_size", self.hidden_size)?;
        check_size("intermediate_size", self.intermediate_size)?;
        check_size("num_attention_heads", heads)?;
        check("num_key_value_heads", self.num_key_value_heads, 1..=heads)?;
        check_size("head_dim", self.head_dim)?;
        check_size(
            "num_attention_heads * head_dim",
            heads.saturating_mul(self.head_dim),
        )?;
        check_size("position_embedding_size", self.position_embedding_size)?;
        check_positive("rms_norm_eps", self.rms_norm_eps)?;
        check_positive(
            "rope_parameters.rope_theta",
            self.rope_parameters.rope_theta,
        )?;
        check("patch_size", self.patch_size, 1..=256)?;
        check("pooling_kernel_size", self.pooling_kernel_size, 1..=64)?;
        if self.head_dim % 4 != 0 {
            let found = self.head_dim.to_string();
            return Err(Error::field("head_dim", "a multiple of 4", found));
        }
        if heads % self.num_key_value_heads != 0 {
            let expected = format!("a divisor of the {heads} attention heads");
            let found = self.num_key_value_heads.to_string();
            return Err(Error::field("num_key_value_heads", expected, found));
        }
        if self.hidden_activation != ACTIVATION {
            let found = self.hidden_activation.as_str();
            return Err(Error::unsupported("hidden_activation", found));
        }
        Ok(())
    }

    fn patch_len(&self) -> i32 {
        3 * self.patch_size * self.patch_size
    }
}

/// The vision tower of Gemma 4, and what brings its tokens into the language model.
#[derive(Debug)]
pub(super) struct GemmaTower {
    input_proj: Linear,
    /// `[2, P, D]`: of columns and of rows.
    positions: Array,
    layers: Vec<Layer>,
    /// What is taken off, and the factor after it, `[D]` each.
    standard: Option<(Array, Array)>,
    projector: Projector,
    config: Config,
}

impl GemmaTower {
    /// Takes the tower from `tower` and the projection to `width` from `projector`, as
    /// `vision_config` describes them.
    pub(super) fn load(
        config: &ModelConfig,
        tower: &Weights,
        projector: &Weights,
        width: i32,
    ) -> Result<Self> {
        let config: Config = config.parse()?;
        config.validate()?;
        let hidden = config.hidden_size;
        let embedder = tower.pp("patch_embedder");
        let layers = tower.pp("encoder").pp("layers");
        let layers = (0..config.num_hidden_layers).map(|n| Layer::load(&layers.pp(n), &config));
        let table = [2, config.position_embedding_size, hidden];
        let standard = match config.standardize {
            true => Some((
                tower.get_float("std_bias", &[hidden])?,
                tower.get_float("std_scale", &[hidden])?,
            )),
            false => None,
        };
        Ok(Self {
            input_proj: Linear::load(
                &embedder.pp("input_proj"),
                config.patch_len(),
                hidden,
                false,
            )?,
            positions: embedder.get_float("position_embedding_table", &table)?,
            layers: layers.collect::<Result<_>>()?,
            standard,
            projector: Projector::load(projector, hidden, width, config.rms_norm_eps)?,
            config,
        })
    }

    /// The patches of an image or a frame to `[tokens, width]`.
    pub(super) fn forward(&self, input: &GemmaInput) -> Result<Array> {
        let config = &self.config;
        let expected = config.patch_len() as usize;
        if input.patch_len != expected {
            let expected = format!("{expected} values, as vision_config has it");
            let found = input.patch_len.to_string();
            return Err(Error::field("patch", expected, found));
        }
        let [rows, columns] = self.grid(input)?;
        let patches = [1, rows * columns, config.patch_len()];
        let patches = Array::from_slice(&input.patches, &patches)?;
        let patches = patches.subtract(0.5)?.multiply(2.0)?;
        let patches = patches.as_type(self.positions.dtype())?;
        let mut x = self.input_proj.forward(&patches)?;
        x = x.add(&self.places(rows, columns)?.as_type(x.dtype())?)?;
        let rotations = self.rotations(rows, columns)?;
        let mut blocks = Blocks::default();
        for layer in &self.layers {
            x = layer.forward(&x, &rotations, config)?;
            blocks.done(&x)?;
        }
        let mut tokens = self.pool(&x, rows, columns)?;
        if let Some((bias, scale)) = &self.standard {
            tokens = tokens.subtract(bias)?.multiply(scale)?;
        }
        self.projector.forward(&tokens)
    }

    /// Rows and columns of patches.
    fn grid(&self, input: &GemmaInput) -> Result<[i32; 2]> {
        let found = format!("{:?}", input.grid);
        let wrong = |expected: String| Error::field("grid of patches", expected, found.clone());
        let most = self.config.position_embedding_size;
        let side = |side: usize| {
            let side = i32::try_from(side).ok();
            side.filter(|side| (1..=most).contains(side))
        };
        let [Some(rows), Some(columns)] = input.grid.map(side) else {
            return Err(wrong(format!("sides from 1 to {most}")));
        };
        let pooling = self.config.pooling_kernel_size;
        if rows % pooling != 0 || columns % pooling != 0 {
            return Err(wrong(format!("sides in multiples of {pooling}")));
        }
        let count = i64::from(rows) * i64::from(columns) * i64::from(self.config.patch_len());
        if input.patches.len() as i64 != count {
            return Err(wrong("as many as there are patches".to_owned()));
        }
        Ok([rows, columns])
    }

    /// The sum of the embeddings of each patch's column and row, `[1, N, D]`.
    fn places(&self, rows: i32, columns: i32) -> Result<Array> {
        let along = |table: i32, count: i32| self.positions.at(0, table)?.slice_axis(0, 0, count);
        let x = along(0, columns)?.expand_dims(0)?;
        let y = along(1, rows)?.expand_dims(1)?;
        Ok(x.add(&y)?.flatten(0, 1)?.expand_dims(0)?)
    }

    /// The rotations of the first half of a head, by the column, and of the second, by the row.
    fn rotations(&self, rows: i32, columns: i32) -> Result<Rotations> {
        let pairs = self.config.head_dim / 4;
        let theta = self.config.rope_parameters.rope_theta;
        let scales: Vec<f32> = (0..pairs)
            .map(|pair| theta.powf(pair as f32 / pairs as f32))
            .collect();
        let places = (0..rows).flat_map(|row| (0..columns).map(move |column| [column, row]));
        let angles = places.flatten().flat_map(|position| {
            let position = position as f32;
            scales.iter().map(move |scale| position / scale)
        });
        let angles: Vec<f32> = angles.collect();
        Ok(Rotations::of_parts(&angles, 2, pairs as usize, 1.0)?)
    }

    /// The mean of each square of patches times the root of the width, `[tokens, D]`.
    fn pool(&self, x: &Array, rows: i32, columns: i32) -> Result<Array> {
        let (side, width) = (self.config.pooling_kernel_size, self.config.hidden_size);
        let squares = [rows / side, side, columns / side, side, width];
        let means = x.reshape(&squares)?.mean(&[1, 3], false)?.flatten(0, 1)?;
        Ok(means.multiply((width as f32).sqrt())?)
    }
}

#[derive(Debug)]
struct Layer {
    q_proj: ClippedLinear,
    k_proj: ClippedLinear,
    v_proj: ClippedLinear,
    o_proj: ClippedLinear,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    /// Without a weight: of ones.
    v_norm: RmsNorm,
    gate_proj: ClippedLinear,
    up_proj: ClippedLinear,
    down_proj: ClippedLinear,
    input_layernorm: RmsNorm,
    post_attention_layernorm: RmsNorm,
    pre_feedforward_layernorm: RmsNorm,
    post_feedforward_layernorm: RmsNorm,
}

impl Layer {
    fn load(weights: &Weights, config: &Config) -> Result<Self> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let (attn, mlp) = (weights.pp("self_attn"), weights.pp("mlp"));
        let linear = |weights: Weights, input, output| {
            ClippedLinear::load(&weights, input, output, config.use_clipped_linears)
        };
        let queries = config.num_attention_heads * config.head_dim;
        let keys = config.num_key_value_heads * config.head_dim;
        let norm = |name| RmsNorm::load(&weights.pp(name), hidden, config.rms_norm_eps);
        let head_norm = |name| RmsNorm::load(&attn.pp(name), config.head_dim, HEAD_EPS);
        let q_norm = attn.pp("q_norm").get_float("weight", &[config.head_dim])?;
        let ones = Array::ones(&[config.head_dim], q_norm.dtype())?;
        Ok(Self {
            q_proj: linear(attn.pp("q_proj"), hidden, queries)?,
            k_proj: linear(attn.pp("k_proj"), hidden, keys)?,
            v_proj: linear(attn.pp("v_proj"), hidden, keys)?,
            o_proj: linear(attn.pp("o_proj"), queries, hidden)?,
            q_norm: RmsNorm::new(q_norm, HEAD_EPS),
            k_norm: head_norm("k_norm")?,
            v_norm: RmsNorm::new(ones, HEAD_EPS),
            gate_proj: linear(mlp.pp("gate_proj"), hidden, inner)?,
            up_proj: linear(mlp.pp("up_proj"), hidden, inner)?,
            down_proj: linear(mlp.pp("down_proj"), inner, hidden)?,
            input_layernorm: norm("input_layernorm")?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            pre_feedforward_layernorm: norm("pre_feedforward_layernorm")?,
            post_feedforward_layernorm: norm("post_feedforward_layernorm")?,
        })
    }

    fn forward(&self, x: &Array, rotations: &Rotations, config: &Config) -> Result<Array> {
        let attended = self.attend(&self.input_layernorm.forward(x)?, rotations, config)?;
        let x = x.add(&self.post_attention_layernorm.forward(&attended)?)?;
        let fed = self.feed(&self.pre_feedforward_layernorm.forward(&x)?)?;
        Ok(x.add(&self.post_feedforward_layernorm.forward(&fed)?)?)
    }

    fn attend(&self, x: &Array, rotations: &Rotations, config: &Config) -> Result<Array> {
        let heads = |x: Array| -> Result<Array> { Ok(x.unflatten(-1, &[-1, config.head_dim])?) };
        let rotated =
            |x: Array| -> Result<Array> { Ok(rotations.apply(&x.transpose(&[0, 2, 1, 3])?)?) };
        let queries = rotated(self.q_norm.forward(&heads(self.q_proj.forward(x)?)?)?)?;
        let keys = rotated(self.k_norm.forward(&heads(self.k_proj.forward(x)?)?)?)?;
        let values = self.v_norm.forward(&heads(self.v_proj.forward(x)?)?)?;
        let values = values.transpose(&[0, 2, 1, 3])?;
        // The norm of the queries has the scale.
        let output = attend(&queries, &keys, &values, 1.0)?;
        let output = output.transpose(&[0, 2, 1, 3])?.flatten(2, 3)?;
        self.o_proj.forward(&output)
    }

    fn feed(&self, x: &Array) -> Result<Array> {
        let (gate, up) = (self.gate_proj.forward(x)?, self.up_proj.forward(x)?);
        self.down_proj
            .forward(&Activation::GeluTanh.gated(&gate, &up)?)
    }
}
