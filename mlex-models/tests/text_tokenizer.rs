//! Tokenizers built by hand, files that are broken, and the real SmolLM2 vocabulary.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use mlex_models::ErrorKind;
use mlex_models::text::{GgufVocab, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

/// A byte-level vocabulary of a few tokens: all printable ASCII, a space, and some merges.
fn byte_level() -> Value {
    let mut tokens: Vec<String> = ('!'..='~').map(String::from).collect();
    tokens.extend(["Ġ", "Ċ", "Ã", "©", "he", "ll", "hell", "hello", "Ġhello"].map(String::from));
    let vocab: serde_json::Map<String, Value> = tokens
        .iter()
        .enumerate()
        .map(|(id, token)| (token.clone(), id.into()))
        .collect();
    let end = vocab.len();
    json!({
        "version": "1.0",
        "added_tokens": [
            {"id": end, "content": "<|end|>", "special": true, "normalized": false,
             "single_word": false, "lstrip": false, "rstrip": false},
            {"id": end + 1, "content": "<think>", "special": false, "normalized": false,
             "single_word": false, "lstrip": false, "rstrip": false},
        ],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true},
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": [["h", "e"], ["l", "l"], ["he", "ll"], ["hell", "o"], ["Ġ", "hello"]],
        },
    })
}

fn write(dir: &Path, name: &str, text: &str) {
    std::fs::write(dir.join(name), text).unwrap();
}

fn load(tokenizer: &Value, config: &Value) -> mlex_models::Result<Tokenizer> {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "tokenizer.json", &tokenizer.to_string());
    write(dir.path(), "tokenizer_config.json", &config.to_string());
    Tokenizer::from_dir(dir.path())
}

fn message(result: mlex_models::Result<Tokenizer>) -> String {
    let message = result.expect_err("broken input was taken").to_string();
    assert!(!message.contains('\n'), "{message:?}");
    message
}

#[test]
fn text_goes_to_ids_and_back() {
    let config = json!({"eos_token": "<|end|>", "bos_token": null, "pad_token": {"content": "!"}});
    let tokenizer = load(&byte_level(), &config).unwrap();
    let id = |token: &str| tokenizer.token_to_id(token).unwrap();
    let ids = tokenizer.encode("hello hello<|end|>\n", false).unwrap();
    assert_eq!(ids, [id("hello"), id("Ġhello"), id("<|end|>"), id("Ċ")]);
    assert_eq!(
        tokenizer.decode(&ids, false).unwrap(),
        "hello hello<|end|>\n"
    );
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "hello hello\n");
    assert_eq!(tokenizer.eos_ids(), [id("<|end|>")]);
    assert_eq!((tokenizer.bos_id(), tokenizer.pad_id()), (None, Some(0)));
    assert!(tokenizer.is_special(id("<|end|>")));
    assert!(!tokenizer.is_special(id("<think>")));
    // A token that the config names as padding is special from then on.
    assert!(tokenizer.is_special(0));
    assert_eq!(tokenizer.id_to_token(id("Ġ")).as_deref(), Some("Ġ"));
    assert_eq!(tokenizer.vocab_size(), 105);
    assert_eq!(
        Value::Object(tokenizer.special_tokens()),
        json!({"eos_token": "<|end|>", "pad_token": "!"})
    );
}

