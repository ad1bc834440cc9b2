//! `tokenizer_config.json`: special tokens and flags that `tokenizer.json` does not hold.

use std::path::Path;

use serde_json::{Map, Value};
use tokenizers::AddedToken;

use super::files::{describe, read_optional_object};
use crate::error::{Error, Result, ResultExt};

/// The named special tokens, in the order in which transformers lists them.
const NAMED: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// What is read of `tokenizer_config.json` and of `special_tokens_map.json`.
#[derive(Debug, Clone, Default)]
pub(super) struct TokenizerConfig {
    /// The named special tokens that are set: `bos_token` and so on.
    pub(super) named: Vec<(&'static str, AddedToken)>,
    /// Further special tokens.
    pub(super) extra: Vec<AddedToken>,
    /// Tokens with the ids they must have.
    pub(super) added: Vec<(u32, AddedToken)>,
    pub(super) add_bos_token: Option<bool>,
    pub(super) add_eos_token: Option<bool>,
    /// `clean_up_tokenization_spaces`, and whether it is asked for even on BPE.
    pub(super) clean_up: bool,
    pub(super) clean_up_bpe: bool,
    /// The file as it stands, to write it again.
    pub(super) raw: Map<String, Value>,
}

impl TokenizerConfig {
    /// Reads the files of a model directory; a missing one leaves the defaults.
    pub(super) fn from_dir(dir: &Path) -> Result<Self> {
        let path = dir.join("tokenizer_config.json");
        let mut config = match read_optional_object(&path)? {
            Some(raw) => Self::new(raw).with_path(&path)?,
            None => Self::default(),
        };
        let path = dir.join("special_tokens_map.json");
        if let Some(map) = read_optional_object(&path)? {
            config.fill_named(&map).with_path(&path)?;
        }
        Ok(config)
    }

    /// Reads the fields of a `tokenizer_config.json`.
    pub(super) fn new(raw: Map<String, Value>) -> Result<Self> {
        let mut config = Self {
            add_bos_token: flag(&raw, "add_bos_token")?,
            add_eos_token: flag(&raw, "add_eos_token")?,
            clean_up: flag(&raw, "clean_up_tokenization_spaces")?.unwrap_or(false),
            clean_up_bpe: flag(
                &raw,
                "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
            )?
            .unwrap_or(false),
            ..Self::default()
        };
        config.fill_named(&raw)?;
        for field in ["additional_special_tokens", "extra_special_tokens"] {
            let values: Vec<&Value> = match raw.get(field) {
                None | Some(Value::Null) => continue,
                Some(Value::Array(values)) => values.iter().collect(),
                Some(Value::Object(values)) => values.values().collect(),
                Some(other) => return Err(Error::field(field, "a list", describe(other))),
            };
            for value in values {
                config
                    .extra
                    .extend(token(field, value)?.map(|token| token.special(true)));
            }
        }
        match raw.get("added_tokens_decoder") {
            None | Some(Value::Null) => {}
            Some(Value::Object(added)) => {
                for (id, value) in added {
                    let field = format!("added_tokens_decoder.{id}");
                    let id = id
                        .parse()
                        .map_err(|_| Error::field(&field, "an id", "a name"))?;
                    config
                        .added
                        .extend(token(&field, value)?.map(|token| (id, token)));
                }
                config.added.sort_by_key(|(id, _)| *id);
            }
            Some(other) => {
                return Err(Error::field(
                    "added_tokens_decoder",
                    "an object",
                    describe(other),
                ));
            }
        }
        config.raw = raw;
        Ok(config)
    }

    /// The token of a name such as `bos_token`.
    pub(super) fn named(&self, name: &str) -> Option<&str> {
        let found = self.named.iter().find(|(key, _)| *key == name);
        found.map(|(_, token)| token.content.as_str())
    }

    fn fill_named(&mut self, fields: &Map<String, Value>) -> Result<()> {
        for name in NAMED {
            if self.named(name).is_none()
                && let Some(value) = fields.get(name)
                && let Some(token) = token(name, value)?
            {
                self.named.push((name, token.special(true)));
            }
        }
        Ok(())
    }
}

fn flag(fields: &Map<String, Value>, name: &str) -> Result<Option<bool>> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Bool(flag)) => Ok(Some(*flag)),
        Some(other) => Err(Error::field(name, "true or false", describe(other))),
    }
}

/// A token: a string, or an object with its `content` and flags.
fn token(field: &str, value: &Value) -> Result<Option<AddedToken>> {
    let expected = "a string, an object with content, or null";
    match value {
        Value::Null => Ok(None),
        Value::String(content) => Ok(Some(AddedToken::from(content.clone(), true))),
        Value::Object(fields) => {
            let Some(Value::String(content)) = fields.get("content") else {
                return Err(Error::field(field, expected, "an object without content"));
            };
            let special = flag(fields, "special")?.unwrap_or(false);
            let mut token = AddedToken::from(content.clone(), special);
            token.lstrip = flag(fields, "lstrip")?.unwrap_or(false);
            token.rstrip = flag(fields, "rstrip")?.unwrap_or(false);
            token.single_word = flag(fields, "single_word")?.unwrap_or(false);
            token.normalized = flag(fields, "normalized")?.unwrap_or(!special);
            Ok(Some(token))
        }
        other => Err(Error::field(field, expected, describe(other))),
    }
}
