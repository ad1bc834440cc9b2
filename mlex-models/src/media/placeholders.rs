//! What stands for media in the text of a prompt, and how it grows to their tokens.
//!
//! Source: the processors of mlx-vlm and transformers for Qwen2.5-VL, Qwen3-VL and Gemma 4.

use std::collections::VecDeque;
use std::fmt::Write as _;

use serde::Deserialize;

use crate::config::ModelConfig;
use crate::text::Tokenizer;
use crate::towers::{Encoded, MediaKind, MediaTokens, Run, media_tokens};
use crate::{Error, Result};

/// What stands for media in a prompt's text.
#[derive(Clone, Debug)]
pub(crate) struct Placeholders {
    model_type: String,
    /// The ids of the tokens that stand for features.
    pub(crate) tokens: MediaTokens,
    style: Style,
    /// The texts of these tokens.
    texts: Vec<(MediaKind, String)>,
    /// What is put around the tokens of a picture: by Qwen3-VL and Qwen3.5 of frames alone, since
    /// the template does it for images.
    picture: [String; 2],
    /// What is put around the tokens of a sound.
    sound: [String; 2],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Style {
    /// Everything stands where the template has its placeholder (Qwen2.5-VL).
    Plain,
    /// The frames of a video follow their times (Qwen3-VL and later).
    Qwen,
    Gemma,
}

#[derive(Debug, Deserialize)]
struct Fields {
    boi_token_id: Option<u32>,
    eoi_token_id: Option<u32>,
    boa_token_id: Option<u32>,
    eoa_token_id: Option<u32>,
    eoa_token_index: Option<u32>,
}

/// A medium, by the tokens that stand for it in a prompt.
pub(crate) trait Medium {
    /// What it is.
    fn kind(&self) -> MediaKind;
    /// Its tokens.
    fn runs(&self) -> &[Run];
}

impl Medium for Encoded {
    fn kind(&self) -> MediaKind {
        self.kind
    }

    fn runs(&self) -> &[Run] {
        &self.runs
    }
}

/// A medium of which no more is known than its tokens.
#[derive(Clone, Debug)]
pub(crate) struct Counted {
    pub(crate) kind: MediaKind,
    pub(crate) runs: Vec<Run>,
}

impl Medium for Counted {
    fn kind(&self) -> MediaKind {
        self.kind
    }

    fn runs(&self) -> &[Run] {
        &self.runs
    }
}

impl Placeholders {
    /// Those of a model that takes `kinds`; none where it takes none.
    pub(crate) fn new(
        config: &ModelConfig,
        kinds: &[MediaKind],
        tokenizer: &Tokenizer,
    ) -> Result<Option<Self>> {
        if kinds.is_empty() {
            return Ok(None);
        }
        let tokens = media_tokens(config)?;
        let text = |field: &str, id: u32| {
            tokenizer.id_to_token(id).ok_or_else(|| {
                let expected = "a token of the tokenizer";
                Error::field(field, expected, id.to_string())
            })
        };
        let mut texts = Vec::new();
        for &kind in kinds {
            let id = tokens.of(kind);
            let id = id.ok_or_else(|| Error::missing(format!("field {kind}_token_id")))?;
            texts.push((kind, text(&format!("{kind}_token_id"), id)?));
        }
        let model_type = config.model_type()?.to_owned();
        let style = match model_type.as_str() {
            "qwen2_5_vl" => Style::Plain,
            name if name.starts_with("qwen") => Style::Qwen,
            _ => Style::Gemma,
        };
        let (picture, sound) = match style {
            Style::Plain => Default::default(),
            Style::Qwen => (
                ["<|vision_start|>", "<|vision_end|>"].map(str::to_owned),
                Default::default(),
            ),
            Style::Gemma => {
                let fields: Fields = config.parse()?;
                let boi = text("boi_token_id", fields.boi_token_id.unwrap_or(255_999))?;
                let eoi = text("eoi_token_id", fields.eoi_token_id.unwrap_or(258_882))?;
                let sound = if kinds.contains(&MediaKind::Audio) {
                    let eoa = fields.eoa_token_id.or(fields.eoa_token_index);
                    [
                        text("boa_token_id", fields.boa_token_id.unwrap_or(256_000))?,
                        text("eoa_token_id", eoa.unwrap_or(258_883))?,
                    ]
                } else {
                    Default::default()
                };
                ([boi, eoi], sound)
            }
        };
        Ok(Some(Self {
            model_type,
            tokens,
            style,
            texts,
            picture,
            sound,
        }))
    }

