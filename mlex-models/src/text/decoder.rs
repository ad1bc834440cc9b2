//! From token strings to text, one token at a time.
//!
//! A `tokenizer.json` names its decoder as a chain of steps on the whole list of tokens. Here
//! each step is a small machine that takes one token and gives out what can no longer change,
//! so that the pieces put together are what the chain gives for the whole list, byte for byte.

use serde::Deserialize;
use serde_json::Value;
use tokenizers::Decoder as _;
use tokenizers::normalizers::Replace;

use super::byte_level;
use crate::error::{Error, Result};

/// The decoder of a tokenizer, with the state of one text.
#[derive(Clone)]
pub(super) struct Decoder {
    tokens: Vec<TokenStep>,
    fusion: Fusion,
    texts: Vec<TextStep>,
}

/// A step that still sees where tokens begin and end.
#[derive(Clone)]
enum TokenStep {
    Replace(Replace),
    /// Tokens such as `<0xE2>` that spell a byte. A run of them is text if it is UTF-8 as a
    /// whole, and one U+FFFD per byte if not, so a run is known when it has ended.
    ByteFallback {
        run: Vec<u8>,
    },
    Strip {
        content: char,
        start: usize,
    },
    Metaspace {
        replacement: char,
        drop_first: bool,
        first: bool,
    },
    WordPiece {
        prefix: String,
        cleanup: bool,
        first: bool,
    },
    /// The end-of-word suffix is a space, except at the end of the text.
    WordSuffix {
        suffix: String,
        held: Option<String>,
    },
    /// No decoder: tokens with a space between them.
    Spaced {
        first: bool,
    },
}

/// How tokens become one text.
#[derive(Clone)]
enum Fusion {
    Concat,
    /// Each character of a token stands for a byte; what is not UTF-8 becomes U+FFFD.
    Bytes {
        pending: Vec<u8>,
    },
}

/// A step on the text as a whole.
#[derive(Clone)]
enum TextStep {
    /// Takes up to `left` more of `content` off the beginning.
    StripStart {
        content: char,
        left: usize,
    },
    Map {
        from: char,
        to: Option<char>,
    },
    Replace(Replacer),
}

/// One step of the chain, as `tokenizer.json` spells it.
#[derive(Deserialize)]
#[serde(tag = "type")]
enum Step {
    BPEDecoder {
        suffix: String,
    },
    ByteFallback,
    ByteLevel,
    Fuse,
    Metaspace {
        replacement: char,
        prepend_scheme: String,
    },
    Replace {
        pattern: Pattern,
        content: String,
    },
    Sequence {
        decoders: Vec<Value>,
    },
    Strip {
        content: char,
        start: usize,
        stop: usize,
    },
    WordPiece {
        prefix: String,
        cleanup: bool,
    },
}

#[derive(Deserialize)]
enum Pattern {
    String(String),
    Regex(#[allow(dead_code)] String),
}

impl Decoder {
    /// The decoder that `spec`, the `decoder` entry of a `tokenizer.json`, describes. With
    /// `cleanup` the spaces before punctuation go, as `clean_up_tokenization_spaces` asks.
    pub(super) fn new(spec: &Value, cleanup: bool) -> Result<Self> {
        let mut decoder = Self {
            tokens: vec![],
            fusion: Fusion::Concat,
            texts: vec![],
        };
        if spec.is_null() {
            decoder.tokens.push(TokenStep::Spaced { first: true });
        } else {
            let mut fused = false;
            decoder.add(spec, &mut fused)?;
        }
        if cleanup {
            let rules = CLEANUP
                .iter()
                .map(|(from, to)| TextStep::Replace(Replacer::new(from, to)));
            decoder.texts.extend(rules);
        }
        Ok(decoder)
    }

