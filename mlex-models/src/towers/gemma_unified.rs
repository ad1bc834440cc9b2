//! What the variants of Gemma 4 without encoders have in their place: projections of patches
//! and of samples.
//!
//! Reference: mlx-vlm `models/gemma4_unified/gemma4_unified.py`.

use mlex_audio::RawFeatures;
use mlex_core::Array;
use mlex_nn::{LayerNorm, Linear, Weights};
use mlex_vision::GemmaInput;
use serde::Deserialize;

use super::layers::Projector;
use crate::config::{ModelConfig, check, check_positive, check_size};
use crate::{Error, Result};

/// Of the norms of patches, MLX's default.
const EPS: f32 = 1e-5;

/// The fields of `vision_config`; defaults as in mlx-vlm.
#[derive(Debug, Deserialize)]
#[serde(default)]
struct VisionConfig {
    model_patch_size: i32,
    mm_embed_dim: i32,
    mm_posemb_size: i32,
    output_proj_dims: i32,
    rms_norm_eps: f32,
}

impl Default for VisionConfig {
    fn default() -> Self {
        Self {
            model_patch_size: 48,
            mm_embed_dim: 3840,
            mm_posemb_size: 1120,
            output_proj_dims: 3840,
            rms_norm_eps: 1e-6,
        }
    }
}

/// Patches of the size of a token, projected.
#[derive(Debug)]
pub(super) struct PatchEmbedder {
    patch_ln1: LayerNorm,
    patch_dense: Linear,
    patch_ln2: LayerNorm,
    /// `[P, 2, D]`: of columns and of rows.
    positions: Array,
    pos_norm: LayerNorm,
    projector: Projector,
    patch_len: i32,
    most: i32,
}

impl PatchEmbedder {
    /// Takes it from `embedder` and the projection to `width` from `projector`, as
    /// `vision_config` describes them.
    pub(super) fn load(
        config: &ModelConfig,
        embedder: &Weights,
        projector: &Weights,
        width: i32,
    ) -> Result<Self> {
        let config: VisionConfig = config.parse()?;
        let (dim, side) = (config.mm_embed_dim, config.model_patch_size);
        check_size("mm_embed_dim", dim)?;
        check("model_patch_size", side, 1..=1024)?;
        check_size("mm_posemb_size", config.mm_posemb_size)?;
        check("output_proj_dims", config.output_proj_dims, dim..=dim)?;
        check_positive("rms_norm_eps", config.rms_norm_eps)?;
        let patch_len = 3 * side * side;
        let norm = |name, dim| LayerNorm::load(&embedder.pp(name), dim, EPS);
        let table = [config.mm_posemb_size, 2, dim];
        Ok(Self {
            patch_ln1: norm("patch_ln1", patch_len)?,
            patch_dense: Linear::load(&embedder.pp("patch_dense"), patch_len, dim, true)?,
            patch_ln2: norm("patch_ln2", dim)?,
            positions: embedder.get_float("pos_embedding", &table)?,
            pos_norm: norm("pos_norm", dim)?,
            projector: Projector::load(projector, dim, width, config.rms_norm_eps)?,
            patch_len,
            most: config.mm_posemb_size,
        })
    }

    /// The patches of an image or a frame to `[tokens, width]`.
    pub(super) fn forward(&self, input: &GemmaInput) -> Result<Array> {
        let found = format!("{:?} of {} values", input.grid, input.patch_len);
        let wrong = |expected: String| Error::field("grid of patches", expected, found.clone());
        if input.patch_len as i32 != self.patch_len {
            let expected = format!("patches of {} values", self.patch_len);
            return Err(wrong(expected));
        }
        let side = |side: usize| {
            let side = i32::try_from(side).ok();
            side.filter(|side| (1..=self.most).contains(side))
        };
        let [Some(rows), Some(columns)] = input.grid.map(side) else {
            return Err(wrong(format!("sides from 1 to {}", self.most)));
        };
        let count = i64::from(rows) * i64::from(columns) * i64::from(self.patch_len);
        if input.patches.len() as i64 != count {
            return Err(wrong("as many as there are patches".to_owned()));
        }
        let patches = Array::from_slice(&input.patches, &[rows * columns, self.patch_len])?;
        let patches = patches.as_type(self.positions.dtype())?;
        let x = self
            .patch_dense
            .forward(&self.patch_ln1.forward(&patches)?)?;
        let x = self.patch_ln2.forward(&x)?;
        let along = |which: i32, count: i32| self.positions.at(1, which)?.slice_axis(0, 0, count);
        let across = along(0, columns)?.expand_dims(0)?;
        let down = along(1, rows)?.expand_dims(1)?;
        let places = across.add(&down)?.flatten(0, 1)?;
        let x = x.add(&places.as_type(x.dtype())?)?;
        self.projector.forward(&self.pos_norm.forward(&x)?)
    }
}

/// The fields of `audio_config`; defaults as in mlx-vlm.
#[derive(Debug, Deserialize)]
#[serde(default)]
struct AudioConfig {
    output_proj_dims: i32,
    rms_norm_eps: f32,
}

impl Default for AudioConfig {
    fn default() -> Self {
        Self {
            output_proj_dims: 640,
            rms_norm_eps: 1e-6,
        }
    }
}

/// The samples of a token, projected.
#[derive(Debug)]
pub(super) struct SampleEmbedder {
    projector: Projector,
    samples: i32,
}

impl SampleEmbedder {
    /// Takes the projection to `width` from `projector`, as `audio_config` describes it.
    pub(super) fn load(config: &ModelConfig, projector: &Weights, width: i32) -> Result<Self> {
        let config: AudioConfig = config.parse()?;
        let samples = config.output_proj_dims;
        check_size("output_proj_dims", samples)?;
        check_positive("rms_norm_eps", config.rms_norm_eps)?;
        Ok(Self {
            projector: Projector::load(projector, samples, width, config.rms_norm_eps)?,
            samples,
        })
    }

    /// A sound to `[tokens, width]`.
    pub(super) fn forward(&self, input: &RawFeatures) -> Result<Array> {
        let fits = input.samples_per_token as i32 == self.samples
            && input.values.len() == input.tokens * input.samples_per_token;
        if !fits {
            let expected = self.samples.to_string();
            let found = input.samples_per_token.to_string();
            return Err(Error::field("samples per token", expected, found));
        }
        let shape = [input.tokens as i32, self.samples];
        self.projector
            .forward(&Array::from_slice(&input.values, &shape)?)
    }
}
