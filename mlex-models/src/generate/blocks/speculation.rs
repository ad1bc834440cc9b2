//! Self-speculation: the model guesses as it fills blocks, and checks as it goes from token to
//! token.

use super::{Parts, SelfSpeculation};
use crate::Result;
use crate::generate::token_stream::forward_ids;

impl Parts<'_> {
    /// The `known` token and those after it that were guessed right, which the cache holds
    /// afterwards; `known` becomes the one after them.
    pub(super) fn speculate(
        &mut self,
        settings: SelfSpeculation,
        known: &mut u32,
    ) -> Result<Vec<u32>> {
        let length = settings.draft_length;
        let mut draft = vec![self.blocks.mask_token(); length];
        draft[0] = *known;
        if length > 1 {
            let hidden = self.forward_blocks(&draft, settings.block_length)?;
            let open = hidden.squeeze(0)?.slice_axis(0, 1, length as i32)?;
            let guessed = self.penalty.likeliest(&self.model.logits(&open)?)?;
            self.cache.trim(length as i32)?;
            draft[1..].copy_from_slice(&guessed);
        }
        let hidden = forward_ids(self.model, self.cache, &draft)?;
        let logits = self.model.logits(&hidden.squeeze(0)?)?;
        let next = self.penalty.likeliest_after(&logits, &draft)?;
        let pairs = draft[1..].iter().zip(&next);
        let right = 1 + pairs.take_while(|(guess, next)| guess == next).count();
        self.cache.trim((length - right) as i32)?;
        draft.truncate(right);
        self.penalty.extend(&draft);
        *known = next[right - 1];
        Ok(draft)
    }
}
