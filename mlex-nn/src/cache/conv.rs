//! What a short convolution remembers: its last inputs.

use mlex_core::{Array, Dtype};

use super::LayerState;
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
        // Rows before those that were held are not known, but for zeros before the first token.
        self.extra = self.extra.saturating_add(new).min(held - needed);
        self.rows = Some(rows);
        self.progress.seen += new;
        Ok(())
    }

    /// What is remembered, without what it was announced: the inputs that the layer needs.
    pub(super) fn to_state(&self) -> Result<LayerState> {
        self.progress.check_unpadded()?;
        let needed = |rows: &Array| -> Result<Array> {
            let held = rows.dim(1)?;
            Ok(rows.slice_axis(1, self.extra, held)?)
        };
        Ok(LayerState::Conv {
            seen: self.progress.seen,
            rows: self.rows.as_ref().map(needed).transpose()?,
        })
    }

    /// Takes a state for one sequence in place of an empty one.
    pub(super) fn restore(&mut self, seen: i32, rows: Option<Array>) -> Result<()> {
        if seen < 0 || (seen == 0) != rows.is_none() {
            return Err(Error::setting("tokens seen", "those of the state", seen));
        }
        if let Some(rows) = &rows {
            let is_float = matches!(
                rows.dtype(),
                Dtype::Float32 | Dtype::Float16 | Dtype::Bfloat16
            );
            if rows.ndim() != 3 || rows.dim(0)? != 1 || rows.size() == 0 || !is_float {
                let found = format!("{} {:?}", rows.dtype(), rows.shape());
                let expected = "floats [1, rows, channels]";
                return Err(Error::setting("inputs of a convolution", expected, found));
            }
        }
        self.rows = rows;
        self.extra = 0;
        self.progress.seen = seen;
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

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(values: &[f32]) -> Result<Array> {
        Ok(Array::from_slice(values, &[1, values.len() as i32, 1])?)
    }

    fn held(cache: &ConvCache) -> Result<Vec<f32>> {
        match cache.to_state()? {
            LayerState::Conv {
                rows: Some(rows), ..
            } => Ok(rows.contiguous()?.to_vec()?),
            other => Err(Error::setting("state", "rows", format!("{other:?}"))),
        }
    }

    #[test]
    fn a_state_is_what_the_layer_needs() -> Result<()> {
        let mut cache = ConvCache::default();
        cache.set_spare(2);
        cache.update(rows(&[1.0, 2.0, 3.0, 4.0])?, 2, 4)?;
        assert_eq!(held(&cache)?, [3.0, 4.0]);
        cache.trim(1)?;
        assert_eq!(held(&cache)?, [2.0, 3.0]);
        let mut restored = ConvCache::default();
        restored.restore(cache.len(), Some(rows(&[2.0, 3.0])?))?;
        assert_eq!((restored.len(), held(&restored)?), (3, vec![2.0, 3.0]));
        assert!(restored.can_trim(0) && restored.can_trim(3) && !restored.can_trim(1));
        let mut empty = ConvCache::default();
        empty.restore(0, None)?;
        assert!(empty.is_empty() && empty.rows().is_none());
        Ok(())
    }

    #[test]
    fn only_tokens_whose_inputs_are_known_are_forgotten() -> Result<()> {
        let mut cache = ConvCache::default();
        cache.update(rows(&[1.0, 2.0])?, 2, 5)?;
        // Room for two more, of which one is filled: what was before the first row is not known.
        cache.set_spare(2);
        cache.update(rows(&[0.0, 1.0, 2.0, 3.0])?, 2, 1)?;
        assert!(cache.can_trim(1) && !cache.can_trim(2));
        cache.update(rows(&[1.0, 2.0, 3.0, 4.0])?, 2, 1)?;
        assert!(cache.can_trim(2) && !cache.can_trim(3));
        cache.trim(2)?;
        assert_eq!((cache.len(), held(&cache)?), (5, vec![1.0, 2.0]));
        Ok(())
    }

    #[test]
    fn states_that_do_not_fit_are_refused() -> Result<()> {
        let zeros = |shape: &[i32], dtype| Array::zeros(shape, dtype);
        let wrong = [
            (-1, Some(rows(&[1.0])?)),
            (0, Some(rows(&[1.0])?)),
            (3, None),
            (3, Some(zeros(&[2, 3, 4], Dtype::Float32)?)),
            (3, Some(zeros(&[1, 3], Dtype::Float32)?)),
            (3, Some(zeros(&[1, 0, 4], Dtype::Float32)?)),
            (3, Some(zeros(&[1, 3, 4], Dtype::Int32)?)),
        ];
        for (seen, rows) in wrong {
            let mut cache = ConvCache::default();
            assert!(
                cache.restore(seen, rows.clone()).is_err(),
                "{seen} {rows:?}"
            );
            assert!(cache.is_empty());
        }
        Ok(())
    }
}
