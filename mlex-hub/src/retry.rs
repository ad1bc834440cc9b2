//! How long it is tried again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::Error;

/// How often in a row a request may fail without bringing a byte, after the first time.
const RETRIES: u32 = 5;
/// How soon a wait ends that has lost its purpose.
const TICK: Duration = Duration::from_millis(100);

/// The patience with one file.
pub(crate) struct Patience<'a> {
    delay: Duration,
    stop: &'a AtomicBool,
    failures: u32,
}

impl<'a> Patience<'a> {
    /// The first wait takes `delay`, and each one twice as long as the one before. `stop` ends
    /// it all.
    pub(crate) fn new(delay: Duration, stop: &'a AtomicBool) -> Self {
        Self {
            delay,
            stop,
            failures: 0,
        }
    }

    /// Whether it is all over.
    pub(crate) fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Something has come.
    pub(crate) fn renew(&mut self) {
        self.failures = 0;
    }

    /// Waits after a failure. Whether it is worth another try.
    pub(crate) fn again(&mut self, error: &Error) -> bool {
        if !error.is_transient() || self.failures == RETRIES {
            return false;
        }
        let end = Instant::now() + self.delay.saturating_mul(1 << self.failures);
        self.failures += 1;
        while !self.is_over()
            && let Some(left) = end.checked_duration_since(Instant::now())
        {
            thread::sleep(left.min(TICK));
        }
        !self.is_over()
    }
}
