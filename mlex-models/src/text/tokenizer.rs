//! The tokenizer: text to token ids and back.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};
use tokenizers::Tokenizer as Backend;
use tokenizers::models::ModelWrapper;

use super::StreamingDetokenizer;
use super::decoder::Decoder;
use super::files::{read_optional, write, write_json};
use super::gguf_vocab::GgufVocab;
use super::tokenizer_config::TokenizerConfig;
use super::vocab_check;
use crate::error::{Error, Result, ResultExt};

/// A tokenizer with its special tokens. Clones share it.
///
/// It is read from a model directory ([`Tokenizer::from_dir`]) or rebuilt from the vocabulary
/// in a GGUF file ([`Tokenizer::from_gguf_vocab`]), and can be used from any thread.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

struct Inner {
    backend: Backend,
    decoder: Decoder,
    config: TokenizerConfig,
    special: HashSet<u32>,
    vocab_size: usize,
    bos: Option<u32>,
    eos: Vec<u32>,
    pad: Option<u32>,
    /// `add_bos_token` and `add_eos_token`, where the config has either: they then stand in
    /// place of the post-processor of `tokenizer.json`.
    frame: Option<(bool, bool)>,
}

impl Tokenizer {
    /// Reads the tokenizer of a model directory: `tokenizer.json`, and the special tokens and
    /// flags of `tokenizer_config.json` and `special_tokens_map.json` where they exist.
    ///
    /// Fails if `tokenizer.json` is missing, is not a tokenizer, names a token or an id twice,
    /// or uses a decoder that no text model uses; or if a field has the wrong type.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let path = dir.join("tokenizer.json");
        let json =
            read_optional(&path)?.ok_or_else(|| Error::missing("tokenizer.json").with_path(dir))?;
        let config = TokenizerConfig::from_dir(dir)?;
        Self::build(&json, config, &[]).with_path(&path)
    }

    /// Builds the tokenizer that a GGUF file describes.
    pub fn from_gguf_vocab(vocab: &GgufVocab) -> Result<Self> {
        let json = vocab.tokenizer_json()?.to_string();
        let config = TokenizerConfig::new(vocab.tokenizer_config())?;
        Self::build(&json, config, &vocab.end_ids())
    }

    fn build(json: &str, config: TokenizerConfig, end_ids: &[u32]) -> Result<Self> {
        let added = vocab_check::check(json)?;
        let mut backend = parse(json)?;
        for (token, id) in &added {
            check_id(&backend, "added_tokens", token, *id)?;
        }
        // A file may keep the limits of the training run; prompts are taken whole.
        backend.with_truncation(None).map_err(Error::tokenizer)?;
        backend.with_padding(None);
        add_tokens(&mut backend, &config)?;

        let spec = serde_json::to_value(backend.get_decoder()).map_err(Error::tokenizer)?;
        let is_bpe = matches!(backend.get_model(), ModelWrapper::BPE(_));
        // On BPE it would take real spaces away (transformers ignores it there, too).
        let clean_up = config.clean_up && (!is_bpe || config.clean_up_bpe);
        let decoder = Decoder::new(&spec, clean_up)?;

        let added = backend.get_added_vocabulary().get_added_tokens_decoder();
        let special = added
            .iter()
            .filter(|(_, token)| token.special)
            .map(|(&id, _)| id)
            .collect();
        let id = |name| {
            config
                .named(name)
                .and_then(|token| backend.token_to_id(token))
        };
        let (bos, pad) = (id("bos_token"), id("pad_token"));
        let mut eos: Vec<u32> = id("eos_token").into_iter().collect();
        for end in end_ids {
            if !eos.contains(end) {
                eos.push(*end);
            }
        }
        let frame = (config.add_bos_token.is_some() || config.add_eos_token.is_some()).then(|| {
            (
                config.add_bos_token == Some(true),
                config.add_eos_token == Some(true),
            )
        });
        let vocab_size = backend.get_vocab_size(true);
        let inner = Inner {
            backend,
            decoder,
            config,
            special,
            vocab_size,
            bos,
            eos,
            pad,
            frame,
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// The token ids of `text`. Special tokens that are spelled out in it become their ids.
    ///
    /// With `add_special` the tokens that frame a text are added, such as a leading BOS. Leave
    /// it off for a prompt from a [`ChatTemplate`](super::ChatTemplate): the template writes
    /// them itself.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let inner = &*self.inner;
        let post_process = add_special && inner.frame.is_none();
        let encoding = inner
            .backend
            .encode_fast(text, post_process)
            .map_err(Error::tokenizer)?;
        let ids = encoding.get_ids();
        let (add_bos, add_eos) = match inner.frame {
            Some(frame) if add_special => frame,
            _ => (false, false),
        };
        let bos = inner.bos.filter(|_| add_bos);
        let eos = inner.eos.first().copied().filter(|_| add_eos);
        Ok(bos
            .into_iter()
            .chain(ids.iter().copied())
            .chain(eos)
            .collect())
    }

    /// The text of `ids`; with `skip_special` without the special tokens among them. Bytes
    /// that are not UTF-8 become U+FFFD. Fails on an id that no token has.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        let mut stream = StreamingDetokenizer::new(self, skip_special);
        let mut text = String::new();
        for &id in ids {
            if self.inner.backend.id_to_token(id).is_none() {
                let expected = format!("an id of the {} tokens", self.vocab_size());
                return Err(Error::field("token id", expected, id.to_string()));
            }
            text.push_str(&stream.push(id));
        }
        text.push_str(&stream.finish());
        Ok(text)
    }

    /// The id of the token that is spelled `token` in the vocabulary.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.backend.token_to_id(token)
    }

    /// The spelling of a token in the vocabulary, which is not its text: byte-level BPE, for
    /// one, spells a space `Ġ`.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.backend.id_to_token(id)
    }

    /// The bytes that a token stands for within a text, which need not be whole characters.
    /// None for special tokens and ids without a token.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        if self.is_special(id) {
            return None;
        }
        Some(self.inner.decoder.bytes(self.id_to_token(id)?))
    }

    /// The number of tokens, added ones included. A model may have more embeddings.
    pub fn vocab_size(&self) -> usize {
        self.inner.vocab_size
    }

    /// The id of the beginning-of-sequence token.
    pub fn bos_id(&self) -> Option<u32> {
        self.inner.bos
    }

    /// The ids that end a text as far as the tokenizer knows: the end-of-sequence token first,
    /// for a GGUF file also the end-of-turn and end-of-message tokens. A model's
    /// `generation_config.json` may name further ones.
    pub fn eos_ids(&self) -> &[u32] {
        &self.inner.eos
    }

    /// The id of the padding token.
    pub fn pad_id(&self) -> Option<u32> {
        self.inner.pad
    }

    /// Whether the token is a special one, which [`decode`](Self::decode) can skip.
    pub fn is_special(&self, id: u32) -> bool {
        self.inner.special.contains(&id)
    }

    /// The special tokens, in no order.
    pub fn special_ids(&self) -> impl Iterator<Item = u32> {
        self.inner.special.iter().copied()
    }

    /// The named special tokens that are set, by the names that chat templates know them
    /// under: `bos_token`, `eos_token`, `unk_token`, `pad_token` and so on.
    pub fn special_tokens(&self) -> Map<String, Value> {
        let named = self.inner.config.named.iter();
        named
            .map(|(name, token)| ((*name).to_owned(), token.content.clone().into()))
            .collect()
    }

    /// Writes `tokenizer.json` and `tokenizer_config.json` into a directory, so that this
    /// crate, transformers and mlx-lm read the same ids from it.
    pub fn save(&self, dir: impl AsRef<Path>) -> Result<()> {
        let dir = dir.as_ref();
        let json = self
            .inner
            .backend
            .to_string(true)
            .map_err(Error::tokenizer)?;
        write(&dir.join("tokenizer.json"), &json)?;
        let config = Value::Object(self.inner.config.raw.clone());
        write_json(&dir.join("tokenizer_config.json"), &config)
    }

    /// Whether the token was added to the vocabulary, special or not.
    pub(crate) fn is_added(&self, id: u32) -> bool {
        let added = self.inner.backend.get_added_vocabulary();
        added.get_added_tokens_decoder().contains_key(&id)
    }

    pub(super) fn decoder(&self) -> Decoder {
        self.inner.decoder.clone()
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.inner.vocab_size)
            .field("bos", &self.inner.bos)
            .field("eos", &self.inner.eos)
            .finish_non_exhaustive()
    }
}

