//! Ctrl-C: the first one ends what is being done in good order, the second one the program.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

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
