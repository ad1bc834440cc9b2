//! Host operations: from MLX's evaluation to a Rust function and back.

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice;
use std::sync::{Arc, Mutex, PoisonError};

use mlex_sys::{mlx_host_output, mlx_host_output_, mlx_host_view};

use super::{VectorHandle, c_string, check, lock, try_lock};
use crate::dtype::Element;
use crate::host_op::{HostOp, HostOutput, HostView, HostViewMut, row_major};
use crate::{Array, Dtype, Error, ErrorKind, Result, Stream};

thread_local! {
    /// Of the evaluations that this thread has started.
    static FAILURES: Arc<Failures> = Arc::default();
}

/// Returns, once, what a host operation has failed with that this thread has evaluated.
pub(crate) fn check_failures() -> Result<()> {
    drop_retired();
    // While the thread ends there is nobody left to tell.
    FAILURES
        .try_with(|failures| failures.check())
        .unwrap_or(Ok(()))
}

/// What host operations have failed with and no evaluation has returned yet.
///
/// A failure cannot go through MLX: an exception on a stream's thread ends the process.
#[derive(Debug, Default)]
struct Failures(Mutex<Option<Error>>);

impl Failures {
    /// Returns the failure, once.
    fn check(&self) -> Result<()> {
        self.slot().take().map_or(Ok(()), Err)
    }

    fn is_set(&self) -> bool {
        self.slot().is_some()
    }

    /// Keeps the first failure: later ones come of it.
    fn set(&self, error: Error) {
        self.slot().get_or_insert(error);
    }

