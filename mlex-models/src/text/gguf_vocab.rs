//! The vocabulary in a GGUF file, and the `tokenizer.json` that it amounts to.
//!
//! A GGUF file holds tokens, merges or scores, and the ids of special tokens; what happens to
//! text before and after is implied by `tokenizer.ggml.model` and `tokenizer.ggml.pre`. The
//! result is what the `tokenizer.json` of the models themselves says: rebuilt from their
//! vocabularies alone, those of Llama 2 and 3, Qwen3, DeepSeek V3, gpt-oss and Gemma 3 encode
//! alike. Merges that follow from scores are derived as transformers derives them.

use std::collections::HashMap;

use mlex_core::io::GgufMetadata;
use serde_json::{Map, Value, json};

use super::pre_tokenizer::{PreTokenizer, byte_level};
use crate::error::{Error, Result};

const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

/// The vocabulary of a GGUF file: its `tokenizer.ggml.*` metadata.
///
/// [`GgufVocab::from_metadata`] reads it; [`Tokenizer::from_gguf_vocab`] makes a tokenizer of
/// it.
///
/// [`Tokenizer::from_gguf_vocab`]: super::Tokenizer::from_gguf_vocab
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct GgufVocab {
    /// `general.architecture`, since Gemma's SentencePiece is not Llama's.
    pub architecture: String,
    /// `model`: `gpt2` (byte-level BPE), `llama` (SentencePiece) or `gemma4`.
    pub model: String,
    /// `pre`: the name of the pre-tokenizer, for `gpt2`.
    pub pre: Option<String>,
    /// `tokens`: their spelling by id.
    pub tokens: Vec<String>,
    /// `scores` by id; merges follow from them where there are none.
    pub scores: Vec<f32>,
    /// `token_type` by id: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    pub token_types: Vec<i32>,
    /// `merges`: two tokens each, with a space between them, best first.
    pub merges: Option<Vec<String>>,
    /// `bos_token_id`.
    pub bos: Option<u32>,
    /// `eos_token_id`.
    pub eos: Option<u32>,
    /// `eot_token_id` and `eom_token_id`: the ends of a turn and of a message.
    pub ends: Vec<u32>,
    /// `unknown_token_id`.
    pub unknown: Option<u32>,
    /// `padding_token_id`.
    pub padding: Option<u32>,
    /// `add_bos_token`.
    pub add_bos: Option<bool>,
    /// `add_eos_token`.
    pub add_eos: Option<bool>,
    /// `add_space_prefix`.
    pub add_space_prefix: Option<bool>,
}

impl GgufVocab {
    /// Reads the vocabulary out of a file's metadata. Fails if it has none, or if a value has
    /// the wrong type.
    pub fn from_metadata(metadata: &GgufMetadata) -> Result<Self> {
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let owned = |text: Option<&str>| text.map(str::to_owned);
        let id = |name: &str| metadata.get::<u32>(&key(name));
        let ends = [id("eot_token_id")?, id("eom_token_id")?];
        Ok(Self {
            architecture: owned(metadata.get("general.architecture")?).unwrap_or_default(),
            model: metadata.require::<&str>(&key("model"))?.to_owned(),
            pre: owned(metadata.get(&key("pre"))?),
            tokens: metadata.require::<&[String]>(&key("tokens"))?.to_vec(),
            scores: metadata
                .get::<&[f32]>(&key("scores"))?
                .unwrap_or_default()
                .to_vec(),
            token_types: metadata.get(&key("token_type"))?.unwrap_or_default(),
            merges: metadata
                .get::<&[String]>(&key("merges"))?
                .map(<[String]>::to_vec),
            bos: id("bos_token_id")?,
            eos: id("eos_token_id")?,
            ends: ends.into_iter().flatten().collect(),
            unknown: id("unknown_token_id")?,
            padding: id("padding_token_id")?,
            add_bos: metadata.get(&key("add_bos_token"))?,
            add_eos: metadata.get(&key("add_eos_token"))?,
            add_space_prefix: metadata.get(&key("add_space_prefix"))?,
        })
    }

    /// The ids that end a turn or a message, beside the end-of-sequence token.
    pub(super) fn end_ids(&self) -> Vec<u32> {
        self.ends.clone()
    }

