//! Self-attention whose output goes through a gate of its own ("Gated Attention for Large
//! Language Models: Non-linearity, Sparsity, and Attention-Sink-Free").

use mlex_core::Array;

use crate::activation::Activation;
use crate::attention::attention;
use crate::cache::{KvCache, Mask};
use crate::host::{Attend, CacheUpdate, Sequence, Value};
use crate::{AttentionConfig, Error, Linear, Result, RmsNorm, Rope, Rotations, Weights};

/// Softmax attention over a cache, `o(attention(q, k, v) * sigmoid(gate))`. The query projection
/// has the gate's rows too, head by head: `[H, (query, gate), D]`.
#[derive(Clone, Debug)]
pub struct GatedAttention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    rope: Rope,
    num_heads: i32,
    num_kv_heads: i32,
    head_dim: i32,
}

impl GatedAttention {
    /// Takes the projections and the norms of queries and keys from `weights`. The norms' epsilon
    /// is `eps`, whatever `config` has; `rope` may rotate a part of each head.
    ///
    /// # Errors
    /// When a tensor cannot be read or the heads do not divide.
    pub fn load(weights: &Weights, config: &AttentionConfig, eps: f32, rope: Rope) -> Result<Self> {
        let &AttentionConfig {
            hidden_size,
            num_heads,
            num_kv_heads,
            head_dim,
            ..
        } = config;
        if num_kv_heads <= 0 || num_heads % num_kv_heads != 0 {
            let expected = format!("a divisor of the {num_heads} query heads");
            return Err(Error::setting(
                "num_key_value_heads",
                expected,
                num_kv_heads,
            ));
        }
        let project = |name, heads: i32| {
            let width = heads.saturating_mul(head_dim);
            Linear::load(&weights.pp(name), hidden_size, width, config.qkv_bias)
        };
        let width = num_heads.saturating_mul(head_dim);
        Ok(Self {
            q_proj: project("q_proj", num_heads.saturating_mul(2))?,
            k_proj: project("k_proj", num_kv_heads)?,
            v_proj: project("v_proj", num_kv_heads)?,
            o_proj: Linear::load(&weights.pp("o_proj"), width, hidden_size, config.o_bias)?,
            q_norm: RmsNorm::load(&weights.pp("q_norm"), head_dim, eps)?,
            k_norm: RmsNorm::load(&weights.pp("k_norm"), head_dim, eps)?,
            rope,
            num_heads,
            num_kv_heads,
            head_dim,
        })
    }

    /// `x` `[B, L, hidden_size]` to the same shape; adds its keys and values to `cache`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward(&self, x: &Array, mask: &Mask, cache: &mut KvCache) -> Result<Array> {
        if let Some((mut sequence, value)) = Sequence::start(x)?
            && let Some((y, update)) = self.record(&mut sequence, value, mask, cache)?
        {
            return sequence.finish_keys(y, &update, cache);
        }
        let offset = cache.offset();
        self.compute(x, mask, cache, |x| self.rope.forward(x, &offset))
    }

    /// As [`forward`](Self::forward), of tokens with these rotations.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward_rotated(
        &self,
        x: &Array,
        mask: &Mask,
        rotations: &Rotations,
        cache: &mut KvCache,
    ) -> Result<Array> {
        self.compute(x, mask, cache, |x| rotations.apply(x))
    }

    fn compute(
        &self,
        x: &Array,
        mask: &Mask,
        cache: &mut KvCache,
        rotate: impl Fn(&Array) -> Result<Array>,
    ) -> Result<Array> {
        let dim = self.head_dim;
        let queries = self.q_proj.forward(x)?;
        let queries = queries.unflatten(-1, &[self.num_heads, 2 * dim])?;
        let gate = queries.slice_axis(-1, dim, 2 * dim)?.flatten(-2, -1)?;
        let queries = self.q_norm.forward(&queries.slice_axis(-1, 0, dim)?)?;
        let heads = |x: Array| x.unflatten(-1, &[self.num_kv_heads, dim]);
        let keys = self.k_norm.forward(&heads(self.k_proj.forward(x)?)?)?;
        let values = heads(self.v_proj.forward(x)?)?;

        let rotated = |x: Array| rotate(&x.transpose(&[0, 2, 1, 3])?);
        let (queries, keys) = (rotated(queries)?, rotated(keys)?);
        let (keys, values) = cache.update(&keys, &values.transpose(&[0, 2, 1, 3])?)?;

        let mask = mask.as_attention();
        let output = attention(&queries, &keys, &values, self.scale(), mask, None)?;
        let output = output.transpose(&[0, 2, 1, 3])?.flatten(2, 3)?;
        self.o_proj
            .forward(&Activation::Sigmoid.gated(&gate, &output)?)
    }

    /// The same as steps of `sequence`; none where there is no kernel for one. The cache changes
    /// when the [`CacheUpdate`] is applied, after the sequence is finished.
    ///
    /// # Errors
    /// When the weights cannot be read or the shapes do not fit.
    pub fn record(
        &self,
        sequence: &mut Sequence,
        x: Value,
        mask: &Mask,
        cache: &KvCache,
    ) -> Result<Option<(Value, CacheUpdate)>> {
        let dim = self.head_dim;
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let projected = Linear::record_all(sequence, x, projections)?;
        let Some([queries, keys, values]) = projected else {
            return Ok(None);
        };
        let gate = sequence.columns(queries, 2 * dim, dim, dim);
        let queries = sequence.columns(queries, 2 * dim, 0, dim);
        let (Some(queries), Some(gate)) = (queries, gate) else {
            return Ok(None);
        };
        let attend = Attend {
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            scale: self.scale(),
            rope: Some(&self.rope),
            query_norm: Some(&self.q_norm),
            key_norm: Some(&self.k_norm),
            norm_last: false,
            value_eps: None,
        };
        let attended = attend.record(sequence, [queries, keys, values], mask, cache)?;
        let Some((output, update)) = attended else {
            return Ok(None);
        };
        let Some(gated) = sequence.gate(Activation::Sigmoid, gate, output) else {
            return Ok(None);
        };
        let output = self.o_proj.record(sequence, gated)?;
        Ok(output.map(|output| (output, update)))
    }

    fn scale(&self) -> f32 {
        (self.head_dim as f32).powf(-0.5)
    }
}
