//! Kernels of one's own on a GPU, compiled by MLX when they are first used.

use crate::{Array, Dtype, Error, ErrorKind, Result, ffi};

/// The text of a kernel: the body of a function whose parameters are pointers to the named
/// inputs and outputs, for one kind of GPU.
///
/// MLX writes the function around it. Metal's has parameters for the positions of a thread that
/// the text names (`thread_position_in_grid`), CUDA's has its built-in variables. The text is
/// trusted: nothing checks where it reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuKernelText<'a> {
    /// The kernel's name, which no other one may have.
    pub name: &'a str,
    /// The names of the inputs.
    pub inputs: &'a [&'a str],
    /// The names of the outputs, at least one.
    pub outputs: &'a [&'a str],
    /// What stands before the function.
    pub header: &'a str,
    /// What stands in the function.
    pub source: &'a str,
}

/// Which language a text is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GpuLanguage {
    /// Metal, on Apple GPUs.
    Metal,
    /// CUDA, on NVIDIA GPUs.
    Cuda,
}

impl GpuLanguage {
    /// The language of the GPUs that this build of MLX can use on this machine.
    ///
    /// # Errors
    /// When MLX cannot tell.
    pub fn available() -> Result<Option<Self>> {
        let (mut metal, mut cuda) = (false, false);
        ffi::call!(mlx_metal_is_available(&raw mut metal))?;
        if metal {
            return Ok(Some(Self::Metal));
        }
        ffi::call!(mlx_cuda_is_available(&raw mut cuda))?;
        Ok(cuda.then_some(Self::Cuda))
    }
}

/// A call of a [`GpuKernel`].
#[derive(Clone, Copy, Debug)]
pub struct GpuLaunch<'a> {
    /// Shape and dtype of each output.
    pub outputs: &'a [(&'a [i32], Dtype)],
    /// Threads in all, along three dimensions. On CUDA they are rounded up to whole groups.
    pub grid: [i32; 3],
    /// Threads of a group.
    pub group: [i32; 3],
    /// Constants of the kernel that are whole numbers.
    pub numbers: &'a [(&'a str, i32)],
    /// Constants that are true or false.
    pub flags: &'a [(&'a str, bool)],
    /// Names for element types.
    pub types: &'a [(&'a str, Dtype)],
}

/// A kernel of one's own.
pub struct GpuKernel(ffi::GpuKernelHandle);

impl GpuKernel {
    /// A kernel of a text.
    ///
    /// # Errors
    /// When this build of MLX has no such GPUs or the text has no output.
    pub fn new(language: GpuLanguage, text: &GpuKernelText<'_>) -> Result<Self> {
        // A CUDA build of MLX takes a Metal kernel, and fails when it is evaluated.
        let available = GpuLanguage::available()?;
        if available.is_some_and(|available| available != language) {
            return Err(Error::new(ErrorKind::Argument {
                argument: "language",
                expected: "that of the GPU back-end of this build of MLX",
                found: format!("{language:?}"),
            }));
        }
        ffi::new_gpu_kernel(language, text).map(Self)
    }

    /// Puts a call into the graph: its outputs, not computed yet. Inputs are made contiguous.
    ///
    /// # Errors
    /// When there are not as many inputs or outputs as names, or the current stream is not one
    /// of a GPU.
    #[track_caller]
    pub fn call(&self, inputs: &[&Array], launch: &GpuLaunch<'_>) -> Result<Vec<Array>> {
        self.0.apply(inputs, launch)
    }
}

impl std::fmt::Debug for GpuKernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GpuKernel").finish_non_exhaustive()
    }
}
