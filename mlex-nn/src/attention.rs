//! Self-attention with grouped key and value heads.

use mlex_core::{Array, AttentionMask};

use crate::cache::{KvCache, Mask, Offset};
use crate::host::{self, Attend, CacheUpdate, Sequence, Value};
use crate::{Error, Linear, Result, RmsNorm, Rope, Rotations, Weights, cuda};

/// The settings of a [`SelfAttention`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionConfig {
    /// Width of the input and output.
    pub hidden_size: i32,
    /// Query heads.
    pub num_heads: i32,
    /// Key and value heads; divides the query heads.
    pub num_kv_heads: i32,
    /// Width of a head.
    pub head_dim: i32,
    /// Whether `q_proj`, `k_proj` and `v_proj` have a bias.
    pub qkv_bias: bool,
    /// Whether `o_proj` has a bias.
    pub o_bias: bool,
    /// Queries and keys are normalized per head (`q_norm`, `k_norm`) with this epsilon.
    pub qk_norm_eps: Option<f32>,
}

/// Softmax attention over a cache ("GQA: Training Generalized Multi-Query Transformer Models
/// from Multi-Head Checkpoints").
#[derive(Clone, Debug)]
pub struct SelfAttention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    q_norm: Option<RmsNorm>,
    k_norm: Option<RmsNorm>,
    rope: Option<Rope>,
    num_heads: i32,
    num_kv_heads: i32,
    scale: f32,
}

impl SelfAttention {
    /// Takes the projections, and the norms where there are any, from `weights`. Without
    /// `rope` positions are not encoded.
    ///
    /// # Errors
    /// When a tensor cannot be read or the heads do not divide.
    pub fn load(weights: &Weights, config: &AttentionConfig, rope: Option<Rope>) -> Result<Self> {
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
        let project = |name, heads| {
            Linear::load(
                &weights.pp(name),
                hidden_size,
                heads * head_dim,
                config.qkv_bias,
            )
        };
        let norm = |name| {
            let load = |eps| RmsNorm::load(&weights.pp(name), head_dim, eps);
            config.qk_norm_eps.map(load).transpose()
        };
        Ok(Self {
            q_proj: project("q_proj", num_heads)?,
            k_proj: project("k_proj", num_kv_heads)?,
            v_proj: project("v_proj", num_kv_heads)?,
            o_proj: Linear::load(
                &weights.pp("o_proj"),
                num_heads * head_dim,
                hidden_size,
                config.o_bias,
            )?,
            q_norm: norm("q_norm")?,
            k_norm: norm("k_norm")?,
            rope,
            num_heads,
            num_kv_heads,
            scale: (head_dim as f32).powf(-0.5),
        })
    }

