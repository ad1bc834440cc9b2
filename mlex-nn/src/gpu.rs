//! Kernels of our own on a GPU, behind the same functions as MLX's operations.

use std::cell::RefCell;

use mlex_core::{Array, Device, GpuKernel, GpuKernelText, GpuLanguage, GpuLaunch, Stream};
use mlex_kernels::gpu::GpuSource;

use crate::{Result, host};

thread_local! {
    /// The kernels that this thread has used, by their names.
    static KERNELS: RefCell<Vec<(&'static str, GpuKernel)>> = const { RefCell::new(Vec::new()) };
}

/// Puts a call of `source` into the graph. `None` where the current stream is not one of a GPU
/// that has kernels of our own, or they are switched off.
pub(crate) fn call(
    source: &GpuSource,
    inputs: &[&Array],
    launch: &GpuLaunch<'_>,
) -> Result<Option<Vec<Array>>> {
    if !host::enabled() || Stream::current()?.device() == Device::Cpu {
        return Ok(None);
    }
    let Some(language) = GpuLanguage::available()? else {
        return Ok(None);
    };
    KERNELS.with_borrow_mut(|kernels| {
        let known = kernels.iter().position(|(name, _)| *name == source.name);
        let index = match known {
            Some(index) => index,
            None => {
                kernels.push((source.name, compile(source, language)?));
                kernels.len() - 1
            }
        };
        Ok(Some(kernels[index].1.call(inputs, launch)?))
    })
}

fn compile(source: &GpuSource, language: GpuLanguage) -> Result<GpuKernel> {
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
}
