//! The element types that kernels read and write, and slices whose type is known at run time.

use std::borrow::Cow;

use half::{bf16, f16};

use crate::simd::rows::Widen;
use crate::simd::scratch::Buffer;
use crate::simd::{Level, Vector};

/// An element type of activations: [`f32`], [`struct@f16`] or [`bf16`]. Kernels compute in f32.
pub trait Element: Vector {
    /// The value in f32; exact.
    fn to_f32(self) -> f32;
    /// The nearest value, ties to even.
    fn from_f32(value: f32) -> Self;
}

impl Element for f32 {
    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Element for f16 {
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    fn from_f32(value: f32) -> Self {
        f16::from_f32(value)
    }
}

impl Element for bf16 {
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value)
    }
}

/// A slice of one of the [`Element`] types: weights, scales and biases, whose type need not
/// be the activations'.
#[derive(Debug, Clone, Copy)]
pub enum Floats<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// Half precision.
    F16(&'a [f16]),
    /// bfloat16.
    Bf16(&'a [bf16]),
}

impl<'a> Floats<'a> {
    /// The number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(s) => s.len(),
            Self::F16(s) => s.len(),
            Self::Bf16(s) => s.len(),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element at `index` in f32.
    ///
    /// # Panics
    /// When `index` is outside of the slice.
    pub fn get(&self, index: usize) -> f32 {
        match self {
            Self::F32(s) => s[index],
            Self::F16(s) => s[index].to_f32(),
            Self::Bf16(s) => s[index].to_f32(),
        }
    }

    /// All elements in f32; borrowed where they are.
    pub(crate) fn widened(&self) -> Cow<'a, [f32]> {
        if let Self::F32(s) = self {
            return Cow::Borrowed(s);
        }
        let mut memory = Buffer::default();
        Cow::Owned(self.widened_in(&mut memory).to_vec())
    }

    /// All elements in f32: where they are, or in `memory`.
    pub(crate) fn widened_in<'b>(&self, memory: &'b mut Buffer) -> &'b [f32]
    where
        'a: 'b,
    {
        fn widen<'b, T: Element>(from: &[T], memory: &'b mut Buffer) -> &'b [f32] {
            let to = &mut memory.floats(from.len())[..from.len()];
            let wide = &mut *to;
            Level::current().dispatch(Widen { from, to: wide });
            to
        }
        match self {
            Self::F32(s) => s,
            Self::F16(s) => widen(s, memory),
            Self::Bf16(s) => widen(s, memory),
        }
    }

    /// The elements of a range.
    ///
    /// # Panics
    /// When the range is outside of the slice.
    #[must_use]
    pub fn slice(&self, range: std::ops::Range<usize>) -> Floats<'a> {
        match self {
            Self::F32(s) => Self::F32(&s[range]),
            Self::F16(s) => Self::F16(&s[range]),
            Self::Bf16(s) => Self::Bf16(&s[range]),
        }
    }
}

impl<'a> From<&'a [f32]> for Floats<'a> {
    fn from(slice: &'a [f32]) -> Self {
        Self::F32(slice)
    }
}

impl<'a> From<&'a [f16]> for Floats<'a> {
    fn from(slice: &'a [f16]) -> Self {
        Self::F16(slice)
    }
}

impl<'a> From<&'a [bf16]> for Floats<'a> {
    fn from(slice: &'a [bf16]) -> Self {
        Self::Bf16(slice)
    }
}
