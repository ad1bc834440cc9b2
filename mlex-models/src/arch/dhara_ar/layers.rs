//! The layers of Dhara, as arrays and as steps of a sequence.

use mlex_core::{Array, Dtype};
use mlex_nn::{
    Activation, Attend, Canon, GatedMlp, LayerCache, Linear, Mask, RmsNorm, Rope, RopeConfig,
    RopeScaling, Value, Weights, attention,
};

use super::config::Config;
use crate::arch::stream::{Recording, Stream};
use crate::{Error, Result};

/// The states of a layer and those after it, in the order in which they are asked for.
pub(super) type States<'a> = std::slice::IterMut<'a, LayerCache>;

fn next<'a>(states: &mut States<'a>) -> Result<&'a mut LayerCache> {
    let state = states.next();
    state.ok_or_else(|| Error::missing("a layer's cache"))
}

/// `x` through a Canon layer, where there is one.
fn mix(canon: Option<&Canon>, x: Array, states: &mut States<'_>) -> Result<Array> {
    match canon {
        Some(canon) => Ok(canon.forward(&x, next(states)?.conv()?)?),
        None => Ok(x),
    }
}

/// [`mix`] in a step; none where it has no kernel.
fn record_mix(
    canon: Option<&Canon>,
    recording: &mut Recording,
    x: Value,
    states: &mut States<'_>,
) -> Result<Option<Value>> {
    let Some(canon) = canon else {
        return Ok(Some(x));
    };
    let recorded = canon.record(&mut recording.sequence, x, next(states)?.conv()?)?;
    Ok(recorded.map(|(y, update)| {
        recording.update(update);
        y
    }))
}

struct Attention {
    projections: [Linear; 3],
    canons: [Option<Canon>; 3],
    norms: Option<[RmsNorm; 2]>,
    rope: Rope,
    o_proj: Linear,
    heads: [i32; 3],
    scale: f32,
}

impl Attention {
    fn load(weights: &Weights, config: &Config) -> Result<Self> {
        let head_dim = config.head_dim();
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let project = |name, heads: i32| {
            let width = heads * head_dim;
            Linear::load(&weights.pp(name), config.hidden_size, width, false)
        };
        let canon = |name, heads: i32| config.canon(weights, 'B', name, heads * head_dim);
        let norm = |name| RmsNorm::load(&weights.pp(name), head_dim, config.rms_norm_eps);
        let norms = config
            .use_qk_norm
            .then(|| Ok::<_, Error>([norm("q_norm")?, norm("k_norm")?]));
        Ok(Self {
            projections: [
                project("q_proj", heads)?,
                project("k_proj", kv_heads)?,
                project("v_proj", kv_heads)?,
            ],
            canons: [
                canon("canon_b_q", heads)?,
                canon("canon_b_k", kv_heads)?,
                canon("canon_b_v", kv_heads)?,
            ],
            norms: norms.transpose()?,
            rope: rope(&weights.pp("rotary_emb"), config)?,
            o_proj: Linear::load(
                &weights.pp("o_proj"),
                heads * head_dim,
                config.hidden_size,
                false,
            )?,
            heads: [heads, kv_heads, kv_heads],
            scale: (head_dim as f32).powf(-0.5),
        })
    }

    fn forward(&self, x: &Array, mask: &Mask, states: &mut States<'_>) -> Result<Array> {
        let mut parts = Vec::with_capacity(3);
        for ((linear, canon), heads) in self.projections.iter().zip(&self.canons).zip(self.heads) {
            let part = mix(canon.as_ref(), linear.forward(x)?, states)?;
            let part = part.unflatten(-1, &[heads, -1])?;
            parts.push(part.transpose(&[0, 2, 1, 3])?);
        }
        let kv = next(states)?.attention()?;
        let offset = kv.offset();
        for (index, part) in parts.iter_mut().take(2).enumerate() {
            *part = self.rope.forward(part, &offset)?;
            if let Some(norms) = &self.norms {
                *part = norms[index].forward(part)?;
            }
        }
        let (keys, values) = kv.update(&parts[1], &parts[2])?;
        let mask = mask.as_attention();
        let output = attention::attention(&parts[0], &keys, &values, self.scale, mask, None)?;
        let output = output.transpose(&[0, 2, 1, 3])?.flatten(2, 3)?;
        Ok(self.o_proj.forward(&output)?)
    }

