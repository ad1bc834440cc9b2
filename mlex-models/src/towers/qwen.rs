//! The vision tower of Qwen3.5: a transformer over patches of images and pairs of frames, with
//! positions in two directions, whose neighbouring outputs become one token.
//!
//! Reference: mlx-vlm `models/qwen3_vl/vision.py`, which Qwen3.5 uses without deepstack.

use mlex_core::{Array, Dtype};
use mlex_nn::activation::{gelu, gelu_tanh};
use mlex_nn::{Embedding, LayerNorm, Linear, Rotations, Weights};
use mlex_vision::QwenInput;
use serde::Deserialize;

use super::layers::attend;
use crate::config::{ModelConfig, check, check_layers, check_size};
use crate::{Error, Result};

/// The base of the rotary embedding.
const ROPE_THETA: f32 = 10_000.0;
/// Of the norms.
const EPS: f32 = 1e-6;
/// The most patches at once, so that a long video takes no more memory than a large image.
const MOST_PATCHES: i32 = 1 << 14;
/// The only activation that is known.
const ACTIVATION: &str = "gelu_pytorch_tanh";

/// The fields of `vision_config`; those with defaults have them as in transformers.
#[derive(Debug, Deserialize)]
struct Config {
    depth: i32,
    hidden_size: i32,
    intermediate_size: i32,
    num_heads: i32,
    out_hidden_size: i32,
    #[serde(default = "patch_size")]
    patch_size: i32,
    #[serde(default = "two")]
    temporal_patch_size: i32,
    #[serde(default = "two")]
    spatial_merge_size: i32,
    #[serde(default = "in_channels")]
    in_channels: i32,
    #[serde(default = "num_position_embeddings")]
    num_position_embeddings: i32,
    hidden_act: Option<String>,
    #[serde(default)]
    deepstack_visual_indexes: Vec<i32>,
}

fn patch_size() -> i32 {
    16
}

fn two() -> i32 {
    2
}

fn in_channels() -> i32 {
    3
}

fn num_position_embeddings() -> i32 {
    2304
}

impl Config {
    fn validate(&self) -> Result<()> {
        check_layers("depth", self.depth)?;
        check_size("hidden_size", self.hidden_size)?;
        check_size("intermediate_size", self.intermediate_size)?;
        check_size("out_hidden_size", self.out_hidden_size)?;
        check_size("num_position_embeddings", self.num_position_embeddings)?;
        check("num_heads", self.num_heads, 1..=self.hidden_size)?;
        check("patch_size", self.patch_size, 1..=256)?;
        check("temporal_patch_size", self.temporal_patch_size, 1..=16)?;
        check("spatial_merge_size", self.spatial_merge_size, 1..=16)?;
        check("in_channels", self.in_channels, 3..=3)?;
        if self.hidden_size % (4 * self.num_heads) != 0 {
            let expected = format!("a multiple of 4 * {} heads", self.num_heads);
            let found = self.hidden_size.to_string();
            return Err(Error::field("hidden_size", expected, found));
        }
        match self.hidden_act.as_deref() {
            None | Some(ACTIVATION) => {}
            Some(other) => return Err(Error::unsupported("hidden_act", other)),
        }
        if !self.deepstack_visual_indexes.is_empty() {
            let found = "a list of layers";
            return Err(Error::unsupported("deepstack_visual_indexes", found));
        }
        Ok(())
    }

    fn patch_len(&self) -> i32 {
        self.in_channels * self.temporal_patch_size * self.patch_size * self.patch_size
    }
}

/// The vision tower of Qwen3.5.
#[derive(Debug)]
pub(super) struct QwenTower {
    patch_embed: Linear,
    /// What it computes in.
    dtype: Dtype,
    pos_embed: Embedding,
    /// Rows, and columns, of the table of positions.
    side: i32,
    blocks: Vec<Block>,
    merger: Merger,
    config: Config,
}