#[test]
fn bos_and_eos_are_added_as_the_config_asks() {
    let config = |bos: Value, eos: Value| json!({"bos_token": "<|end|>", "eos_token": "<think>", "add_bos_token": bos, "add_eos_token": eos});
    let ids = |bos: Value, eos: Value, special| {
        let tokenizer = load(&byte_level(), &config(bos, eos)).unwrap();
        let ids = tokenizer.encode("a", special).unwrap();
        ids.iter()
            .map(|&id| tokenizer.id_to_token(id).unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(ids(true.into(), Value::Null, true), ["<|end|>", "a"]);
    assert_eq!(
        ids(true.into(), true.into(), true),
        ["<|end|>", "a", "<think>"]
    );
    assert_eq!(ids(false.into(), true.into(), true), ["a", "<think>"]);
    assert_eq!(ids(Value::Null, Value::Null, true), ["a"]);
    assert_eq!(ids(true.into(), true.into(), false), ["a"]);
}

#[test]
fn the_post_processor_of_the_file_counts_where_the_config_is_silent() {
    let mut file = byte_level();
    let end = file["added_tokens"][0]["id"].clone();
    file["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [end], "tokens": ["<|end|>"]}},
    });
    let end = u32::try_from(end.as_u64().unwrap()).unwrap();
    let with = |config: Value| load(&file, &config).unwrap().encode("!", true).unwrap();
    assert_eq!(with(json!({})), [end, 0]);
    // transformers replaces it as soon as a flag is given.
    assert_eq!(
        with(json!({"bos_token": "<|end|>", "add_bos_token": false})),
        [0]
    );
}

#[test]
fn limits_of_the_training_run_do_not_cut_the_text() {
    let mut file = byte_level();
    file["truncation"] =
        json!({"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0});
    file["padding"] = json!({"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "!"});
    let tokenizer = load(&file, &json!({})).unwrap();
    assert_eq!(tokenizer.encode("abcdef", true).unwrap().len(), 6);
    assert_eq!(tokenizer.encode("a", true).unwrap().len(), 1);
}

#[test]
fn tokens_of_the_config_are_added_with_their_ids() {
    let config = |id: u32| {
        json!({"added_tokens_decoder": {
            "103": {"content": "<|end|>", "special": true, "normalized": false},
            (id.to_string()): {"content": "<tool>", "special": true},
        }})
    };
    let tokenizer = load(&byte_level(), &config(105)).unwrap();
    assert_eq!(tokenizer.encode("a<tool>", false).unwrap()[1], 105);
    assert!(tokenizer.is_special(105));
    let error = message(load(&byte_level(), &config(200)));
    assert!(
        error.ends_with("added_tokens_decoder: id of \"<tool>\": expected 200, found 105"),
        "{error}"
    );
}

#[test]
fn an_id_without_a_token_is_an_error() {
    let tokenizer = load(&byte_level(), &json!({})).unwrap();
    let error = tokenizer.decode(&[1, 4_000_000_000], false).unwrap_err();
    assert_eq!(
        error.to_string(),
        "token id: expected an id of the 105 tokens, found 4000000000"
    );
}

#[test]
fn broken_files_give_one_line_that_names_them() {
    let dir = tempfile::tempdir().unwrap();
    let error = message(Tokenizer::from_dir(dir.path()));
    assert!(error.ends_with(": missing tokenizer.json"), "{error}");

    let text = byte_level().to_string();
    let path = dir.path().join("tokenizer.json");
    // Wherever it is cut: no panic (the decoder's parser has an `expect`), and one line.
    for end in (0..text.len())
        .filter(|&end| text.is_char_boundary(end))
        .step_by(5)
    {
        write(dir.path(), "tokenizer.json", &text[..end]);
        let result = Tokenizer::from_dir(dir.path());
        let error = result.unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Json { .. }), "{error}");
        assert_eq!(error.path(), Some(path.as_path()));
        assert!(!error.to_string().contains('\n'));
    }
    std::fs::write(&path, b"{\"model\": \"\xFF\"}").unwrap();
    assert!(message(Tokenizer::from_dir(dir.path())).contains("UTF-8"));
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(message(Tokenizer::from_dir(dir.path())).contains("expected a regular file"));
}

#[test]
fn a_vocabulary_that_contradicts_itself_is_refused() {
    let text = byte_level().to_string();
    let broken = |from: &str, to: &str| {
        let dir = tempfile::tempdir().unwrap();
        assert!(text.contains(from), "{from}");
        write(dir.path(), "tokenizer.json", &text.replacen(from, to, 1));
        let result = Tokenizer::from_dir(dir.path());
        assert!(result.is_err(), "{to} was taken");
        message(result)
    };
    let cases = [
        ("\"a\":64", "\"b\":64", "twice"),
        ("\"a\":64", "\"a\":65", "two tokens have id 65"),
        (
            "\"a\":64",
            "\"a\":4294967295",
            "token id 4294967295 is too large",
        ),
        ("\"a\":64", "\"a\":-1", "expected u32"),
        ("\"a\":64", "\"a\":\"64\"", "expected u32"),
        (
            "\"id\":103",
            "\"id\":3",
            "an id of its own, found 3, which another token has",
        ),
        ("\"id\":103", "\"id\":104", "an id of its own"),
        (
            "\"id\":104",
            "\"id\":900",
            "added_tokens: id of \"<think>\": expected 900, found 104",
        ),
        ("\"type\":\"BPE\"", "\"type\":\"Magic\"", "tokenizer"),
        ("\"model\":", "\"muddle\":", "missing field model"),
        ("\"vocab\":", "\"vocabulary\":", "missing field model.vocab"),
        ("[\"h\",\"e\"]", "[\"h\",\"ee\"]", "tokenizer"),
        ("[\"h\",\"e\"]", "[\"h\"]", "tokenizer"),
        (
            "[\"h\",\"e\"]",
            "[\"hello\",\"hello\"]",
            "model.merges: expected merges that make tokens, of at most 7 bytes, found one that makes 10",
        ),
        (
            "\"type\":\"BPE\"",
            "\"type\":\"BPE\",\"continuing_subword_prefix\":\"##\"",
            "continuing_subword_prefix with merges: \"##\" is not supported",
        ),
        ("\"type\":\"ByteLevel\"", "\"type\":\"Nibble\"", "tokenizer"),
    ];
    for (from, to, expected) in cases {
        let error = broken(from, to);
        assert!(error.contains(expected), "{to}: {error}");
        assert!(error.contains("tokenizer.json"), "{error}");
    }
}

#[test]
fn a_field_of_the_wrong_type_is_named() {
    let cases = [
        (
            json!([]),
            "tokenizer_config.json: the file: expected an object, found a list of 0",
        ),
        (
            json!({"bos_token": 1}),
            "bos_token: expected a string, an object with content, or null, found 1",
        ),
        (
            json!({"add_bos_token": "yes"}),
            "add_bos_token: expected true or false, found \"yes\"",
        ),
        (
            json!({"eos_token": {"text": "x"}}),
            "found an object without content",
        ),
        (
            json!({"added_tokens_decoder": {"x": "y"}}),
            "added_tokens_decoder.x: expected an id, found a name",
        ),
        (
            json!({"added_tokens_decoder": []}),
            "added_tokens_decoder: expected an object, found a list of 0",
        ),
        (
            json!({"extra_special_tokens": "x"}),
            "extra_special_tokens: expected a list, found \"x\"",
        ),
    ];
    for (config, expected) in cases {
        let error = message(load(&byte_level(), &config));
        assert!(error.ends_with(expected), "{error}");
        assert!(error.contains("tokenizer_config.json"), "{error}");
    }
}

#[test]
fn decoders_that_no_text_model_has_are_named() {
    let cases = [
        json!({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true}),
        json!({"type": "Strip", "content": " ", "start": 0, "stop": 1}),
        json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}),
    ];
    for decoder in cases {
        let mut file = byte_level();
        file["decoder"] = decoder;
        let error = message(load(&file, &json!({})));
        assert!(
            error.contains("decoder: ") && error.contains("is not supported"),
            "{error}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whatever a byte of the file becomes, there is an answer and no panic.
    #[test]
    fn a_file_with_a_flaw_is_read_or_refused(at: prop::sample::Index, flaw in flaw()) {
        let mut bytes = byte_level().to_string().into_bytes();
        let at = at.index(bytes.len());
        match flaw {
            Flaw::Replace(byte) => bytes[at] = byte,
            Flaw::Remove(count) => drop(bytes.drain(at..(at + count).min(bytes.len()))),
            Flaw::Insert(text) => drop(bytes.splice(at..at, text.bytes())),
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), &bytes).unwrap();
        match Tokenizer::from_dir(dir.path()) {
            Ok(tokenizer) => {
                if let Ok(ids) = tokenizer.encode("hello <|end|>é\n", true) {
                    tokenizer.decode(&ids, false).unwrap();
                }
            }
            Err(error) => assert!(!error.to_string().contains('\n'), "{error}"),
        }
    }
}

#[derive(Debug, Clone)]
enum Flaw {
    Replace(u8),
    Remove(usize),
    Insert(&'static str),
}

fn flaw() -> impl Strategy<Value = Flaw> {
    let text = [
        "null",
        "[",
        "}",
        "\"",
        "-1",
        "1e9",
        "true",
        ",",
        "{}",
        "\\u0000",
        "99999999999",
    ];
    prop_oneof![
        any::<u8>().prop_map(Flaw::Replace),
        (b'0'..=b'9').prop_map(Flaw::Replace),
        (1usize..30).prop_map(Flaw::Remove),
        prop::sample::select(text.to_vec()).prop_map(Flaw::Insert),
    ]
}

fn gguf_vocab() -> GgufVocab {
    let mut vocab = GgufVocab::default();
    vocab.model = "gpt2".into();
    vocab.pre = Some("smollm".into());
    vocab.tokens = ["<|end|>", "h", "i", "hi", "Ġ", "1", "2", "12"]
        .map(String::from)
        .to_vec();
    vocab.token_types = vec![3, 1, 1, 1, 1, 1, 1, 1];
    vocab.merges = Some(vec!["h i".into(), "1 2".into()]);
    vocab.eos = Some(0);
    vocab
}

#[test]
fn a_gguf_vocabulary_splits_text_as_its_pre_tokenizer_says() {
    let mut vocab = gguf_vocab();
    let ids = |vocab: &GgufVocab| {
        let tokenizer = Tokenizer::from_gguf_vocab(vocab).unwrap();
        tokenizer.encode("hi 12<|end|>", false).unwrap()
    };
    // Digits stay single for SmolLM, up to three together for Llama 3.
    assert_eq!(ids(&vocab), [3, 4, 5, 6, 0]);
    vocab.pre = Some("llama-bpe".into());
    assert_eq!(ids(&vocab), [3, 4, 7, 0]);
}

#[test]
fn a_broken_gguf_vocabulary_is_refused() {
    type Change = fn(&mut GgufVocab);
    let cases: [(Change, &str); 9] = [
        (
            |v| v.tokens[2] = "h".into(),
            "tokenizer.ggml.tokens: expected each token once, found \"h\" as 1 and 2",
        ),
        (
            |v| v.tokens.clear(),
            "tokenizer.ggml.tokens: expected at least one token, found none",
        ),
        (
            |v| v.eos = Some(8),
            "tokenizer.ggml.eos_token_id: expected an id of the 8 tokens, found 8",
        ),
        (
            |v| v.token_types.push(1),
            "tokenizer.ggml.token_type: expected 8 values, found 9",
        ),
        (
            |v| v.scores.push(1.0),
            "tokenizer.ggml.scores: expected 8 values, found 1",
        ),
        (
            |v| v.merges = Some(vec!["h e".into()]),
            "tokenizer.ggml.merges[0]: expected two tokens of the vocabulary, found \"h e\"",
        ),
        (|v| v.merges = None, "missing tokenizer.ggml.merges"),
        (
            |v| v.model = "t5".into(),
            "tokenizer.ggml.model: \"t5\" is not supported",
        ),
        (
            |v| v.pre = Some("new".into()),
            "tokenizer.ggml.pre: \"new\" is not supported",
        ),
    ];
    for (change, expected) in cases {
        let mut vocab = gguf_vocab();
        change(&mut vocab);
        assert_eq!(message(Tokenizer::from_gguf_vocab(&vocab)), expected);
    }
}

#[test]
fn a_saved_tokenizer_is_read_back_the_same() {
    let mut vocab = gguf_vocab();
    vocab.bos = Some(0);
    vocab.add_bos = Some(true);
    let tokenizer = Tokenizer::from_gguf_vocab(&vocab).unwrap();
    let dir = tempfile::tempdir().unwrap();
    tokenizer.save(dir.path()).unwrap();
    let again = Tokenizer::from_dir(dir.path()).unwrap();
    for text in ["hi 12", "<|end|>hihi", ""] {
        let ids = tokenizer.encode(text, true).unwrap();
        assert_eq!(ids[0], 0);
        assert_eq!(again.encode(text, true).unwrap(), ids);
        assert_eq!(
            again.decode(&ids, false).unwrap(),
            tokenizer.decode(&ids, false).unwrap()
        );
    }
    assert_eq!(again.eos_ids(), tokenizer.eos_ids());
    assert_eq!(again.special_tokens(), tokenizer.special_tokens());
    let names: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(names.len(), 2, "{names:?}");
    assert!(tokenizer.save(dir.path().join("none")).is_err());
}

/// The merges that a SentencePiece vocabulary implies, and bytes for what it lacks.
#[test]
fn a_sentencepiece_vocabulary_is_rebuilt_with_its_merges() {
    let mut vocab = GgufVocab::default();
    vocab.model = "llama".into();
    vocab.tokens = vec!["<unk>".into(), "<s>".into(), "</s>".into()];
    vocab
        .tokens
        .extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    vocab
        .tokens
        .extend(["▁", "a", "b", "ab", "▁a", "▁ab"].map(String::from));
    let count = vocab.tokens.len();
    vocab.scores = (0..count).map(|id| -(id as f32)).collect();
    vocab.token_types = vec![1; count];
    vocab.token_types[..3].copy_from_slice(&[2, 3, 3]);
    vocab.token_types[3..259].fill(6);
    (vocab.unknown, vocab.bos, vocab.eos) = (Some(0), Some(1), Some(2));
    let tokenizer = Tokenizer::from_gguf_vocab(&vocab).unwrap();
    // "▁ab": "ab" has a better score than "▁a", so it is made first, then "▁ab".
    assert_eq!(tokenizer.encode("ab", true).unwrap(), [1, 264]);
    assert_eq!(tokenizer.encode("ab ab", false).unwrap(), [264, 264]);
    // é is C3 A9 in UTF-8.
    let ids = tokenizer.encode("é", false).unwrap();
    assert_eq!(ids, [259, 3 + 0xC3, 3 + 0xA9]);
    for text in ["ab ab", "é", "  a  b ", ""] {
        let ids = tokenizer.encode(text, true).unwrap();
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
    }
    vocab.add_space_prefix = Some(false);
    let tokenizer = Tokenizer::from_gguf_vocab(&vocab).unwrap();
    assert_eq!(tokenizer.encode("ab", false).unwrap(), [262]);
    vocab.scores.clear();
    assert_eq!(
        message(Tokenizer::from_gguf_vocab(&vocab)),
        "missing tokenizer.ggml.scores"
    );
}

fn smollm2() -> Tokenizer {
    let path = std::env::var_os("MLEX_TEST_MODEL")
        .map(PathBuf::from)
        .unwrap();
    if path.is_dir() {
        return Tokenizer::from_dir(&path).unwrap();
    }
    let file = mlex_core::io::GgufFile::open(&path).unwrap();
    let vocab = GgufVocab::from_metadata(file.metadata()).unwrap();
    Tokenizer::from_gguf_vocab(&vocab).unwrap()
}

/// Expected values: tests/data/smollm2-tokens.json, by the tokenizers library of Python.
#[test]
#[ignore = "needs MLEX_TEST_MODEL"]
fn smollm2_encodes_and_decodes_as_the_reference() {
    let tokenizer = smollm2();
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/data/smollm2-tokens.json"
    );
    let rows: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert!(rows.len() > 90);
    for row in &rows {
        let ids: Vec<u32> = serde_json::from_value(row["ids"].clone()).unwrap();
        let text = row["text"].as_str().unwrap();
        assert_eq!(tokenizer.encode(text, false).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.encode(text, true).unwrap(), ids, "{text:?}");
        assert_eq!(
            tokenizer.decode(&ids, false).unwrap(),
            row["decoded"],
            "{text:?}"
        );
        assert_eq!(
            tokenizer.decode(&ids, true).unwrap(),
            row["decoded_skip_special"],
            "{text:?}"
        );
    }
    assert_eq!(
        (tokenizer.bos_id(), tokenizer.eos_ids(), tokenizer.pad_id()),
        (Some(1), &[2][..], Some(2))
    );
    assert_eq!(tokenizer.vocab_size(), 49152);
}
