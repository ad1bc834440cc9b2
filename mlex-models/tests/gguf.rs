//! GGUF files that the `gguf` package wrote (`tools/make_model_gguf.py`), against what mlx-lm
//! computes from their values; and files that were damaged.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::{Expected, data, message};
use mlex_core::{Array, Dtype};
use mlex_models::generate::{
    Event, LoadOptions, Prompt, Request, Sampler, SamplerConfig, Session, StreamOptions,
    TokenStream,
};
use mlex_models::{Input, LoadedModel, ModelFiles, load};
use serde_json::{Value, json};

fn path(name: &str) -> PathBuf {
    data("gguf").join(format!("{name}.gguf"))
}

fn expected(name: &str) -> Expected {
    Expected::open(&format!("gguf/{name}.expected.safetensors"))
}

/// The files of `tests/data/gguf`, so that a new one is tested without a further line here.
fn names() -> Vec<String> {
    let entries = std::fs::read_dir(data("gguf")).unwrap();
    let names = entries.filter_map(|entry| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        name.strip_suffix(".gguf").map(str::to_owned)
    });
    let mut names: Vec<String> = names.collect();
    names.sort();
    assert!(names.len() >= 7, "the data are not all there: {names:?}");
    names
}

fn open(name: &str, dtype: Option<Dtype>) -> LoadedModel {
    load(&ModelFiles::open(path(name)).unwrap(), dtype, |_| {}).unwrap()
}

/// Fails unless the logits of the expected prompt are within `tolerance` of the expected ones,
/// relative to the largest.
fn check_logits(name: &str, loaded: &LoadedModel, tolerance: f32) {
    let tokens = expected(name).tokens("tokens");
    let ids = Array::from_slice(&tokens, &[1, tokens.len() as i32]).unwrap();
    let mut cache = loaded.model.new_cache().unwrap();
    let hidden = loaded
        .model
        .forward(Input::Tokens(&ids), &mut cache)
        .unwrap();
    let logits = loaded
        .model
        .logits(&hidden)
        .unwrap()
        .as_type(Dtype::Float32)
        .unwrap();
    let found: Vec<f32> = logits.to_vec().unwrap();
    let wanted: Vec<f32> = expected(name).rows("logits").concat();
    assert_eq!(found.len(), wanted.len());
    let scale = wanted.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    for (found, wanted) in found.iter().zip(&wanted) {
        let error = (found - wanted).abs() / scale;
        assert!(error <= tolerance, "{name}: {found} {wanted}");
    }
}

#[test]
fn logits_are_those_of_the_values_in_the_file() {
    for name in names() {
        check_logits(&name, &open(&name, Some(Dtype::Float32)), 1e-4);
        // As they are stored: some halves are rounded on the way.
        check_logits(&name, &open(&name, None), 2e-2);
    }
}

#[test]
fn greedy_tokens_match() {
    for name in names() {
        let loaded = open(&name, Some(Dtype::Float32));
        let prompt = expected(&name).tokens("tokens");
        let greedy = expected(&name).tokens("greedy");
        let sampler = Sampler::new(SamplerConfig::default(), 64, &prompt).unwrap();
        let mut cache = loaded.model.new_cache().unwrap();
        let options = StreamOptions {
            max_tokens: greedy.len(),
            prefill_step: 10.into(),
            ..StreamOptions::default()
        };
        let stream = TokenStream::new(
            &*loaded.model,
            &mut cache,
            sampler,
            &prompt,
            options,
            &mut |_| true,
        );
        let found: Vec<u32> = stream.unwrap().map(|id| id.unwrap()).collect();
        assert_eq!(found, greedy, "{name}");
    }
}

