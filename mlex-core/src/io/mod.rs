//! Readers and writers of weight files.
//!
//! Everything here is about bytes: files are mapped, headers are checked before anything is
//! allocated by what they say, and tensors are given out as bytes that borrow from the file or as
//! plain vectors.

mod checkpoint;
mod gguf;
mod json;
mod safetensors;
mod stored_dtype;
mod writer;

pub use checkpoint::Checkpoint;
pub use gguf::{
    Affine, BlockSize, Decoded, FromGguf, GgmlType, GgufArray, GgufFile, GgufMetadata, GgufTensor,
    GgufTensorInfo, GgufValue, Mxfp4, unpermute_rope_rows,
};
pub use safetensors::{SafetensorsFile, TensorInfo};
pub use stored_dtype::{
    F8_E4M3_VALUES, F8_E5M2_VALUES, StoredDtype, f8_e4m3_to_f32, f8_e5m2_to_f32, f8_e8m0_to_f32,
};
pub use writer::{TensorSink, TensorSpec, write_safetensors, write_safetensors_in_order};
