//! MLX's memory: what is in use, what is kept for reuse, and the limits of both, in bytes.

use crate::Result;
use crate::ffi::call;

macro_rules! figure {
    ($(#[$doc:meta])* $name:ident, $function:ident) => {
        $(#[$doc])*
        ///
        /// # Errors
        /// When MLX cannot tell.
        pub fn $name() -> Result<usize> {
            let mut bytes = 0;
            call!($function(&raw mut bytes))?;
            Ok(bytes)
        }
    };
}

figure!(
    /// Bytes of the buffers that arrays hold.
    active, mlx_get_active_memory
);
figure!(
    /// Bytes of freed buffers that are kept for reuse.
    cached, mlx_get_cache_memory
);
figure!(
    /// The most bytes that were active at once, since the start or [`reset_peak`].
    peak, mlx_get_peak_memory
);

/// Lets [`peak`] start again.
///
/// # Errors
/// When MLX refuses.
pub fn reset_peak() -> Result<()> {
    call!(mlx_reset_peak_memory())
}

/// Gives freed buffers back to the system.
///
/// # Errors
/// When MLX refuses.
pub fn clear_cache() -> Result<()> {
    call!(mlx_clear_cache())
}

/// Limits the bytes of freed buffers that are kept for reuse. Returns the former limit. MLX
/// keeps none on a CPU, where this does nothing and returns 0.
///
/// # Errors
/// When MLX refuses the limit.
pub fn set_cache_limit(bytes: usize) -> Result<usize> {
    let mut former = 0;
    call!(mlx_set_cache_limit(&raw mut former, bytes))?;
    Ok(former)
}

/// Limits the bytes that MLX allocates: on a GPU it waits for running work and drops its cache
/// to stay below. On a CPU MLX keeps the number alone. Returns the former limit.
///
/// # Errors
/// When MLX refuses the limit.
pub fn set_limit(bytes: usize) -> Result<usize> {
    let mut former = 0;
    call!(mlx_set_memory_limit(&raw mut former, bytes))?;
    Ok(former)
}
