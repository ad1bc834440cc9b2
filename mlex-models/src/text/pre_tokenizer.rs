//! How text is split before byte-level BPE, by the name that GGUF files give it in
//! `tokenizer.ggml.pre`.
//!
//! The names are llama.cpp's; the patterns are those of the `tokenizer.json` of the models
//! that each name was made for.

use serde_json::{Value, json};

/// What a name in `tokenizer.ggml.pre` stands for.
pub(super) struct PreTokenizer {
    splits: Splits,
    /// Text is brought to Unicode's form NFC first.
    nfc: bool,
    /// A word that is a token needs no merges to become it.
    pub(super) ignore_merges: bool,
    /// Whether llama.cpp adds a BOS where the file does not say.
    pub(super) add_bos: bool,
}

enum Splits {
    /// The pattern of GPT-2, which the tokenizers crate has built in.
    Gpt2,
    /// Single digits, then GPT-2's pattern.
    DigitsThenGpt2,
    /// Own patterns, one after the other.
    Patterns(&'static [&'static str]),
}

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &[&str] = &[
    r"\p{N}{1,3}",
    r"[一-龥\u3040-ゟ゠-ヿ]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];
/// What llama.cpp does where a file names no pre-tokenizer.
const DEFAULT: &[&str] = &[
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
];

impl PreTokenizer {
    /// The pre-tokenizer of that name, or `None` if it is not known.
    pub(super) fn named(name: &str) -> Option<Self> {
        let (splits, nfc) = match name {
            "default" => (Splits::Patterns(DEFAULT), false),
            "gpt-2" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion" | "granite-docling"
            | "exaone4" | "gigachat" | "a.x-4.0" | "mellum" | "jina-es" | "jina-de"
            | "jina-v2-es" | "jina-v2-de" => (Splits::Gpt2, false),
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone"
            | "minerva-7b" => (Splits::DigitsThenGpt2, false),
            "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral"
            | "midm-2.0" | "lfm2" | "dbrx" | "smaug-bpe" | "glm4" | "chatglm-bpe" => {
                (Splits::Patterns(&[LLAMA3]), false)
            }
            "qwen2" => (Splits::Patterns(&[QWEN2]), true),
            "deepseek-r1-qwen" | "kormo" | "megrez" | "stablelm2" | "hunyuan" | "grok-2" => {
                (Splits::Patterns(&[QWEN2]), false)
            }
            "qwen35" => (Splits::Patterns(&[QWEN35]), true),
            "tekken" => (Splits::Patterns(&[TEKKEN]), false),
            "gpt-4o" | "llama4" | "minimax-m2" | "kanana2" => (Splits::Patterns(&[GPT4O]), false),
            "deepseek-v3" | "hunyuan-dense" => (Splits::Patterns(DEEPSEEK3), false),
            _ => return None,
        };
        let llama3 = matches!(
            name,
            "llama3"
                | "llama-v3"
                | "llama-bpe"
                | "falcon3"
                | "falcon-h1"
                | "pixtral"
                | "midm-2.0"
                | "lfm2"
        );
        let ignore_merges = llama3 || name == "tekken";
        Some(Self {
            splits,
            nfc,
            ignore_merges,
            add_bos: ignore_merges,
        })
    }

    /// The `normalizer` entry of a `tokenizer.json`.
    pub(super) fn normalizer_json(&self) -> Value {
        if self.nfc {
            json!({"type": "NFC"})
        } else {
            Value::Null
        }
    }

    /// The `pre_tokenizer` entry of a `tokenizer.json`.
    pub(super) fn pre_tokenizer_json(&self) -> Value {
        let mut steps = match &self.splits {
            Splits::Gpt2 => vec![],
            Splits::DigitsThenGpt2 => vec![json!({"type": "Digits", "individual_digits": true})],
            Splits::Patterns(patterns) => patterns.iter().map(|pattern| split(pattern)).collect(),
        };
        let use_regex = !matches!(self.splits, Splits::Patterns(_));
        steps.push(byte_level(use_regex));
        json!({"type": "Sequence", "pretokenizers": steps})
    }
}

/// The `ByteLevel` entry, which is pre-tokenizer, post-processor and decoder alike.
pub(super) fn byte_level(use_regex: bool) -> Value {
    json!({
        "type": "ByteLevel",
        "add_prefix_space": false,
        "trim_offsets": true,
        "use_regex": use_regex,
    })
}

fn split(pattern: &str) -> Value {
    json!({
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": false,
    })
}
