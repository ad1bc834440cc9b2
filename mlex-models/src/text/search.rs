//! Several strings looked for in text that arrives in pieces.

use std::collections::VecDeque;

/// Finds strings in text that arrives in pieces, wherever the borders of the pieces lie.
///
/// Text is held back only while it may still become part of one of them. The one that ends
/// first in the text is found; of those that end at the same place, the longest. So the result
/// depends on the text alone, not on how it was cut.
///
/// It is an Aho-Corasick automaton over the bytes: one step a byte, however many strings there
/// are. A match always lies on character borders, because UTF-8 sequences cannot match in the
/// middle of a character.
#[derive(Debug, Clone)]
pub(super) struct Search {
    nodes: Vec<Node>,
    /// The lengths of the strings.
    lengths: Vec<usize>,
    state: usize,
    held: String,
}

#[derive(Debug, Clone, Default)]
struct Node {
    // Few strings share a prefix, so a list searched from the front does.
    children: Vec<(u8, usize)>,
    /// The node of the longest proper suffix that is also a prefix of a string.
    fallback: usize,
    /// How many bytes lead to this node: what must be held back in this state.
    depth: usize,
    /// The longest string that ends here.
    found: Option<usize>,
}

/// What a piece of text turned out to be.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Outcome<'a> {
    /// Text before the string that was found, or that is not part of one for certain.
    pub(super) text: String,
    /// The string that was found, as an index into the list given to [`Search::new`].
    pub(super) found: Option<usize>,
    /// What of the piece comes after it, not looked at yet.
    pub(super) rest: &'a str,
}

impl Search {
    /// A search for `strings`. Empty ones are never found.
    pub(super) fn new<S: AsRef<str>>(strings: &[S]) -> Self {
        let mut nodes = vec![Node::default()];
        for (index, string) in strings.iter().enumerate() {
            let mut at = 0;
            for &byte in string.as_ref().as_bytes() {
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
                nodes[at].found.get_or_insert(index);
            }
        }
        let mut queue: VecDeque<usize> = nodes[0].children.iter().map(|&(_, node)| node).collect();
        while let Some(at) = queue.pop_front() {
            for (byte, node) in nodes[at].children.clone() {
                let fallback = step(&nodes, nodes[at].fallback, byte);
                nodes[node].fallback = fallback;
                if nodes[node].found.is_none() {
                    nodes[node].found = nodes[fallback].found;
                }
                queue.push_back(node);
            }
        }
        Self {
            nodes,
            lengths: strings.iter().map(|string| string.as_ref().len()).collect(),
            state: 0,
            held: String::new(),
        }
    }

    /// Whether there is nothing to search for.
    pub(super) fn is_empty(&self) -> bool {
        self.nodes.len() == 1
    }

    /// Takes the next piece of text, up to the first string that is found.
    pub(super) fn push<'a>(&mut self, piece: &'a str) -> Outcome<'a> {
        let before = self.held.len();
        for (offset, byte) in piece.bytes().enumerate() {
            self.state = step(&self.nodes, self.state, byte);
            if let Some(found) = self.nodes[self.state].found {
                let (seen, rest) = piece.split_at(offset + 1);
                self.held.push_str(seen);
                self.held
                    .truncate(before + offset + 1 - self.lengths[found]);
                return Outcome {
                    text: self.finish(),
                    found: Some(found),
                    rest,
                };
            }
        }
        self.held.push_str(piece);
        let certain = self.held.len() - self.nodes[self.state].depth;
        let kept = self.held.split_off(certain);
        Outcome {
            text: std::mem::replace(&mut self.held, kept),
            found: None,
            rest: "",
        }
    }

    /// Ends the text: returns what was held back. A new text can begin afterwards.
    pub(super) fn finish(&mut self) -> String {
        self.state = 0;
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
