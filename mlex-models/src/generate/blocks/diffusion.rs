//! Block diffusion: what the model is sure of is filled in first.

use mlex_core::Array;
use mlex_nn::dispatch::argmax;

use super::{Diffusion, Parts};
use crate::Result;

impl Parts<'_> {
    /// The next block, which the cache holds afterwards.
    pub(super) fn fill(&mut self, settings: Diffusion) -> Result<Vec<u32>> {
        let Diffusion {
            block_length: length,
            threshold,
        } = settings;
        let mask = self.blocks.mask_token();
        let mut block = vec![mask; length];
        // Each step fills a place at least; a model may fill it with the mask token itself.
        for _ in 0..length {
            let is_open = |place: &usize| block[*place] == mask;
            let open: Vec<usize> = (0..length).filter(is_open).collect();
            if open.is_empty() {
                break;
            }
            let hidden = self.forward_blocks(&block, length)?;
            let predicted = self.predict(&hidden, &open)?;
            self.cache.trim(length as i32)?;
            take(&mut block, &open, &predicted, threshold);
        }
        self.forward_blocks(&block, length)?.eval()?;
        self.penalty.extend(&block);
        Ok(block)
    }

    /// The likeliest token and its probability at some places of hidden states `[1, L, D]`.
    fn predict(&self, hidden: &Array, places: &[usize]) -> Result<Vec<(u32, f32)>> {
        let places: Vec<i32> = places.iter().map(|&place| place as i32).collect();
        let places = Array::from_slice(&places, &[places.len() as i32])?;
        let hidden = hidden.squeeze(0)?.take(&places, 0)?;
        let logits = self.penalty.apply(&self.model.logits(&hidden)?)?;
        let probabilities = logits.softmax(&[-1], true)?;
        let ids: Vec<i32> = argmax(&probabilities)?.to_vec()?;
        let sure: Vec<f32> = probabilities.max(&[-1], false)?.to_vec()?;
        let ids = ids.into_iter().map(|id| id as u32);
        Ok(ids.zip(sure).collect())
    }
}

/// Takes the predictions that are sure enough, or the surest.
fn take(block: &mut [u32], open: &[usize], predicted: &[(u32, f32)], threshold: f32) {
    let mut taken = false;
    let mut surest: Option<(usize, u32, f32)> = None;
    for (&place, &(id, sure)) in open.iter().zip(predicted) {
        if sure >= threshold {
            block[place] = id;
            taken = true;
        }
        if surest.is_none_or(|(_, _, most)| sure > most) {
            surest = Some((place, id, sure));
        }
    }
    if let (false, Some((place, id, _))) = (taken, surest) {
        block[place] = id;
    }
}
