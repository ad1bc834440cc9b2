//! How keys and values are held.

use mlex_nn::{Cache, KvQuantization};
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::model::Model;

/// How many of the first positions stay in sight where the number of keys is limited, as mlx-lm
/// has it.
const SINKS: i32 = 4;

/// How the keys and values of a generation are held. States that are held otherwise are another
/// prompt's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct KvSettings {
    /// The most positions that a query sees, in layers that see all otherwise: the first four and
    /// the last ones. At least 5.
    pub max_kv_size: Option<i32>,
    /// Keys and values are packed into so many bits; not with `max_kv_size`. Layers with a window
    /// are not packed.
    pub bits: Option<i32>,
    /// Numbers that share a scale and a bias; none for 64.
    pub group_size: Option<i32>,
    /// From how many tokens on they are packed.
    pub quantized_start: i32,
}

impl KvSettings {
    /// Keys and values as the model makes them, of all positions.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty cache for `model`.
    ///
    /// # Errors
    /// When a number is outside of its range.
    pub fn new_cache(&self, model: &dyn Model) -> Result<Cache> {
        let mut cache = model.new_cache()?;
        if let Some(bits) = self.bits {
            cache.set_quantization(KvQuantization {
                bits,
                group_size: self.group_size.unwrap_or(64),
                start: self.quantized_start,
            })?;
        }
        if let Some(size) = self.max_kv_size {
            cache.limit(size, SINKS)?;
        }
        Ok(cache)
    }

    /// Tokens before which keys and values are not packed.
    pub(super) fn plain_before(&self) -> usize {
        match self.bits {
            Some(_) => usize::try_from(self.quantized_start).unwrap_or(0),
            None => 0,
        }
    }

    /// Whether the last token of a prompt is computed in a step of its own, as mlx-lm does it:
    /// here a query of a chunk sees other keys than a single one.
    pub(super) fn last_token_alone(&self) -> bool {
        self.bits.is_some() || self.max_kv_size.is_some()
    }
}