    fn add(&mut self, spec: &Value, fused: &mut bool) -> Result<()> {
        let name = spec
            .get("type")
            .and_then(Value::as_str)
            .unwrap_or("without a type")
            .to_owned();
        let unsupported = |what: &str| Error::unsupported("decoder", format!("{name}{what}"));
        let step = Step::deserialize(spec)
            .map_err(|error| Error::unsupported("decoder", format!("{name} ({error})")))?;
        match step {
            Step::Sequence { decoders } => {
                for spec in &decoders {
                    self.add(spec, fused)?;
                }
            }
            Step::Fuse => *fused = true,
            Step::ByteLevel if !*fused => {
                self.fusion = Fusion::Bytes { pending: vec![] };
                *fused = true;
            }
            Step::ByteFallback if !*fused => {
                self.tokens.push(TokenStep::ByteFallback { run: vec![] });
            }
            Step::Strip { stop: 1.., .. } => return Err(unsupported(" with stop > 0")),
            Step::Strip { content, start, .. } if *fused => {
                self.texts.push(TextStep::StripStart {
                    content,
                    left: start,
                });
            }
            Step::Strip { content, start, .. } => {
                self.tokens.push(TokenStep::Strip { content, start });
            }
            Step::Metaspace {
                replacement,
                prepend_scheme,
            } => {
                let drop_first = prepend_scheme != "never";
                if *fused {
                    // The whole text counts as the first token.
                    let to = (!drop_first).then_some(' ');
                    self.texts.push(TextStep::Map {
                        from: replacement,
                        to,
                    });
                } else {
                    let step = TokenStep::Metaspace {
                        replacement,
                        drop_first,
                        first: true,
                    };
                    self.tokens.push(step);
                }
            }
            Step::Replace {
                pattern: Pattern::String(pattern),
                content,
            } if *fused => {
                self.texts
                    .push(TextStep::Replace(Replacer::new(&pattern, &content)));
            }
            Step::Replace { .. } if !*fused => {
                let replace = serde_json::from_value(spec.clone()).map_err(Error::tokenizer)?;
                self.tokens.push(TokenStep::Replace(replace));
            }
            Step::WordPiece { prefix, cleanup } if !*fused => {
                self.tokens.push(TokenStep::WordPiece {
                    prefix,
                    cleanup,
                    first: true,
                });
            }
            Step::BPEDecoder { suffix } if !*fused => {
                self.tokens
                    .push(TokenStep::WordSuffix { suffix, held: None });
            }
            _ => return Err(unsupported(" on fused text")),
        }
        Ok(())
    }

    /// The bytes that `token` stands for within a text, which need not be whole characters.
    pub(super) fn bytes(&self, mut token: String) -> Vec<u8> {
        for step in &self.tokens {
            match step {
                TokenStep::ByteFallback { .. } => {
                    if let Some(byte) = spelled_byte(&token) {
                        return vec![byte];
                    }
                }
                TokenStep::WordSuffix { suffix, .. } => {
                    token = token.replace(suffix.as_str(), " ");
                }
                _ => {
                    let mut step = step.clone();
                    step.begin();
                    let mut given = Vec::new();
                    step.push(token, &mut given);
                    token = given.concat();
                }
            }
        }
        if let Fusion::Bytes { .. } = &self.fusion {
            let bytes: Option<Vec<u8>> = token.chars().map(byte_level::byte).collect();
            return bytes.unwrap_or_else(|| token.into_bytes());
        }
        for step in &self.texts {
            // What is taken off the beginning of a text is none of the middle's.
            if !matches!(step, TextStep::StripStart { .. }) {
                let mut step = step.clone();
                token = step.push(token);
                step.finish(&mut token);
            }
        }
        token.into_bytes()
    }

    /// Takes the next token and returns the text that is certain by now.
    pub(super) fn push(&mut self, token: String) -> String {
        let mut tokens = vec![token];
        for step in &mut self.tokens {
            let taken = tokens;
            tokens = Vec::with_capacity(taken.len());
            for token in taken {
                step.push(token, &mut tokens);
            }
        }
        let mut text = String::new();
        for token in &tokens {
            self.fusion.push(token, &mut text);
        }
        for step in &mut self.texts {
            text = step.push(text);
        }
        text
    }

