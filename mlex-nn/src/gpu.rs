//! Kernels of our own on a GPU, behind the same functions as MLX's operations.

use std::cell::RefCell;
use std::sync::OnceLock;

use mlex_core::{Array, Device, GpuKernel, GpuKernelText, GpuLanguage, GpuLaunch, Stream};
use mlex_kernels::gpu::{CudaSource, GpuSource};

use crate::{Result, host};

thread_local! {
    /// The kernels that this thread has used, by their names.
    static KERNELS: RefCell<Vec<(&'static str, GpuKernel)>> = const { RefCell::new(Vec::new()) };
}

/// What kind of GPU the current stream is one of; none for a CPU.
///
/// # Errors
/// When MLX cannot tell.
pub(crate) fn language() -> Result<Option<GpuLanguage>> {
    static KNOWN: OnceLock<Option<GpuLanguage>> = OnceLock::new();
    if Stream::current()?.device() == Device::Cpu {
        return Ok(None);
    }
    if let Some(known) = KNOWN.get() {
        return Ok(*known);
    }
    let found = GpuLanguage::available()?;
    Ok(*KNOWN.get_or_init(|| found))
}

/// Whether kernels for CUDA compute.
///
/// # Errors
/// When MLX cannot tell.
pub(crate) fn is_cuda() -> Result<bool> {
    Ok(language()? == Some(GpuLanguage::Cuda) && host::enabled())
}

/// Puts a call of `source` into the graph. `None` where the current stream is not one of a GPU
/// that has kernels of our own, or they are switched off.
pub(crate) fn call(
    source: &GpuSource,
    inputs: &[&Array],
    launch: &GpuLaunch<'_>,
) -> Result<Option<Vec<Array>>> {
    let Some(language) = language()?.filter(|_| host::enabled()) else {
        return Ok(None);
    };
    let compile = || {
        let text = match language {
            GpuLanguage::Metal => source.metal(),
            GpuLanguage::Cuda => source.cuda(),
        };
        let text = GpuKernelText {
            name: source.name,
            inputs: source.inputs,
            outputs: source.outputs,
            header: text.header,
            source: &text.source,
        };
        Ok(GpuKernel::new(language, &text)?)
    };
    launched(source.name, compile, inputs, launch).map(Some)
}

/// As [`call`], of a kernel that is for CUDA alone.
pub(crate) fn call_cuda(
    source: &CudaSource,
    inputs: &[&Array],
    launch: &GpuLaunch<'_>,
) -> Result<Option<Vec<Array>>> {
    if !is_cuda()? {
        return Ok(None);
    }
    let compile = || {
        let text = GpuKernelText {
            name: source.name,
            inputs: source.inputs,
            outputs: source.outputs,
            header: source.header,
            source: source.source,
        };
        Ok(GpuKernel::new(GpuLanguage::Cuda, &text)?)
    };
    launched(source.name, compile, inputs, launch).map(Some)
}

/// A call of the kernel `name`, which `compile` makes the first time. Outputs without elements are
/// made of nothing: there would be no threads to launch.
fn launched(
    name: &'static str,
    compile: impl FnOnce() -> Result<GpuKernel>,
    inputs: &[&Array],
    launch: &GpuLaunch<'_>,
) -> Result<Vec<Array>> {
    if launch.outputs.iter().all(|(shape, _)| shape.contains(&0)) {
        let outputs = launch.outputs.iter();
        let zeros = outputs.map(|&(shape, dtype)| Ok(Array::zeros(shape, dtype)?));
        return zeros.collect();
    }
    KERNELS.with_borrow_mut(|kernels| {
        let index = match kernels.iter().position(|(known, _)| *known == name) {
            Some(index) => index,
            None => {
                kernels.push((name, compile()?));
                kernels.len() - 1
            }
        };
        Ok(kernels[index].1.call(inputs, launch)?)
    })
}
