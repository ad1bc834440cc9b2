//! GGUF files to MLX directories: the same tensors, config, tokens and template.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::{Path, PathBuf};

use common::{Copy, data, message};
use mlex_core::io::{SafetensorsFile, StoredDtype};
use mlex_core::{Array, Dtype};
use mlex_models::text::ChatRequest;
use mlex_models::{ConvertOptions, ErrorKind, Input, LoadedModel, ModelFiles, convert, load};
use serde_json::{Value, json};

fn gguf(name: &str) -> ModelFiles {
    ModelFiles::open(data("gguf").join(format!("{name}.gguf"))).unwrap()
}

/// A converted file of `tests/data/gguf`, in a folder of its own.
struct Converted {
    parent: tempfile::TempDir,
    files: ModelFiles,
}

impl Converted {
    fn of(name: &str, options: ConvertOptions) -> Self {
        let parent = tempfile::tempdir().unwrap();
        let out = parent.path().join("out");
        convert(&gguf(name), &out, options, |_| true).unwrap();
        let files = ModelFiles::open(out).unwrap();
        Self { parent, files }
    }

    fn json(&self, name: &str) -> Value {
        let text = std::fs::read(self.files.path().join(name)).unwrap();
        assert_eq!(text.last(), Some(&b'\n'), "{name} ends with a line break");
        serde_json::from_slice(&text).unwrap()
    }

    fn tensors(&self) -> SafetensorsFile {
        SafetensorsFile::open(self.files.path().join("model.safetensors")).unwrap()
    }
}

/// What is in a folder, sorted.
fn entries(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn logits(files: &ModelFiles, dtype: Option<Dtype>) -> Vec<f32> {
    let LoadedModel { model, .. } = load(files, dtype, |_| {}).unwrap();
    let tokens: Vec<i32> = (3..40).collect();
    let tokens = Array::from_slice(&tokens, &[1, tokens.len() as i32]).unwrap();
    let mut cache = model.new_cache().unwrap();
    let hidden = model.forward(Input::Tokens(&tokens), &mut cache).unwrap();
    let logits = model.logits(&hidden).unwrap();
    logits.as_type(Dtype::Float32).unwrap().to_vec().unwrap()
}

const NAMES: [&str; 7] = [
    "llama",
    "llama-bias",
    "llama-blocks",
    "llama-rope-freqs",
    "llama-tied",
    "qwen2",
    "qwen3",
];

#[test]
fn the_directory_gives_the_same_logits_text_and_prompts() {
    for name in NAMES {
        let (before, converted) = (gguf(name), Converted::of(name, ConvertOptions::default()));
        let after = &converted.files;
        assert_eq!(entries(converted.parent.path()), ["out"], "{name}");
        assert_eq!(
            entries(after.path()),
            [
                "chat_template.jinja",
                "config.json",
                "model.safetensors",
                "tokenizer.json",
                "tokenizer_config.json"
            ],
            "{name}"
        );
        // Bit for bit: the tensors are the same, and so is what is computed.
        assert_eq!(logits(&before, None), logits(after, None), "{name}");

        let (old, new) = (before.tokenizer().unwrap(), after.tokenizer().unwrap());
        for text in ["the rain in thé end.\nis it?", "<s>a<|end|> b"] {
            let ids = old.encode(text, true).unwrap();
            assert_eq!(new.encode(text, true).unwrap(), ids, "{name}");
            assert_eq!(new.decode(&ids, false).unwrap(), text, "{name}");
        }
        assert_eq!(
            (new.bos_id(), new.pad_id()),
            (old.bos_id(), old.pad_id()),
            "{name}"
        );
        // What ends a text, from config and tokenizer together.
        assert_eq!(
            after.config().unwrap().eos_token_ids().unwrap(),
            [2, 63],
            "{name}"
        );

        let messages = [json!({"role": "user", "content": "on and on"})];
        let request = ChatRequest {
            messages: &messages,
            add_generation_prompt: true,
            ..ChatRequest::default()
        };
        let prompt = |files: &ModelFiles| {
            files
                .chat_template()
                .unwrap()
                .unwrap()
                .render(&request)
                .unwrap()
        };
        assert_eq!(prompt(after), "<s>user on and on<|end|><s>", "{name}");
        assert_eq!(prompt(&before), prompt(after), "{name}");
    }
}

#[test]
fn the_config_is_what_the_metadata_say() {
    for name in NAMES {
        let converted = Converted::of(name, ConvertOptions::default());
        let config = gguf(name).config().unwrap();
        assert_eq!(
            converted.json("config.json"),
            Value::Object(config.json().clone()),
            "{name}"
        );
    }
    let tensors = Converted::of("llama-blocks", ConvertOptions::default()).tensors();
    assert_eq!(
        tensors.metadata().get("format").map(String::as_str),
        Some("mlx")
    );
    let dtype = |name: &str| tensors.info(name).unwrap().dtype;
    assert_eq!(dtype("model.embed_tokens.weight"), StoredDtype::U32);
    assert_eq!(dtype("model.embed_tokens.scales"), StoredDtype::F32);
    assert_eq!(
        dtype("model.layers.0.mlp.up_proj.weight"),
        StoredDtype::BF16
    );
    assert_eq!(
        dtype("model.layers.0.mlp.down_proj.weight"),
        StoredDtype::F16
    );
    assert_eq!(dtype("model.norm.weight"), StoredDtype::F32);
}

#[test]
fn floats_become_the_dtype_that_is_asked_for() {
    for (dtype, stored) in [
        (Dtype::Float16, StoredDtype::F16),
        (Dtype::Bfloat16, StoredDtype::BF16),
        (Dtype::Float32, StoredDtype::F32),
    ] {
        let options = ConvertOptions::default().with_dtype(Some(dtype));
        let converted = Converted::of("llama-blocks", options);
        let tensors = converted.tensors();
        for name in tensors.names() {
            let found = tensors.info(name).unwrap().dtype;
            let packed = found == StoredDtype::U32 && name.ends_with(".weight");
            assert!(packed || found == stored, "{name}: {found}");
        }
        // As casting while the model is loaded does.
        assert_eq!(
            logits(&converted.files, None),
            logits(&gguf("llama-blocks"), Some(dtype)),
            "{dtype}"
        );
    }
}

#[test]
fn progress_counts_up_to_all_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let mut seen = Vec::new();
    let out = dir.path().join("out");
    convert(
        &gguf("llama"),
        &out,
        ConvertOptions::default(),
        |progress| {
            seen.push(progress);
            true
        },
    )
    .unwrap();
    let last = *seen.last().unwrap();
    assert_eq!(last.loaded, last.total);
    assert!(seen.is_sorted_by_key(|progress| progress.loaded));
    let tensors = SafetensorsFile::open(out.join("model.safetensors")).unwrap();
    assert_eq!(seen.len(), tensors.names().len());
}

