//! Attention with normalized queries, keys and values, over the layer's own keys and values or
//! those of an earlier layer.

use mlex_core::Array;
use mlex_nn::{
    Attend, CacheUpdate, KvCache, Linear, Mask, Offset, RmsNorm, Rope, Sequence, Value, Weights,
    attention,
};

use super::config::{LayerConfig, TextConfig};
use crate::Result;

/// Scores are not scaled: the norm of the queries has the factor.
const SCALE: f32 = 1.0;

/// Keys and values that a layer's queries see, `[B, H_kv, S, D]`.
pub(super) type KeysValues = (Array, Array);

/// Where a layer's keys and values are.
pub(super) enum Source<Cache, Seen> {
    /// Made from the layer's input and added to this cache.
    Own(Cache),
    /// Those of another layer.
    Shared(Seen),
}

pub(super) struct Attention {
    q_proj: Linear,
    q_norm: RmsNorm,
    o_proj: Linear,
    /// None where the keys and values are another layer's.
    own: Option<OwnKeys>,
    rope: Rope,
    num_heads: i32,
    num_kv_heads: i32,
}

struct OwnKeys {
    k_proj: Linear,
    /// None where the keys are the values too.
    v_proj: Option<Linear>,
    k_norm: RmsNorm,
    eps: f32,
}

impl Attention {
    pub(super) fn load(
        weights: &Weights,
        config: &TextConfig,
        layer: &LayerConfig,
    ) -> Result<Self> {
        let (hidden_size, head_dim) = (config.hidden_size, layer.head_dim);
        let (num_heads, eps) = (config.num_attention_heads, config.rms_norm_eps);
        let project = |name, heads: i32| {
            Linear::load(&weights.pp(name), hidden_size, heads * head_dim, false)
        };
        let norm = |name| RmsNorm::load(&weights.pp(name), head_dim, eps);
        let own = match layer.shared_with {
            Some(_) => None,
            None => Some(OwnKeys {
                k_proj: project("k_proj", layer.num_kv_heads)?,
                v_proj: (!layer.keys_are_values)
                    .then(|| project("v_proj", layer.num_kv_heads))
                    .transpose()?,
                k_norm: norm("k_norm")?,
                eps,
            }),
        };
        Ok(Self {
            q_proj: project("q_proj", num_heads)?,
            q_norm: norm("q_norm")?,
            o_proj: Linear::load(
                &weights.pp("o_proj"),
                num_heads * head_dim,
                hidden_size,
                false,
            )?,
            own,
            rope: Rope::new(&layer.rope)?,
            num_heads,
            num_kv_heads: layer.num_kv_heads,
        })
    }

    /// `x` `[B, L, hidden_size]` to the same shape, and the keys and values that were seen.
    pub(super) fn forward(
        &self,
        x: &Array,
        mask: &Mask,
        offset: &Offset,
        source: Source<&mut KvCache, &KeysValues>,
    ) -> Result<(Array, KeysValues)> {
        let queries = heads(&self.q_proj.forward(x)?, self.num_heads)?;
        let queries = self.q_norm.forward(&queries)?.transpose(&[0, 2, 1, 3])?;
        let queries = self.rope.forward(&queries, offset)?;
        let (keys, values) = match (source, &self.own) {
            (Source::Own(cache), Some(own)) => {
                let (keys, values) = own.forward(x, self.num_kv_heads, &self.rope, offset)?;
                cache.update(&keys, &values)?
            }
            (Source::Shared(seen), _) => seen.clone(),
            (Source::Own(_), None) => {
                return Err(crate::Error::missing("keys and values of the layer"));
            }
        };
        let output =
            attention::attention(&queries, &keys, &values, SCALE, mask.as_attention(), None)?;
        let output = output.transpose(&[0, 2, 1, 3])?.flatten(2, 3)?;
        Ok((self.o_proj.forward(&output)?, (keys, values)))
    }

    /// [`forward`](Self::forward) in steps; none where one has no kernel. A layer with keys and
    /// values of its own gives what becomes of its cache.
    pub(super) fn record(
        &self,
        sequence: &mut Sequence,
        x: Value,
        mask: &Mask,
        offset: &Offset,
        source: Source<&KvCache, &CacheUpdate>,
    ) -> Result<Option<(Value, Option<CacheUpdate>)>> {
        let own = self.own.as_ref();
        let attend = Attend {
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            scale: SCALE,
            rope: Some(&self.rope),
            query_norm: Some(&self.q_norm),
            key_norm: own.map(|own| &own.k_norm),
            norm_last: false,
            value_eps: own.map(|own| own.eps),
        };
        let attended = match (source, own) {
            (Source::Own(cache), Some(own)) => {
                let Some(projected) = self.project(sequence, x, own)? else {
                    return Ok(None);
                };
                let attended = attend.record(sequence, projected, mask, cache)?;
                attended.map(|(output, update)| (output, Some(update)))
            }
            (Source::Shared(other), _) => {
                let Some(queries) = self.q_proj.record(sequence, x)? else {
                    return Ok(None);
                };
                let attended = attend.record_over(sequence, queries, mask, other, offset)?;
                attended.map(|output| (output, None))
            }
            (Source::Own(_), None) => None,
        };
        let Some((output, update)) = attended else {
            return Ok(None);
        };
        let output = self.o_proj.record(sequence, output)?;
        Ok(output.map(|output| (output, update)))
    }

    /// Queries, keys and values.
    fn project(
        &self,
        sequence: &mut Sequence,
        x: Value,
        own: &OwnKeys,
    ) -> Result<Option<[Value; 3]>> {
        Ok(match &own.v_proj {
            Some(v_proj) => Linear::record_all(sequence, x, [&self.q_proj, &own.k_proj, v_proj])?,
            None => Linear::record_all(sequence, x, [&self.q_proj, &own.k_proj])?
                .map(|[queries, keys]| [queries, keys, keys]),
        })
    }
}

impl OwnKeys {
    /// Keys and values `[B, H_kv, L, D]` of new tokens.
    fn forward(
        &self,
        x: &Array,
        num_kv_heads: i32,
        rope: &Rope,
        offset: &Offset,
    ) -> Result<KeysValues> {
        let projected = heads(&self.k_proj.forward(x)?, num_kv_heads)?;
        let values = match &self.v_proj {
            Some(v_proj) => heads(&v_proj.forward(x)?, num_kv_heads)?,
            None => projected.clone(),
        };
        let keys = self.k_norm.forward(&projected)?.transpose(&[0, 2, 1, 3])?;
        let values = values.rms_norm(None, self.eps)?.transpose(&[0, 2, 1, 3])?;
        Ok((rope.forward(&keys, offset)?, values))
    }
}

/// `[B, L, heads * D]` to `[B, L, heads, D]`.
fn heads(x: &Array, heads: i32) -> Result<Array> {
    Ok(x.unflatten(-1, &[heads, -1])?)
}