    /// Ends the text and returns its rest.
    pub(super) fn finish(&mut self) -> String {
        let mut tokens = vec![];
        for step in &mut self.tokens {
            let taken = std::mem::take(&mut tokens);
            for token in taken {
                step.push(token, &mut tokens);
            }
            step.finish(&mut tokens);
        }
        let mut text = String::new();
        for token in &tokens {
            self.fusion.push(token, &mut text);
        }
        self.fusion.finish(&mut text);
        for step in &mut self.texts {
            text = step.push(text);
            step.finish(&mut text);
        }
        text
    }
}

impl TokenStep {
    /// Goes on as if a token had been pushed.
    fn begin(&mut self) {
        match self {
            Self::Metaspace { first, .. }
            | Self::WordPiece { first, .. }
            | Self::Spaced { first } => *first = false,
            Self::Replace(_)
            | Self::ByteFallback { .. }
            | Self::Strip { .. }
            | Self::WordSuffix { .. } => {}
        }
    }

    fn push(&mut self, mut token: String, out: &mut Vec<String>) {
        match self {
            Self::Replace(replace) => {
                // A literal or a compiled pattern on one string has no way to fail; if one did,
                // the token as it stands is the nearest to right.
                let replaced = replace.decode_chain(vec![token.clone()]);
                out.extend(replaced.unwrap_or_else(|_| vec![token]));
            }
            Self::ByteFallback { run } => match spelled_byte(&token) {
                Some(byte) => run.push(byte),
                None => {
                    end_run(run, out);
                    out.push(token);
                }
            },
            Self::Strip { content, start } => {
                let cut = leading(&token, *content, *start);
                out.push(token.split_off(cut));
            }
            Self::Metaspace {
                replacement,
                drop_first,
                first,
            } => {
                let to = if std::mem::take(first) && *drop_first {
                    ""
                } else {
                    " "
                };
                out.push(token.replace(*replacement, to));
            }
            Self::WordPiece {
                prefix,
                cleanup,
                first,
            } => {
                if !std::mem::take(first) {
                    token = match token.strip_prefix(prefix.as_str()) {
                        Some(rest) => rest.to_owned(),
                        None => format!(" {token}"),
                    };
                }
                if *cleanup {
                    token = tokenizers::decoders::wordpiece::cleanup(&token);
                }
                out.push(token);
            }
            Self::WordSuffix { suffix, held } => {
                if let Some(token) = held.replace(token) {
                    out.push(token.replace(suffix.as_str(), " "));
                }
            }
            Self::Spaced { first } => {
                if !std::mem::take(first) {
                    token.insert(0, ' ');
                }
                out.push(token);
            }
        }
    }

    fn finish(&mut self, out: &mut Vec<String>) {
        match self {
            Self::ByteFallback { run } => end_run(run, out),
            Self::WordSuffix { suffix, held } => {
                out.extend(held.take().map(|token| token.replace(suffix.as_str(), "")));
            }
            _ => {}
        }
    }
}

/// The byte that a token such as `<0xE2>` spells.
fn spelled_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    // As the tokenizers crate reads them, which allows a sign: `<0x+A>` is 10.
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok())?
}

fn end_run(run: &mut Vec<u8>, out: &mut Vec<String>) {
    if run.is_empty() {
        return;
    }
    let length = run.len();
    let text = String::from_utf8(std::mem::take(run));
    out.push(text.unwrap_or_else(|_| "\u{FFFD}".repeat(length)));
}

/// How many bytes the first characters take, up to `limit`, that are `content`.
fn leading(text: &str, content: char, limit: usize) -> usize {
    text.chars()
        .take(limit)
        .take_while(|&c| c == content)
        .map(char::len_utf8)
        .sum()
}

