//! The architectures, one file or folder each.

mod decoder;
pub(crate) mod dhara_ar;
pub(crate) mod gemma4;
mod language;
pub(crate) mod llama;
pub(crate) mod minicpm;
mod mixed;
mod mrope;
mod mtp;
pub(crate) mod nemotron_h;
pub(crate) mod qwen2;
pub(crate) mod qwen2_5_vl;
pub(crate) mod qwen3;
pub(crate) mod qwen3_5;
pub(crate) mod qwen3_moe;
pub(crate) mod qwen3_next;
pub(crate) mod qwen3_vl;
pub(crate) mod smollm3;
mod stream;
