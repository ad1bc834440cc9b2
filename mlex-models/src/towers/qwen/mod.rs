//! The vision towers of Qwen2.5-VL, Qwen3-VL and Qwen3.5: a transformer over patches of images and
//! pairs of frames, with positions in two directions, whose neighbouring outputs become one token.
//!
//! Qwen3-VL makes features of blocks in between too, which its language model adds behind its
//! first layers (deepstack). In Qwen2.5-VL the patches of most blocks see those of their own
//! window alone.
//!
//! Reference: mlx-vlm `models/qwen3_vl/vision.py` (also of Qwen3.5) and
//! `models/qwen2_5_vl/vision.py`. mlx-vlm's tower of `qwen3_vl_moe` has other activations than
//! transformers, with which the weights were trained; ours are those of transformers.

mod config;
mod grid;
mod layers;

use mlex_core::{Array, Dtype};
use mlex_nn::{Embedding, Linear, Rotations, Weights};
use mlex_vision::QwenInput;

use self::config::Config;
pub(super) use self::config::QwenKind;
use self::grid::{Grid, Order, Windows};
use self::layers::{Block, Merger, patch_embed};
use super::interrupt::Blocks;
use crate::config::ModelConfig;
use crate::{Error, Result};

/// The base of the rotary embedding.
const ROPE_THETA: f32 = 10_000.0;
/// The most patches at once, so that a long video takes no more memory than a large image.
const MOST_PATCHES: i32 = 1 << 14;

/// The vision tower of a Qwen model.
#[derive(Debug)]
pub(super) struct QwenTower {
    patch_embed: Linear,
    /// What it computes in.
    dtype: Dtype,
    positions: Option<Positions>,
    blocks: Vec<Block>,
    merger: Merger,
    /// By the block whose output they take.
    deepstack: Vec<(usize, Merger)>,
    config: Config,
}

impl QwenTower {
    /// Takes the tower from `weights`, as `vision_config` describes it.
    pub(super) fn load(config: &ModelConfig, weights: &Weights, kind: QwenKind) -> Result<Self> {
        let config = Config::new(config, kind)?;
        let blocks = (0..config.depth).map(|n| Block::load(&weights.pp("blocks").pp(n), &config));
        let (patch_embed, dtype) = patch_embed(&weights.pp("patch_embed").pp("proj"), &config)?;
        let positions = config.num_position_embeddings;
        let positions =
            positions.map(|rows| Positions::load(&weights.pp("pos_embed"), rows, &config));
        let mergers = weights.pp("deepstack_merger_list");
        let deepstack = config.deepstack.iter().enumerate().map(|(index, &block)| {
            let merger = Merger::load(&mergers.pp(index), &config, true)?;
            Ok((block as usize, merger))
        });
        Ok(Self {
            patch_embed,
            dtype,
            positions: positions.transpose()?,
            blocks: blocks.collect::<Result<_>>()?,
            merger: Merger::load(&weights.pp("merger"), &config, false)?,
            deepstack: deepstack.collect::<Result<_>>()?,
            config,
        })
    }