#[test]
fn metadata_become_the_config() {
    let config = |name: &str| Value::Object(open(name, None).config.json().clone());
    assert_eq!(
        config("llama"),
        json!({
            "model_type": "llama",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "intermediate_size": 36,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
            "vocab_size": 64,
            "rope_theta": 10000.0,
            "max_position_embeddings": 512,
            "tie_word_embeddings": false,
            "bos_token_id": 1,
            // With the end of a turn, which the file names by itself.
            "eos_token_id": [2, 63],
        })
    );
    let blocks = config("llama-blocks");
    let layout = |bits: i32| json!({"bits": bits, "group_size": 32, "mode": "affine"});
    let section = &blocks["quantization"];
    assert_eq!(
        (&section["bits"], &section["group_size"]),
        (&json!(4), &json!(32))
    );
    assert_eq!(section["model.embed_tokens"], layout(8));
    assert_eq!(section["model.layers.1.self_attn.v_proj"], layout(5));
    assert_eq!(section["model.layers.0.self_attn.o_proj"], layout(5));
    assert_eq!(section["model.layers.0.mlp.up_proj"], Value::Null);
    assert_eq!(config("llama-tied")["tie_word_embeddings"], true);
    let bias = config("llama-bias");
    assert_eq!(
        (&bias["attention_bias"], &bias["mlp_bias"]),
        (&json!(true), &json!(true))
    );
    assert_eq!(config("qwen2")["rope_theta"], 1e6);
}

#[test]
fn a_session_takes_tokenizer_and_template_from_the_file() {
    let session = Session::load(path("llama"), LoadOptions::default()).unwrap();
    let id = |token: &str| session.tokenizer().token_to_id(token).unwrap();
    let chat = Request::chat("the end").with_max_tokens(4);
    // `Ġ th` comes before `th e` among the merges, and nothing joins `Ġth` and `e`.
    let user: Vec<u32> = ["u", "s", "er", "Ġth", "e", "Ġ", "en", "d"].map(id).into();
    let prompt = [vec![1], user, vec![63, 1]].concat();
    assert_eq!(session.prompt_tokens(&chat).unwrap(), prompt);
    assert_eq!(session.tokenizer().eos_ids(), [2, 63]);
    let tokens = expected("llama").tokens("tokens");
    let request = Request::new(Prompt::Tokens(tokens)).with_max_tokens(16);
    let ids: Vec<u32> = session
        .generate(request)
        .filter_map(|event| match event.unwrap() {
            Event::Token { id, .. } => Some(id),
            _ => None,
        })
        .collect();
    let greedy = expected("llama").tokens("greedy");
    let end = greedy.iter().position(|id| [2, 63].contains(id));
    assert_eq!(ids, greedy[..end.map_or(16, |end| end + 1)]);
}

/// A GGUF file of `tests/data`, to be damaged.
struct Damaged {
    dir: tempfile::TempDir,
    bytes: Vec<u8>,
}

impl Damaged {
    fn of(name: &str) -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
            bytes: std::fs::read(path(name)).unwrap(),
        }
    }

    /// Where a string of the file begins, which its length stands before.
    fn find(&self, text: &str) -> usize {
        let mut wanted = (text.len() as u64).to_le_bytes().to_vec();
        wanted.extend(text.as_bytes());
        let at = self
            .bytes
            .windows(wanted.len())
            .position(|window| window == wanted);
        at.expect(text) + 8
    }

    /// Puts a string of the same length in the place of another.
    fn rename(mut self, from: &str, to: &str) -> Self {
        assert_eq!(from.len(), to.len());
        let at = self.find(from);
        self.bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        self
    }

    /// Sets an unsigned 32-bit value of the metadata.
    fn set(mut self, key: &str, value: u32) -> Self {
        let at = self.find(key) + key.len();
        assert_eq!(
            self.bytes[at..at + 4],
            4u32.to_le_bytes(),
            "{key} is no u32"
        );
        self.bytes[at + 4..at + 8].copy_from_slice(&value.to_le_bytes());
        self
    }

    /// Sets the type of a matrix.
    fn set_type(mut self, tensor: &str, value: u32) -> Self {
        // After the name: the count of dimensions, two of them, the type.
        let at = self.find(tensor) + tensor.len() + 4 + 16;
        self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        self
    }

    fn cut(mut self, length: usize) -> Self {
        self.bytes.truncate(length);
        self
    }

    fn file(&self) -> PathBuf {
        let file = self.dir.path().join("m.gguf");
        std::fs::write(&file, &self.bytes).unwrap();
        file
    }

    fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The message with which loading it fails, soon.
    fn fails(&self) -> String {
        let start = Instant::now();
        let result = ModelFiles::open(self.file()).and_then(|files| load(&files, None, |_| {}));
        let message = message(&result.expect_err("a broken file was loaded"), self.dir());
        assert!(start.elapsed() < Duration::from_secs(5), "{message}");
        let rest = message.strip_prefix("M/m.gguf: ").expect(&message);
        assert!(!rest.contains("M/m.gguf"), "{message}");
        rest.to_owned()
    }

    /// As [`fails`](Self::fails), for what a session needs besides.
    fn session_fails(&self) -> String {
        let result = Session::load(self.file(), LoadOptions::default());
        let message = message(&result.expect_err("a broken file was loaded"), self.dir());
        message
            .strip_prefix("M/m.gguf: ")
            .expect(&message)
            .to_owned()
    }
}

