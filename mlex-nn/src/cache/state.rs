//! States as arrays and numbers, to be written to files and read back.

use mlex_core::Array;

use super::{Cache, KvPacking, LayerCache, RecurrentState};
use crate::{Error, Result};

/// What one layer remembers.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LayerState {
    /// An attention layer's.
    Attention(KvState),
    /// A recurrent layer's.
    Recurrent {
        /// Tokens seen.
        seen: i32,
        /// None before the first one.
        state: Option<RecurrentState>,
    },
    /// A short convolution's.
    Conv {
        /// Tokens seen.
        seen: i32,
        /// The last inputs that the layer needs, `[B, K - 1, C]`; none before the first token.
        rows: Option<Array>,
    },
}

/// Keys and values of an attention layer.
#[derive(Clone, Debug)]
pub struct KvState {
    /// Tokens seen.
    pub seen: i32,
    /// How far the position of the next token is beyond their number.
    pub shift: i32,
    /// How many of them cannot be forgotten, because their positions do not count up.
    pub fixed: i32,
    /// How they are packed, if they are.
    pub packing: Option<KvPacking>,
    /// Keys and values of the positions that are held, `[B, H_kv, S, D]` (packed: uint32
    /// `[.., words]`); none before the first
    /// token.
    pub arrays: Option<[Array; 2]>,
}

impl Cache {
    /// The states of all layers.
    ///
    /// # Errors
    /// For a batch with padding, or when MLX fails.
    pub fn to_states(&self) -> Result<Vec<LayerState>> {
        let layers = self.layers.iter();
        layers
            .map(|layer| match layer {
                LayerCache::Attention(cache) => cache.to_state().map(LayerState::Attention),
                LayerCache::Recurrent(cache) => cache.to_state(),
                LayerCache::Conv(cache) => cache.to_state(),
            })
            .collect()
    }

    /// Takes the states of all layers, in place of the empty ones that it has. Shapes are checked
    /// for one sequence; whether they are those of a model shows in its next step.
    ///
    /// # Errors
    /// When tokens have been seen already, or a state does not fit its layer.
    pub fn restore(&mut self, states: Vec<LayerState>) -> Result<()> {
        if !self.is_empty() {
            let found = self.len();
            return Err(Error::setting("states", "an empty cache", found));
        }
        if states.len() != self.layers.len() {
            let expected = format!("{} layers", self.layers.len());
            return Err(Error::setting("states", expected, states.len()));
        }
        let mut restored = self.layers.clone();
        for (layer, state) in restored.iter_mut().zip(states) {
            match state {
                LayerState::Attention(state) => layer.attention()?.restore(state)?,
                LayerState::Recurrent { seen, state } => layer.recurrent()?.restore(seen, state)?,
                LayerState::Conv { seen, rows } => layer.conv()?.restore(seen, rows)?,
            }
        }
        let seen = restored.first().map_or(0, LayerCache::len);
        if let Some(other) = restored.iter().find(|layer| layer.len() != seen) {
            let expected = format!("{seen} in every layer");
            return Err(Error::setting("tokens seen", expected, other.len()));
        }
        self.layers = restored;
        Ok(())
    }
}
