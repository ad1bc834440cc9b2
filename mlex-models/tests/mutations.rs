//! Many small damages to configs and GGUF files: each loads or gives an error of one line, and
//! what loads can run. Nothing panics, hangs or asks for memory that the file does not have.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::Path;

use common::{Copy, data, message};
use mlex_core::Array;
use mlex_models::{Input, LoadedModel, ModelFiles, load};
use serde_json::{Map, Value, json};

/// Loads and runs what is at `path`, or looks at the error. Returns whether it loaded.
fn try_out(path: &Path, dir: &Path) -> bool {
    let loaded = ModelFiles::open(path).and_then(|files| {
        let loaded = load(&files, None, |_| {})?;
        // What a session would ask for; a broken one is an error here too.
        files.config()?.eos_token_ids()?;
        let _ = files.tokenizer().map_err(|error| message(&error, dir));
        let _ = files.chat_template().map_err(|error| message(&error, dir));
        Ok(loaded)
    });
    match loaded.and_then(|loaded| run(&loaded)) {
        Ok(()) => true,
        Err(error) => {
            let message = message(&error, dir);
            assert!(!message.contains("panicked"), "{message}");
            false
        }
    }
}

fn run(LoadedModel { model, .. }: &LoadedModel) -> mlex_models::Result<()> {
    let tokens = Array::from_slice(&[1, 2, 3], &[1, 3])?;
    let mut cache = model.new_cache()?;
    let hidden = model.forward(Input::Tokens(&tokens), &mut cache)?;
    Ok(model.logits(&hidden)?.eval()?)
}

/// Values that no field is made for.
fn strange() -> Vec<Value> {
    vec![
        Value::Null,
        json!(true),
        json!(0),
        json!(-1),
        json!(3),
        json!(1_000_000_000),
        json!(1_u64 << 40),
        json!(0.5),
        json!(1e300),
        json!("x\ny"),
        json!([]),
        json!([1, "a", null]),
        json!({}),
        json!({"type": "linear", "factor": 1e30, "bits": 4}),
    ]
}

/// The paths of all fields, those of nested objects too.
fn fields(object: &Map<String, Value>) -> Vec<Vec<String>> {
    let mut paths = Vec::new();
    for (key, value) in object {
        paths.push(vec![key.clone()]);
        let nested = value.as_object().map(fields).unwrap_or_default();
        paths.extend(
            nested
                .into_iter()
                .map(|path| [vec![key.clone()], path].concat()),
        );
    }
    paths
}

fn set(object: &mut Map<String, Value>, path: &[String], value: Value) {
    match path {
        [] => {}
        [key] => _ = object.insert(key.clone(), value),
        [key, rest @ ..] => set(object[key].as_object_mut().unwrap(), rest, value),
    }
}

#[test]
fn every_field_of_a_config_may_hold_anything() {
    for name in [
        "llama-rope-yarn",
        "llama-rope-longrope",
        "llama-sliding",
        "llama-mixed-bits",
        "qwen2-config-minimal",
        "qwen3-tied-4bit",
        "minicpm",
        "smollm3",
        "qwen3_moe-sparse-step",
        "qwen3_next-hf",
        "qwen3_5-4bit",
        "qwen3_5_moe-text",
        "gemma4-small",
        "gemma4-experts",
        "nemotron_h-experts",
    ] {
        let model = Copy::of(name);
        let config: Map<String, Value> =
            serde_json::from_slice(&model.read("config.json")).unwrap();
        assert!(try_out(model.path(), model.path()), "{name}");
        let mut more = config.clone();
        // Settings that the checkpoint does without.
        for key in [
            "rope_scaling",
            "rope_parameters",
            "head_dim",
            "sliding_window",
            "layer_types",
            "attention_bias",
            "quantization",
            "no_rope_layer_interval",
            "rope_traditional",
        ] {
            more.entry(key).or_insert(Value::Null);
        }
        let mut refused = 0;
        for path in fields(&more) {
            for value in strange() {
                let mut changed = config.clone();
                set(&mut changed, &path, value);
                model.write("config.json", Value::Object(changed).to_string());
                refused += usize::from(!try_out(model.path(), model.path()));
            }
        }
        assert!(refused > 50, "{name}: only {refused} were refused");
    }
}

/// A repeatable source of numbers (Knuth's MMIX constants).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % limit
    }
}

/// Loads 400 variants of `bytes` with damage in the first `header` of them.
fn damage(bytes: &[u8], header: usize, file: &Path, model: &Path, dir: &Path) {
    let mut numbers = Numbers(1);
    let mut refused = 0;
    for round in 0..400 {
        let mut damaged = bytes.to_vec();
        for _ in 0..=round % 3 {
            let at = numbers.below(header);
            match numbers.below(4) {
                0 => damaged[at] ^= 1 << numbers.below(8),
                1 => damaged[at] = numbers.below(256) as u8,
                2 => damaged[at..at + 4].copy_from_slice(&[0xff; 4]),
                _ => drop(damaged.splice(at..at + 1, [])),
            }
        }
        std::fs::write(file, damaged).unwrap();
        refused += usize::from(!try_out(model, dir));
    }
    assert!(refused > 100, "only {refused} were refused");
}

#[test]
fn the_header_of_a_gguf_file_may_hold_anything() {
    for name in ["llama-blocks", "llama-rope-freqs", "qwen3"] {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("m.gguf");
        let bytes = std::fs::read(data("gguf").join(format!("{name}.gguf"))).unwrap();
        // Metadata, and the list of the tensors.
        damage(&bytes, 3500, &file, &file, dir.path());
    }
}

#[test]
fn the_header_of_a_safetensors_file_may_hold_anything() {
    let model = Copy::of("llama-4bit");
    let bytes = model.read("model.safetensors");
    let file = model.file("model.safetensors");
    damage(&bytes, 5000, &file, model.path(), model.path());
}
