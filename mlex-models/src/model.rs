//! What every architecture offers to generation.

use mlex_core::Array;
use mlex_nn::Cache;

use crate::Result;

/// What a model is, as data.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ModelInfo {
    /// The architecture's name, as config.json gives it.
    pub model_type: String,
    /// How many tokens it knows.
    pub vocab_size: i32,
    /// The width of its hidden states.
    pub hidden_size: i32,
    /// How many layers it has.
    pub num_layers: i32,
    /// Numbers that a token adds to the cache, over all layers.
    pub cache_per_token: i64,
    /// The longest context that it was made for, where the config says.
    pub max_context: Option<i32>,
}

/// What a model computes on.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Input<'a> {
    /// Token ids, integers `[B, L]`.
    Tokens(&'a Array),
    /// Embeddings `[B, L, D]` in their place, as a tower makes them.
    Embeddings(&'a Array),
}

/// A language model: tokens and a cache to hidden states, hidden states to logits.
///
/// The two are apart so that a prefill projects the last position only.
pub trait Model {
    /// What it is.
    fn info(&self) -> &ModelInfo;

    /// An empty cache for it.
    ///
    /// # Errors
    /// When MLX is out of memory.
    fn new_cache(&self) -> Result<Cache>;

    /// Hidden states `[B, L, D]` of `L` new tokens, which are added to `cache`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    fn forward(&self, input: Input<'_>, cache: &mut Cache) -> Result<Array>;

    /// Logits `[.., vocab_size]` of hidden states `[.., D]`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    fn logits(&self, hidden: &Array) -> Result<Array>;
}