    /// `x` `[B, L, hidden_size]` to the same shape; adds its keys and values to `cache`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward(&self, x: &Array, mask: &Mask, cache: &mut KvCache) -> Result<Array> {
        let [queries, keys, values] = self.project(x)?;
        let projected = [&queries, &keys, &values];
        if let Some(output) = host::attend(&self.attend(), projected, mask, cache)? {
            return self.o_proj.forward(&output);
        }
        let offset = cache.offset();
        if let Some(ready) = self.normed_and_rotated(&queries, &keys, &offset)? {
            return self.attended(ready, values, mask, cache);
        }
        self.compute([queries, keys, values], mask, cache, |x| match &self.rope {
            Some(rope) => rope.forward(&x, &offset),
            None => Ok(x),
        })
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
        let projected = self.project(x)?;
        self.compute(projected, mask, cache, |x| rotations.apply(&x))
    }

    /// Attention by MLX's operations, of what the projections give.
    fn compute(
        &self,
        [queries, keys, values]: [Array; 3],
        mask: &Mask,
        cache: &mut KvCache,
        rotate: impl Fn(Array) -> Result<Array>,
    ) -> Result<Array> {
        let queries = rotate(self.heads(queries, self.num_heads, self.q_norm.as_ref())?)?;
        let keys = rotate(self.heads(keys, self.num_kv_heads, self.k_norm.as_ref())?)?;
        self.attended([queries, keys], values, mask, cache)
    }

    /// Queries and keys with their positions in them, in one node; none where there is no kernel.
    fn normed_and_rotated(
        &self,
        queries: &Array,
        keys: &Array,
        offset: &Offset,
    ) -> Result<Option<[Array; 2]>> {
        let (Some(rope), &Offset::Same(offset)) = (&self.rope, offset) else {
            return Ok(None);
        };
        let norms = match (&self.q_norm, &self.k_norm) {
            (Some(query), Some(key)) => Some([query.parameters(), key.parameters()]),
            _ => None,
        };
        let heads = [self.num_heads, self.num_kv_heads];
        cuda::normed_and_rotated([queries, keys], heads, norms, rope, offset)
    }

    /// The rest, of queries and keys `[B, H, L, D]` that have their positions in them.
    fn attended(
        &self,
        [queries, keys]: [Array; 2],
        values: Array,
        mask: &Mask,
        cache: &mut KvCache,
    ) -> Result<Array> {
        let values = self.heads(values, self.num_kv_heads, None)?;
        let (keys, values) = cache.update(&keys, &values)?;

        let output = merged_attention(&queries, &keys, &values, self.scale, mask.as_attention())?;
        self.o_proj.forward(&output)
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
        let Some(projected) = Linear::record_all(sequence, x, self.projections())? else {
            return Ok(None);
        };
        let attended = self.attend().record(sequence, projected, mask, cache)?;
        let Some((output, update)) = attended else {
            return Ok(None);
        };
        let output = self.o_proj.record(sequence, output)?;
        Ok(output.map(|output| (output, update)))
    }

    fn projections(&self) -> [&Linear; 3] {
        [&self.q_proj, &self.k_proj, &self.v_proj]
    }

    /// What the kernels do between the projections in one piece.
    fn attend(&self) -> Attend<'_> {
        Attend {
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            scale: self.scale,
            rope: self.rope.as_ref(),
            query_norm: self.q_norm.as_ref(),
            key_norm: self.k_norm.as_ref(),
            norm_last: false,
            value_eps: None,
        }
    }

    /// Queries `[B, L, H * D]`, keys and values `[B, L, H_kv * D]`.
    fn project(&self, x: &Array) -> Result<[Array; 3]> {
        let projections = self.projections();
        let outputs = host::linear_many(x, projections.map(Linear::weight))?;
        if let Some(Ok(outputs)) = outputs.map(<[Array; 3]>::try_from) {
            return Ok(outputs);
        }
        if let Some(outputs) = cuda::linear_three(x, projections.map(Linear::weight))? {
            return Ok(outputs);
        }
        let [q_proj, k_proj, v_proj] = projections;
        Ok([q_proj.forward(x)?, k_proj.forward(x)?, v_proj.forward(x)?])
    }

    /// `[B, L, heads * D]` to `[B, heads, L, D]`, normalized per head.
    fn heads(&self, x: Array, heads: i32, norm: Option<&RmsNorm>) -> Result<Array> {
        let (batch, length) = (x.dim(0)?, x.dim(1)?);
        if norm.is_none() && length == 1 {
            return Ok(x.reshape(&[batch, heads, 1, -1])?);
        }
        let x = x.unflatten(-1, &[heads, -1])?;
        let x = match norm {
            Some(norm) => norm.forward(&x)?,
            None => x,
        };
        Ok(x.transpose(&[0, 2, 1, 3])?)
    }
}

/// `softmax(scale * q k^T + mask) v` for queries `[B, H, L, D]`, keys `[B, H_kv, S, D]` and
/// values `[B, H_kv, S, D_v]`. `sinks` `[H]` are the scores of one more key that has no value
/// ("Efficient Streaming Language Models with Attention Sinks").
///
/// # Errors
/// When the shapes do not fit.
pub fn attention(
    queries: &Array,
    keys: &Array,
    values: &Array,
    scale: f32,
    mask: AttentionMask<'_>,
    sinks: Option<&Array>,
) -> Result<Array> {
    let heads = queries.dim(1)?;
    match host::attention(queries, keys, values, scale, mask, sinks)? {
        // [B, L, H * D] -> [B, H, L, D]
        Some(merged) => Ok(merged
            .unflatten(-1, &[heads, -1])?
            .transpose(&[0, 2, 1, 3])?),
        None => Ok(queries.attention(keys, values, scale, mask, sinks)?),
    }
}

/// As [`attention`], the heads side by side: `[B, L, H * D_v]`.
fn merged_attention(
    queries: &Array,
    keys: &Array,
    values: &Array,
    scale: f32,
    mask: AttentionMask<'_>,
) -> Result<Array> {
    if let Some(merged) = host::attention(queries, keys, values, scale, mask, None)? {
        return Ok(merged);
    }
    let output = queries.attention(keys, values, scale, mask, None)?;
    Ok(output.transpose(&[0, 2, 1, 3])?.flatten(2, 3)?)
}