    /// The `tokenizer_config.json` to the vocabulary. The ids must have been checked, as
    /// [`tokenizer_json`](Self::tokenizer_json) does.
    pub(super) fn tokenizer_config(&self) -> Map<String, Value> {
        let mut config = Map::new();
        // The class that takes a tokenizer.json as it is.
        config.insert("tokenizer_class".into(), "PreTrainedTokenizerFast".into());
        config.insert("add_bos_token".into(), self.adds_bos().into());
        config.insert("add_eos_token".into(), self.add_eos.unwrap_or(false).into());
        config.insert("clean_up_tokenization_spaces".into(), false.into());
        for (name, id) in self.named_ids() {
            let token = id.and_then(|id| self.tokens.get(id as usize));
            config.insert(
                name.into(),
                token.map_or(Value::Null, |token| token.clone().into()),
            );
        }
        config
    }

    fn named_ids(&self) -> [(&'static str, Option<u32>); 4] {
        [
            ("bos_token", self.bos),
            ("eos_token", self.eos),
            ("unk_token", self.unknown),
            ("pad_token", self.padding),
        ]
    }

    /// Whether a text begins with a BOS. Where the file does not say, as llama.cpp does it.
    fn adds_bos(&self) -> bool {
        let implied = match self.model.as_str() {
            "llama" => true,
            // The chat template writes it (transformers overrides a flag that is set).
            "gemma4" => return false,
            _ => self.pre_tokenizer().is_ok_and(|pre| pre.add_bos),
        };
        self.bos.is_some() && self.add_bos.unwrap_or(implied)
    }

    fn pre_tokenizer(&self) -> Result<PreTokenizer> {
        let name = self.pre.as_deref().unwrap_or("default");
        PreTokenizer::named(name)
            .ok_or_else(|| Error::unsupported("tokenizer.ggml.pre", format!("{name:?}")))
    }

    /// The `tokenizer.json` to the vocabulary.
    ///
    /// Fails if a token is there twice, an id is not in the vocabulary, a list has the wrong
    /// length, or the kind of tokenizer is not known.
    pub(super) fn tokenizer_json(&self) -> Result<Value> {
        let ids = self.check()?;
        let mut json = match self.model.as_str() {
            "gpt2" => self.byte_level_json(&ids)?,
            "gemma4" => self.gemma_json(&self.tokens, &ids)?,
            "llama" if self.architecture.starts_with("gemma") => {
                let tokens = self.gemma_tokens();
                let ids = index(&tokens)?;
                self.gemma_json(&tokens, &ids)?
            }
            "llama" => self.sentencepiece_json(&ids)?,
            other => {
                return Err(Error::unsupported(
                    "tokenizer.ggml.model",
                    format!("{other:?}"),
                ));
            }
        };
        json["version"] = "1.0".into();
        json["truncation"] = Value::Null;
        json["padding"] = Value::Null;
        json["added_tokens"] = self.added_tokens(&self.spelled(&json)).into();
        if let Some(frame) = self.post_processor() {
            json["post_processor"] = frame;
        }
        Ok(json)
    }

    /// Checks ids and lengths and returns the ids by token.
    fn check(&self) -> Result<HashMap<&str, u32>> {
        let count = self.tokens.len();
        let ids = index(&self.tokens)?;
        for (field, length) in [
            ("scores", self.scores.len()),
            ("token_type", self.token_types.len()),
        ] {
            if length != 0 && length != count {
                let field = format!("tokenizer.ggml.{field}");
                return Err(Error::field(
                    field,
                    format!("{count} values"),
                    length.to_string(),
                ));
            }
        }
        let named = self
            .named_ids()
            .into_iter()
            .filter_map(|(name, id)| Some((name, id?)));
        let ends = self.ends.iter().map(|&id| ("eot_token", id));
        for (name, id) in named.chain(ends) {
            if id as usize >= count {
                let field = format!("tokenizer.ggml.{name}_id");
                let expected = format!("an id of the {count} tokens");
                return Err(Error::field(field, expected, id.to_string()));
            }
        }
        Ok(ids)
    }

    /// The spelling of each token in the vocabulary of `json`, by id.
    fn spelled(&self, json: &Value) -> Vec<String> {
        let mut spelled = self.tokens.clone();
        for (token, id) in json["model"]["vocab"].as_object().into_iter().flatten() {
            let id = id.as_u64().and_then(|id| usize::try_from(id).ok());
            if let Some(slot) = id.and_then(|id| spelled.get_mut(id)) {
                slot.clone_from(token);
            }
        }
        spelled
    }

    /// Control tokens, and those that are always kept whole.
    fn added_tokens(&self, spelled: &[String]) -> Vec<Value> {
        let named: Vec<u32> = self
            .named_ids()
            .into_iter()
            .filter_map(|(_, id)| id)
            .collect();
        let mut added = Vec::new();
        for (id, token) in (0u32..).zip(spelled) {
            let kind = self
                .token_types
                .get(id as usize)
                .copied()
                .unwrap_or_default();
            let special = kind == CONTROL || named.contains(&id) || self.ends.contains(&id);
            if token.is_empty() || !(special || kind == USER_DEFINED) {
                continue;
            }
            added.push(json!({
                "id": id,
                "content": token,
                "single_word": false,
                "lstrip": false,
                "rstrip": false,
                "normalized": false,
                "special": special,
            }));
        }
        added
    }

    fn byte_level_json(&self, ids: &HashMap<&str, u32>) -> Result<Value> {
        let pre = self.pre_tokenizer()?;
        if self.pre.is_none() {
            tracing::warn!("the file names no pre-tokenizer; llama.cpp's default is used");
        }
        Ok(json!({
            "normalizer": pre.normalizer_json(),
            "pre_tokenizer": pre.pre_tokenizer_json(),
            "post_processor": byte_level(true),
            "decoder": byte_level(true),
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": null,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": false,
                "byte_fallback": false,
                "ignore_merges": pre.ignore_merges,
                "vocab": vocab_json(&self.tokens),
                "merges": self.merges_json(ids)?,
            },
        }))
    }

