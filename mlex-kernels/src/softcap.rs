//! Soft bounds.

use crate::error::check_len;
use crate::simd::Level;
use crate::simd::softcap::Softcap;
use crate::threads::parallel_chunks;
use crate::{Element, Result};

/// Elements that one task takes.
const TASK: usize = 8192;

/// `out = cap * tanh(x / cap)`, computed in f32 and rounded once. The relative error in f32 is
/// below 5e-7.
///
/// # Errors
/// When the slices differ in length.
pub fn softcap<T: Element>(out: &mut [T], x: &[T], cap: f32) -> Result<()> {
    check_len("softcap: x", out.len(), x.len())?;
    let level = Level::current();
    parallel_chunks(out, TASK, |first, out| {
        let x = &x[first..first + out.len()];
        level.dispatch(Softcap { x, out, cap });
    });
    Ok(())
}
