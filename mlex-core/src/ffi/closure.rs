//! Rust functions as MLX closures, for `compile`.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use mlex_sys::{mlx_closure, mlx_vector_array};

use super::{VectorHandle, call, lock};
use crate::{Array, Error, Result};

type Function = Box<dyn Fn(&[Array]) -> Result<Vec<Array>>>;

/// How a function that MLX called has failed.
enum Failure {
    Error(Error),
    Panic(Box<dyn Any + Send>),
}

thread_local! {
    /// What the innermost function has failed with: MLX itself carries only that it did.
    static FAILURE: RefCell<Option<Failure>> = const { RefCell::new(None) };
}

/// A function that MLX can trace. Not `Send`, since the function need not be.
pub(crate) struct Closure(mlx_closure);

impl Closure {
    /// `function`, compiled: traced at its first call for a set of input shapes and dtypes.
    pub(crate) fn compiled(function: Function, shapeless: bool) -> Result<Self> {
        let _guard = lock();
        let payload = Box::into_raw(Box::new(function)).cast::<c_void>();
        // SAFETY: `payload` is a boxed `Function`, which is what both callbacks take it for;
        // MLX calls `drop_function` once, when the last copy of the closure is gone.
        let plain = Self(unsafe {
            mlex_sys::mlx_closure_new_func_payload(Some(trampoline), payload, Some(drop_function))
        });
        let mut compiled = Self(mlx_closure {
            ctx: std::ptr::null_mut(),
        });
        call!(mlx_compile(&raw mut compiled.0, plain.0, shapeless))?;
        Ok(compiled)
    }

    /// Calls it.
    #[track_caller]
    pub(crate) fn apply<'a>(
        &self,
        inputs: impl IntoIterator<Item = &'a Array>,
    ) -> Result<Vec<Array>> {
        let _guard = lock();
        FAILURE.with(|slot| slot.borrow_mut().take());
        let inputs = VectorHandle::from_arrays(inputs);
        let mut outputs = VectorHandle::empty();
        let applied = call!(mlx_closure_apply(
            outputs.as_mut_ptr(),
            self.0,
            inputs.raw()
        ));
        match FAILURE.with(|slot| slot.borrow_mut().take()) {
            Some(Failure::Panic(payload)) => resume_unwind(payload),
            Some(Failure::Error(error)) => return Err(error),
            None => applied?,
        }
        outputs.to_arrays()
    }
}

impl Drop for Closure {
    fn drop(&mut self) {
        if !self.0.ctx.is_null() {
            let _guard = lock();
            // SAFETY: the handle is owned and is not used after this.
            unsafe { mlex_sys::mlx_closure_free(self.0) };
        }
    }
}

extern "C" fn trampoline(
    outputs: *mut mlx_vector_array,
    inputs: mlx_vector_array,
    payload: *mut c_void,
) -> c_int {
    // SAFETY: the payload that `compiled` gave, alive as long as the closure is.
    let function = unsafe { &*payload.cast::<Function>() };
    // A panic must not cross C++: it is carried around and goes on in `apply`.
    let result = catch_unwind(AssertUnwindSafe(|| {
        // Borrowed from MLX, which frees it: not dropped here.
        let inputs = std::mem::ManuallyDrop::new(VectorHandle::from_raw(inputs));
        function(&inputs.to_arrays()?)
    }));
    let failure = match result {
        Ok(Ok(arrays)) => {
            let vector = VectorHandle::from_arrays(&arrays);
            // SAFETY: `outputs` is the out-handle that MLX gave; the references are copied.
            return unsafe { mlex_sys::mlx_vector_array_set(outputs, vector.raw()) };
        }
        Ok(Err(error)) => Failure::Error(error),
        Err(payload) => Failure::Panic(payload),
    };
    FAILURE.with(|slot| *slot.borrow_mut() = Some(failure));
    1
}

extern "C" fn drop_function(payload: *mut c_void) {
    // SAFETY: the box that `compiled` leaked, given back once.
    drop(unsafe { Box::from_raw(payload.cast::<Function>()) });
}