    fn record(
        &self,
        recording: &mut Recording,
        x: Value,
        mask: &Mask,
        states: &mut States<'_>,
    ) -> Result<Option<Value>> {
        let projections = self.projections.each_ref();
        let Some(mut parts) = Linear::record_all(&mut recording.sequence, x, projections)? else {
            return Ok(None);
        };
        for (part, canon) in parts.iter_mut().zip(&self.canons) {
            let Some(mixed) = record_mix(canon.as_ref(), recording, *part, states)? else {
                return Ok(None);
            };
            *part = mixed;
        }
        let [num_heads, num_kv_heads, _] = self.heads;
        let norms = self.norms.as_ref();
        let attend = Attend {
            num_heads,
            num_kv_heads,
            scale: self.scale,
            rope: Some(&self.rope),
            query_norm: norms.map(|[query, _]| query),
            key_norm: norms.map(|[_, key]| key),
            norm_last: true,
            value_eps: None,
        };
        let kv = next(states)?.attention()?;
        let attended = attend.record(&mut recording.sequence, parts, mask, kv)?;
        let Some((output, update)) = attended else {
            return Ok(None);
        };
        recording.update(update);
        Ok(self.o_proj.record(&mut recording.sequence, output)?)
    }
}

/// The checkpoint's own frequencies, which are not those of the base alone, where it has them.
fn rope(weights: &Weights, config: &Config) -> Result<Rope> {
    let dims = config.head_dim();
    let rope = RopeConfig {
        dims,
        base: config.rope_theta,
        traditional: false,
        scaling: RopeScaling::None,
    };
    let pairs = dims / 2;
    match weights.get_optional("inv_freq", &[pairs])? {
        Some(inverse) => {
            let inverse: Vec<f32> = inverse.as_type(Dtype::Float32)?.to_vec()?;
            Ok(Rope::with_frequencies(&rope, &inverse)?)
        }
        None => Ok(Rope::new(&rope)?),
    }
}

/// A Canon layer stands between the two halves.
struct Mlp {
    mlp: GatedMlp,
    canon_d: Option<Canon>,
}

impl Mlp {
    fn load(weights: &Weights, config: &Config) -> Result<Self> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        Ok(Self {
            mlp: GatedMlp::load(weights, hidden, inner, false, Activation::Silu)?,
            canon_d: config.canon(weights, 'D', "canon_d", inner)?,
        })
    }

    fn forward(&self, x: &Array, states: &mut States<'_>) -> Result<Array> {
        let inner = mix(self.canon_d.as_ref(), self.mlp.inner(x)?, states)?;
        Ok(self.mlp.down_proj().forward(&inner)?)
    }

    fn record(
        &self,
        recording: &mut Recording,
        x: Value,
        states: &mut States<'_>,
    ) -> Result<Option<Value>> {
        let Some(inner) = self.mlp.record_inner(&mut recording.sequence, x)? else {
            return Ok(None);
        };
        match record_mix(self.canon_d.as_ref(), recording, inner, states)? {
            Some(inner) => {
                let down = self.mlp.down_proj();
                Ok(down.record(&mut recording.sequence, inner)?)
            }
            None => Ok(None),
        }
    }
}

pub(super) struct Block {
    input_layernorm: RmsNorm,
    canon_a: Option<Canon>,
    self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    canon_c: Option<Canon>,
    mlp: Mlp,
}

impl Block {
    pub(super) fn load(weights: &Weights, config: &Config) -> Result<Self> {
        let hidden = config.hidden_size;
        let norm = |name| RmsNorm::load(&weights.pp(name), hidden, config.rms_norm_eps);
        Ok(Self {
            input_layernorm: norm("input_layernorm")?,
            canon_a: config.canon(weights, 'A', "canon_a", hidden)?,
            self_attn: Attention::load(&weights.pp("self_attn"), config)?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            canon_c: config.canon(weights, 'C', "canon_c", hidden)?,
            mlp: Mlp::load(&weights.pp("mlp"), config)?,
        })
    }

    pub(super) fn forward(
        &self,
        stream: &mut Stream,
        mask: &Mask,
        states: &mut States<'_>,
    ) -> Result<()> {
        let normed = stream.norm(&self.input_layernorm)?;
        let normed = mix(self.canon_a.as_ref(), normed, states)?;
        stream.add(self.self_attn.forward(&normed, mask, states)?)?;
        let normed = stream.norm(&self.post_attention_layernorm)?;
        let normed = mix(self.canon_c.as_ref(), normed, states)?;
        stream.add(self.mlp.forward(&normed, states)?)
    }

    /// [`forward`](Self::forward) in steps; none where one has no kernel.
    pub(super) fn record(
        &self,
        recording: &mut Recording,
        mask: &Mask,
        states: &mut States<'_>,
    ) -> Result<Option<()>> {
        let Some(normed) = recording.norm(&self.input_layernorm)? else {
            return Ok(None);
        };
        let Some(normed) = record_mix(self.canon_a.as_ref(), recording, normed, states)? else {
            return Ok(None);
        };
        let Some(attended) = self.self_attn.record(recording, normed, mask, states)? else {
            return Ok(None);
        };
        recording.add(attended);
        let Some(normed) = recording.norm(&self.post_attention_layernorm)? else {
            return Ok(None);
        };
        let Some(normed) = record_mix(self.canon_c.as_ref(), recording, normed, states)? else {
            return Ok(None);
        };
        let fed = self.mlp.record(recording, normed, states)?;
        Ok(fed.map(|fed| recording.add(fed)))
    }
}
