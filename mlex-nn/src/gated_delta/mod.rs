//! Gated DeltaNet: a layer with a fast-weight state in place of attention, behind a short
//! convolution ("Gated Delta Networks: Improving Mamba2 with Delta Rule").
//!
//! The state and the decay are in f32 whatever the layer computes in; everything else has the
//! type of the input. References: mlx-lm `models/qwen3_next.py`, `models/gated_delta.py`.

mod gpu;
mod rule;

use mlex_core::{Array, Dtype};

pub use rule::{DeltaInputs, gated_delta_rule};

use crate::activation::silu;
use crate::cache::{RecurrentCache, RecurrentState};
use crate::conv::CausalConv;
use crate::host::{self, CacheUpdate, Columns, Constants, Delta, Sequence, Value};
use crate::{Error, Linear, Result, Weights};

/// The epsilon of the norms of queries and keys, inside of the mean of squares.
const QK_EPS: f32 = 1e-6;

/// The settings of a [`GatedDeltaNet`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedDeltaConfig {
    /// Width of the input and output.
    pub hidden_size: i32,
    /// Heads of queries and keys.
    pub num_key_heads: i32,
    /// Heads of values; a multiple of the key heads.
    pub num_value_heads: i32,
    /// Width of a query and a key.
    pub key_head_dim: i32,
    /// Width of a value.
    pub value_head_dim: i32,
    /// How many positions the convolution sees, its own included.
    pub conv_kernel: i32,
    /// The epsilon of the norm of the output.
    pub norm_eps: f32,
}

impl GatedDeltaConfig {
    fn validate(&self) -> Result<()> {
        for (name, value) in [
            ("linear_num_key_heads", self.num_key_heads),
            ("linear_num_value_heads", self.num_value_heads),
            ("linear_key_head_dim", self.key_head_dim),
            ("linear_value_head_dim", self.value_head_dim),
        ] {
            if value <= 0 {
                return Err(Error::setting(name, "a positive number", value));
            }
        }
        if self.num_value_heads % self.num_key_heads != 0 {
            let expected = format!("a divisor of the {} value heads", self.num_value_heads);
            return Err(Error::setting(
                "linear_num_key_heads",
                expected,
                self.num_key_heads,
            ));
        }
        if !(2..=64).contains(&self.conv_kernel) {
            let expected = "a number from 2 to 64";
            return Err(Error::setting(
                "linear_conv_kernel_dim",
                expected,
                self.conv_kernel,
            ));
        }
        Ok(())
    }

    /// The width of all keys.
    pub fn key_dim(&self) -> i32 {
        self.num_key_heads.saturating_mul(self.key_head_dim)
    }

    /// The width of all values.
    pub fn value_dim(&self) -> i32 {
        self.num_value_heads.saturating_mul(self.value_head_dim)
    }

    /// The channels of the convolution: queries, keys and values.
    pub fn conv_dim(&self) -> i32 {
        (2 * i64::from(self.key_dim()) + i64::from(self.value_dim()))
            .try_into()
            .unwrap_or(i32::MAX)
    }
}

/// The projections of the input.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "one for each layer of a model")]
enum Input {
    /// One for queries, keys and values (`in_proj_qkv`), and one each for the output's gate,
    /// the step size and the decay (`in_proj_z`, `in_proj_b`, `in_proj_a`).
    Apart {
        qkv: Linear,
        z: Linear,
        b: Linear,
        a: Linear,
    },
    /// Two of them together (`in_proj_qkvz`, `in_proj_ba`).
    Together { qkvz: Linear, ba: Linear },
}

/// What the input is projected to.
struct Projected {
    /// Queries, keys and values before the convolution, `[B, L, conv_dim]`.
    qkv: Array,
    /// The gate of the output, `[B, L, value_dim]`.
    z: Array,
    /// The logit of the step size, `[B, L, H_v]`.
    b: Array,
    /// The decay before softplus, `[B, L, H_v]`.
    a: Array,
}

/// A Gated DeltaNet layer.
#[derive(Clone, Debug)]
pub struct GatedDeltaNet {
    input: Input,
    conv: CausalConv,
    a_log: Array,
    dt_bias: Array,
    /// Of the norm of the output, `[D_v]`.
    norm: Array,
    constants: Constants,
    out_proj: Linear,
    config: GatedDeltaConfig,
}

