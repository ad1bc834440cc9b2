//! MLX's fused primitives: norms, rotary embedding, attention.

use super::arithmetic::optional_float;
use super::unless_empty;
use crate::ffi::{op, optional};
use crate::{Array, Result};

/// Which keys a query sees in [`Array::attention`].
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub enum AttentionMask<'a> {
    /// All of them.
    #[default]
    None,
    /// Those up to its own position, the last query standing at the last key.
    Causal,
    /// A bool array (true: sees) or a floating-point one that is added to the scores;
    /// it broadcasts to `[B, H, L, S]`.
    Array(&'a Array),
}

/// What [`Array::rope`] rotates by.
#[derive(Clone, Copy, Debug)]
pub struct Rope<'a> {
    /// How many of the last dimension's entries are rotated.
    pub dims: i32,
    /// Neighbouring entries form a pair; otherwise the two halves do.
    pub traditional: bool,
    /// The base of the frequencies; unused when `freqs` are given.
    pub base: f32,
    /// What positions are multiplied by.
    pub scale: f32,
    /// Wavelengths `[dims / 2]` by which positions are divided, instead of a base.
    pub freqs: Option<&'a Array>,
}

impl Rope<'_> {
    fn base(&self) -> mlex_sys::mlx_optional_float {
        optional_float(self.freqs.is_none().then_some(self.base))
    }
}

impl Array {
    /// `x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in f32 inside
    /// ("Root Mean Square Layer Normalization").
    ///
    /// # Errors
    /// When the weight is not `[D]`.
    #[track_caller]
    pub fn rms_norm(&self, weight: Option<&Array>, eps: f32) -> Result<Array> {
        unless_empty(op!(mlx_fast_rms_norm(self.raw(), optional(weight), eps)))
    }

    /// `(x - mean) / sqrt(var + eps) * weight + bias` over the last dimension.
    ///
    /// # Errors
    /// When weight or bias are not `[D]`.
    #[track_caller]
    pub fn layer_norm(
        &self,
        weight: Option<&Array>,
        bias: Option<&Array>,
        eps: f32,
    ) -> Result<Array> {
        unless_empty(op!(mlx_fast_layer_norm(
            self.raw(),
            optional(weight),
            optional(bias),
            eps
        )))
    }

    /// Rotary position embedding of `[B, .., L, D]`, positions from `offset` on
    /// ("RoFormer: Enhanced Transformer with Rotary Position Embedding").
    ///
    /// # Errors
    /// When `dims` exceed the last dimension or the frequencies do not fit.
    #[track_caller]
    pub fn rope(&self, rope: Rope<'_>, offset: i32) -> Result<Array> {
        unless_empty(op!(mlx_fast_rope(
            self.raw(),
            rope.dims,
            rope.traditional,
            rope.base(),
            rope.scale,
            offset,
            optional(rope.freqs),
        )))
    }

    /// As [`rope`](Self::rope), with the offset in an array: a scalar or one per batch row.
    ///
    /// # Errors
    /// As [`rope`](Self::rope).
    #[track_caller]
    pub fn rope_at(&self, rope: Rope<'_>, offset: &Array) -> Result<Array> {
        unless_empty(op!(mlx_fast_rope_dynamic(
            self.raw(),
            rope.dims,
            rope.traditional,
            rope.base(),
            rope.scale,
            offset.raw(),
            optional(rope.freqs),
        )))
    }

    /// Attention of queries `self` `[B, H, L, D]` over `keys` `[B, H_kv, S, D]` and `values`
    /// `[B, H_kv, S, D_v]`: `softmax(scale * q k^T + mask) v`, `[B, H, L, D_v]`. H is a
    /// multiple of H_kv. `sinks` `[H]` are extra logits that take part in the softmax.
    ///
    /// # Errors
    /// When the shapes do not fit.
    #[track_caller]
    pub fn attention(
        &self,
        keys: &Array,
        values: &Array,
        scale: f32,
        mask: AttentionMask<'_>,
        sinks: Option<&Array>,
    ) -> Result<Array> {
        let (mode, mask) = match mask {
            AttentionMask::None => (c"", None),
            AttentionMask::Causal => (c"causal", None),
            AttentionMask::Array(array) => (c"array", Some(array)),
        };
        unless_empty(op!(mlx_fast_scaled_dot_product_attention(
            self.raw(),
            keys.raw(),
            values.raw(),
            scale,
            mode.as_ptr(),
            optional(mask),
            optional(sinks),
        )))
    }
}
