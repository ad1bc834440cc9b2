//! Mamba 2: a layer with a state of fixed size in place of attention, behind a short convolution
//! ("Transformers are SSMs").
//!
//! The step sizes and the state are in f32 whatever the layer computes in; everything else has
//! the type of the input. References: mlx-lm `models/nemotron_h.py`, `models/ssm.py`.

mod gpu;
mod scan;

use mlex_core::{Array, Dtype};

pub use scan::{ScanInputs, mamba2_scan};

use crate::activation::silu;
use crate::cache::{RecurrentCache, RecurrentState};
use crate::conv::CausalConv;
use crate::host::{self, CacheUpdate, Constants, Selective, Sequence, Value};
use crate::{Activation, Error, Linear, Result, Weights};

/// The settings of a [`Mamba2`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mamba2Config {
    /// Width of the input and output.
    pub hidden_size: i32,
    /// Heads.
    pub num_heads: i32,
    /// Width of a head.
    pub head_dim: i32,
    /// Entries of the state for each entry of a head.
    pub state_size: i32,
    /// Groups of heads that share what is written to their states and read from them; divides the
    /// heads.
    pub num_groups: i32,
    /// How many positions the convolution sees, its own included.
    pub conv_kernel: i32,
    /// Whether the projections have a bias.
    pub proj_bias: bool,
    /// Whether the convolution has a bias.
    pub conv_bias: bool,
    /// The least and the largest step size.
    pub time_step_limit: (f32, f32),
    /// The epsilon of the norm of the output.
    pub norm_eps: f32,
}

impl Mamba2Config {
    fn validate(&self) -> Result<()> {
        for (name, value) in [
            ("mamba_num_heads", self.num_heads),
            ("mamba_head_dim", self.head_dim),
            ("ssm_state_size", self.state_size),
            ("n_groups", self.num_groups),
        ] {
            if value <= 0 {
                return Err(Error::setting(name, "a positive number", value));
            }
        }
        if self.num_heads % self.num_groups != 0 {
            let expected = format!("a divisor of the {} heads", self.num_heads);
            return Err(Error::setting("n_groups", expected, self.num_groups));
        }
        if !(2..=64).contains(&self.conv_kernel) {
            let expected = "a number from 2 to 64";
            return Err(Error::setting("conv_kernel", expected, self.conv_kernel));
        }
        let (least, most) = self.time_step_limit;
        if least.is_nan() || most.is_nan() || least > most {
            let found = format!("{least} and {most}");
            let expected = "a number and one that is not below it";
            return Err(Error::setting("time_step_limit", expected, found));
        }
        if self.projected().is_none() {
            let found = self.num_heads;
            return Err(Error::setting("mamba_num_heads", "a smaller layer", found));
        }
        Ok(())
    }

    /// The width of all heads.
    pub fn inner_size(&self) -> i32 {
        self.num_heads.saturating_mul(self.head_dim)
    }

    /// The channels of the convolution: heads, and what is written and read, by group.
    pub fn conv_dim(&self) -> i32 {
        let shared = self.num_groups.saturating_mul(self.state_size);
        self.inner_size().saturating_add(shared.saturating_mul(2))
    }

    /// The width of the input's projection, where it is a number of a reasonable size.
    fn projected(&self) -> Option<i32> {
        let width = self
            .inner_size()
            .checked_add(self.conv_dim())?
            .checked_add(self.num_heads)?;
        (width < i32::MAX / 2).then_some(width)
    }
}

/// A Mamba 2 layer.
#[derive(Clone, Debug)]
pub struct Mamba2 {
    in_proj: Linear,
    conv: CausalConv,
    a_log: Array,
    dt_bias: Array,
    d: Array,
    norm: Array,
    constants: Constants,
    out_proj: Linear,
    config: Mamba2Config,
}