impl GatedDeltaNet {
    /// Takes the projections (`in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`; or
    /// `in_proj_qkvz` and `in_proj_ba`), `conv1d` (`[C, K, 1]` or `[C, 1, K]`), `A_log`,
    /// `dt_bias`, `norm` and `out_proj` from `weights`.
    ///
    /// # Errors
    /// When a tensor cannot be read or a setting is out of range.
    pub fn load(weights: &Weights, config: &GatedDeltaConfig) -> Result<Self> {
        config.validate()?;
        let hidden = config.hidden_size;
        let heads = config.num_value_heads;
        let (values, channels) = (config.value_dim(), config.conv_dim());
        let project = |name, output| Linear::load(&weights.pp(name), hidden, output, false);
        let together = weights.pp("in_proj_qkvz").contains("weight");
        let input = if together {
            reorder(weights, config);
            Input::Together {
                qkvz: project("in_proj_qkvz", channels.saturating_add(values))?,
                ba: project("in_proj_ba", heads.saturating_mul(2))?,
            }
        } else {
            Input::Apart {
                qkv: project("in_proj_qkv", channels)?,
                z: project("in_proj_z", values)?,
                b: project("in_proj_b", heads)?,
                a: project("in_proj_a", heads)?,
            }
        };
        let kernel = config.conv_kernel;
        Ok(Self {
            input,
            conv: CausalConv::load(&weights.pp("conv1d"), channels, kernel, false)?,
            a_log: weights.get_float("A_log", &[heads])?,
            dt_bias: weights.get_float("dt_bias", &[heads])?,
            norm: weights
                .pp("norm")
                .get_float("weight", &[config.value_head_dim])?,
            constants: Constants::default(),
            out_proj: Linear::load(&weights.pp("out_proj"), values, hidden, false)?,
            config: *config,
        })
    }

    /// `x` `[B, L, hidden_size]` to the same shape; `cache` goes on by `L` positions. What
    /// stands at padding is of no meaning.
    ///
    /// # Errors
    /// When the shapes do not fit; then the cache is as it was.
    pub fn forward(&self, x: &Array, cache: &mut RecurrentCache) -> Result<Array> {
        if let Some((mut sequence, value)) = Sequence::start(x)?
            && let Some((y, update)) = self.record(&mut sequence, value, cache)?
        {
            return sequence.finish_state(y, &update, cache);
        }
        let projected = self.project(x)?;
        let (y, state) = self.recur(&projected, cache)?;
        let output = self.out_proj.forward(&y)?;
        cache.update(state, x.dim(1)?);
        Ok(output)
    }

    /// The same as steps of `sequence`; none where there is no kernel for one. The cache changes
    /// when the [`CacheUpdate`] is applied, after the sequence is finished.
    ///
    /// # Errors
    /// When the weights cannot be read or the cache is another layer's.
    pub fn record(
        &self,
        sequence: &mut Sequence,
        x: Value,
        cache: &RecurrentCache,
    ) -> Result<Option<(Value, CacheUpdate)>> {
        let projected = match &self.input {
            Input::Apart { qkv, z, b, a } => {
                let outputs = Linear::record_all(sequence, x, [qkv, z, b, a])?;
                let Some(outputs) = outputs else {
                    return Ok(None);
                };
                outputs.map(|value| Columns { value, first: 0 })
            }
            Input::Together { qkvz, ba } => {
                let outputs = Linear::record_all(sequence, x, [qkvz, ba])?;
                let Some([qkvz, ba]) = outputs else {
                    return Ok(None);
                };
                let (channels, heads) = (self.config.conv_dim(), self.config.num_value_heads);
                let places = [(qkvz, 0), (qkvz, channels), (ba, 0), (ba, heads)];
                places.map(|(value, first)| Columns { value, first })
            }
        };
        let layer = Delta {
            conv: &self.conv,
            norm: &self.norm,
            a_log: &self.a_log,
            dt_bias: &self.dt_bias,
            constants: &self.constants,
            config: &self.config,
        };
        let recurred = host::record_gated_delta(sequence, &layer, projected, cache)?;
        let Some((y, update)) = recurred else {
            return Ok(None);
        };
        let output = self.out_proj.record(sequence, y)?;
        Ok(output.map(|output| (output, update)))
    }

