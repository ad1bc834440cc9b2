//! What the readers of JSON headers share.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

/// An object of strings. A map type would keep the last of two equal keys and say nothing; this
/// one refuses them.
pub(super) struct UniqueStrings(pub(super) BTreeMap<String, String>);

impl<'de> Deserialize<'de> for UniqueStrings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StringsVisitor;

        impl<'de> Visitor<'de> for StringsVisitor {
            type Value = UniqueStrings;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
                let mut strings = BTreeMap::new();
                while let Some((key, value)) = entries.next_entry::<String, String>()? {
                    if strings.insert(key.clone(), value).is_some() {
                        return Err(A::Error::custom(given_twice(&key)));
                    }
                }
                Ok(UniqueStrings(strings))
            }
        }

        deserializer.deserialize_map(StringsVisitor)
    }
}

/// The message about a key that an object has twice.
pub(super) fn given_twice(key: &str) -> String {
    format!("{} is given twice", quoted(key))
}

/// Text from a file, in quotes, escaped and cut, for an error's one line.
pub(super) fn quoted(text: &str) -> String {
    const MAX_CHARS: usize = 120;
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{:?}...", &text[..end]),
        None => format!("{text:?}"),
    }
}

/// A JSON error on one line: its message can hold text of the file.
pub(super) fn one_line(error: &serde_json::Error) -> String {
    let text: String = error.to_string().chars().take(400).collect();
    text.replace(char::is_control, " ")
}
