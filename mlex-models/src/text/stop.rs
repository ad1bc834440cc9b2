//! Stop strings, found in streamed text.

use std::collections::VecDeque;

/// Finds stop strings in text that arrives in pieces.
///
/// Text is held back only while it may still become part of a stop string, and a stop string
/// is found wherever the borders of the pieces lie. Of several stop strings, the one that ends
/// first in the text counts; of those that end at the same place, the longest. So the result
/// depends on the text alone, not on how it was cut.
///
/// It is an Aho-Corasick automaton over the bytes: one step a byte, however many stop strings
/// there are. A match always lies on character borders, because UTF-8 sequences cannot match
/// in the middle of a character.
#[derive(Debug, Clone)]
pub struct StopSequences {
    nodes: Vec<Node>,
    stops: Vec<String>,
    state: usize,
    held: String,
    stopped: bool,
}

#[derive(Debug, Clone, Default)]
struct Node {
    // Few stop strings share a prefix, so a list searched from the front does.
    children: Vec<(u8, usize)>,
    /// The node of the longest proper suffix that is also a prefix of a stop string.
    fallback: usize,
    /// How many bytes lead to this node: what must be held back in this state.
    depth: usize,
    /// The longest stop string that ends here.
    stop: Option<usize>,
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
        let mut nodes = vec![Node::default()];
        for (index, stop) in stops.iter().enumerate() {
            let mut at = 0;
            for &byte in stop.as_ref().as_bytes() {
                at = match child(&nodes[at], byte) {
                    Some(next) => next,
                    None => {
                        let depth = nodes[at].depth + 1;
                        nodes.push(Node {
                            depth,
                            ..Node::default()
                        });
                        let next = nodes.len() - 1;
                        nodes[at].children.push((byte, next));
                        next
                    }
                };
            }
            if at != 0 {
                nodes[at].stop.get_or_insert(index);
            }
        }
        let mut queue: VecDeque<usize> = nodes[0].children.iter().map(|&(_, node)| node).collect();
        while let Some(at) = queue.pop_front() {
            for (byte, node) in nodes[at].children.clone() {
                let fallback = step(&nodes, nodes[at].fallback, byte);
                nodes[node].fallback = fallback;
                if nodes[node].stop.is_none() {
                    nodes[node].stop = nodes[fallback].stop;
                }
                queue.push_back(node);
            }
        }
        let stops = stops.iter().map(|stop| stop.as_ref().to_owned()).collect();
        Self {
            nodes,
            stops,
            state: 0,
            held: String::new(),
            stopped: false,
        }
    }

    /// Whether there is nothing to search for.
    pub fn is_empty(&self) -> bool {
        self.nodes.len() == 1
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
        let before = self.held.len();
        self.held.push_str(piece);
        for (offset, byte) in piece.bytes().enumerate() {
            self.state = step(&self.nodes, self.state, byte);
            if let Some(stop) = self.nodes[self.state].stop {
                let end = before + offset + 1;
                self.held.truncate(end - self.stops[stop].len());
                self.stopped = true;
                return StopOutcome {
                    text: std::mem::take(&mut self.held),
                    stop: Some(stop),
                };
            }
        }
        let certain = self.held.len() - self.nodes[self.state].depth;
        let kept = self.held.split_off(certain);
        StopOutcome {
            text: std::mem::replace(&mut self.held, kept),
            stop: None,
        }
    }

    /// Ends the text: returns what was held back. A new text can begin afterwards.
    pub fn finish(&mut self) -> String {
        self.state = 0;
        self.stopped = false;
        std::mem::take(&mut self.held)
    }
}

fn child(node: &Node, byte: u8) -> Option<usize> {
    node.children
        .iter()
        .find(|(label, _)| *label == byte)
        .map(|&(_, next)| next)
}

fn step(nodes: &[Node], mut at: usize, byte: u8) -> usize {
    loop {
        if let Some(next) = child(&nodes[at], byte) {
            return next;
        }
        if at == 0 {
            return 0;
        }
        at = nodes[at].fallback;
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
