//! Weights in huge pages. A decode step reads all of them, and with pages of 4 KiB it would wait
//! for the tables of the pages as well, and the CPU's prefetcher stops at the end of each.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

/// The size of a huge page, on CPUs with pages of 4 KiB.
pub(super) const HUGE: usize = 2 << 20;

/// What is smaller is not worth the trouble.
pub(super) const SMALL: usize = 64 << 10;

/// Layers come one after the other. A call costs more than a page does, and their memory adjoins.
const PAUSE: Duration = Duration::from_millis(5);

/// Asks Linux (6.1 or later) to put this memory into huge pages, once, on a thread of its own,
/// since that is a copy. Nothing but time depends on it: where it cannot be done, or no huge page
/// is free, all stays as it is.
pub(super) fn prefer(bytes: &[u8]) {
    static QUEUE: OnceLock<Option<Sender<Range<usize>>>> = OnceLock::new();
    if bytes.len() < SMALL {
        return;
    }
    let queue = QUEUE.get_or_init(|| {
        let (queue, ranges) = channel();
        let name = "mlex-huge-pages".to_owned();
        let spawned = thread::Builder::new().name(name).spawn(|| serve(ranges));
        spawned.ok().map(|_| queue)
    });
    if let Some(queue) = queue {
        let start = bytes.as_ptr().addr();
        // Fails when the thread has ended, which it never does.
        let _ = queue.send(start..start + bytes.len());
    }
}

/// Takes the ranges that come together at a time.
fn serve(ranges: Receiver<Range<usize>>) {
    let mut asked = BTreeSet::new();
    while let Ok(range) = ranges.recv() {
        let mut blocks = BTreeSet::from_iter(blocks(range));
        while let Ok(range) = ranges.recv_timeout(PAUSE) {
            blocks.extend(self::blocks(range));
        }
        blocks.retain(|block| asked.insert(*block));
        runs(blocks).into_iter().for_each(collapse);
    }
}

/// The numbers of the huge pages that a range is in.
fn blocks(range: Range<usize>) -> Range<usize> {
    range.start / HUGE..range.end.div_ceil(HUGE)
}

/// Blocks that follow each other.
fn runs(blocks: impl IntoIterator<Item = usize>) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for block in blocks {
        match runs.last_mut() {
            Some(run) if run.end == block => run.end += 1,
            _ => runs.push(block..block + 1),
        }
    }
    runs
}

/// Makes huge pages of the pages of some blocks. What fails ends the call, though it may be a gap
/// between two mappings: both halves are tried again.
fn collapse(blocks: Range<usize>) {
    let start = std::ptr::without_provenance_mut(blocks.start * HUGE);
    // SAFETY: this changes which pages memory is in, and nothing in it, whoever it belongs to; an
    // address without memory is an error.
    let failed = unsafe { libc::madvise(start, blocks.len() * HUGE, libc::MADV_COLLAPSE) } != 0;
    if failed && blocks.len() > 1 {
        let middle = blocks.start + blocks.len() / 2;
        collapse(blocks.start..middle);
        collapse(middle..blocks.end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_adjoin_are_one_run() {
        assert_eq!(blocks(1..HUGE), 0..1);
        assert_eq!(blocks(HUGE - 1..2 * HUGE + 1), 0..3);
        assert_eq!(runs([1, 2, 3, 7, 9, 10]), [1..4, 7..8, 9..11]);
        assert!(runs([]).is_empty());
    }
}
