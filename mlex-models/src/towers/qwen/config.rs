//! What `vision_config` says of a tower.

use serde::Deserialize;

use crate::config::{ModelConfig, check, check_layers, check_size};
use crate::{Error, Result};

/// The towers that differ in their layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::towers) enum QwenKind {
    /// Blocks within windows beside full ones, RMS norms, gated feed-forward layers, and no table
    /// of positions.
    Qwen2_5Vl,
    /// Full blocks, and features of blocks in between.
    Qwen3Vl,
    /// Full blocks alone.
    Qwen3_5,
}

impl QwenKind {
    /// The activation of the feed-forward layers.
    fn activation(self) -> &'static str {
        match self {
            Self::Qwen2_5Vl => "silu",
            Self::Qwen3Vl | Self::Qwen3_5 => "gelu_pytorch_tanh",
        }
    }

    fn patch_size(self) -> i32 {
        match self {
            Self::Qwen2_5Vl => 14,
            Self::Qwen3Vl | Self::Qwen3_5 => 16,
        }
    }

    /// Whether there are windows. Other configs may have the fields that describe them, which
    /// neither transformers nor mlx-vlm reads.
    fn has_windows(self) -> bool {
        self == Self::Qwen2_5Vl
    }
}

/// The fields of `vision_config`; those with defaults have them as in transformers.
#[derive(Debug, Deserialize)]
struct Fields {
    depth: i32,
    hidden_size: i32,
    intermediate_size: i32,
    num_heads: i32,
    out_hidden_size: i32,
    patch_size: Option<i32>,
    temporal_patch_size: Option<i32>,
    spatial_merge_size: Option<i32>,
    in_channels: Option<i32>,
    num_position_embeddings: Option<i32>,
    hidden_act: Option<String>,
    deepstack_visual_indexes: Option<Vec<i32>>,
    window_size: Option<i32>,
    fullatt_block_indexes: Option<Vec<i32>>,
}

/// A tower's settings, checked.
#[derive(Debug)]
pub(super) struct Config {
    pub(super) kind: QwenKind,
    pub(super) depth: i32,
    pub(super) hidden_size: i32,
    pub(super) intermediate_size: i32,
    pub(super) num_heads: i32,
    pub(super) out_hidden_size: i32,
    pub(super) patch_size: i32,
    pub(super) temporal_patch_size: i32,
    pub(super) spatial_merge_size: i32,
    pub(super) in_channels: i32,
    /// Entries of the table of positions; none without one.
    pub(super) num_position_embeddings: Option<i32>,
    /// The blocks that give features of their own, in the order of their mergers.
    pub(super) deepstack: Vec<i32>,
    pub(super) windows: Option<Windows>,
}

/// Blocks whose patches see those of their own window alone.
#[derive(Debug)]
pub(super) struct Windows {
    /// The side of a window in tokens.
    pub(super) side: i32,
    /// The blocks that have none.
    pub(super) full: Vec<i32>,
}

impl Config {
    pub(super) fn new(config: &ModelConfig, kind: QwenKind) -> Result<Self> {
        let fields: Fields = config.parse()?;
        let deepstack = fields.deepstack_visual_indexes.clone().unwrap_or_default();
        if kind != QwenKind::Qwen3Vl && !deepstack.is_empty() {
            // Refused by mlx-vlm too; transformers has no such field there.
            let found = "a list of layers";
            return Err(Error::unsupported("deepstack_visual_indexes", found));
        }
        let positions = fields.num_position_embeddings.unwrap_or(2304);
        let mut config = Self {
            kind,
            depth: fields.depth,
            hidden_size: fields.hidden_size,
            intermediate_size: fields.intermediate_size,
            num_heads: fields.num_heads,
            out_hidden_size: fields.out_hidden_size,
            patch_size: fields.patch_size.unwrap_or(kind.patch_size()),
            temporal_patch_size: fields.temporal_patch_size.unwrap_or(2),
            spatial_merge_size: fields.spatial_merge_size.unwrap_or(2),
            in_channels: fields.in_channels.unwrap_or(3),
            num_position_embeddings: Some(positions).filter(|_| kind != QwenKind::Qwen2_5Vl),
            deepstack,
            windows: None,
        };
        config.validate()?;
        let activation = fields.hidden_act.as_deref();
        if let Some(other) = activation.filter(|name| *name != kind.activation()) {
            return Err(Error::unsupported("hidden_act", other));
        }
        if kind.has_windows() {
            config.windows = Some(config.windows(&fields)?);
        }
        Ok(config)
    }

    fn validate(&self) -> Result<()> {
        check_layers("depth", self.depth)?;
        check_size("hidden_size", self.hidden_size)?;
        check_size("intermediate_size", self.intermediate_size)?;
        check_size("out_hidden_size", self.out_hidden_size)?;
        if let Some(positions) = self.num_position_embeddings {
            check_size("num_position_embeddings", positions)?;
        }
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
        self.check_blocks("deepstack_visual_indexes", &self.deepstack)
    }

    /// Checks that they are blocks of the tower, each named once.
    fn check_blocks(&self, field: &str, blocks: &[i32]) -> Result<()> {
        let mut seen = vec![false; self.depth as usize];
        for &block in blocks {
            let slot = usize::try_from(block).ok().and_then(|n| seen.get_mut(n));
            match slot {
                Some(seen) if !*seen => *seen = true,
                _ => {
                    let last = self.depth - 1;
                    let expected = format!("blocks from 0 to {last}, each once");
                    return Err(Error::field(field, expected, block.to_string()));
                }
            }
        }
        Ok(())
    }

    fn windows(&self, fields: &Fields) -> Result<Windows> {
        let token = self.patch_size * self.spatial_merge_size;
        let size = fields.window_size.unwrap_or(112);
        if size < 1 || size % token != 0 {
            let expected = format!("a multiple of {token} (patch_size * spatial_merge_size)");
            return Err(Error::field("window_size", expected, size.to_string()));
        }
        let full = match &fields.fullatt_block_indexes {
            Some(full) => {
                self.check_blocks("fullatt_block_indexes", full)?;
                full.clone()
            }
            None => vec![7, 15, 23, 31],
        };
        Ok(Windows {
            side: size / token,
            full,
        })
    }

    /// Values of a patch.
    pub(super) fn patch_len(&self) -> i32 {
        self.in_channels * self.temporal_patch_size * self.patch_size * self.patch_size
    }
}
