//! A first look at a `tokenizer.json`: that it is JSON, and that its vocabulary names each
//! token and each id once. The tokenizers crate would keep the last of two silently.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::error::{Error, Result};

/// Larger than any vocabulary, small enough for every sum of ids.
const MAX_ID: u32 = 1 << 30;

#[derive(Deserialize)]
struct File {
    model: Option<Model>,
    #[serde(default)]
    added_tokens: Option<Vec<Added>>,
}

#[derive(Deserialize)]
struct Model {
    vocab: Option<Vocab>,
    #[serde(default)]
    merges: Option<Merges>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
}

/// The length in bytes of the longest token that a merge makes.
struct Merges {
    longest: usize,
}

struct Vocab {
    tokens: HashSet<String>,
    ids: HashSet<u32>,
}

/// Checks the text of a `tokenizer.json` and returns its added tokens with their ids.
pub(super) fn check(json: &str) -> Result<Vec<(String, u32)>> {
    let file: File = serde_json::from_str(json)?;
    let model = file.model.ok_or_else(|| Error::missing("field model"))?;
    let vocab = model
        .vocab
        .ok_or_else(|| Error::missing("field model.vocab"))?;
    if let Some(merges) = model.merges {
        // The tokenizers crate writes past a buffer (and panics) in these two cases.
        if let Some(prefix) = model
            .continuing_subword_prefix
            .filter(|prefix| !prefix.is_empty())
        {
            let what = "model.continuing_subword_prefix with merges";
            return Err(Error::unsupported(what, format!("{prefix:?}")));
        }
        let longest = vocab.tokens.iter().map(String::len).max().unwrap_or(0);
        if merges.longest > longest {
            let found = format!("one that makes {} bytes", merges.longest);
            let expected = format!("merges that make tokens, of at most {longest} bytes");
            return Err(Error::field("model.merges", expected, found));
        }
    }
    let mut added_ids = HashSet::new();
    let mut added = Vec::new();
    for token in file.added_tokens.into_iter().flatten() {
        let field = || format!("added_tokens: id of {:?}", token.content);
        if token.id >= MAX_ID {
            return Err(Error::field(
                field(),
                format!("below {MAX_ID}"),
                token.id.to_string(),
            ));
        }
        let again = !added_ids.insert(token.id);
        let taken = vocab.ids.contains(&token.id) && !vocab.tokens.contains(&token.content);
        if again || taken {
            let found = format!("{}, which another token has", token.id);
            return Err(Error::field(field(), "an id of its own", found));
        }
        added.push((token.content, token.id));
    }
    Ok(added)
}

impl<'de> Deserialize<'de> for Vocab {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct VocabVisitor;

        impl<'de> Visitor<'de> for VocabVisitor {
            type Value = Vocab;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a vocabulary: an object of ids or a list of scored tokens")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vocab, A::Error> {
                let mut vocab = Vocab {
                    tokens: HashSet::new(),
                    ids: HashSet::new(),
                };
                while let Some((token, id)) = map.next_entry::<String, u32>()? {
                    if id >= MAX_ID {
                        return Err(A::Error::custom(format_args!("token id {id} is too large")));
                    }
                    if !vocab.ids.insert(id) {
                        return Err(A::Error::custom(format_args!("two tokens have id {id}")));
                    }
                    if let Some(token) = vocab.tokens.replace(token) {
                        return Err(A::Error::custom(format_args!("token {token:?} twice")));
                    }
                }
                Ok(vocab)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vocab, A::Error> {
                let mut vocab = Vocab {
                    tokens: HashSet::new(),
                    ids: HashSet::new(),
                };
                let mut id = 0;
                while let Some((token, _)) = list.next_element::<(String, IgnoredAny)>()? {
                    if let Some(token) = vocab.tokens.replace(token) {
                        return Err(A::Error::custom(format_args!("token {token:?} twice")));
                    }
                    vocab.ids.insert(id);
                    id += 1;
                }
                Ok(vocab)
            }
        }

        deserializer.deserialize_any(VocabVisitor)
    }
}

impl<'de> Deserialize<'de> for Merges {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MergesVisitor;

        impl<'de> Visitor<'de> for MergesVisitor {
            type Value = Merges;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of merges")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Merges, A::Error> {
                let mut longest = 0;
                while let Some(MergedLength(length)) = list.next_element()? {
                    longest = longest.max(length);
                }
                Ok(Merges { longest })
            }
        }

        deserializer.deserialize_seq(MergesVisitor)
    }
}

/// The length of the token that a merge makes: `"a b"` or `["a", "b"]`.
struct MergedLength(usize);

impl<'de> Deserialize<'de> for MergedLength {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MergeVisitor;

        impl<'de> Visitor<'de> for MergeVisitor {
            type Value = MergedLength;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a merge: two tokens in a list, or with a space between them")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<MergedLength, E> {
                Ok(MergedLength(text.len().saturating_sub(1)))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<MergedLength, A::Error> {
                let mut length = 0;
                while let Some(token) = list.next_element::<Cow<'de, str>>()? {
                    length += token.len();
                }
                Ok(MergedLength(length))
            }
        }

        deserializer.deserialize_any(MergeVisitor)
    }
}