    fn sentencepiece_json(&self, ids: &HashMap<&str, u32>) -> Result<Value> {
        let space_prefix = self.add_space_prefix.unwrap_or(true);
        let merges = match self.merges {
            Some(_) => self.merges_json(ids)?,
            None => {
                if self.scores.is_empty() {
                    return Err(Error::missing("tokenizer.ggml.scores"));
                }
                derive_merges(&self.tokens, ids, |id| self.scores[id as usize])
            }
        };
        let mut decoders = sentencepiece_decoders();
        if space_prefix {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        let mut normalizers = Vec::new();
        if space_prefix {
            normalizers.push(json!({"type": "Prepend", "prepend": "▁"}));
        }
        normalizers.push(json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}));
        Ok(json!({
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": null,
            "post_processor": null,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": self.sentencepiece_model(&self.tokens, merges),
        }))
    }

    fn gemma_json(&self, tokens: &[String], ids: &HashMap<&str, u32>) -> Result<Value> {
        let merges = match self.merges {
            Some(_) => self.merges_json(ids)?,
            // The order of the tokens tells the order of the merges (the scores in the files
            // do not), except that runs of white space come first.
            None => derive_merges(tokens, ids, |id| {
                let token = tokens[id as usize].as_str();
                let blank = ['▁', '\n', '\t']
                    .iter()
                    .any(|c| token.trim_matches(*c).is_empty());
                if blank { f32::INFINITY } else { -(id as f32) }
            }),
        };
        Ok(json!({
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"String": " "},
                "behavior": "MergedWithPrevious",
                "invert": false,
            },
            "post_processor": null,
            "decoder": {"type": "Sequence", "decoders": sentencepiece_decoders()},
            "model": self.sentencepiece_model(tokens, merges),
        }))
    }

    /// Gemma's tokens, with those of several spaces spelled as the normalizer spells spaces.
    fn gemma_tokens(&self) -> Vec<String> {
        let blank = |token: &str| !token.is_empty() && token.chars().all(|c| c == ' ');
        let spell = |token: &String| {
            if blank(token) {
                token.replace(' ', "▁")
            } else {
                token.clone()
            }
        };
        self.tokens.iter().map(spell).collect()
    }

    fn sentencepiece_model(&self, tokens: &[String], merges: Vec<Value>) -> Value {
        let unknown = self.unknown.and_then(|id| tokens.get(id as usize));
        json!({
            "type": "BPE",
            "dropout": null,
            "unk_token": unknown,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": true,
            "byte_fallback": true,
            "ignore_merges": false,
            "vocab": vocab_json(tokens),
            "merges": merges,
        })
    }

    /// The merges of the file, as pairs of tokens.
    fn merges_json(&self, ids: &HashMap<&str, u32>) -> Result<Vec<Value>> {
        let merges = self
            .merges
            .as_deref()
            .ok_or_else(|| Error::missing("tokenizer.ggml.merges"))?;
        let pair = |(index, merge): (usize, &String)| {
            // A token may itself hold spaces, so the space that parts two tokens is looked for.
            let known = |at: &usize| {
                let (left, right) = (&merge[..*at], &merge[at + 1..]);
                ids.contains_key(left)
                    && ids.contains_key(right)
                    && ids.contains_key(format!("{left}{right}").as_str())
            };
            let at = merge.match_indices(' ').map(|(at, _)| at).find(known);
            at.map(|at| json!([merge[..at], merge[at + 1..]]))
                .ok_or_else(|| {
                    let field = format!("tokenizer.ggml.merges[{index}]");
                    Error::field(field, "two tokens of the vocabulary", format!("{merge:?}"))
                })
        };
        merges.iter().enumerate().map(pair).collect()
    }

    /// BOS and EOS around the text, as the flags ask.
    fn post_processor(&self) -> Option<Value> {
        let frame = |id: Option<u32>, add: bool| id.filter(|_| add);
        let bos = frame(self.bos, self.adds_bos());
        let eos = frame(self.eos, self.add_eos.unwrap_or(false));
        if bos.is_none() && eos.is_none() {
            return None;
        }
        let token = |id: u32| &self.tokens[id as usize];
        let mut special = Map::new();
        for id in bos.into_iter().chain(eos) {
            let content = token(id);
            let entry = json!({"id": content, "ids": [id], "tokens": [content]});
            special.insert(content.clone(), entry);
        }
        let sequence = |name: &str, kind: u32| {
            let special = |id| json!({"SpecialToken": {"id": token(id), "type_id": kind}});
            let text = json!({"Sequence": {"id": name, "type_id": kind}});
            let parts = bos
                .map(special)
                .into_iter()
                .chain([text])
                .chain(eos.map(special));
            parts.collect::<Vec<Value>>()
        };
        let single = sequence("A", 0);
        let pair = [sequence("A", 0), sequence("B", 1)].concat();
        Some(json!({
            "type": "TemplateProcessing",
            "single": single,
            "pair": pair,
            "special_tokens": special,
        }))
    }
}