impl QwenTower {
    /// Takes the tower from `weights`, as `vision_config` describes it.
    pub(super) fn load(config: &ModelConfig, weights: &Weights) -> Result<Self> {
        let config: Config = config.parse()?;
        config.validate()?;
        let side = f64::from(config.num_position_embeddings).sqrt() as i32;
        let blocks = (0..config.depth).map(|n| Block::load(&weights.pp("blocks").pp(n), &config));
        let rows = config.num_position_embeddings;
        let (patch_embed, dtype) = patch_embed(&weights.pp("patch_embed").pp("proj"), &config)?;
        Ok(Self {
            patch_embed,
            dtype,
            pos_embed: Embedding::load(&weights.pp("pos_embed"), rows, config.hidden_size)?,
            side,
            blocks: blocks.collect::<Result<_>>()?,
            merger: Merger::load(&weights.pp("merger"), &config)?,
            config,
        })
    }

    /// The patches of an image or of a video to `[tokens, out_hidden_size]`.
    pub(super) fn forward(&self, input: &QwenInput) -> Result<Array> {
        self.forward_by(input, MOST_PATCHES)
    }

    /// So many patches at once, but whole frames, which see nothing of each other.
    fn forward_by(&self, input: &QwenInput, most: i32) -> Result<Array> {
        let expected = self.config.patch_len() as usize;
        if input.patch_len != expected {
            let expected = format!("{expected} values, as vision_config has it");
            let found = input.patch_len.to_string();
            return Err(Error::field("patch", expected, found));
        }
        let grid = Grid::new(input, &self.config)?;
        let frame = grid.h * grid.w;
        let frames = (most / frame).max(1);
        let length = frame as usize * expected;
        let mut features = Vec::new();
        for patches in input.patches.chunks(frames as usize * length) {
            let t = (patches.len() / length) as i32;
            let part = self.part(patches, &Grid { t, ..grid })?;
            part.eval()?;
            features.push(part);
        }
        match &features[..] {
            [one] => Ok(one.clone()),
            parts => Ok(Array::concatenate(parts, 0)?),
        }
    }

    fn part(&self, patches: &[f32], grid: &Grid) -> Result<Array> {
        let shape = [1, grid.t * grid.h * grid.w, self.config.patch_len()];
        let patches = Array::from_slice(patches, &shape)?;
        let mut x = self.patch_embed.forward(&patches.as_type(self.dtype)?)?;
        x = x.add(&self.positions(grid)?.as_type(x.dtype())?)?;
        let rotations = self.rotations(grid)?;
        for block in &self.blocks {
            x = block.forward(&x, &rotations, grid.t)?;
        }
        self.merger.forward(&x)
    }

    /// The table of positions, between whose rows and columns those of the grid lie, `[1, N, D]`.
    fn positions(&self, grid: &Grid) -> Result<Array> {
        let last = (self.side - 1) as f32;
        let along = |index: i32, count: i32| {
            let part = if count > 1 {
                index as f32 / (count - 1) as f32
            } else {
                0.0
            };
            let exact = part * last;
            let floor = exact as i32;
            (floor, (floor + 1).min(self.side - 1), exact - floor as f32)
        };
        let mut ids: [Vec<i32>; 4] = Default::default();
        let mut weights: [Vec<f32>; 4] = Default::default();
        for [row, column] in grid.places() {
            let (top, bottom, down) = along(row, grid.h);
            let (left, right, across) = along(column, grid.w);
            let corners = [
                (top, left, (1.0 - down) * (1.0 - across)),
                (top, right, (1.0 - down) * across),
                (bottom, left, down * (1.0 - across)),
                (bottom, right, down * across),
            ];
            for (corner, (row, column, weight)) in corners.into_iter().enumerate() {
                ids[corner].push(row * self.side + column);
                weights[corner].push(weight);
            }
        }
        let count = grid.h * grid.w;
        let ids = Array::from_slice(&ids.concat(), &[4, count])?;
        let weights = Array::from_slice(&weights.concat(), &[4, count, 1])?;
        let rows = self.pos_embed.forward(&ids)?;
        let rows = rows.multiply(&weights.as_type(rows.dtype())?)?;
        Ok(rows.sum(&[0], true)?.tile(&[1, grid.t, 1])?)
    }