    fn slot(&self) -> std::sync::MutexGuard<'_, Option<Error>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a node hands to [`run`].
struct Context {
    op: Arc<dyn HostOp>,
    /// For each output, the input that it starts as.
    in_place: Vec<Option<usize>>,
}

#[track_caller]
pub(crate) fn host_op(
    op: Arc<dyn HostOp>,
    inputs: &[&Array],
    contiguous: &[bool],
    outputs: &[HostOutput],
) -> Result<Vec<Array>> {
    let _guard = lock();
    let stream = Stream::current()?;
    let name = op.name();
    let c_name = c_string(name);
    let specs: Vec<mlx_host_output> = outputs
        .iter()
        .map(|output| mlx_host_output_ {
            shape: output.shape.as_ptr(),
            ndim: output.shape.len(),
            dtype: output.dtype.to_raw(),
            in_place: output.in_place.map_or(-1, |index| index as c_int),
        })
        .collect();
    let vector = VectorHandle::from_arrays(inputs.iter().copied());
    let context = Box::new(Context {
        op,
        in_place: outputs.iter().map(|output| output.in_place).collect(),
    });
    let mut made = VectorHandle::empty();
    // SAFETY: all pointers are to values that outlive the call, and the counts are theirs.
    // `context` is what `run` and `destroy` take it for; MLX owns it from here, and calls
    // `destroy` once. `HostOp` is `Send + Sync`, so that both may happen on another thread.
    let status = unsafe {
        mlex_sys::mlx_host_op(
            made.as_mut_ptr(),
            c_name.as_ptr(),
            vector.raw(),
            contiguous.as_ptr(),
            specs.as_ptr(),
            specs.len(),
            Some(begin),
            Some(run),
            Box::into_raw(context).cast::<c_void>(),
            Some(destroy),
            stream.raw(),
        )
    };
    check(name, status)?;
    made.to_arrays()
}

extern "C" fn destroy(context: *mut c_void) {
    // SAFETY: the box that `host_op` gave away, given back once.
    let context = unsafe { Box::from_raw(context.cast::<Context>()) };
    // A panic in a destructor of the operation must not cross C++.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(context)));
}

/// Remembers which thread is to be told of a failure: the one that evaluates.
extern "C" fn begin(_context: *mut c_void) -> *mut c_void {
    let failures = FAILURES.try_with(Arc::clone).unwrap_or_default();
    Arc::into_raw(failures).cast_mut().cast()
}

extern "C" fn run(
    context: *mut c_void,
    evaluation: *mut c_void,
    inputs: *const mlx_host_view,
    inputs_num: usize,
    outputs: *const mlx_host_view,
    outputs_num: usize,
) {
    // SAFETY: MLX passes the context of `host_op`, alive until `destroy`, and that many views.
    // `evaluation` is what `begin` returned for this run.
    let (context, failures, inputs, outputs) = unsafe {
        (
            &*context.cast::<Context>(),
            Arc::from_raw(evaluation.cast::<Failures>()),
            slice::from_raw_parts(inputs, inputs_num),
            slice::from_raw_parts(outputs, outputs_num),
        )
    };
    let given_away = |index: usize| context.in_place.contains(&Some(index));
    // SAFETY: while the operation runs, MLX keeps the buffers; nothing else reads or writes an
    // output, and nothing writes an input: one whose memory an output may have is left empty.
    let inputs: Vec<HostView<'_>> = inputs
        .iter()
        .enumerate()
        .map(|(index, view)| unsafe { input_view(view, given_away(index)) })
        .collect();
    // SAFETY: as above.
    let mut outputs: Vec<HostViewMut<'_>> = outputs
        .iter()
        .map(|view| unsafe { output_view(view) })
        .collect();
    for (output, in_place) in outputs.iter_mut().zip(&context.in_place) {
        // Memory as it comes is a bit pattern of every dtype but this.
        if output.dtype == Dtype::Bool && in_place.is_none() {
            output.bytes.fill(0);
        }
    }
    // After a failure there is no sense in what would be computed from its output.
    let failure = if failures.is_set() {
        None
    } else {
        match catch_unwind(AssertUnwindSafe(|| context.op.run(&inputs, &mut outputs))) {
            Ok(Ok(())) => return,
            Ok(Err(error)) => Some(error),
            Err(payload) => Some(Error::new(ErrorKind::HostOp {
                op: context.op.name().to_owned(),
                message: format!("panicked: {}", panic_message(&*payload)),
            })),
        }
    };
    for output in &mut outputs {
        output.bytes.fill(0);
    }
    if let Some(error) = failure {
        failures.set(error);
    }
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message")
        .lines()
        .collect::<Vec<_>>()
        .join(" ")
}

/// # Safety
/// `view` describes memory that nothing writes to during `'a`.
unsafe fn input_view<'a>(view: &'a mlx_host_view, given_away: bool) -> HostView<'a> {
    // SAFETY: shape and strides have that many entries, and live as long as the view.
    let (shape, strides) =
        unsafe { (parts(view.shape, view.ndim), parts(view.strides, view.ndim)) };
    let dtype = Dtype::from_raw(view.dtype);
    // Up to the last element that the strides reach; they are not negative.
    let reach: i64 = shape
        .iter()
        .zip(strides)
        .map(|(&dim, &stride)| i64::from(dim - 1) * stride)
        .sum();
    let count = if view.size == 0 || given_away {
        0
    } else {
        reach as usize + 1
    };
    // SAFETY: those elements are within the array's buffer.
    let bytes = unsafe { parts(view.data.cast::<u8>(), count * dtype.size_in_bytes()) };
    HostView {
        bytes,
        shape,
        strides,
        dtype,
    }
}

/// # Safety
/// `view` describes memory that nothing else reads or writes during `'a`.
unsafe fn output_view<'a>(view: &'a mlx_host_view) -> HostViewMut<'a> {
    // SAFETY: shape and strides have that many entries, and live as long as the view.
    let (shape, strides) =
        unsafe { (parts(view.shape, view.ndim), parts(view.strides, view.ndim)) };
    let dtype = Dtype::from_raw(view.dtype);
    let bytes = if view.size == 0 {
        &mut []
    } else {
        // SAFETY: outputs are allocated without gaps.
        unsafe {
            slice::from_raw_parts_mut(view.data.cast::<u8>(), view.size * dtype.size_in_bytes())
        }
    };
    HostViewMut {
        bytes,
        shape,
        strides,
        dtype,
    }
}

