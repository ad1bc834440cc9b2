//! What a short convolution remembers: its last inputs.

use mlex_core::Array;

use super::padding::Progress;
use crate::{Error, Result};

/// The last inputs of a layer that is a short convolution and nothing more. It can hold more of
/// them than the layer needs, so that some of the last tokens can be forgotten.
#[derive(Clone, Debug, Default)]
pub struct ConvCache {
    /// `[B, held, C]`, the newest last. Replaced, never written to, so that a clone stays what it
    /// was.
    rows: Option<Array>,
    /// How many of them the layer does not need.
    extra: i32,
    /// How many of the last tokens it shall be possible to forget.
    spare: i32,
    progress: Progress,
}

impl ConvCache {
    /// Tokens seen, padding included.
    pub fn len(&self) -> i32 {
        self.progress.seen
    }

    /// Whether none was seen.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Announces that row `b` of the batch starts with `padding[b]` tokens of padding, which
    /// count as zero.
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

    /// Keeps so many inputs more from the next update on, that the last `tokens` can be forgotten.
    pub fn set_spare(&mut self, tokens: i32) {
        self.spare = tokens.max(0);
    }

    /// How many inputs an update shall hold for a layer that needs `needed`.
    pub(crate) fn keep(&self, needed: i32) -> i32 {
        needed.saturating_add(self.spare)
    }

    /// The last inputs, `[B, held, C]`; `None` before the first token.
    pub fn rows(&self) -> Option<&Array> {
        self.rows.as_ref()
    }

    /// Replaces the inputs by those after `new` more tokens, of which the layer needs `needed`.
    ///
    /// # Errors
    /// When there are fewer.
    pub fn update(&mut self, rows: Array, needed: i32, new: i32) -> Result<()> {
        let held = rows.dim(1)?;
        if held < needed {
            let expected = format!("at least {needed} rows");
            return Err(Error::setting("inputs of a convolution", expected, held));
        }
        self.extra = held - needed;
        self.rows = Some(rows);
        self.progress.seen += new;
        Ok(())
    }

    /// Whether the last `count` tokens can be forgotten: as many as there are inputs to spare, or
    /// all.
    pub fn can_trim(&self, count: i32) -> bool {
        count == self.len() || (0..=self.extra.min(self.len())).contains(&count)
    }

    /// Forgets the last `count` tokens.
    ///
    /// # Errors
    /// When it cannot ([`can_trim`](Self::can_trim)); then nothing is changed.
    pub fn trim(&mut self, count: i32) -> Result<()> {
        if !self.can_trim(count) {
            let expected = format!("at most {} of a convolution, or all", self.extra);
            return Err(Error::setting("tokens to trim", expected, count));
        }
        if count == self.len() {
            self.rows = None;
            self.extra = 0;
        } else if let Some(rows) = &self.rows {
            let held = rows.dim(1)?;
            self.rows = Some(rows.slice_axis(1, 0, held - count)?);
            self.extra -= count;
        }
        self.progress.seen -= count;
        Ok(())
    }

    /// The arrays that hold the state.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.rows.iter()
    }
}
