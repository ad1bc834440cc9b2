//! Safe arrays, devices, streams and operations over Apple MLX.
//!
//! An [`Array`] is a reference to a node of MLX's lazy graph. Operations are its methods;
//! they return [`Result`], put nodes on the thread's current [`Stream`] and compute nothing
//! until [`eval`], [`async_eval`] or an accessor of the data asks for it.
//!
//! ```
//! use mlex_core::{Array, Dtype};
//!
//! let x = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
//! let y = x.matmul(&x.t()?)?.add(1.0)?;
//! assert_eq!(y.as_slice::<f32>()?, [6.0, 12.0, 12.0, 26.0]);
//! # Ok::<(), mlex_core::Error>(())
//! ```

mod array;
mod compile;
mod device;
mod dtype;
mod error;
mod ffi;
mod gpu_kernel;
mod host_op;
pub mod io;
pub mod memory;
pub mod ops;
mod stream;

pub use array::{Array, async_eval, eval};
pub use compile::Compiled;
pub use device::Device;
pub use dtype::{Complex64, Dtype, Element};
pub use error::{Error, ErrorKind, Result, ResultExt};
pub use gpu_kernel::{GpuKernel, GpuKernelText, GpuLanguage, GpuLaunch};
pub use host_op::{HostBuffer, HostConstant, HostOp, HostOutput, HostView, HostViewMut, host_op};
pub use ops::random;
pub use ops::{AttentionMask, Operand, QuantizationMode, Quantized, QuantizedWeight, Rope};
pub use stream::Stream;

/// The version of MLX that is linked, such as `0.31.2`.
///
/// # Errors
/// When MLX cannot tell.
pub fn mlx_version() -> Result<String> {
    let mut text = ffi::StringHandle::empty();
    ffi::call!(mlx_version(text.as_mut_ptr()))?;
    Ok(text.to_string_lossy())
}
