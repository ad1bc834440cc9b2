//! SIMD kernels for the inference of quantized language models, as plain functions on slices.
mod attention;
mod element;
mod error;
mod matmul;
mod simd;
pub mod threads;

pub use attention::{
    AttentionOptions, AttentionShape, Heads, Mask, OutputOrder, attention,
};
pub use element::{Element, Floats};
pub use error::{KernelError, Result};
pub use matmul::{
    Linear, Mode, Precision, QuantizedWeight, Scales, gather_quantized_matmul, linear,
    quantized_matmul,
};
pub use simd::Level;
