//! What reads the calls between two markers.

use serde_json::{Map, Value};

/// What a reader has found out.
#[derive(Debug, PartialEq)]
pub(super) enum Grown {
    /// A call begins.
    Begin { name: String, id: Option<String> },
    /// Its arguments grow by so much JSON text.
    Arguments(String),
    /// It is whole. A reader returns right after this.
    End(Map<String, Value>),
}

/// How a reader goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    /// With more text.
    More,
    /// Not at all: what was consumed ended the calls.
    Closed,
    /// Not at all: what comes now, and what was consumed since the last call, is text.
    Left,
    /// Not at all: this is no call.
    Failed,
}

/// How far a reader came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Progress {
    /// Bytes of the text that it took: all of them, except after [`Grown::End`] and at an end.
    /// A failure is at the same place in the text however that was cut.
    pub(super) consumed: usize,
    pub(super) status: Status,
    /// With a failure, how much of the end of what was taken was not looked at yet.
    pub(super) back: usize,
}

impl Progress {
    pub(super) fn new(consumed: usize, status: Status) -> Self {
        Self {
            consumed,
            status,
            back: 0,
        }
    }
}

/// A reader of calls in one syntax. Its result depends on the text, not on its pieces.
pub(super) trait Body: std::fmt::Debug + Send {
    /// Takes more text, at most up to the end of a call.
    fn push(&mut self, text: &str, grown: &mut Vec<Grown>) -> Progress;

    /// Ends the text. Says whether all of it was calls, and at least one.
    fn finish(&mut self) -> bool;
}