    /// Half of a head's pairs turn with the row, half with the column.
    fn rotations(&self, grid: &Grid) -> Result<Rotations> {
        let pairs = self.config.hidden_size / self.config.num_heads / 2;
        let dims = pairs as f32;
        let inverse: Vec<f32> = (0..pairs / 2)
            .map(|pair| 1.0 / ROPE_THETA.powf(2.0 * pair as f32 / dims))
            .collect();
        let mut angles = Vec::with_capacity((grid.h * grid.w * pairs) as usize);
        for place in grid.places() {
            for position in place {
                angles.extend(inverse.iter().map(|inverse| position as f32 * inverse));
            }
        }
        let angles = angles.repeat(grid.t as usize);
        Ok(Rotations::new(&angles, pairs as usize, 1.0)?)
    }
}

/// The projection of a patch: a convolution over patches that do not overlap. MLX's checkpoints
/// have the channels last, the published ones first, as the patches do.
fn patch_embed(weights: &Weights, config: &Config) -> Result<(Linear, Dtype)> {
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
    let bias = weights.get_float("bias", &[out])?;
    let dtype = weight.dtype();
    Ok((Linear::of(weight, Some(bias))?, dtype))
}

/// How many patches there are in each direction.
#[derive(Clone, Copy)]
struct Grid {
    t: i32,
    h: i32,
    w: i32,
    merge: i32,
}

impl Grid {
    fn new(input: &QwenInput, config: &Config) -> Result<Self> {
        let merge = config.spatial_merge_size;
        let found = format!("{:?}", input.grid);
        let wrong = |expected: &str| Error::field("grid of patches", expected, found.clone());
        let side = |side: usize| {
            let side = i32::try_from(side).ok().filter(|side| *side > 0);
            side.filter(|side| *side < 1 << 20)
        };
        let [Some(t), Some(h), Some(w)] = input.grid.map(side) else {
            return Err(wrong("sides from 1 to 2^20"));
        };
        if h % merge != 0 || w % merge != 0 {
            return Err(wrong(&format!("height and width in multiples of {merge}")));
        }
        let count = i64::from(t) * i64::from(h) * i64::from(w);
        if input.patches.len() as i64 != count.saturating_mul(i64::from(config.patch_len())) {
            return Err(wrong("as many as there are patches"));
        }
        Ok(Self { t, h, w, merge })
    }

    /// Row and column of each patch of a frame: in squares that become one token.
    fn places(&self) -> impl Iterator<Item = [i32; 2]> {
        let (merge, h, w) = (self.merge, self.h / self.merge, self.w / self.merge);
        let squares = (0..h).flat_map(move |row| (0..w).map(move |column| [row, column]));
        squares.flat_map(move |[row, column]| {
            (0..merge * merge).map(move |n| [row * merge + n / merge, column * merge + n % merge])
        })
    }
}

#[derive(Debug)]
struct Block {
    norm1: LayerNorm,
    norm2: LayerNorm,
    qkv: Linear,
    proj: Linear,
    linear_fc1: Linear,
    linear_fc2: Linear,
    num_heads: i32,
}

