//! Text that waits for the string that ends it.

/// A buffer that is read up to markers, in time that grows with the text alone.
#[derive(Debug, Default)]
pub(super) struct Pending {
    text: String,
    /// Where the search goes on.
    from: usize,
}

/// Whether a text begins as expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Begins {
    /// It does, and the beginning was taken.
    Yes,
    /// It may, with more text.
    Perhaps,
    /// It does not.
    No,
}

impl Pending {
    pub(super) fn push(&mut self, text: &str) {
        self.text.push_str(text);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// Gives back what was not read.
    pub(super) fn take(&mut self) -> String {
        self.from = 0;
        std::mem::take(&mut self.text)
    }

    pub(super) fn skip_whitespace(&mut self) {
        let rest = self.text.trim_start().len();
        self.remove(self.text.len() - rest);
    }

    /// The text before `end`, which is taken too; nothing while `end` has not come.
    pub(super) fn until(&mut self, end: &str) -> Option<String> {
        match self.text[self.from..].find(end) {
            Some(at) => {
                let at = self.from + at;
                let before = self.text[..at].to_owned();
                self.remove(at + end.len());
                Some(before)
            }
            None => {
                // The end may have begun already.
                let from = self.text.len().saturating_sub(end.len() - 1);
                self.from = self.from.max(self.text.floor_char_boundary(from));
                None
            }
        }
    }

    /// Takes `start` from the beginning.
    pub(super) fn begins(&mut self, start: &str) -> Begins {
        if self.text.starts_with(start) {
            self.remove(start.len());
            Begins::Yes
        } else if start.starts_with(&self.text) {
            Begins::Perhaps
        } else {
            Begins::No
        }
    }

    fn remove(&mut self, count: usize) {
        if count > 0 {
            self.text.drain(..count);
            self.from = 0;
        }
    }

    /// The first character.
    pub(super) fn first(&self) -> Option<char> {
        self.text.chars().next()
    }
}
