//! The layers' operations as host operations: MLX's graph on the CPU with [`mlex_kernels`].
//!
//! Each function returns `None` where the kernels do not apply (another device, an unusual
//! dtype, switched off); the caller then uses MLX's own operation, which computes the same.

mod activation;
mod attend;
mod attention;
mod choose;
mod constants;
mod conv;
mod gated_delta;
mod linear;
mod mamba2;
mod moe;
mod node;
mod norm;
mod quantize;
mod recurrent;
mod replay;
mod residual;
mod rope;
mod scratch;
mod sequence;
mod softcap;
mod stream;
mod update;
mod weight;

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, Ordering};

use mlex_core::{Array, Device, Dtype, Element, Error, ErrorKind, HostView, HostViewMut, Stream};
use mlex_kernels::{Floats, KernelError};

pub(crate) use activation::{activate, gated};
pub use attend::Attend;
pub(crate) use attend::attend;
pub(crate) use attention::attention;
pub(crate) use choose::{argmax, record_rows};
pub(crate) use constants::Constants;
pub(crate) use conv::{ShortConv, record_conv};
pub(crate) use gated_delta::{Delta, record_gated_delta};
pub(crate) use linear::{gated_linear, linear, linear_many, narrowed, record_gated, record_linear};
pub(crate) use mamba2::{Selective, record_mamba2};
pub(crate) use moe::{Mixture, record_mixture};
pub(crate) use norm::{
    Parameters, add_rms_norm, layer_norm, record_add_rms_norm, record_rms_norm,
    record_rms_norm_of_parts, rms_norm,
};
pub(crate) use quantize::quantize;
pub(crate) use recurrent::Columns;
pub use replay::Replay;
pub(crate) use residual::{add_normed, record_add_normed};
pub(crate) use rope::{RopeKernel, rope, rotate};
pub use sequence::{Sequence, Value};
pub(crate) use softcap::softcap;
pub(crate) use stream::clip;
pub use update::CacheUpdate;
pub(crate) use weight::Weight;

static ENABLED: AtomicBool = AtomicBool::new(true);

/// Turns the kernels on (as they are at first) or off, for the whole process. Off, the CPU
/// computes with MLX's own operations: slower, for comparison.
pub fn set_kernels(enabled: bool) {
    ENABLED.store(enabled, Ordering::Relaxed);
}

/// Whether kernels are to be used.
pub(crate) fn enabled() -> bool {
    ENABLED.load(Ordering::Relaxed)
}

/// Whether the kernels compute on `x` as it will be used now.
fn applies(x: &Array) -> mlex_core::Result<bool> {
    Ok(is_kernel_float(x.dtype()) && on_cpu()?)
}

/// Whether the kernels compute at all now.
fn on_cpu() -> mlex_core::Result<bool> {
    Ok(enabled() && Stream::current()?.device() == Device::Cpu)
}

/// Whether the kernels know a dtype.
fn is_kernel_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::Float32 | Dtype::Float16 | Dtype::Bfloat16)
}

/// Whether `x` of a dtype, combined with `other`, keeps it, as a kernel's output does.
fn keeps_dtype(dtype: Dtype, other: &Array) -> bool {
    keeps(dtype, other.dtype())
}

/// As [`keeps_dtype`].
fn keeps(dtype: Dtype, other: Dtype) -> bool {
    is_kernel_float(other) && (dtype == Dtype::Float32 || dtype == other)
}

/// A step has been given other outputs than it was recorded with.
fn outputs_error(expected: u64, found: &[HostViewMut<'_>]) -> Error {
    Error::new(ErrorKind::Length {
        what: "outputs of a step",
        expected,
        found: found.len() as u64,
    })
}

/// A kernel's error as one of its operation.
pub(crate) fn kernel_error(op: &'static str) -> impl Fn(KernelError) -> Error {
    move |error| {
        Error::new(ErrorKind::HostOp {
            op: op.to_owned(),
            message: error.to_string(),
        })
    }
}

/// The elements of an input in whatever floating-point type it has.
fn floats<'a>(view: &HostView<'a>) -> mlex_core::Result<Floats<'a>> {
    Ok(match view.dtype() {
        Dtype::Float16 => Floats::F16(view.as_slice()?),
        Dtype::Bfloat16 => Floats::Bf16(view.as_slice()?),
        _ => Floats::F32(view.as_slice()?),
    })
}

/// Runs `$body` with `$element` standing for the element type of `$dtype`.
macro_rules! by_dtype {
    ($dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            mlex_core::Dtype::Float16 => {
                type $element = half::f16;
                $body
            }
            mlex_core::Dtype::Bfloat16 => {
                type $element = half::bf16;
                $body
            }
            _ => {
                type $element = f32;
                $body
            }
        }
    };
}
use by_dtype;

/// The length of the rows of an input.
fn columns(x: &HostView<'_>) -> usize {
    x.shape().last().copied().map_or(0, size)
}

/// A size or position that is known not to be negative.
fn size(value: i32) -> usize {
    usize::try_from(value).unwrap_or_default()
}

/// `[B, H, L, D]` as the kernels take it: neighbours along the last dimension are neighbours in
/// memory. Heads are so wherever they come from a projection; others are copied.
fn heads<'a, T: Element>(view: &HostView<'a>) -> mlex_core::Result<(Cow<'a, [T]>, [usize; 3])> {
    let data = view.as_slice::<T>()?;
    let sizes: Vec<usize> = view.shape().iter().map(|&dim| size(dim)).collect();
    let strides: Vec<usize> = view
        .strides()
        .iter()
        .map(|&stride| usize::try_from(stride).unwrap_or_default())
        .collect();
    if strides[3] == 1 || sizes[3] <= 1 {
        return Ok((Cow::Borrowed(data), [strides[0], strides[1], strides[2]]));
    }
    let mut packed = Vec::with_capacity(sizes.iter().product());
    for b in 0..sizes[0] {
        for h in 0..sizes[1] {
            for l in 0..sizes[2] {
                let start = b * strides[0] + h * strides[1] + l * strides[2];
                packed.extend((0..sizes[3]).map(|d| data[start + d * strides[3]]));
            }
        }
    }
    let row = sizes[3];
    Ok((
        Cow::Owned(packed),
        [sizes[1] * sizes[2] * row, sizes[2] * row, row],
    ))
}