    fn project(&self, x: &Array) -> Result<Projected> {
        match &self.input {
            Input::Apart { qkv, z, b, a } => Ok(Projected {
                qkv: qkv.forward(x)?,
                z: z.forward(x)?,
                b: b.forward(x)?,
                a: a.forward(x)?,
            }),
            Input::Together { qkvz, ba } => {
                let (channels, heads) = (self.config.conv_dim(), self.config.num_value_heads);
                let split = |x: Array, first: i32, second: i32| -> Result<(Array, Array)> {
                    let rest = x.slice_axis(-1, first, first + second)?;
                    Ok((x.slice_axis(-1, 0, first)?, rest))
                };
                let (qkv, z) = split(qkvz.forward(x)?, channels, self.config.value_dim())?;
                let (b, a) = split(ba.forward(x)?, heads, heads)?;
                Ok(Projected { qkv, z, b, a })
            }
        }
    }

    /// Convolution, rule, norm and gate: `[B, L, value_dim]`, and the state after it.
    fn recur(
        &self,
        projected: &Projected,
        cache: &RecurrentCache,
    ) -> Result<(Array, RecurrentState)> {
        if let Some(recurred) = gpu::recur(self, projected, cache)? {
            return Ok(recurred);
        }
        let Projected { qkv, z, b, a } = projected;
        let &GatedDeltaConfig {
            num_key_heads: key_heads,
            num_value_heads: heads,
            key_head_dim: key_dim,
            value_head_dim: value_dim,
            ..
        } = &self.config;
        let length = qkv.dim(1)?;
        let mask = cache.mask(length)?;
        let before = cache.state().map(|state| &state.conv);
        let (conv, tail) = self.conv.forward(qkv, mask.as_ref(), before)?;
        let conv = silu(&conv)?;
        let keys = self.config.key_dim();
        let head = |start: i32, heads: i32, dim: i32| -> Result<Array> {
            let part = conv.slice_axis(-1, start, start + heads * dim)?;
            Ok(part.unflatten(-1, &[heads, dim])?)
        };
        let scale = (key_dim as f32).powf(-0.5);
        let q = head(0, key_heads, key_dim)?.rms_norm(None, QK_EPS)?;
        let k = head(keys, key_heads, key_dim)?.rms_norm(None, QK_EPS)?;
        let rate = self.a_log.as_type(Dtype::Float32)?.exp()?.negative()?;
        let zero = Array::scalar(0.0f32)?.as_type(a.dtype())?;
        let softplus = a.add(&self.dt_bias)?.logaddexp(&zero)?;
        let inputs = DeltaInputs {
            queries: &q.multiply(scale * scale)?,
            keys: &k.multiply(scale)?,
            values: &head(2 * keys, heads, value_dim)?,
            log_decay: &rate.multiply(&softplus)?,
            beta: &b.sigmoid()?,
        };
        let state = cache.state().map(|state| &state.state);
        let (y, state) = gated_delta_rule(&inputs, state, mask.as_ref())?;

        // The gate is applied in f32.
        let normed = y.rms_norm(Some(&self.norm), self.config.norm_eps)?;
        let gate = silu(&z.as_type(Dtype::Float32)?)?.unflatten(-1, &[heads, value_dim])?;
        let gated = gate.multiply(&normed.as_type(Dtype::Float32)?)?;
        let y = gated.as_type(y.dtype())?.flatten(-2, -1)?;
        Ok((y, RecurrentState { conv: tail, state }))
    }
}

/// Brings the rows of projections that lie together into the order in which they are used:
/// the checkpoint has them by key head.
fn reorder(weights: &Weights, config: &GatedDeltaConfig) {
    let heads = i64::from(config.num_key_heads);
    let group = i64::from(config.num_value_heads / config.num_key_heads);
    let (keys, values) = (
        i64::from(config.key_head_dim),
        group * i64::from(config.value_head_dim),
    );
    for (name, widths) in [
        ("in_proj_qkvz", &[keys, keys, values, values][..]),
        ("in_proj_ba", &[group, group][..]),
    ] {
        let prefix = weights.path(format_args!("{name}."));
        let widths = widths.to_vec();
        weights.transform(
            move |path| path.starts_with(&prefix),
            move |array| {
                let total: i64 = widths.iter().sum();
                let mut rows = Vec::new();
                let mut start = 0;
                for width in &widths {
                    for head in 0..heads {
                        let first = head * total + start;
                        rows.extend((first..first + width).map(|row| row as i32));
                    }
                    start += width;
                }
                let rows = mlex_core::Array::from_slice(&rows, &[rows.len() as i32])?;
                array.take(&rows, 0)
            },
        );
    }
}
