//! Ctrl-C: the first one ends what is being done in good order, the second one the program.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use mlex_models::generate::CancelHandle;

use crate::failure::INTERRUPTED;

/// Lets the first Ctrl-C call `cancel`, on a thread of its own. To be called once.
///
/// # Errors
/// When the system refuses the handler.
pub(crate) fn cancel_on_interrupt(cancel: impl Fn() + Send + 'static) -> Result<()> {
    let pressed = AtomicBool::new(false);
    let on_interrupt = move || {
        if pressed.swap(true, Ordering::Relaxed) {
            leave_at_once();
        }
        cancel();
    };
    ctrlc::set_handler(on_interrupt).context("handler of Ctrl-C")
}

/// What Ctrl-C ends, one thing after the other. Pressed when there is nothing, it ends the
/// program.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupts(Arc<Mutex<Option<CancelHandle>>>);

impl Interrupts {
    /// Takes Ctrl-C over. To be called once.
    ///
    /// # Errors
    /// When the system refuses the handler.
    pub(crate) fn install() -> Result<Self> {
        let interrupts = Self::default();
        let seen = interrupts.clone();
        let on_interrupt = move || match seen.set(None) {
            Some(handle) => handle.cancel(),
            None => leave_at_once(),
        };
        ctrlc::set_handler(on_interrupt).context("handler of Ctrl-C")?;
        Ok(interrupts)
    }

    /// Sets what the next Ctrl-C ends; gives back what it was.
    pub(crate) fn set(&self, handle: Option<CancelHandle>) -> Option<CancelHandle> {
        let mut current = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *current, handle)
    }
}

/// Ends the program while MLX computes.
///
/// `std::process::exit` would run the libraries' clean-up, which waits for the computation
/// (OpenBLAS) or crashes beside it. Becoming another program ends all threads without that.
fn leave_at_once() -> ! {
    #[cfg(unix)]
    {
        use std::os::unix::process::CommandExt;
        let exit = format!("exit {INTERRUPTED}");
        // It returns only when there is no shell.
        let _ = std::process::Command::new("/bin/sh")
            .args(["-c", &exit])
            .exec();
    }
    std::process::abort()
}