    /// The patches of an image or of a video to `[tokens, out_hidden_size]`; with features of
    /// blocks in between, in the order of the blocks, `[tokens, (1 + count) * out_hidden_size]`.
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
        let side = self.config.windows.as_ref().map(|windows| windows.side);
        let order = Order::new(&grid, side);
        let frame = grid.h * grid.w;
        let frames = (most / frame).max(1);
        let length = frame as usize * expected;
        let mut features = Vec::new();
        for patches in input.patches.chunks(frames as usize * length) {
            let t = (patches.len() / length) as i32;
            let part = self.part(patches, &Grid { t, ..grid }, &order)?;
            part.eval()?;
            features.push(part);
        }
        match &features[..] {
            [one] => Ok(one.clone()),
            parts => Ok(Array::concatenate(parts, 0)?),
        }
    }

    fn part(&self, patches: &[f32], grid: &Grid, order: &Order) -> Result<Array> {
        let shape = [1, grid.t * grid.h * grid.w, self.config.patch_len()];
        let patches = Array::from_slice(patches, &shape)?;
        let mut x = self.patch_embed.forward(&patches.as_type(self.dtype)?)?;
        if let Some(tokens) = &order.tokens {
            let square = self.config.spatial_merge_size.pow(2);
            x = moved(&x, tokens, grid.t, square)?.reshape(&[1, shape[1], -1])?;
        }
        if let Some(positions) = &self.positions {
            x = x.add(&positions.of(grid, order)?.as_type(x.dtype())?)?;
        }
        let rotations = self.rotations(grid, order)?;
        let whole = [Windows::whole(grid)];
        let mut deep = Vec::new();
        let mut blocks = Blocks::default();
        for (index, block) in self.blocks.iter().enumerate() {
            let windows = match &self.config.windows {
                Some(windows) if !windows.full.contains(&(index as i32)) => &order.windows[..],
                _ => &whole,
            };
            x = block.forward(&x, &rotations, grid.t, windows)?;
            blocks.done(&x)?;
            if let Some((_, merger)) = self.deepstack.iter().find(|(block, _)| *block == index) {
                deep.push(merger.forward(&x)?);
            }
        }
        let mut features = self.merger.forward(&x)?;
        if !deep.is_empty() {
            deep.insert(0, features);
            features = Array::concatenate(&deep, -1)?;
        }
        match order.back() {
            Some(back) => {
                let width = features.dim(-1)?;
                Ok(moved(&features, &back, grid.t, 1)?.reshape(&[-1, width])?)
            }
            None => Ok(features),
        }
    }

    /// Half of a head's pairs turn with the row, half with the column.
    fn rotations(&self, grid: &Grid, order: &Order) -> Result<Rotations> {
        let pairs = self.config.hidden_size / self.config.num_heads / 2;
        let dims = pairs as f32;
        let inverse: Vec<f32> = (0..pairs / 2)
            .map(|pair| 1.0 / ROPE_THETA.powf(2.0 * pair as f32 / dims))
            .collect();
        let mut angles = Vec::with_capacity((grid.h * grid.w * pairs) as usize);
        for position in order.places.iter().flatten() {
            angles.extend(inverse.iter().map(|inverse| *position as f32 * inverse));
        }
        let angles = angles.repeat(grid.t as usize);
        Ok(Rotations::new(&angles, pairs as usize, 1.0)?)
    }
}

/// Rows of `x` in another order within each of `frames`: those of each token, `rows` of them, stay
/// together. `[frames, tokens, rows * D]`.
fn moved(x: &Array, tokens: &[i32], frames: i32, rows: i32) -> Result<Array> {
    let count = tokens.len() as i32;
    let width = x.dim(-1)?.saturating_mul(rows);
    let tokens = Array::from_slice(tokens, &[count])?;
    Ok(x.reshape(&[frames, count, width])?.take(&tokens, 1)?)
}

/// A table of positions, between whose rows and columns those of a grid lie.
#[derive(Debug)]
struct Positions {
    table: Embedding,
    /// Rows, and columns, of the table.
    side: i32,
}

impl Positions {
    fn load(weights: &Weights, rows: i32, config: &Config) -> Result<Self> {
        Ok(Self {
            table: Embedding::load(weights, rows, config.hidden_size)?,
            side: f64::from(rows).sqrt() as i32,
        })
    }

    /// What is added to the patches `[1, N, D]`.
    fn of(&self, grid: &Grid, order: &Order) -> Result<Array> {
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
        for &[row, column] in &order.places {
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
        let rows = self.table.forward(&ids)?;
        let rows = rows.multiply(&weights.as_type(rows.dtype())?)?;
        Ok(rows.sum(&[0], true)?.tile(&[1, grid.t, 1])?)
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
        for (name, place, kind, width) in [
            ("media-qwen3_5", "vision_tower", QwenKind::Qwen3_5, 32),
            ("media-qwen3_vl", "vision_tower", QwenKind::Qwen3Vl, 96),
            ("media-qwen2_5_vl", "visual", QwenKind::Qwen2_5Vl, 32),
        ] {
            let files = ModelFiles::open(data.join(name)).unwrap();
            let config = files.config().unwrap();
            let section = config.json()["vision_config"].as_object().unwrap().clone();
            let weights = Weights::new(files.tensors().unwrap(), Default::default());
            let config = ModelConfig::new(section);
            let tower = QwenTower::load(&config, &weights.pp(place), kind).unwrap();
            let values = (0..5 * 24 * 96).map(|n| (n as f32 * 0.7).sin());
            let input = QwenInput {
                patches: values.collect(),
                patch_len: 96,
                grid: [5, 4, 6],
                tokens: 30,
            };
            let whole: Vec<f32> = tower.forward(&input).unwrap().to_vec().unwrap();
            assert_eq!(whole.len(), 30 * width);
            for most in [1, 24, 71] {
                let parts = tower.forward_by(&input, most).unwrap();
                let parts: Vec<f32> = parts.to_vec().unwrap();
                let pairs = parts.iter().zip(&whole);
                assert!(
                    pairs.clone().all(|(a, b)| (a - b).abs() < 1e-4),
                    "{name}: {most}"
                );
                assert_eq!(parts.len(), whole.len());
            }
        }
    }
}
