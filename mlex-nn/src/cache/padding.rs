//! How far a layer is, and where its batch rows begin.

use std::sync::Arc;

use mlex_core::Array;

use crate::{Error, Result};

/// Tokens seen, and the padding among them.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress {
    /// Tokens seen, padding included.
    pub(super) seen: i32,
    /// Tokens of padding at the start of each row; empty for none.
    left_padding: Arc<[i32]>,
}

impl Progress {
    pub(super) fn set_left_padding(&mut self, padding: &[i32]) -> Result<()> {
        if self.seen > 0 {
            return Err(Error::setting("left padding", "an empty cache", self.seen));
        }
        if let Some(&count) = padding.iter().find(|&&count| count < 0) {
            return Err(Error::setting("left padding", "no negative number", count));
        }
        self.left_padding = if padding.iter().all(|&count| count == 0) {
            Arc::default()
        } else {
            padding.into()
        };
        Ok(())
    }

    /// Refuses padding where what is remembered is to be saved.
    pub(super) fn check_unpadded(&self) -> Result<()> {
        if self.left_padding.is_empty() {
            Ok(())
        } else {
            Err(Error::setting("states", "no padding", "some"))
        }
    }

    /// How many of the next `new` tokens of each row are padding; `None` where none is.
    pub(super) fn padding(&self, new: i32) -> Option<Vec<i32>> {
        let rows = self.left_padding.iter();
        let rows: Vec<i32> = rows
            .map(|&count| (count - self.seen).clamp(0, new))
            .collect();
        rows.iter().any(|&count| count > 0).then_some(rows)
    }

    /// `[B, new]`: false where the next tokens are padding; `None` where none is.
    pub(super) fn mask(&self, new: i32) -> Result<Option<Array>> {
        let Some(padding) = self.padding(new) else {
            return Ok(None);
        };
        let positions: Vec<i32> = (0..new).collect();
        let positions = Array::from_slice(&positions, &[1, new])?;
        let padding = Array::from_slice(&padding, &[padding.len() as i32, 1])?;
        Ok(Some(positions.greater_equal(&padding)?))
    }
}
