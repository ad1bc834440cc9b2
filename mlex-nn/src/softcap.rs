//! A soft bound on logits.

use mlex_core::Array;

use crate::chain::{self, Chain};
use crate::{Result, host};

/// `cap * tanh(x / cap)`, of any shape, in the type of `x` ("Gemma 2: Improving Open Language
/// Models at a Practical Size").
///
/// # Errors
/// When MLX refuses the dtype.
pub fn softcap(x: &Array, cap: f32) -> Result<Array> {
    if let Some(y) = host::softcap(x, cap)? {
        return Ok(y);
    }
    chain::call(Chain::Softcap(cap), std::slice::from_ref(x))
}