/// The backend for a `tokenizer.json` that is valid JSON.
fn parse(json: &str) -> Result<Backend> {
    // The tokenizers crate asserts a few things about its input instead of refusing it.
    match catch_unwind(AssertUnwindSafe(|| json.parse::<Backend>())) {
        Ok(parsed) => parsed.map_err(Error::tokenizer),
        Err(_) => Err(Error::tokenizer(
            "the tokenizers library gave up on the file",
        )),
    }
}

/// Adds the tokens of the config that `tokenizer.json` does not have, as transformers does.
fn add_tokens(backend: &mut Backend, config: &TokenizerConfig) -> Result<()> {
    // In two calls, since each builds the search for added tokens anew.
    let added = config.added.iter().map(|(_, token)| token.clone());
    backend.add_tokens(added).map_err(Error::tokenizer)?;
    for (id, token) in &config.added {
        check_id(backend, "added_tokens_decoder", &token.content, *id)?;
    }
    let mut special = Vec::new();
    for token in config
        .named
        .iter()
        .map(|(_, token)| token)
        .chain(&config.extra)
    {
        // A name that the vocabulary lacks would become an id that the model has no row for.
        let Some(id) = backend.token_to_id(&token.content) else {
            tracing::warn!(token = token.content, "special token not in the vocabulary");
            continue;
        };
        let known = backend
            .get_added_vocabulary()
            .get_added_tokens_decoder()
            .get(&id);
        if !known.is_some_and(|known| known.special) {
            special.push(known.unwrap_or(token).clone().special(true));
        }
    }
    backend
        .add_tokens(special)
        .map(drop)
        .map_err(Error::tokenizer)
}

/// Fails unless the token got the id that the file gives it.
fn check_id(backend: &Backend, field: &str, token: &str, id: u32) -> Result<()> {
    match backend.token_to_id(token) {
        Some(found) if found == id => Ok(()),
        found => {
            let found = found.map_or("none".to_owned(), |id| id.to_string());
            Err(Error::field(
                format!("{field}: id of {token:?}"),
                id.to_string(),
                found,
            ))
        }
    }
}