fn sentencepiece_decoders() -> Vec<Value> {
    vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ]
}

fn vocab_json(tokens: &[String]) -> Map<String, Value> {
    (0u32..)
        .zip(tokens)
        .map(|(id, token)| (token.clone(), id.into()))
        .collect()
}

/// The ids by token; fails if a token is there twice.
fn index(tokens: &[String]) -> Result<HashMap<&str, u32>> {
    if tokens.is_empty() {
        return Err(Error::field(
            "tokenizer.ggml.tokens",
            "at least one token",
            "none",
        ));
    }
    let mut ids = HashMap::with_capacity(tokens.len());
    for (id, token) in (0u32..).zip(tokens) {
        if let Some(first) = ids.insert(token.as_str(), id) {
            let found = format!("{token:?} as {first} and {id}");
            return Err(Error::field(
                "tokenizer.ggml.tokens",
                "each token once",
                found,
            ));
        }
    }
    Ok(ids)
}

/// The merges that a vocabulary with scores implies: every way to put a token together from
/// two others, best score first, then longest parts first.
fn derive_merges(
    tokens: &[String],
    ids: &HashMap<&str, u32>,
    score: impl Fn(u32) -> f32,
) -> Vec<Value> {
    let mut merges = Vec::new();
    for (id, token) in (0u32..).zip(tokens) {
        let borders = token.char_indices().map(|(at, _)| at).skip(1);
        let parts = borders.map(|at| token.split_at(at));
        let mut local: Vec<_> = parts
            .filter_map(|(left, right)| Some((ids.get(left)?, ids.get(right)?, left, right)))
            .collect();
        local.sort_by_key(|&(left, right, ..)| (left, right));
        merges.extend(local.into_iter().map(|(.., left, right)| {
            (
                score(id),
                left.chars().count(),
                right.chars().count(),
                left,
                right,
            )
        }));
    }
    merges.sort_by(|a, b| {
        b.0.total_cmp(&a.0)
            .then_with(|| (b.1, b.2).cmp(&(a.1, a.2)))
    });
    merges
        .into_iter()
        .map(|(.., left, right)| json!([left, right]))
        .collect()
}
