//! Weights in huge pages. A decode step reads all of them, and with pages of 4 KiB it would wait
//! for the tables of the pages as well, and the CPU's prefetcher stops at the end of each.

use std::collections::HashSet;
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};
use std::thread;

/// The size of a huge page, on CPUs with pages of 4 KiB.
const HUGE: usize = 2 << 20;

/// What is smaller is not worth a call.
const SMALL: usize = 64 << 10;

/// Memory to be put into huge pages.
struct Range {
    start: usize,
    end: usize,
    /// It holds weights, which stay where they are: asked for once.
    lasting: bool,
}

/// Asks Linux (6.1 or later) to put this memory into huge pages, on a thread of its own, since that
/// takes about as long as copying it. Nothing but time depends on it: where it cannot be done, or
/// no huge page is free, all stays as it is.
pub(super) fn prefer(bytes: &[u8], lasting: bool) {
    static QUEUE: OnceLock<Option<Sender<Range>>> = OnceLock::new();
    if bytes.len() < SMALL {
        return;
    }
    let queue = QUEUE.get_or_init(|| {
        let (queue, ranges) = channel::<Range>();
        let name = "mlex-huge-pages".to_owned();
        let spawned = thread::Builder::new().name(name).spawn(move || {
            let mut asked = HashSet::new();
            for range in ranges {
                let first = range.start / HUGE * HUGE;
                (first..range.end)
                    .step_by(HUGE)
                    .filter(|block| asked.insert(*block) || !range.lasting)
                    .for_each(collapse);
            }
        });
        spawned.ok().map(|_| queue)
    });
    if let Some(queue) = queue {
        let start = bytes.as_ptr().addr();
        // Fails when the thread has ended, which it never does.
        let _ = queue.send(Range {
            start,
            end: start + bytes.len(),
            lasting,
        });
    }
}

/// Makes one huge page of the pages at `start`.
fn collapse(start: usize) {
    // SAFETY: this changes which pages memory is in, and nothing in it, whoever it belongs to; an
    // address without memory is an error, which is ignored.
    unsafe { libc::madvise(start as *mut libc::c_void, HUGE, libc::MADV_COLLAPSE) };
}