#[test]
fn files_that_are_cut_or_no_gguf() {
    let whole = Damaged::of("llama").bytes.len();
    for (length, expected) in [
        (0, "magic: "),
        (3, "magic: "),
        (4, "version: "),
        (20, "metadata count: "),
        (40, "metadata"),
        (whole / 2, "tensor \""),
        (whole - 1, "tensor \""),
    ] {
        let message = Damaged::of("llama").cut(length).fails();
        assert!(message.starts_with(expected), "{length}: {message}");
    }
    let mut other = Damaged::of("llama");
    other.bytes[..4].copy_from_slice(b"ZZZZ");
    assert_eq!(other.fails(), "magic: expected \"GGUF\", found \"ZZZZ\"");
    let mut old = Damaged::of("llama");
    old.bytes[4..8].copy_from_slice(&9u32.to_le_bytes());
    assert_eq!(old.fails(), "version: expected 2 or 3, found 9");
    // Counts without end cost nothing.
    for at in [8, 16] {
        let mut many = Damaged::of("llama");
        many.bytes[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
        let message = many.fails();
        assert!(message.contains("count: expected "), "{message}");
        assert!(message.ends_with("found 18446744073709551615"), "{message}");
    }
}

#[test]
fn architectures_and_tensors_that_are_not_known() {
    assert_eq!(
        Damaged::of("llama").rename("llama", "mamba").fails(),
        "general.architecture: expected one of llama, qwen2, qwen3, found \"mamba\""
    );
    assert_eq!(
        Damaged::of("llama")
            .rename("general.architecture", "general.architextura")
            .fails(),
        "metadata \"general.architecture\": expected string, found nothing"
    );
    assert_eq!(
        Damaged::of("llama")
            .rename("blk.1.attn_q.weight", "blk.1.attn_x.weight")
            .fails(),
        "tensor name: expected one of a Llama-shaped model, found \"blk.1.attn_x.weight\""
    );
    assert_eq!(
        Damaged::of("llama")
            .rename("blk.1.attn_q.weight", "blk.7.attn_q.weight")
            .fails(),
        "the tensors do not fit the model: 1 missing (model.layers.1.self_attn.q_proj.weight); \
         1 unexpected (model.layers.7.self_attn.q_proj.weight)"
    );
    assert_eq!(
        Damaged::of("llama")
            .rename("token_embd.weight", "token_embx.weight")
            .fails(),
        "missing tensor \"token_embd.weight\""
    );
    let message = Damaged::of("llama-tied")
        .set_type("blk.0.ffn_up.weight", 77)
        .fails();
    assert_eq!(
        message,
        "tensor \"blk.0.ffn_up.weight\": type: expected a known ggml type, found 77"
    );
}

#[test]
fn weights_of_integers_are_refused() {
    // ggml's I16, as large as the F16 that is there.
    let message = Damaged::of("llama-tied")
        .set_type("blk.0.ffn_up.weight", 25)
        .fails();
    assert_eq!(
        message,
        "the tensors do not fit the model: 1 of another dtype \
         (model.layers.0.mlp.up_proj.weight: expected a floating-point type, found int16)"
    );
}

#[test]
fn metadata_that_are_missing_or_do_not_fit() {
    for (key, other) in [
        ("llama.block_count", "llama.block_kount"),
        ("llama.embedding_length", "llama.embedding_lenght"),
        ("llama.feed_forward_length", "llama.feed_forward_lenght"),
        ("llama.attention.head_count", "llama.attention.head_kount"),
    ] {
        assert_eq!(
            Damaged::of("llama").rename(key, other).fails(),
            format!("metadata \"{key}\": expected u64, found nothing")
        );
    }
    assert_eq!(
        Damaged::of("llama")
            .rename(
                "llama.attention.layer_norm_rms_epsilon",
                "llama.attention.layer_norm_rms_epsilom"
            )
            .fails(),
        "missing llama.attention.layer_norm_rms_epsilon"
    );
    let size = "expected a number from 1 to 16777216";
    for (key, value, expected) in [
        ("llama.block_count", u32::MAX, "num_hidden_layers: expected a whole number, found 4294967295".to_owned()),
        ("llama.block_count", 100_000, "num_hidden_layers: expected a number from 1 to 1024, found 100000".to_owned()),
        ("llama.embedding_length", 0, format!("hidden_size: {size}, found 0")),
        ("llama.feed_forward_length", 1 << 30, format!("intermediate_size: {size}, found {}", 1 << 30)),
        (
            "llama.attention.head_count",
            0,
            "llama.attention.head_count: expected a divisor of the 64 rows of \"blk.0.attn_q.weight\", found 0".to_owned(),
        ),
        (
            "llama.attention.head_count",
            7,
            "llama.attention.head_count: expected a divisor of the 64 rows of \"blk.0.attn_q.weight\", found 7".to_owned(),
        ),
        (
            "llama.rope.dimension_count",
            8,
            "llama.rope.dimension_count: 8, a part of each head, is not supported".to_owned(),
        ),
    ] {
        assert_eq!(Damaged::of("llama").set(key, value).fails(), expected);
    }
    let message = Damaged::of("llama")
        .set("llama.embedding_length", 33)
        .fails();
    assert!(
        message.contains("model.norm.weight: expected shape [33], found [32]")
            || message.contains("of another shape"),
        "{message}"
    );
}

#[test]
fn tokenizers_that_are_missing_or_broken() {
    assert_eq!(
        Damaged::of("llama")
            .rename("tokenizer.ggml.tokens", "tokenizer.ggml.tokenz")
            .session_fails(),
        "metadata \"tokenizer.ggml.tokens\": expected array of string, found nothing"
    );
    assert_eq!(
        Damaged::of("llama").rename("gpt2", "bert").session_fails(),
        "tokenizer.ggml.model: \"bert\" is not supported"
    );
    assert_eq!(
        Damaged::of("llama")
            .rename("gpt-2", "gpt-9")
            .session_fails(),
        "tokenizer.ggml.pre: \"gpt-9\" is not supported"
    );
    let message = Damaged::of("llama")
        .set("tokenizer.ggml.eos_token_id", 640)
        .session_fails();
    assert!(
        message.contains("expected an id of the 64 tokens, found 640"),
        "{message}"
    );
    let mut template = Damaged::of("llama");
    let at = template.find("tokenizer.chat_template") + "tokenizer.chat_template".len() + 12;
    template.bytes[at..at + 6].copy_from_slice(b"{% if ");
    let message = template.session_fails();
    assert!(
        message.starts_with("chat template: default, line 1: syntax error"),
        "{message}"
    );
}
