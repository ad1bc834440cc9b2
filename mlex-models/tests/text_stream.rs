//! Streamed decoding and stop strings: pieces put together are the whole.
#![allow(clippy::unwrap_used)]

use mlex_models::text::{GgufVocab, StopSequences, StreamingDetokenizer, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

/// A tokenizer of this crate and the same file in the tokenizers library, as the reference.
struct Pair {
    ours: Tokenizer,
    reference: tokenizers::Tokenizer,
}

impl Pair {
    fn new(file: &Value) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        std::fs::write(&path, file.to_string()).unwrap();
        let reference = tokenizers::Tokenizer::from_file(&path).unwrap();
        Self {
            ours: Tokenizer::from_dir(dir.path()).unwrap(),
            reference,
        }
    }

    fn check(&self, ids: &[u32], skip_special: bool) {
        let shown = |id: &&u32| !(skip_special && self.ours.is_special(**id));
        // The library's BPEDecoder panics on nothing.
        let expected = match ids.iter().find(shown) {
            Some(_) => self.reference.decode(ids, skip_special).unwrap(),
            None => String::new(),
        };
        let mut stream = StreamingDetokenizer::new(&self.ours, skip_special);
        let mut text = String::new();
        for &id in ids {
            text.push_str(&stream.push(id));
            assert!(
                expected.starts_with(&text),
                "{text:?} is not the beginning of {expected:?}"
            );
        }
        text.push_str(&stream.finish());
        assert_eq!(text, expected);
        assert_eq!(self.ours.decode(ids, skip_special).unwrap(), expected);
    }
}

fn file(tokens: &[String], special: &[usize], decoder: Value) -> Value {
    let vocab: serde_json::Map<String, Value> = tokens
        .iter()
        .enumerate()
        .map(|(id, token)| (token.clone(), id.into()))
        .collect();
    let added: Vec<Value> = special
        .iter()
        .map(|&id| {
            json!({"id": id, "content": tokens[id], "special": true, "normalized": false,
                   "single_word": false, "lstrip": false, "rstrip": false})
        })
        .collect();
    json!({
        "version": "1.0",
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": decoder,
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": true},
    })
}

fn byte_level_step() -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true})
}

/// All bytes, halves of characters, words, and tokens outside of the byte alphabet.
fn byte_level() -> Pair {
    let alphabet = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
    let mut tokens: Vec<String> = alphabet.into_iter().map(String::from).collect();
    tokens.sort();
    let more = [
        "<|end|>",
        "<｜fin▁｜>",
        "Ġthe",
        "ðŁĺ",
        "ĢðŁ",
        "Ã©Ġ",
        "ĠĠ",
        "é你",
        "\n",
    ]
    .map(String::from);
    tokens.extend(more);
    Pair::new(&file(&tokens, &[256, 257], byte_level_step()))
}

/// Bytes, words, and tokens that look like bytes.
fn sentencepiece_tokens() -> Vec<String> {
    let mut tokens = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    let more = [
        "▁", "▁▁", "▁the", "a▁b", "é", "你好", " ", "<0x+A>", "<0xé>", "<0xG0>", ".", "'s", "▁n't",
        "▁'",
    ];
    tokens.extend(more.map(String::from));
    tokens
}

fn replace() -> Value {
    json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "})
}

