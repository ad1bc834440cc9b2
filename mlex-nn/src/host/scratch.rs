//! Memory for what an operation computes on the way, kept from call to call.

use std::cell::RefCell;

use half::{bf16, f16};

/// An element type with such memory on each thread.
pub(super) trait Scratch: mlex_core::Element + mlex_kernels::Element {
    /// Runs `body` with at least `count` elements of any content.
    fn with<R>(count: usize, body: impl FnOnce(&mut [Self]) -> R) -> R;
}

macro_rules! scratch {
    ($($element:ty => $zero:expr),*) => {
        $(
            impl Scratch for $element {
                fn with<R>(count: usize, body: impl FnOnce(&mut [Self]) -> R) -> R {
                    thread_local! {
                        static MEMORY: RefCell<Vec<$element>> = const { RefCell::new(Vec::new()) };
                    }
                    // Taken out, so that an operation within an operation has its own.
                    let mut memory = MEMORY.take();
                    if memory.len() < count {
                        memory.resize(count, $zero);
                    }
                    let result = body(&mut memory[..count]);
                    MEMORY.set(memory);
                    result
                }
            }
        )*
    };
}

scratch!(f32 => 0.0, f16 => f16::ZERO, bf16 => bf16::ZERO);
