//! The architectures, one file each.

mod decoder;
pub(crate) mod llama;
pub(crate) mod minicpm;
pub(crate) mod qwen2;
pub(crate) mod qwen3;
pub(crate) mod smollm3;
