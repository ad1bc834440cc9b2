//! mlx-c's handles, each freed when it is dropped.

use std::ffi::{CStr, CString};

use mlex_sys::{mlx_array, mlx_device, mlx_stream, mlx_string, mlx_vector_array};

use super::{call, lock};
use crate::{Array, Result};

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident, $raw:ident, $free:ident) => {
        $(#[$doc])*
        pub(crate) struct $name($raw);

        // SAFETY: the handle owns a heap value of MLX that no thread-local storage refers to,
        // and every use of it, its freeing included, happens under the process-wide lock. A
        // graph names the streams of its thread by number: MLX refuses, with an error, to
        // evaluate it where they are not known.
        unsafe impl Send for $name {}

        #[allow(dead_code, reason = "not every handle is made in every way")]
        impl $name {
            /// An out-handle that holds nothing yet.
            pub(crate) fn empty() -> Self {
                Self($raw { ctx: std::ptr::null_mut() })
            }

            /// Takes over a handle that mlx-c gave out.
            pub(crate) fn from_raw(raw: $raw) -> Self {
                Self(raw)
            }

            pub(crate) fn as_mut_ptr(&mut self) -> *mut $raw {
                &raw mut self.0
            }

            pub(crate) fn raw(&self) -> $raw {
                self.0
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                if !self.0.ctx.is_null() {
                    let _guard = lock();
                    // SAFETY: the handle is owned and is not used after this.
                    unsafe { mlex_sys::$free(self.0) };
                }
            }
        }
    };
}
pub(super) use handle;

handle!(
    /// One reference to an array.
    ArrayHandle, mlx_array, mlx_array_free
);
handle!(
    /// A list of arrays.
    VectorHandle, mlx_vector_array, mlx_vector_array_free
);
handle!(DeviceHandle, mlx_device, mlx_device_free);
handle!(StreamHandle, mlx_stream, mlx_stream_free);
handle!(StringHandle, mlx_string, mlx_string_free);

impl Clone for ArrayHandle {
    fn clone(&self) -> Self {
        let _guard = lock();
        let mut out = Self::empty();
        // SAFETY: both are valid handles. Assigning an array to an empty handle copies a
        // reference, which can fail only for want of memory.
        unsafe { mlex_sys::mlx_array_set(out.as_mut_ptr(), self.0) };
        out
    }
}

impl Clone for StreamHandle {
    fn clone(&self) -> Self {
        let _guard = lock();
        let mut out = Self::empty();
        // SAFETY: both are valid handles.
        unsafe { mlex_sys::mlx_stream_set(out.as_mut_ptr(), self.0) };
        out
    }
}

impl VectorHandle {
    /// A vector that holds a reference to each of `arrays`.
    pub(crate) fn from_arrays<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Self {
        let raw: Vec<mlx_array> = arrays.into_iter().map(Array::raw).collect();
        let _guard = lock();
        // SAFETY: `raw` holds that many live handles; mlx-c copies the references.
        Self(unsafe { mlex_sys::mlx_vector_array_new_data(raw.as_ptr(), raw.len()) })
    }

    /// The arrays in it.
    #[track_caller]
    pub(crate) fn to_arrays(&self) -> Result<Vec<Array>> {
        let _guard = lock();
        // SAFETY: a valid handle.
        let len = unsafe { mlex_sys::mlx_vector_array_size(self.0) };
        (0..len)
            .map(|index| {
                let mut out = ArrayHandle::empty();
                call!(mlx_vector_array_get(out.as_mut_ptr(), self.0, index))?;
                Ok(Array::from_handle(out))
            })
            .collect()
    }
}

impl StringHandle {
    pub(crate) fn to_string_lossy(&self) -> String {
        if self.0.ctx.is_null() {
            return String::new();
        }
        let _guard = lock();
        // SAFETY: a valid handle; the text lives as long as it does.
        let text = unsafe { CStr::from_ptr(mlex_sys::mlx_string_data(self.0)) };
        text.to_string_lossy().into_owned()
    }
}

/// A C string of `text`, which names a mode or an equation and so holds no zero byte.
pub(crate) fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', "")).unwrap_or_default()
}
