//! Everything of this crate that is `unsafe`: calls into mlx-c, the handles it
//! gives out, and mapped files. The rest of the crate is safe code on top.
//!
//! # Soundness
//!
//! MLX keeps process-wide state without locks of its own (command encoders,
//! the stack of traces, the compile cache). Every call into it is made under
//! [`lock`], one lock for the process that a thread may take again (a traced
//! function calls operations). MLX's own worker threads never call back into
//! this crate except through host operations, which take no lock.
#![allow(unsafe_code)]

mod closure;
mod data;
mod error;
mod gpu_kernel;
mod handle;
mod host;
#[cfg(target_os = "linux")]
mod huge_pages;
pub(crate) mod mapped_file;
#[cfg(target_os = "linux")]
mod slabs;
mod words;

use std::cell::Cell;
use std::marker::PhantomData;
use std::os::raw::c_int;
use std::sync::{Mutex, MutexGuard, Once, PoisonError, TryLockError};

use mlex_sys::{mlx_array, mlx_stream};

use crate::{Array, Error, Result, Stream};

pub(crate) use closure::Closure;
pub(crate) use data::{array_from_bytes, array_from_slice, bytes_of, dtype_of, shape_of, slice_of};
pub(crate) use gpu_kernel::{GpuKernelHandle, new_gpu_kernel};
pub(crate) use handle::{
    ArrayHandle, DeviceHandle, StreamHandle, StringHandle, VectorHandle, c_string,
};
pub(crate) use host::{Pinned, check_failures, host_op, host_slice, host_slice_mut};
pub(crate) use words::Words;

static LOCK: Mutex<()> = Mutex::new(());

