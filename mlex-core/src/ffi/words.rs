//! Memory of buffers. What is large lies in huge pages from its first use on, where the system has
//! them: pieces of slabs that are asked for as such. One piece seldom fills huge pages of its own,
//! and memory that has been used in pages of 4 KiB must be copied to get into them.

#[cfg(target_os = "linux")]
use super::slabs::Piece;

/// Words, zero or what was in them before.
#[derive(Debug)]
pub(crate) enum Words {
    Own(Vec<u128>),
    #[cfg(target_os = "linux")]
    Piece(Piece),
}

impl Default for Words {
    fn default() -> Self {
        Self::Own(Vec::new())
    }
}

impl Words {
    /// At least `count`.
    pub(crate) fn new(count: usize) -> Self {
        #[cfg(target_os = "linux")]
        if let Some(piece) = count.checked_mul(size_of::<u128>()).and_then(Piece::take) {
            return Self::Piece(piece);
        }
        Self::Own(vec![0; count])
    }

    pub(crate) fn len(&self) -> usize {
        self.words().len()
    }

    fn words(&self) -> &[u128] {
        match self {
            Self::Own(words) => words,
            #[cfg(target_os = "linux")]
            Self::Piece(piece) => piece.words(),
        }
    }

    fn words_mut(&mut self) -> &mut [u128] {
        match self {
            Self::Own(words) => words,
            #[cfg(target_os = "linux")]
            Self::Piece(piece) => piece.words_mut(),
        }
    }

    /// Aligned for every element type.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        let words = self.words();
        // SAFETY: words have no padding, and any byte is a `u8`.
        unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
    }

    /// As [`as_bytes`](Self::as_bytes), to be written.
    pub(crate) fn as_bytes_mut(&mut self) -> &mut [u8] {
        let words = self.words_mut();
        // SAFETY: as above, and any bytes are a word.
        unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), size_of_val(words)) }
    }
}