impl Block {
    fn load(weights: &Weights, config: &Config) -> Result<Self> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let (attn, mlp) = (weights.pp("attn"), weights.pp("mlp"));
        Ok(Self {
            norm1: LayerNorm::load(&weights.pp("norm1"), hidden, EPS)?,
            norm2: LayerNorm::load(&weights.pp("norm2"), hidden, EPS)?,
            qkv: Linear::load(&attn.pp("qkv"), hidden, 3 * hidden, true)?,
            proj: Linear::load(&attn.pp("proj"), hidden, hidden, true)?,
            linear_fc1: Linear::load(&mlp.pp("linear_fc1"), hidden, inner, true)?,
            linear_fc2: Linear::load(&mlp.pp("linear_fc2"), inner, hidden, true)?,
            num_heads: config.num_heads,
        })
    }

    /// `[1, N, D]` of `frames`, whose patches see those of their own frame.
    fn forward(&self, x: &Array, rotations: &Rotations, frames: i32) -> Result<Array> {
        let attended = self.attend(&self.norm1.forward(x)?, rotations, frames)?;
        let x = x.add(&attended)?;
        let inner = gelu_tanh(&self.linear_fc1.forward(&self.norm2.forward(&x)?)?)?;
        Ok(x.add(&self.linear_fc2.forward(&inner)?)?)
    }

    fn attend(&self, x: &Array, rotations: &Rotations, frames: i32) -> Result<Array> {
        let qkv = self.qkv.forward(x)?;
        let qkv = qkv.unflatten(-1, &[3, self.num_heads, -1])?;
        let head_dim = qkv.dim(-1)?;
        // [1, N, H, D] -> [frames, H, N / frames, D]
        let by_frame = |x: &Array| -> Result<Array> {
            let x = x.reshape(&[self.num_heads, frames, -1, head_dim])?;
            Ok(x.transpose(&[1, 0, 2, 3])?)
        };
        let heads = |index: i32| qkv.at(2, index)?.transpose(&[0, 2, 1, 3]);
        let queries = by_frame(&rotations.apply(&heads(0)?)?)?;
        let keys = by_frame(&rotations.apply(&heads(1)?)?)?;
        let values = by_frame(&heads(2)?)?;
        let scale = (head_dim as f32).powf(-0.5);
        let output = attend(&queries, &keys, &values, scale)?;
        let output = output.transpose(&[0, 2, 1, 3])?;
        let output = output.reshape(&[1, -1, self.num_heads * head_dim])?;
        Ok(self.proj.forward(&output)?)
    }
}

/// Makes one token of the patches of a square.
#[derive(Debug)]
struct Merger {
    norm: LayerNorm,
    linear_fc1: Linear,
    linear_fc2: Linear,
    width: i32,
}

impl Merger {
    fn load(weights: &Weights, config: &Config) -> Result<Self> {
        let merge = config.spatial_merge_size;
        let width = config.hidden_size.saturating_mul(merge * merge);
        check_size("hidden_size * spatial_merge_size^2", width)?;
        let (fc1, fc2) = (weights.pp("linear_fc1"), weights.pp("linear_fc2"));
        Ok(Self {
            norm: LayerNorm::load(&weights.pp("norm"), config.hidden_size, EPS)?,
            linear_fc1: Linear::load(&fc1, width, width, true)?,
            linear_fc2: Linear::load(&fc2, width, config.out_hidden_size, true)?,
            width,
        })
    }

    /// `[1, N, D]` to `[tokens, out_hidden_size]`.
    fn forward(&self, x: &Array) -> Result<Array> {
        let x = self.norm.forward(x)?.reshape(&[-1, self.width])?;
        Ok(self
            .linear_fc2
            .forward(&gelu(&self.linear_fc1.forward(&x)?)?)?)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::ModelFiles;

    #[test]
    fn frames_can_be_taken_one_by_one() {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
        let files = ModelFiles::open(data.join("media-qwen3_5")).unwrap();
        let config = files.config().unwrap();
        let section = config.json()["vision_config"].as_object().unwrap().clone();
        let weights = Weights::new(files.tensors().unwrap(), Default::default());
        let config = ModelConfig::new(section);
        let tower = QwenTower::load(&config, &weights.pp("vision_tower")).unwrap();
        let values = (0..5 * 8 * 96).map(|n| (n as f32 * 0.7).sin());
        let input = QwenInput {
            patches: values.collect(),
            patch_len: 96,
            grid: [5, 2, 4],
            tokens: 10,
        };
        let whole: Vec<f32> = tower.forward(&input).unwrap().to_vec().unwrap();
        assert_eq!(whole.len(), 10 * 32);
        for most in [1, 8, 23] {
            let parts = tower.forward_by(&input, most).unwrap();
            let parts: Vec<f32> = parts.to_vec().unwrap();
            let pairs = parts.iter().zip(&whole);
            assert!(pairs.clone().all(|(a, b)| (a - b).abs() < 1e-4), "{most}");
            assert_eq!(parts.len(), whole.len());
        }
    }
}
