//! Stop strings, found in streamed text.

use super::search::Search;

/// Finds stop strings in text that arrives in pieces.
///
/// Text is held back only while it may still become part of a stop string, and a stop string
/// is found wherever the borders of the pieces lie. Of several stop strings, the one that ends
/// first in the text counts; of those that end at the same place, the longest. So the result
/// depends on the text alone, not on how it was cut.
#[derive(Debug, Clone)]
pub struct StopSequences {
    search: Search,
    stopped: bool,
}

/// What a piece of text turned out to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StopOutcome {
    /// Text that belongs to the output for certain: what stood held back, then of the piece
    /// what can be told already, up to the stop string if there is one.
    pub text: String,
    /// The stop string that was found, as an index into the list given to
    /// [`StopSequences::new`]. Nothing after it is output.
    pub stop: Option<usize>,
}

impl StopSequences {
    /// A search for `stops`. Empty strings are never found.
    pub fn new<S: AsRef<str>>(stops: &[S]) -> Self {
        Self {
            search: Search::new(stops),
            stopped: false,
        }
    }

    /// Whether there is nothing to search for.
    pub fn is_empty(&self) -> bool {
        self.search.is_empty()
    }

    /// Takes the next piece of text and returns what is output for certain by now.
    /// After a stop string was found every further piece is dropped.
    pub fn push(&mut self, piece: &str) -> StopOutcome {
        if self.stopped {
            return StopOutcome {
                text: String::new(),
                stop: None,
            };
        }
        let outcome = self.search.push(piece);
        self.stopped = outcome.found.is_some();
        StopOutcome {
            text: outcome.text,
            stop: outcome.found,
        }
    }

    /// Ends the text: returns what was held back. A new text can begin afterwards.
    pub fn finish(&mut self) -> String {
        self.stopped = false;
        self.search.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, Option<usize>) {
        let mut search = StopSequences::new(stops);
        let mut texts = Vec::new();
        for piece in pieces {
            let outcome = search.push(piece);
            texts.push(outcome.text);
            if outcome.stop.is_some() {
                return (texts, outcome.stop);
            }
        }
        texts.push(search.finish());
        (texts, None)
    }

    #[test]
    fn a_stop_across_pieces_is_found_and_cut() {
        assert_eq!(
            run(&["</end>"], &["one <", "/e", "nd> two"]),
            (vec!["one ".into(), "".into(), "".into()], Some(0))
        );
    }

    #[test]
    fn text_is_released_as_soon_as_it_cannot_be_a_stop() {
        assert_eq!(
            run(&["aab"], &["a", "a", "a", "c", "a"]),
            (
                vec![
                    "".into(),
                    "".into(),
                    "a".into(),
                    "aac".into(),
                    "".into(),
                    "a".into()
                ],
                None
            )
        );
    }

    #[test]
    fn the_stop_that_ends_first_counts_and_releases_the_longer_prefix() {
        assert_eq!(
            run(&["abcd", "bc"], &["xab", "cd"]),
            (vec!["x".into(), "a".into()], Some(1))
        );
        assert_eq!(run(&["c", "abc"], &["abc"]), (vec!["".into()], Some(1)));
    }

    #[test]
    fn empty_stops_never_match_and_the_search_can_be_used_again() {
        assert_eq!(run(&[""], &["a"]).0.concat(), "a");
        assert!(StopSequences::new(&[""]).is_empty());
        let mut search = StopSequences::new(&["x"]);
        assert_eq!(search.push("ax").stop, Some(0));
        assert_eq!(search.push("b").text, "");
        assert_eq!(search.finish(), "");
        assert_eq!(search.push("b").text, "b");
    }
}