    /// The prompt's text with each placeholder grown to the tokens of its medium, and the media
    /// in the order of the text.
    ///
    /// # Errors
    /// When there are more or fewer placeholders than media of a kind.
    pub(crate) fn expand<M: Medium>(&self, text: &str, media: Vec<M>) -> Result<(String, Vec<M>)> {
        let mut waiting: VecDeque<Option<M>> = media.into_iter().map(Some).collect();
        let mut ordered = Vec::with_capacity(waiting.len());
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some((kind, at, length)) = self.next(rest) {
            let next = waiting.iter_mut().find_map(|slot| {
                let fits = slot.as_ref().is_some_and(|medium| medium.kind() == kind);
                if fits { slot.take() } else { None }
            });
            let medium = next.ok_or_else(|| self.uneven(kind, text, &ordered, &waiting))?;
            out.push_str(&rest[..at]);
            self.write(&mut out, &medium, &rest[at..at + length]);
            ordered.push(medium);
            rest = &rest[at + length..];
        }
        out.push_str(rest);
        if let Some(left) = waiting.iter().flatten().next() {
            return Err(self.uneven(left.kind(), text, &ordered, &waiting));
        }
        Ok((out, ordered))
    }

    /// The next placeholder: its kind, where it is and how long.
    fn next(&self, text: &str) -> Option<(MediaKind, usize, usize)> {
        let found = self.texts.iter().filter_map(|(kind, token)| {
            let at = text.find(token.as_str())?;
            Some((*kind, at, token.len()))
        });
        let (kind, at, length) = found.min_by_key(|(_, at, _)| *at)?;
        // The frames of a video have marks of their own.
        if (self.style, kind) == (Style::Qwen, MediaKind::Video) {
            let [before, after] = &self.picture;
            if text[..at].ends_with(before.as_str())
                && text[at + length..].starts_with(after.as_str())
            {
                let length = before.len() + length + after.len();
                return Some((kind, at - before.len(), length));
            }
        }
        Some((kind, at, length))
    }

    fn uneven<M: Medium>(
        &self,
        kind: MediaKind,
        text: &str,
        ordered: &[M],
        waiting: &VecDeque<Option<M>>,
    ) -> Error {
        let all = ordered.iter().chain(waiting.iter().flatten());
        let given = all.filter(|medium| medium.kind() == kind).count();
        let token = self.texts.iter().find(|(known, _)| *known == kind);
        let token = token.map_or("", |(_, token)| token.as_str());
        let found = text.matches(token).count();
        Error::field(
            format!("{}: prompt", self.model_type),
            format!("{given} {token} for as many media of the kind {kind}"),
            found.to_string(),
        )
    }

    /// Writes what stands for a medium.
    fn write(&self, out: &mut String, medium: &impl Medium, placeholder: &str) {
        let token = self.texts.iter().find(|(kind, _)| *kind == medium.kind());
        let token = token.map_or("", |(_, token)| token.as_str());
        let tokens = |out: &mut String, run: &Run, [before, after]: &[String; 2]| {
            out.push_str(before);
            for _ in 0..run.tokens {
                out.push_str(token);
            }
            out.push_str(after);
        };
        let bare = Default::default();
        for (number, run) in medium.runs().iter().enumerate() {
            let seconds = run.timestamp.unwrap_or(0.0);
            match (self.style, medium.kind()) {
                (Style::Qwen, MediaKind::Video) => {
                    // Writing to a text does not fail.
                    let _ = write!(out, "<{seconds:.1} seconds>");
                    tokens(out, run, &self.picture);
                }
                (Style::Plain | Style::Qwen, _) => tokens(out, run, &bare),
                (Style::Gemma, MediaKind::Video) => {
                    if number > 0 {
                        out.push(' ');
                    }
                    let seconds = seconds.max(0.0) as u64;
                    let _ = write!(out, "{:02}:{:02} ", seconds / 60, seconds % 60);
                    tokens(out, run, &self.picture);
                }
                (Style::Gemma, MediaKind::Image) => tokens(out, run, &self.picture),
                (Style::Gemma, MediaKind::Audio) => tokens(out, run, &self.sound),
            }
        }
        if medium.runs().is_empty() {
            out.push_str(placeholder);
        }
    }
}