/// The message of a conversion that is refused, and which leaves `parent` as it was.
fn refused(files: &ModelFiles, out: &Path, options: ConvertOptions, parent: &Path) -> String {
    let before = entries(parent);
    let error = convert(files, out, options, |_| true).unwrap_err();
    assert_eq!(entries(parent), before);
    message(&error, parent)
}

#[test]
fn nothing_that_exists_is_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "mine").unwrap();
    let folder = dir.path().join("folder");
    std::fs::create_dir(&folder).unwrap();
    let source = gguf("llama");
    for (out, name) in [(&file, "file"), (&folder, "folder")] {
        assert_eq!(
            refused(&source, out, ConvertOptions::default(), dir.path()),
            format!(
                "M/{name}: output directory: expected one that does not exist, found it exists"
            )
        );
    }
    assert_eq!(std::fs::read(&file).unwrap(), b"mine");
    let below = refused(
        &source,
        &file.join("out"),
        ConvertOptions::default(),
        dir.path(),
    );
    assert!(below.starts_with("M/file/out"), "{below}");
}

#[test]
fn what_cannot_be_converted_is_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let directory = Copy::of("llama-f32");
    let error = convert(
        &ModelFiles::open(directory.path()).unwrap(),
        &out,
        ConvertOptions::default(),
        |_| true,
    )
    .unwrap_err();
    assert_eq!(
        message(&error, directory.path()),
        "M: convert: a model directory as the source is not supported"
    );
    let options = ConvertOptions::default().with_dtype(Some(Dtype::Uint8));
    assert_eq!(
        refused(&gguf("llama"), &out, options, dir.path()),
        "dtype: expected a floating-point type, found uint8"
    );
    // A file that is broken in its last tensor.
    let mut bytes = std::fs::read(gguf("llama-tied").path()).unwrap();
    let name = b"blk.1.attn_v.weight";
    let at = bytes
        .windows(name.len())
        .position(|window| window == name)
        .unwrap()
        + name.len()
        + 20;
    bytes[at..at + 4].copy_from_slice(&77u32.to_le_bytes());
    let broken: PathBuf = dir.path().join("broken.gguf");
    std::fs::write(&broken, bytes).unwrap();
    assert_eq!(
        refused(
            &ModelFiles::open(&broken).unwrap(),
            &out,
            ConvertOptions::default(),
            dir.path()
        ),
        "M/broken.gguf: tensor \"blk.1.attn_v.weight\": type: expected a known ggml type, found 77"
    );
}

#[test]
fn a_cancelled_conversion_leaves_nothing() {
    for stop_after in [1, 5] {
        let dir = tempfile::tempdir().unwrap();
        let mut count = 0;
        let out = dir.path().join("out");
        let error = convert(&gguf("llama"), &out, ConvertOptions::default(), |_| {
            count += 1;
            count < stop_after
        })
        .unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Cancelled), "{error}");
        assert_eq!(count, stop_after);
        assert!(entries(dir.path()).is_empty());
    }
}