impl Fusion {
    fn push(&mut self, token: &str, out: &mut String) {
        match self {
            Self::Concat => out.push_str(token),
            Self::Bytes { pending } => {
                let length = pending.len();
                for character in token.chars() {
                    match byte_level::byte(character) {
                        Some(byte) => pending.push(byte),
                        None => {
                            // Not spelled in bytes (an added token): the text itself.
                            pending.truncate(length);
                            pending.extend_from_slice(token.as_bytes());
                            break;
                        }
                    }
                }
                drain_utf8(pending, out);
            }
        }
    }

    fn finish(&mut self, out: &mut String) {
        if let Self::Bytes { pending } = self {
            out.push_str(&String::from_utf8_lossy(pending));
            pending.clear();
        }
    }
}

/// Moves to `out` what is decided of `pending`: characters that are complete, and U+FFFD for
/// what can no longer become one, as [`String::from_utf8_lossy`] does. An incomplete
/// character at the end stays.
fn drain_utf8(pending: &mut Vec<u8>, out: &mut String) {
    let mut used = 0;
    loop {
        match std::str::from_utf8(&pending[used..]) {
            Ok(text) => {
                out.push_str(text);
                used = pending.len();
                break;
            }
            Err(error) => {
                let valid = used + error.valid_up_to();
                out.push_str(&String::from_utf8_lossy(&pending[used..valid]));
                used = valid;
                match error.error_len() {
                    Some(length) => {
                        out.push('\u{FFFD}');
                        used += length;
                    }
                    None => break,
                }
            }
        }
    }
    pending.drain(..used);
}

impl TextStep {
    fn push(&mut self, mut text: String) -> String {
        match self {
            Self::StripStart { content, left } => {
                let cut = leading(&text, *content, *left);
                if cut < text.len() {
                    *left = 0;
                    text.split_off(cut)
                } else {
                    *left -= cut / content.len_utf8();
                    String::new()
                }
            }
            Self::Map { from, to } => match to {
                Some(to) => text
                    .chars()
                    .map(|c| if c == *from { *to } else { c })
                    .collect(),
                None => text.replace(*from, ""),
            },
            Self::Replace(replacer) => replacer.push(text),
        }
    }

    fn finish(&mut self, text: &mut String) {
        if let Self::Replace(replacer) = self {
            text.push_str(&std::mem::take(&mut replacer.held));
        }
    }
}

/// The replacements of `clean_up_tokenization_spaces`, one pass each, in this order.
const CLEANUP: [(&str, &str); 10] = [
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
];

/// Replaces a string in streamed text: leftmost matches that do not overlap.
#[derive(Clone)]
struct Replacer {
    from: String,
    to: String,
    /// The end of the text so far, if it may be the beginning of a match.
    held: String,
}

impl Replacer {
    fn new(from: &str, to: &str) -> Self {
        Self {
            from: from.to_owned(),
            to: to.to_owned(),
            held: String::new(),
        }
    }

    fn push(&mut self, text: String) -> String {
        if self.from.is_empty() {
            return text;
        }
        let text = std::mem::take(&mut self.held) + &text;
        let mut out = String::with_capacity(text.len());
        let mut rest = text.as_str();
        while let Some(at) = rest.find(&self.from) {
            out.push_str(&rest[..at]);
            out.push_str(&self.to);
            rest = &rest[at + self.from.len()..];
        }
        let longest = rest.len().min(self.from.len() - 1);
        let held = (1..=longest)
            .rev()
            .find(|&n| rest.as_bytes().ends_with(&self.from.as_bytes()[..n]))
            .unwrap_or(0);
        // `held` bytes of text equal the beginning of `from`, so they start at a character.
        out.push_str(&rest[..rest.len() - held]);
        self.held.push_str(&rest[rest.len() - held..]);
        out
    }
}
