//! Kernels of one's own: without a GPU they are refused, with one they compute.
#![allow(clippy::unwrap_used)]

use mlex_core::{Array, Device, Dtype, GpuKernel, GpuKernelText, GpuLanguage, GpuLaunch, Stream};

/// `out[i] = FACTOR * x[i]`, and the index if `INDEXED`.
fn text(language: GpuLanguage) -> (&'static str, &'static str) {
    match language {
        GpuLanguage::Metal => (
            "",
            "uint i = thread_position_in_grid.x;
             out[i] = static_cast<T>(FACTOR * float(x[i]) + (INDEXED ? float(i) : 0.0f));",
        ),
        GpuLanguage::Cuda => (
            "",
            "int i = blockIdx.x * blockDim.x + threadIdx.x;
             if (i < SIZE) {
               out[i] = static_cast<T>(FACTOR * float(x[i]) + (INDEXED ? float(i) : 0.0f));
             }",
        ),
    }
}

fn kernel(language: GpuLanguage) -> mlex_core::Result<GpuKernel> {
    let (header, source) = text(language);
    GpuKernel::new(
        language,
        &GpuKernelText {
            name: "mlex_test_scale",
            inputs: &["x"],
            outputs: &["out"],
            header,
            source,
        },
    )
}

#[test]
fn what_this_build_does_not_have_is_refused() {
    let available = GpuLanguage::available().unwrap();
    for language in [GpuLanguage::Metal, GpuLanguage::Cuda] {
        if available == Some(language) {
            continue;
        }
        let error = kernel(language).unwrap_err().to_string();
        assert!(error.contains("back-end"), "{error}");
        assert!(!error.contains('\n'), "{error}");
    }
}

#[test]
fn a_kernel_computes() {
    let Some(language) = GpuLanguage::available().unwrap() else {
        // Nothing to run it on.
        assert!(!Device::Gpu(0).is_available().unwrap());
        return;
    };
    let kernel = kernel(language).unwrap();
    let stream = Stream::default_of(Device::Gpu(0)).unwrap();
    stream.scope(|| {
        let x: Vec<f32> = (0..300).map(|i| i as f32 / 8.0).collect();
        // A view that is not contiguous.
        let x = Array::from_slice(&x, &[2, 150]).unwrap().t().unwrap();
        for (indexed, dtype) in [(true, Dtype::Float32), (false, Dtype::Float16)] {
            let launch = GpuLaunch {
                outputs: &[(&[300], dtype)],
                grid: [300, 1, 1],
                group: [64, 1, 1],
                numbers: &[("FACTOR", 4), ("SIZE", 300)],
                flags: &[("INDEXED", indexed)],
                types: &[("T", dtype)],
            };
            let out = kernel.call(&[&x], &launch).unwrap().pop().unwrap();
            let out: Vec<f32> = out.as_type(Dtype::Float32).unwrap().to_vec().unwrap();
            for (i, out) in out.into_iter().enumerate() {
                let x = (i % 2 * 150 + i / 2) as f32 / 8.0;
                let index = if indexed { i as f32 } else { 0.0 };
                assert_eq!(out, 4.0 * x + index, "{i}");
            }
        }
        assert!(
            kernel
                .call(
                    &[],
                    &GpuLaunch {
                        outputs: &[(&[1], Dtype::Float32)],
                        grid: [1, 1, 1],
                        group: [1, 1, 1],
                        numbers: &[],
                        flags: &[],
                        types: &[],
                    }
                )
                .is_err()
        );
    });
}