/// The decoders of models in use, and rarer steps, on a SentencePiece vocabulary.
fn sentencepiece() -> Vec<Pair> {
    let fallback = json!({"type": "ByteFallback"});
    let fuse = json!({"type": "Fuse"});
    let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
    let metaspace = |scheme: &str| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true});
    let sequence = |decoders: Vec<&Value>| json!({"type": "Sequence", "decoders": decoders});
    let decoders = [
        sequence(vec![&replace(), &fallback, &fuse, &strip]),
        sequence(vec![&replace(), &fallback, &fuse]),
        sequence(vec![&fallback, &metaspace("always")]),
        sequence(vec![&fallback, &fuse, &metaspace("always")]),
        sequence(vec![&fuse, &metaspace("never")]),
        sequence(vec![
            &fallback,
            &fuse,
            &json!({"type": "Replace", "pattern": {"String": "▁▁"}, "content": "_"}),
        ]),
        sequence(vec![
            &replace(),
            &strip,
            &fuse,
            &json!({"type": "Strip", "content": " ", "start": 3, "stop": 0}),
        ]),
        sequence(vec![
            &json!({"type": "Replace", "pattern": {"Regex": "[a▁]+"}, "content": "-"}),
            &fallback,
        ]),
        metaspace("first"),
        json!({"type": "WordPiece", "prefix": "▁", "cleanup": true}),
        json!({"type": "BPEDecoder", "suffix": "▁"}),
        Value::Null,
    ];
    decoders
        .iter()
        .map(|decoder| Pair::new(&file(&sentencepiece_tokens(), &[1, 2], decoder.clone())))
        .collect()
}

