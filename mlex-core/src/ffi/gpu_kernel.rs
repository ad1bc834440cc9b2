//! MLX's custom kernels, of Metal and of CUDA: the same calls under two names.

use std::ffi::{CString, c_char};

use mlex_sys::mlx_vector_string;

use super::handle::handle;
use super::{VectorHandle, c_string, call, failure, lock, run_op_vec};
use crate::gpu_kernel::{GpuKernelText, GpuLanguage, GpuLaunch};
use crate::{Array, Result};

use mlex_sys::{
    mlx_fast_cuda_kernel, mlx_fast_cuda_kernel_config, mlx_fast_metal_kernel,
    mlx_fast_metal_kernel_config,
};

handle!(
    /// A list of strings.
    StringsHandle, mlx_vector_string, mlx_vector_string_free
);
handle!(
    MetalKernel,
    mlx_fast_metal_kernel,
    mlx_fast_metal_kernel_free
);
handle!(
    MetalConfig,
    mlx_fast_metal_kernel_config,
    mlx_fast_metal_kernel_config_free
);
handle!(CudaKernel, mlx_fast_cuda_kernel, mlx_fast_cuda_kernel_free);
handle!(
    CudaConfig,
    mlx_fast_cuda_kernel_config,
    mlx_fast_cuda_kernel_config_free
);

/// A kernel of either kind.
pub(crate) enum GpuKernelHandle {
    Metal(MetalKernel),
    Cuda(CudaKernel),
}

/// A list of C strings.
fn strings(texts: &[&str]) -> StringsHandle {
    let texts: Vec<CString> = texts.iter().map(|text| c_string(text)).collect();
    let mut pointers: Vec<*const c_char> = texts.iter().map(|text| text.as_ptr()).collect();
    let _guard = lock();
    // SAFETY: that many C strings, which mlx-c copies.
    let raw =
        unsafe { mlex_sys::mlx_vector_string_new_data(pointers.as_mut_ptr(), pointers.len()) };
    StringsHandle::from_raw(raw)
}

pub(crate) fn new_gpu_kernel(
    language: GpuLanguage,
    text: &GpuKernelText<'_>,
) -> Result<GpuKernelHandle> {
    let (name, header) = (c_string(text.name), c_string(text.header));
    let source = c_string(text.source);
    let (inputs, outputs) = (strings(text.inputs), strings(text.outputs));
    let _guard = lock();
    match language {
        GpuLanguage::Metal => {
            // SAFETY: live handles and C strings, which mlx-c copies.
            let raw = unsafe {
                mlex_sys::mlx_fast_metal_kernel_new(
                    name.as_ptr(),
                    inputs.raw(),
                    outputs.raw(),
                    source.as_ptr(),
                    header.as_ptr(),
                    true,
                    false,
                )
            };
            if raw.ctx.is_null() {
                return Err(failure("mlx_fast_metal_kernel_new"));
            }
            Ok(GpuKernelHandle::Metal(MetalKernel::from_raw(raw)))
        }
        GpuLanguage::Cuda => {
            // SAFETY: as above.
            let raw = unsafe {
                mlex_sys::mlx_fast_cuda_kernel_new(
                    name.as_ptr(),
                    inputs.raw(),
                    outputs.raw(),
                    source.as_ptr(),
                    header.as_ptr(),
                    true,
                    0,
                )
            };
            if raw.ctx.is_null() {
                return Err(failure("mlx_fast_cuda_kernel_new"));
            }
            Ok(GpuKernelHandle::Cuda(CudaKernel::from_raw(raw)))
        }
    }
}

/// Fills in a configuration by the functions of one kind.
macro_rules! configure {
    ($config:expr, $launch:expr, $output:ident, $grid:ident, $group:ident, $type:ident,
     $int:ident, $bool:ident) => {{
        let (config, launch) = ($config.raw(), $launch);
        for (shape, dtype) in launch.outputs {
            call!($output(config, shape.as_ptr(), shape.len(), dtype.to_raw()))?;
        }
        let ([x, y, z], [tx, ty, tz]) = (launch.grid, launch.group);
        call!($grid(config, x, y, z))?;
        call!($group(config, tx, ty, tz))?;
        for (name, dtype) in launch.types {
            call!($type(config, c_string(name).as_ptr(), dtype.to_raw()))?;
        }
        for &(name, value) in launch.flags {
            call!($bool(config, c_string(name).as_ptr(), value))?;
        }
        for &(name, value) in launch.numbers {
            call!($int(config, c_string(name).as_ptr(), value))?;
        }
    }};
}

impl GpuKernelHandle {
    #[track_caller]
    pub(crate) fn apply(&self, inputs: &[&Array], launch: &GpuLaunch<'_>) -> Result<Vec<Array>> {
        let vector = VectorHandle::from_arrays(inputs.iter().copied());
        match self {
            Self::Metal(kernel) => {
                let guard = lock();
                // SAFETY: no arguments, an owned handle out.
                let raw = unsafe { mlex_sys::mlx_fast_metal_kernel_config_new() };
                let config = MetalConfig::from_raw(raw);
                drop(guard);
                configure!(
                    config,
                    launch,
                    mlx_fast_metal_kernel_config_add_output_arg,
                    mlx_fast_metal_kernel_config_set_grid,
                    mlx_fast_metal_kernel_config_set_thread_group,
                    mlx_fast_metal_kernel_config_add_template_arg_dtype,
                    mlx_fast_metal_kernel_config_add_template_arg_int,
                    mlx_fast_metal_kernel_config_add_template_arg_bool
                );
                run_op_vec("metal_kernel", |res, stream| {
                    // SAFETY: live handles, and `res` is a valid out-handle.
                    unsafe {
                        mlex_sys::mlx_fast_metal_kernel_apply(
                            res,
                            kernel.raw(),
                            vector.raw(),
                            config.raw(),
                            stream,
                        )
                    }
                })
            }
            Self::Cuda(kernel) => {
                let guard = lock();
                // SAFETY: as above.
                let raw = unsafe { mlex_sys::mlx_fast_cuda_kernel_config_new() };
                let config = CudaConfig::from_raw(raw);
                drop(guard);
                configure!(
                    config,
                    launch,
                    mlx_fast_cuda_kernel_config_add_output_arg,
                    mlx_fast_cuda_kernel_config_set_grid,
                    mlx_fast_cuda_kernel_config_set_thread_group,
                    mlx_fast_cuda_kernel_config_add_template_arg_dtype,
                    mlx_fast_cuda_kernel_config_add_template_arg_int,
                    mlx_fast_cuda_kernel_config_add_template_arg_bool
                );
                run_op_vec("cuda_kernel", |res, stream| {
                    // SAFETY: as above.
                    unsafe {
                        mlex_sys::mlx_fast_cuda_kernel_apply(
                            res,
                            kernel.raw(),
                            vector.raw(),
                            config.raw(),
                            stream,
                        )
                    }
                })
            }
        }
    }
}
