//! How far a download is.

use std::sync::atomic::{AtomicU64, Ordering};

/// How far [`Hub::pull`](crate::Hub::pull) is with all files together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes that are there, those of an earlier try among them.
    pub done: u64,
    /// Bytes of the files that were not in the cache.
    pub total: u64,
}

/// Adds up what several threads do.
pub(crate) struct Meter<'a> {
    done: AtomicU64,
    total: AtomicU64,
    report: &'a (dyn Fn(Progress) + Sync),
}

impl<'a> Meter<'a> {
    pub(crate) fn new(report: &'a (dyn Fn(Progress) + Sync)) -> Self {
        Self {
            done: AtomicU64::new(0),
            total: AtomicU64::new(0),
            report,
        }
    }

    /// There are `bytes` more to fetch.
    pub(crate) fn expect(&self, bytes: u64) {
        self.total.fetch_add(bytes, Ordering::Relaxed);
    }

    /// `bytes` more are there.
    pub(crate) fn add(&self, bytes: u64) {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed);
        (self.report)(Progress {
            // What servers say of lengths may be anything.
            done: done.wrapping_add(bytes),
            total: self.total.load(Ordering::Relaxed),
        });
    }

    /// `bytes` that were there have been thrown away.
    pub(crate) fn take_back(&self, bytes: u64) {
        self.done.fetch_sub(bytes, Ordering::Relaxed);
    }
}