proptest! {
    #[test]
    fn byte_level_pieces_are_the_whole(ids in prop::collection::vec(0u32..265, 0..40), skip: bool) {
        byte_level().check(&ids, skip);
    }

    /// Often bytes in the right order, so that whole and broken characters occur.
    #[test]
    fn byte_level_text_with_a_flaw_is_the_whole(text in "\\PC{0,12}", at in 0usize..40, skip: bool) {
        let pair = byte_level();
        let mut ids: Vec<u32> = pair.reference.encode(text.as_str(), false).unwrap().get_ids().to_vec();
        if at < ids.len() {
            ids.remove(at);
        }
        pair.check(&ids, skip);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn sentencepiece_pieces_are_the_whole(
        ids in prop::collection::vec(prop_oneof![0u32..273, 259u32..273, Just(3 + 0xE2), Just(3 + 0x82), Just(3 + 0xAC)], 0..30),
        skip: bool,
    ) {
        for pair in sentencepiece() {
            pair.check(&ids, skip);
        }
    }
}

#[test]
fn a_character_comes_when_it_is_complete_and_spaces_stay() {
    let pair = byte_level();
    let mut stream = StreamingDetokenizer::new(&pair.ours, false);
    let id = |token: &str| pair.ours.token_to_id(token).unwrap();
    let pieces = ["Ġ", "Ġ", "a"].map(|token| stream.push(id(token)));
    assert_eq!(pieces, [" ", " ", "a"]);
    // 😀 is F0 9F 98 80: "ðŁĺ" has the first three bytes, "Ģ" the last.
    assert_eq!(stream.push(id("ðŁĺ")), "");
    assert_eq!(stream.push(id("Ģ")), "😀");
    assert_eq!(stream.push(id("ðŁĺ")), "");
    assert_eq!(stream.push(id("Ġthe")), "\u{FFFD} the");
    assert_eq!(stream.push(id("ðŁĺ")), "");
    assert_eq!(stream.push(9999), "");
    assert_eq!(stream.finish(), "\u{FFFD}");
    assert_eq!(stream.push(id("Ġthe")), " the");
}

#[test]
fn clean_up_applies_where_transformers_applies_it() {
    let tokens = [
        "Hi", " ", ".", " '", "  ", "s", "n't", " do", ",", "'", "?!", "ve", "<unk>",
    ]
    .map(String::from);
    let scored: Vec<Value> = tokens.iter().map(|token| json!([token, -1.0])).collect();
    let mut unigram = file(&[], &[], json!({"type": "Fuse"}));
    unigram["model"] = json!({"type": "Unigram", "unk_id": 12, "vocab": scored});
    let load = |file: &Value, config: Value| {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
        std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        Tokenizer::from_dir(dir.path()).unwrap()
    };
    let ids = [
        0, 1, 2, 0, 1, 8, 0, 1, 6, 0, 3, 5, 0, 3, 1, 7, 4, 2, 1, 9, 11, 1,
    ];
    let text = "Hi .Hi ,Hi n'tHi 'sHi '  do  . 've ";
    // By transformers' clean_up_tokenization: ten replacements, each over the whole text.
    let clean = "Hi.Hi,Hin'tHi'sHi' do .'ve ";
    let on = json!({"clean_up_tokenization_spaces": true});
    assert_eq!(load(&unigram, json!({})).decode(&ids, false).unwrap(), text);
    assert_eq!(
        load(&unigram, on.clone()).decode(&ids, false).unwrap(),
        clean
    );
    let bpe = file(&tokens, &[], json!({"type": "Fuse"}));
    assert_eq!(load(&bpe, on).decode(&ids, false).unwrap(), text);
    let forced = json!({"clean_up_tokenization_spaces": true,
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": true});
    assert_eq!(load(&bpe, forced).decode(&ids, false).unwrap(), clean);
}

/// The output up to the stop string that ends first, of those the longest; by trying each end.
fn naive(stops: &[String], text: &str) -> (String, Option<String>) {
    for end in (0..=text.len()).filter(|&end| text.is_char_boundary(end)) {
        let ending = stops
            .iter()
            .filter(|stop| !stop.is_empty() && text[..end].ends_with(*stop));
        if let Some(stop) = ending.max_by_key(|stop| stop.len()) {
            return (text[..end - stop.len()].to_owned(), Some(stop.clone()));
        }
    }
    (text.to_owned(), None)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn stops_are_found_as_by_a_naive_search(
        stops in prop::collection::vec("[abé]{0,4}", 0..4),
        pieces in prop::collection::vec("[abcé]{0,4}", 0..8),
    ) {
        let (expected, expected_stop) = naive(&stops, &pieces.concat());
        let mut search = StopSequences::new(&stops);
        let (mut text, mut stop, mut pushed) = (String::new(), None, String::new());
        for piece in &pieces {
            pushed.push_str(piece);
            let outcome = search.push(piece);
            text.push_str(&outcome.text);
            if let Some(index) = outcome.stop {
                stop = Some(stops[index].clone());
                break;
            }
            // Held back is the longest end of the text that a stop string begins with.
            let held = (0..=pushed.len())
                .filter(|&at| pushed.is_char_boundary(at))
                .map(|at| &pushed[at..])
                .find(|end| stops.iter().any(|stop| stop.starts_with(*end)))
                .unwrap_or_default();
            prop_assert_eq!(text.len() + held.len(), pushed.len());
        }
        if stop.is_none() {
            text.push_str(&search.finish());
        }
        prop_assert_eq!((text, stop), (expected, expected_stop));
    }
}

/// Random ids over the real vocabulary against the tokenizers library on the saved files.
#[test]
#[ignore = "needs MLEX_TEST_MODEL"]
fn smollm2_pieces_are_the_whole() {
    let path = std::path::PathBuf::from(std::env::var_os("MLEX_TEST_MODEL").unwrap());
    let dir = tempfile::tempdir().unwrap();
    let ours = if path.is_dir() {
        Tokenizer::from_dir(&path).unwrap()
    } else {
        let file = mlex_core::io::GgufFile::open(&path).unwrap();
        Tokenizer::from_gguf_vocab(&GgufVocab::from_metadata(file.metadata()).unwrap()).unwrap()
    };
    ours.save(dir.path()).unwrap();
    let reference = tokenizers::Tokenizer::from_file(dir.path().join("tokenizer.json")).unwrap();
    let pair = Pair { ours, reference };
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let size = u32::try_from(pair.ours.vocab_size()).unwrap();
    runner
        .run(
            &(prop::collection::vec(0..size, 0..60), any::<bool>()),
            |(ids, skip)| {
                pair.check(&ids, skip);
                Ok(())
            },
        )
        .unwrap();
}
