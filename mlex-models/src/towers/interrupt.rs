//! What ends the work of towers before its end.
//!
//! A tower over a large image takes seconds. It is computed block by block where somebody may no
//! longer want it, and not as one graph at its end.

use std::cell::RefCell;
use std::rc::Rc;

use mlex_core::{Array, async_eval};

use crate::{Error, ErrorKind, Result};

type Stop = Rc<dyn Fn() -> bool>;

thread_local! {
    /// What is asked on this thread, where there is something to ask.
    static STOP: RefCell<Option<Stop>> = const { RefCell::new(None) };
}

/// Runs `work`. The towers that it runs ask `stop` between their blocks, between frames and
/// before each medium, on this thread, and end once it says true.
///
/// # Errors
/// Those of `work`; that of a tower which was ended is [`ErrorKind::Cancelled`].
pub fn interruptible<T>(
    stop: impl Fn() -> bool + 'static,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    /// Puts back what was asked before, whatever becomes of the work.
    struct Before(Option<Stop>);
    impl Drop for Before {
        fn drop(&mut self) {
            STOP.set(self.0.take());
        }
    }
    let _before = Before(STOP.replace(Some(Rc::new(stop))));
    work()
}

/// Ends the work where it is not wanted any more.
pub(crate) fn check() -> Result<()> {
    let stop = STOP.with_borrow(Clone::clone);
    match stop {
        Some(stop) if stop() => Err(Error::new(ErrorKind::Cancelled)),
        _ => Ok(()),
    }
}

/// The blocks of a tower, one after the other.
#[derive(Default)]
pub(super) struct Blocks {
    /// What the block before the last one gave.
    last: Option<Array>,
}

impl Blocks {
    /// To be called with what a block gives. Where the work may be ended, this is computed, one
    /// block ahead of the wait for it, so that a device always has something to do.
    pub(super) fn done(&mut self, x: &Array) -> Result<()> {
        check()?;
        if STOP.with_borrow(Option::is_some) {
            async_eval([x])?;
            if let Some(last) = self.last.replace(x.clone()) {
                last.eval()?;
            }
        }
        Ok(())
    }
}