/// The memory of an evaluated array, and the array, which keeps it.
pub(crate) struct Pinned {
    data: *const u8,
    bytes: usize,
    shape: Vec<i32>,
    strides: Vec<i64>,
    dtype: Dtype,
    /// Only to be dropped. Always there.
    array: Option<Array>,
}

/// Arrays of operations that ended on a stream's thread.
static RETIRED: Mutex<Vec<Array>> = Mutex::new(Vec::new());

/// Drops what could not be dropped where its use ended.
fn drop_retired() {
    let retired = std::mem::take(&mut *RETIRED.lock().unwrap_or_else(PoisonError::into_inner));
    drop(retired);
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let Some(array) = self.array.take() else {
            return;
        };
        // The last use may end on a stream's thread, for which a thread that holds MLX waits.
        match try_lock() {
            Some(_guard) => drop(array),
            None => RETIRED
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(array),
        }
    }
}

// SAFETY: the memory is that of an evaluated array: nothing writes to it while the array is
// referred to, and it may be read from any thread. `array` itself is `Send`, and only dropped.
unsafe impl Sync for Pinned {}
// SAFETY: as above.
unsafe impl Send for Pinned {}

impl Pinned {
    /// The elements of `array` in row-major order, computed now.
    #[track_caller]
    pub(crate) fn new(array: &Array) -> Result<Self> {
        let array = match array.as_bytes() {
            Ok(_) => array.clone(),
            Err(error) if matches!(error.kind(), ErrorKind::NotContiguous) => array.contiguous()?,
            Err(error) => return Err(error),
        };
        let bytes = array.as_bytes()?;
        let (data, bytes) = (bytes.as_ptr(), bytes.len());
        let mut strides = Vec::new();
        row_major(array.shape(), &mut strides);
        Ok(Self {
            data,
            bytes,
            shape: array.shape().to_vec(),
            strides,
            dtype: array.dtype(),
            array: Some(array),
        })
    }

    /// Asks for huge pages, where there are any.
    pub(crate) fn prefer_huge_pages(&self) {
        #[cfg(target_os = "linux")]
        super::huge_pages::prefer(self.view().bytes);
    }

    pub(crate) fn view(&self) -> HostView<'_> {
        HostView {
            // SAFETY: the bytes of `array`, which is borrowed with `self`; the memory of an
            // array that is referred to twice at least while it is used is never given away.
            bytes: unsafe { parts(self.data, self.bytes) },
            shape: &self.shape,
            strides: &self.strides,
            dtype: self.dtype,
        }
    }
}

/// A slice whose pointer may be null when it is empty.
///
/// # Safety
/// As for [`slice::from_raw_parts`], but for that.
unsafe fn parts<'a, T>(data: *const T, len: usize) -> &'a [T] {
    if len == 0 {
        return &[];
    }
    // SAFETY: the caller's word.
    unsafe { slice::from_raw_parts(data, len) }
}

/// The bytes of elements of `T`, whose dtype has been compared, as such.
pub(crate) fn host_slice<T: Element>(bytes: &[u8]) -> &[T] {
    if bytes.is_empty() {
        return &[];
    }
    // SAFETY: the bytes are whole elements of `T` (see `slice_of` for the bit patterns); MLX
    // aligns buffers to 8 bytes and packs to 16, which no element exceeds.
    unsafe { slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size_of::<T>()) }
}

/// As [`host_slice`], to be written.
pub(crate) fn host_slice_mut<T: Element>(bytes: &mut [u8]) -> &mut [T] {
    if bytes.is_empty() {
        return &mut [];
    }
    // SAFETY: as in `host_slice`.
    unsafe { slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), bytes.len() / size_of::<T>()) }
}
