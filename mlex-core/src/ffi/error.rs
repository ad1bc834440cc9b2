//! MLX's errors: mlx-c hands the message to a handler on the calling thread, then returns 1.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};
use std::panic::Location;

use crate::{Error, ErrorKind};

thread_local! {
    static MESSAGE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Replaces mlx-c's own handler, which ends the process.
pub(super) fn install_handler() {
    // SAFETY: the handler is a plain function that lives as long as the process.
    unsafe { mlex_sys::mlx_set_error_handler(Some(on_error), std::ptr::null_mut(), None) };
}

extern "C" fn on_error(message: *const c_char, _data: *mut c_void) {
    if message.is_null() {
        return;
    }
    // SAFETY: mlx-c passes a C string that lives during the call.
    let message = unsafe { CStr::from_ptr(message) }.to_string_lossy();
    // The file and line of mlx-c's wrapper say nothing to a caller.
    let message = message
        .rsplit_once(" at ")
        .map_or(&*message, |(text, _)| text);
    let line = message.split_whitespace().collect::<Vec<_>>().join(" ");
    // Fails only while the thread ends: then nobody reads the message either.
    let _ = MESSAGE.try_with(|slot| *slot.borrow_mut() = Some(line));
}

/// The message of the call that has just failed on this thread, as an error of `op`.
#[track_caller]
pub(super) fn take(op: &'static str) -> Error {
    let message = MESSAGE.with(|slot| slot.borrow_mut().take());
    // MLX starts most messages with the operation's name in brackets.
    let message = message.unwrap_or_else(|| "failed without a message".to_owned());
    let message = match message.split_once("] ") {
        Some((name, rest)) if name.starts_with('[') => rest.to_owned(),
        _ => message,
    };
    Error::new(ErrorKind::Mlx {
        op,
        message,
        location: Location::caller(),
    })
}
