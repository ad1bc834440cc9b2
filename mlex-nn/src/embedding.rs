//! The token embedding, dense or quantized.

use mlex_core::Array;

use crate::linear::Matrix;
use crate::{Result, Sequence, Value, Weights, host};

/// A table with one row per token.
#[derive(Clone, Debug)]
pub struct Embedding {
    weight: Matrix,
}

impl Embedding {
    /// Takes `weight` `[vocab_size, hidden_size]` from `weights`.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn load(weights: &Weights, vocab_size: i32, hidden_size: i32) -> Result<Self> {
        Ok(Self {
            weight: Matrix::load(weights, vocab_size, hidden_size)?,
        })
    }

    /// Token ids `[B, L]` to `[B, L, D]`. Ids beyond the vocabulary are not checked here.
    ///
    /// # Errors
    /// When the ids are not integers.
    pub fn forward(&self, ids: &Array) -> Result<Array> {
        self.weight.rows(ids)
    }

    /// The same as a step of `sequence`; none where there is no kernel for it.
    ///
    /// # Errors
    /// When the table cannot be read.
    pub fn record(&self, sequence: &mut Sequence, ids: Value) -> Result<Option<Value>> {
        host::record_rows(sequence, ids, &self.weight)
    }

    /// The table as a head: `[.., D]` to logits `[.., vocab_size]`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn as_linear(&self, hidden: &Array) -> Result<Array> {
        self.weight.matmul(hidden)
    }
}
