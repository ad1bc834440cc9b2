//! How this process computes on a CPU.

/// Sets how many threads the CPU kernels use, the calling one included; 0 means every physical
/// core, as it is at first. MLX's own operations have their own threads.
pub fn set_threads(threads: usize) {
    mlex_kernels::threads::set_threads(threads);
}

/// How many threads the CPU kernels use, the calling one included.
pub fn threads() -> usize {
    mlex_kernels::threads::threads()
}

/// Turns the CPU kernels on (as they are at first) or off. Off, a CPU computes with MLX's own
/// operations: slower, for comparison.
pub fn set_kernels(enabled: bool) {
    mlex_nn::dispatch::set_kernels(enabled);
}
