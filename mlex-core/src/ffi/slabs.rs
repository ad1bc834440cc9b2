//! Slabs of memory in huge pages, and the pieces that they are given out in.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use memmap2::{Advice, MmapMut};

use super::huge_pages::{HUGE, SMALL};

/// The size of a slab that several pieces share.
const SLAB: usize = 16 * HUGE;

/// A larger piece has a slab of its own.
const SHARED: usize = SLAB / 2;

/// Pieces are multiples of a page.
const PAGE: usize = 4 << 10;

/// Memory that pieces are cut from, given back to the system when none is left.
struct Slab {
    /// Where the first huge page begins.
    start: usize,
    size: usize,
    /// Places and lengths of what is not given out; no two of them touch.
    free: BTreeMap<usize, usize>,
    _memory: MmapMut,
}

static SLABS: Mutex<Vec<Slab>> = Mutex::new(Vec::new());

fn slabs() -> MutexGuard<'static, Vec<Slab>> {
    SLABS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Slab {
    /// None where the system has no such memory.
    fn new(size: usize) -> Option<Self> {
        let mut memory = MmapMut::map_anon(size.checked_add(HUGE)?).ok()?;
        // Before the first use; without huge pages it is memory like any other.
        let _ = memory.advise(Advice::HugePage);
        let mapped = memory.as_mut_ptr().expose_provenance();
        let start = mapped.next_multiple_of(HUGE);
        Some(Self {
            start,
            size,
            free: BTreeMap::from([(0, size)]),
            _memory: memory,
        })
    }

    /// The first place of `size` bytes.
    fn take(&mut self, size: usize) -> Option<usize> {
        let (&at, &free) = self.free.iter().find(|(_, free)| **free >= size)?;
        self.free.remove(&at);
        if free > size {
            self.free.insert(at + size, free - size);
        }
        Some(at)
    }

    /// Takes back `size` bytes, together with what is free around them.
    fn give(&mut self, at: usize, size: usize) {
        let (mut from, mut to) = (at, at + size);
        if let Some(after) = self.free.remove(&to) {
            to += after;
        }
        if let Some((&before, &free)) = self.free.range(..at).next_back()
            && before + free == at
        {
            from = before;
        }
        self.free.insert(from, to - from);
    }

    fn is_empty(&self) -> bool {
        self.free.get(&0) == Some(&self.size)
    }
}

/// A part of a slab that nothing else refers to.
#[derive(Debug)]
pub(crate) struct Piece {
    start: NonNull<u128>,
    /// In bytes, a multiple of [`PAGE`].
    size: usize,
}

// SAFETY: it is the only owner of its memory, as a box is.
unsafe impl Send for Piece {}
// SAFETY: a reference gives out nothing but references to words.
unsafe impl Sync for Piece {}

impl Piece {
    /// At least `size` bytes of any content; none where that is little, or there is no such memory.
    pub(super) fn take(size: usize) -> Option<Self> {
        if size < SMALL {
            return None;
        }
        let size = size.checked_next_multiple_of(PAGE)?;
        let mut slabs = slabs();
        for slab in slabs.iter_mut().filter(|_| size <= SHARED) {
            if let Some(at) = slab.take(size) {
                return Self::at(slab.start + at, size);
            }
        }
        let whole = if size > SHARED {
            size.checked_next_multiple_of(HUGE)?
        } else {
            SLAB
        };
        let mut slab = Slab::new(whole)?;
        let piece = Self::at(slab.start + slab.take(size)?, size);
        slabs.push(slab);
        piece
    }

    fn at(start: usize, size: usize) -> Option<Self> {
        let start = NonNull::new(std::ptr::with_exposed_provenance_mut(start))?;
        Some(Self { start, size })
    }

    pub(super) fn words(&self) -> &[u128] {
        // SAFETY: the memory is mapped until the piece is given back, aligned to a page, zero or
        // written before, and in no other piece.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.size / size_of::<u128>()) }
    }

    pub(super) fn words_mut(&mut self) -> &mut [u128] {
        // SAFETY: as above, and it is borrowed alone.
        unsafe {
            std::slice::from_raw_parts_mut(self.start.as_ptr(), self.size / size_of::<u128>())
        }
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let start = self.start.addr().get();
        let mut slabs = slabs();
        let found = slabs
            .iter_mut()
            .enumerate()
            .find(|(_, slab)| (slab.start..slab.start + slab.size).contains(&start));
        if let Some((index, slab)) = found {
            slab.give(start - slab.start, self.size);
            if slab.is_empty() {
                slabs.swap_remove(index);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against a list of pieces: none overlap, each keeps what was written to it, and what is
        /// given back can be taken again.
        #[test]
        fn pieces_are_apart(steps in prop::collection::vec((any::<bool>(), 1usize..3 << 20), 1..60)) {
            let mut held: Vec<(Piece, u128)> = Vec::new();
            for (step, (take, size)) in steps.into_iter().enumerate() {
                if !take && !held.is_empty() {
                    let (piece, mark) = held.swap_remove(size % held.len());
                    prop_assert!(piece.words().iter().step_by(200).all(|&word| word == mark));
                } else if let Some(mut piece) = Piece::take(size) {
                    prop_assert!(size >= SMALL && piece.size >= size && piece.size < size + PAGE);
                    let mark = step as u128;
                    piece.words_mut().iter_mut().step_by(200).for_each(|word| *word = mark);
                    held.push((piece, mark));
                } else {
                    prop_assert!(size < SMALL);
                }
            }
            for (piece, mark) in &held {
                prop_assert!(piece.words().iter().step_by(200).all(|word| word == mark));
            }
        }
    }

    #[test]
    fn a_slab_is_whole_again_when_all_is_given_back() {
        let mut slab = Slab::new(SLAB).unwrap();
        let places = [3 * PAGE, PAGE, 5 * PAGE].map(|size| (slab.take(size).unwrap(), size));
        assert_eq!(places.map(|(at, _)| at), [0, 3 * PAGE, 4 * PAGE]);
        assert!(slab.take(SLAB).is_none());
        slab.give(places[0].0, places[0].1);
        slab.give(places[2].0, places[2].1);
        assert!(!slab.is_empty());
        // The first gap that is large enough.
        assert_eq!(slab.take(4 * PAGE), Some(4 * PAGE));
        slab.give(4 * PAGE, 4 * PAGE);
        slab.give(places[1].0, places[1].1);
        assert!(slab.is_empty());
    }

    #[test]
    fn what_is_large_has_a_slab_of_its_own() {
        let piece = Piece::take(SHARED + 1).unwrap();
        let start = piece.start.addr().get();
        assert_eq!(start % HUGE, 0);
        // No other test has a slab of this size.
        let own = || {
            let slabs = slabs();
            slabs
                .iter()
                .filter(|slab| slab.size == SHARED + HUGE)
                .count()
        };
        assert_eq!(own(), 1);
        drop(piece);
        assert_eq!(own(), 0);
        assert!(Piece::take(usize::MAX - PAGE).is_none());
    }
}