impl Mamba2 {
    /// Takes `in_proj`, `conv1d`, `A_log`, `dt_bias`, `D`, `norm` and `out_proj` from `weights`.
    ///
    /// # Errors
    /// When a tensor cannot be read or a setting is out of range.
    pub fn load(weights: &Weights, config: &Mamba2Config) -> Result<Self> {
        config.validate()?;
        let &Mamba2Config {
            hidden_size,
            num_heads,
            proj_bias,
            ..
        } = config;
        let inner = config.inner_size();
        let projected = config.projected().unwrap_or_default();
        Ok(Self {
            in_proj: Linear::load(&weights.pp("in_proj"), hidden_size, projected, proj_bias)?,
            conv: CausalConv::load(
                &weights.pp("conv1d"),
                config.conv_dim(),
                config.conv_kernel,
                config.conv_bias,
            )?,
            a_log: weights.get_float("A_log", &[num_heads])?,
            dt_bias: weights.get_float("dt_bias", &[num_heads])?,
            d: weights.get_float("D", &[num_heads])?,
            norm: weights.pp("norm").get_float("weight", &[inner])?,
            constants: Constants::default(),
            out_proj: Linear::load(&weights.pp("out_proj"), inner, hidden_size, proj_bias)?,
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
        let length = x.dim(1)?;
        let inner = self.config.inner_size();
        let projected = self.in_proj.forward(x)?;
        let part = |start: i32, size: i32| projected.slice_axis(-1, start, start + size);
        let gate = part(0, inner)?;
        let channels = part(inner, self.config.conv_dim())?;
        let dt = part(inner + self.config.conv_dim(), self.config.num_heads)?;
        let mask = cache.mask(length)?;
        let (y, state) = self.recur(&channels, &dt, mask.as_ref(), cache)?;
        let output = self.out_proj.forward(&self.gated_norm(&y, &gate)?)?;
        cache.update(state, length);
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
        let Some(projected) = self.in_proj.record(sequence, x)? else {
            return Ok(None);
        };
        let layer = Selective {
            conv: &self.conv,
            a_log: &self.a_log,
            dt_bias: &self.dt_bias,
            d: &self.d,
            norm: &self.norm,
            constants: &self.constants,
            config: &self.config,
        };
        let scanned = host::record_mamba2(sequence, &layer, projected, cache)?;
        let Some((y, update)) = scanned else {
            return Ok(None);
        };
        let output = self.out_proj.record(sequence, y)?;
        Ok(output.map(|output| (output, update)))
    }

    /// Convolution and scan: `[B, L, inner_size]`, and the state after it.
    fn recur(
        &self,
        channels: &Array,
        dt: &Array,
        mask: Option<&Array>,
        cache: &RecurrentCache,
    ) -> Result<(Array, RecurrentState)> {
        let &Mamba2Config {
            num_heads,
            head_dim,
            state_size,
            num_groups,
            time_step_limit: (least, most),
            ..
        } = &self.config;
        let before = cache.state();
        let conv_state = before.map(|state| &state.conv);
        let (conv, tail) = self.conv.forward(channels, mask, conv_state)?;
        let conv = silu(&conv)?;
        let inner = self.config.inner_size();
        let shared = num_groups * state_size;
        let grouped = |start: i32| -> Result<Array> {
            let part = conv.slice_axis(-1, start, start + shared)?;
            Ok(part.unflatten(-1, &[num_groups, state_size])?)
        };

        let dt = dt.as_type(Dtype::Float32)?.add(&self.dt_bias)?;
        let softplus = dt.logaddexp(&Array::scalar(0.0f32)?)?;
        let mut dt = softplus.maximum(least)?.minimum(most)?;
        if let Some(mask) = mask {
            dt = mask.expand_dims(-1)?.where_(&dt, &dt.zeros_like()?)?;
        }
        let rate = self.a_log.as_type(Dtype::Float32)?.exp()?.negative()?;
        let inputs = ScanInputs {
            x: &conv
                .slice_axis(-1, 0, inner)?
                .unflatten(-1, &[num_heads, head_dim])?,
            dt: &dt,
            a: &rate,
            b: &grouped(inner)?,
            c: &grouped(inner + shared)?,
            d: &self.d,
        };
        let (y, state) = mamba2_scan(&inputs, before.map(|state| &state.state))?;
        Ok((y.flatten(-2, -1)?, RecurrentState { conv: tail, state }))
    }

    /// `y` gated, and normalized by group of heads.
    fn gated_norm(&self, y: &Array, gate: &Array) -> Result<Array> {
        let gated = Activation::Silu.gated(gate, y)?;
        let groups = gated.unflatten(-1, &[self.config.num_groups, -1])?;
        let normed = groups.rms_norm(None, self.config.norm_eps)?;
        Ok(normed.flatten(-2, -1)?.multiply(&self.norm)?)
    }
}
