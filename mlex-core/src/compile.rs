//! Compiled functions: traced once per input shapes, then replayed.

use std::fmt;

use crate::ffi::{Closure, call};
use crate::ops::unless_empty;
use crate::{Array, Device, Result, Stream};

/// A function from arrays to arrays that MLX traces at its first call and then replays.
///
/// On a GPU, chains of element-wise operations are fused into one kernel. On the CPU nothing
/// is fused: MLX would run a C++ compiler at run time and load its result from a folder
/// that others may write to.
pub struct Compiled(Closure);

impl Compiled {
    /// Compiles `function`, which must depend on its inputs alone (what it captures is
    /// frozen at the first call). A `shapeless` function is not traced again when the
    /// shapes of the inputs change, which some operations do not allow.
    ///
    /// # Errors
    /// When MLX refuses.
    pub fn new(
        function: impl Fn(&[Array]) -> Result<Vec<Array>> + 'static,
        shapeless: bool,
    ) -> Result<Self> {
        Closure::compiled(Box::new(function), shapeless).map(Self)
    }

    /// Calls the function.
    ///
    /// # Errors
    /// The function's own at its first call, otherwise MLX's.
    ///
    /// # Panics
    /// When the function panics.
    #[track_caller]
    pub fn call<'a>(&self, inputs: impl IntoIterator<Item = &'a Array>) -> Result<Vec<Array>> {
        let mode = match Stream::current()?.device() {
            Device::Cpu => mlex_sys::MLX_COMPILE_MODE_NO_FUSE,
            Device::Gpu(_) => mlex_sys::MLX_COMPILE_MODE_ENABLED,
        };
        let _guard = crate::ffi::lock();
        call!(mlx_set_compile_mode(mode))?;
        // A fused kernel on a GPU divides by the number of elements.
        let outputs = self.0.apply(inputs)?.into_iter();
        outputs.map(|output| unless_empty(Ok(output))).collect()
    }
}

impl fmt::Debug for Compiled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Compiled")
    }
}
