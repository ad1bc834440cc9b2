//! MLX links, starts and computes.

#![allow(unsafe_code)]

use mlex_sys::*;
use std::ffi::{CStr, c_char, c_void};

#[test]
fn version_is_a_supported_one() {
    // SAFETY: the string outlives its use and is freed once.
    let version = unsafe {
        let mut string = mlx_string_new();
        assert_eq!(mlx_version(&mut string), 0);
        let text = CStr::from_ptr(mlx_string_data(string))
            .to_string_lossy()
            .into_owned();
        mlx_string_free(string);
        text
    };
    assert!(
        version.starts_with("0.31.") || version.starts_with("0.32."),
        "{version}"
    );
}

#[test]
fn adds_two_arrays() {
    let (a, b) = ([1.0f32, 2.0, 3.0], [10.0f32, 20.0, 30.0]);
    let shape = [3];
    // SAFETY: the buffers hold 3 floats, which MLX copies; handles are freed once; the result is
    // evaluated before its data is read.
    unsafe {
        let stream = mlx_default_cpu_stream_new();
        let x = mlx_array_new_data(a.as_ptr().cast(), shape.as_ptr(), 1, MLX_FLOAT32);
        let y = mlx_array_new_data(b.as_ptr().cast(), shape.as_ptr(), 1, MLX_FLOAT32);
        let mut sum = mlx_array_new();
        assert_eq!(mlx_add(&mut sum, x, y, stream), 0);
        assert_eq!(mlx_array_eval(sum), 0);
        let data = std::slice::from_raw_parts(mlx_array_data_float32(sum), 3);
        assert_eq!(data, [11.0, 22.0, 33.0]);
        for array in [x, y, sum] {
            mlx_array_free(array);
        }
        mlx_stream_free(stream);
    }
}

/// Keeps the last message of MLX's in the `String` that `data` points to.
unsafe extern "C" fn keep_message(message: *const c_char, data: *mut c_void) {
    // SAFETY: MLX passes a C string, and the pointer that was registered with this function.
    unsafe {
        *data.cast::<String>() = CStr::from_ptr(message).to_string_lossy().into_owned();
    }
}

/// mlx-c passes the pointer on only if it was registered with a function that frees it.
unsafe extern "C" fn keep_data(_: *mut c_void) {}

/// mlx-c takes messages for printf formats; `csrc/mlxc_error.h` sees that they arrive as they are.
#[test]
fn an_error_with_percent_signs_arrives_unchanged() {
    let mut message = String::new();
    let shape = [1, 1, 1, 8];
    let data = [0.0f32; 8];
    // SAFETY: `message` outlives the handler's use; the buffer holds 8 floats, which MLX copies;
    // handles are freed once.
    unsafe {
        mlx_set_error_handler(
            Some(keep_message),
            (&raw mut message).cast(),
            Some(keep_data),
        );
        let stream = mlx_default_cpu_stream_new();
        let x = mlx_array_new_data(data.as_ptr().cast(), shape.as_ptr(), 4, MLX_FLOAT32);
        let (none, mut result) = (mlx_array_new(), mlx_array_new());
        let mode = c"100%s %n%n";
        let status = mlx_fast_scaled_dot_product_attention(
            &mut result,
            x,
            x,
            x,
            1.0,
            mode.as_ptr(),
            none,
            none,
            stream,
        );
        assert_eq!(status, 1);
        for array in [x, none, result] {
            mlx_array_free(array);
        }
        mlx_stream_free(stream);
        mlx_set_error_handler(None, std::ptr::null_mut(), None);
    }
    assert!(message.contains("100%s %n%n"), "{message}");
}
