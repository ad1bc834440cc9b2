//! SIMD kernels for the inference of quantized language models, as plain functions on slices.
//!
//! * [`quantized_matmul`], [`gather_quantized_matmul`] and [`linear`]: activations times
//!   weights, in every layout that MLX writes.
//! * [`attention`]: prefill and decode, with grouped heads, masks and sinks.
//! * [`project`] and [`project_gated`]: several of them for the same activations.
//! * [`take_rows`] and [`argmax`]: where a token becomes an embedding, and logits a token.
//! * [`rms_norm`], [`add_rms_norm`], [`layer_norm`], [`rope`], [`rotate`], [`activate`],
//!   [`gated`], [`softcap`].
//! * [`add`], [`add_gated`], [`scale`], [`clip`], [`relu2`], [`take_columns`]: what models do in
//!   between.
//! * [`gated_delta`], [`mamba2`]: recurrent layers between their projections.
//! * [`causal_conv`]: the short convolution in front of them, alone.
//! * [`Routes`]: which rows go to which expert of a mixture.
//! * [`quantize`]: weights into every layout that MLX writes.
//! * [`gpu`]: sources of kernels for Metal and CUDA.
//!
//! Elements are [`f32`], [`half::f16`] or [`half::bf16`]; sums are always in f32. The vector
//! instructions are chosen at run time ([`Level`]), and work is spread over one pool of
//! [`threads`]. Arguments are checked: a wrong length is an error, never undefined behaviour.

mod activation;
mod attention;
mod choose;
mod conv;
mod element;
mod error;
mod gated_delta;
pub mod gpu;
mod mamba2;
mod matmul;
mod moe;
mod norm;
mod quantize;
mod recurrence;
mod residual;
mod rope;
mod simd;
mod softcap;
pub mod threads;

pub use activation::{Activation, activate, gated};
pub use attention::{
    AttentionOptions, AttentionShape, FloatType, Heads, Mask, OutputOrder, PackedHeads, PackedRow,
    attention, attention_packed, expect_attention, pack_rows,
};
pub use choose::{argmax, take_rows};
pub use conv::{ConvInputs, ConvLayer, ConvShape, Strided, causal_conv, causal_conv_tail};
pub use element::{Element, Floats};
pub use error::{KernelError, Result};
pub use gated_delta::{DeltaInputs, DeltaLayer, DeltaShape, gated_delta, gated_delta_tail};
pub use mamba2::{Mamba2Inputs, Mamba2Layer, Mamba2Shape, mamba2, mamba2_tail};
pub use matmul::{
    Linear, Mode, Precision, Projection, QuantizedWeight, Scales, expect_projections,
    gather_quantized_matmul, linear, project, project_gated, quantized_matmul,
};
pub use moe::{ExpertGroups, Routes};
pub use norm::{add_rms_norm, layer_norm, rms_norm};
pub use quantize::{ScalesMut, quantize};
pub use residual::{add, add_gated, clip, relu2, scale, take_columns};
pub use rope::{Frequencies, RopeOptions, Turns, rope, rotate};
pub use simd::Level;
pub use softcap::softcap;
pub use threads::Expectation;
