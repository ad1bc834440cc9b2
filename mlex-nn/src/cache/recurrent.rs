//! What a recurrent layer remembers: a state of fixed size, whatever it has seen.

use mlex_core::Array;

use super::LayerState;
use super::padding::Progress;
use crate::{Error, Result};

/// The arrays of a [`RecurrentCache`]. They are replaced, never written to, so that a clone
/// stays what it was.
#[derive(Clone, Debug)]
pub struct RecurrentState {
    /// The last inputs of the layer's convolution, `[B, K - 1, C]`.
    pub conv: Array,
    /// The recurrent state, batch first.
    pub state: Array,
}

/// The state of one recurrent layer behind a short convolution (gated delta, Mamba).
#[derive(Clone, Debug, Default)]
pub struct RecurrentCache {
    state: Option<RecurrentState>,
    progress: Progress,
}

impl RecurrentCache {
    /// Tokens seen, padding included.
    pub fn len(&self) -> i32 {
        self.progress.seen
    }

    /// Whether none was seen.
    pub fn is_empty(&self) -> bool {
        self.progress.seen == 0
    }

    /// Announces that row `b` of the batch starts with `padding[b]` tokens of padding, which
    /// leave no trace in the state.
    ///
    /// # Errors
    /// When tokens have been seen already or a number is negative.
    pub fn set_left_padding(&mut self, padding: &[i32]) -> Result<()> {
        self.progress.set_left_padding(padding)
    }

    /// How many of the next `new` tokens of each row are padding; `None` where none is.
    pub fn padding(&self, new: i32) -> Option<Vec<i32>> {
        self.progress.padding(new)
    }

    /// `[B, new]`: false where the next tokens are padding; `None` where none is.
    ///
    /// # Errors
    /// When MLX is out of memory.
    pub fn mask(&self, new: i32) -> Result<Option<Array>> {
        self.progress.mask(new)
    }

    /// The state; `None` before the first token.
    pub fn state(&self) -> Option<&RecurrentState> {
        self.state.as_ref()
    }

    /// Replaces the state by the one after `new` more tokens.
    pub fn update(&mut self, state: RecurrentState, new: i32) {
        self.state = Some(state);
        self.progress.seen += new;
    }

    /// What is remembered, without what it was announced.
    pub(super) fn to_state(&self) -> Result<LayerState> {
        self.progress.check_unpadded()?;
        Ok(LayerState::Recurrent {
            seen: self.progress.seen,
            state: self.state.clone(),
        })
    }

    /// Takes a state for one sequence in place of an empty one.
    pub(super) fn restore(&mut self, seen: i32, state: Option<RecurrentState>) -> Result<()> {
        if seen < 0 || (seen == 0) != state.is_none() {
            return Err(Error::setting("tokens seen", "those of the state", seen));
        }
        if let Some(RecurrentState { conv, state }) = &state {
            for (name, array) in [("conv", conv), ("state", state)] {
                if array.ndim() < 3 || array.dim(0)? != 1 {
                    let found = format!("{:?}", array.shape());
                    return Err(Error::setting(name, "a batch of 1", found));
                }
            }
        }
        self.state = state;
        self.progress.seen = seen;
        Ok(())
    }

    /// Whether the last `count` tokens can be forgotten: all of them or none, since the state
    /// holds no single one.
    pub fn can_trim(&self, count: i32) -> bool {
        count == 0 || count == self.progress.seen
    }

    /// Forgets the last `count` tokens.
    ///
    /// # Errors
    /// When it cannot ([`can_trim`](Self::can_trim)); then nothing is changed.
    pub fn trim(&mut self, count: i32) -> Result<()> {
        if !self.can_trim(count) {
            let expected = format!("0 or all {} of a recurrent layer", self.progress.seen);
            return Err(Error::setting("tokens to trim", expected, count));
        }
        if count > 0 {
            self.state = None;
            self.progress.seen = 0;
        }
        Ok(())
    }

    /// The arrays that hold the state.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        let arrays = self.state.iter();
        arrays.flat_map(|RecurrentState { conv, state }| [conv, state])
    }
}