thread_local! {
    /// How many guards this thread holds. No destructor, so it is readable while a thread ends.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Holds MLX for the calling thread; dropped, gives it back.
pub(crate) struct MlxGuard {
    _outermost: Option<MutexGuard<'static, ()>>,
    /// The depth belongs to this thread, so the guard must end on it.
    _not_send: PhantomData<*const ()>,
}

/// Takes MLX for the calling thread, which may hold it already.
pub(crate) fn lock() -> MlxGuard {
    let depth = DEPTH.get();
    // A panic under the lock leaves MLX as it was between two of its calls.
    let outermost = (depth == 0).then(|| LOCK.lock().unwrap_or_else(PoisonError::into_inner));
    DEPTH.set(depth + 1);
    static INIT: Once = Once::new();
    // Not under `outermost` alone: the first call of the process decides.
    INIT.call_once(error::install_handler);
    MlxGuard {
        _outermost: outermost,
        _not_send: PhantomData,
    }
}

/// As [`lock`], unless another thread holds MLX, perhaps for as long as an evaluation takes.
pub(crate) fn try_lock() -> Option<MlxGuard> {
    if DEPTH.get() > 0 {
        return Some(lock());
    }
    let outermost = match LOCK.try_lock() {
        Ok(guard) => guard,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return None,
    };
    DEPTH.set(1);
    Some(MlxGuard {
        _outermost: Some(outermost),
        _not_send: PhantomData,
    })
}

impl Drop for MlxGuard {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}

/// Turns the status of a call that was made under the lock into a result.
#[track_caller]
pub(crate) fn check(op: &'static str, status: c_int) -> Result<()> {
    if status == 0 {
        Ok(())
    } else {
        Err(failure(op))
    }
}

/// The error that MLX left for this thread.
#[track_caller]
fn failure(op: &'static str) -> Error {
    error::take(op.strip_prefix("mlx_").unwrap_or(op))
}

/// Runs one operation on the current stream and returns its output.
#[track_caller]
pub(crate) fn run_op(
    op: &'static str,
    call: impl FnOnce(*mut mlx_array, mlx_stream) -> c_int,
) -> Result<Array> {
    let _guard = lock();
    let stream = Stream::current()?;
    let mut out = ArrayHandle::empty();
    let status = call(out.as_mut_ptr(), stream.raw());
    check(op, status)?;
    countable(op, Array::from_handle(out))
}

/// Refuses an array with more elements than can be addressed: MLX's own count would wrap
/// around, and its buffer would be too small. Broadcasting makes such shapes from small ones.
#[track_caller]
fn countable(op: &'static str, array: Array) -> Result<Array> {
    // The same for all dtypes: no element is larger than 8 bytes.
    const MAX: i64 = isize::MAX as i64 / 8;
    let count = array.shape().iter().try_fold(1i64, |count, &dim| {
        let count = count.checked_mul(i64::from(dim))?;
        (0..=MAX).contains(&count).then_some(count)
    });
    if count.is_some() {
        return Ok(array);
    }
    Err(Error::new(crate::ErrorKind::Mlx {
        op: op.strip_prefix("mlx_").unwrap_or(op),
        message: format!("the result would have the shape {:?}", array.shape()),
        location: std::panic::Location::caller(),
    }))
}

/// Runs one operation with several outputs on the current stream.
#[track_caller]
pub(crate) fn run_op_vec(
    op: &'static str,
    call: impl FnOnce(*mut mlex_sys::mlx_vector_array, mlx_stream) -> c_int,
) -> Result<Vec<Array>> {
    let _guard = lock();
    let stream = Stream::current()?;
    let mut out = VectorHandle::empty();
    let status = call(out.as_mut_ptr(), stream.raw());
    check(op, status)?;
    let arrays = out.to_arrays()?;
    arrays
        .into_iter()
        .map(|array| countable(op, array))
        .collect()
}

/// Calls an mlx-c operation `f(res, args.., stream)` on the current stream: `op!(mlx_add(a, b))`.
macro_rules! op {
    ($function:ident($($arg:expr),* $(,)?)) => {
        $crate::ffi::run_op(stringify!($function), |res, stream| {
            // SAFETY: mlx-c operations read the handles and the slices they are given during
            // the call only, all of which outlive it, and write `res`, a valid out-handle.
            #[allow(unsafe_code)]
            unsafe { mlex_sys::$function(res, $($arg,)* stream) }
        })
    };
}

/// As [`op!`], for an operation with a vector of outputs.
macro_rules! op_vec {
    ($function:ident($($arg:expr),* $(,)?)) => {
        $crate::ffi::run_op_vec(stringify!($function), |res, stream| {
            // SAFETY: as in `op!`.
            #[allow(unsafe_code)]
            unsafe { mlex_sys::$function(res, $($arg,)* stream) }
        })
    };
}

/// Calls an mlx-c function that takes no stream and returns a status, under the lock.
macro_rules! call {
    ($function:ident($($arg:expr),* $(,)?)) => {{
        let _guard = $crate::ffi::lock();
        // SAFETY: the handles, pointers and slices given outlive the call, and every
        // out-pointer refers to a live value of the right type.
        #[allow(unsafe_code)]
        let status = unsafe { mlex_sys::$function($($arg),*) };
        $crate::ffi::check(stringify!($function), status)
    }};
}

pub(crate) use {call, op, op_vec};

/// The null array that mlx-c takes for an absent optional argument.
pub(crate) fn optional(array: Option<&Array>) -> mlx_array {
    array.map_or(
        mlx_array {
            ctx: std::ptr::null_mut(),
        },
        Array::raw,
    )
}

/// A device of a kind, by its index.
pub(crate) fn new_device(kind: mlex_sys::mlx_device_type, index: i32) -> Result<DeviceHandle> {
    let _guard = lock();
    // SAFETY: plain values in, an owned handle out.
    let raw = unsafe { mlex_sys::mlx_device_new_type(kind, index) };
    if raw.ctx.is_null() {
        return Err(failure("mlx_device_new_type"));
    }
    Ok(DeviceHandle::from_raw(raw))
}

/// A new stream of a device.
pub(crate) fn new_stream(device: &DeviceHandle) -> Result<StreamHandle> {
    let _guard = lock();
    // SAFETY: a live handle in, an owned handle out.
    let raw = unsafe { mlex_sys::mlx_stream_new_device(device.raw()) };
    if raw.ctx.is_null() {
        return Err(failure("mlx_stream_new_device"));
    }
    Ok(StreamHandle::from_raw(raw))
}
