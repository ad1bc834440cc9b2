//! What the tests of the command share: running it, and models to run it on.
// The helpers are not in a test function, which clippy would let unwrap.
#![allow(dead_code, clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// The command with its arguments; logging is as it is for a user without settings, and nothing
/// is asked of the Hub.
pub(crate) fn mlex<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mlex"));
    command
        .args(args)
        .env_remove("RUST_LOG")
        .env("HF_HUB_CACHE", "/no/cache")
        .env("HF_HUB_OFFLINE", "1")
        .stdin(Stdio::null());
    command
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The stdout of a command that succeeds.
#[track_caller]
pub(crate) fn succeeds(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{:?}: {}",
        output.status,
        stderr(&output)
    );
    stdout(&output)
}

/// The JSON document of a command that succeeds.
#[track_caller]
pub(crate) fn document(command: &mut Command) -> Value {
    serde_json::from_str(&succeeds(command)).unwrap()
}

/// The error and the hint of a command that fails as it shall: code 1, nothing on stdout, one
/// line `error: ` and at most one line `hint: ` on stderr.
#[track_caller]
pub(crate) fn fails(command: &mut Command) -> (String, String) {
    let output = command.output().unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert_eq!(stdout(&output), "");
    let mut lines = text.lines();
    let error = lines
        .next()
        .and_then(|line| line.strip_prefix("error: "))
        .expect(&text);
    let hint = lines
        .next()
        .map(|line| line.strip_prefix("hint: ").expect(&text));
    assert_eq!(lines.next(), None, "{text}");
    (error.to_owned(), hint.unwrap_or_default().to_owned())
}

/// The stderr of a command whose arguments are wrong: code 2.
#[track_caller]
pub(crate) fn refuses(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert_eq!(stdout(&output), "");
    assert!(text.starts_with("error: "), "{text}");
    text
}

/// A small checkpoint of mlex-models with random weights.
pub(crate) fn small(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../mlex-models/tests/data")
        .join(name)
}

/// A copy of a small checkpoint.
pub(crate) fn copy_of(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(small(name)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    dir
}

/// A copy of the small checkpoint llama-f32 with a tokenizer of its 130 tokens, which are
/// spelled `t0`, `t1` and so on, with spaces between them.
pub(crate) fn small_with_tokenizer() -> tempfile::TempDir {
    let dir = copy_of("llama-f32");
    let vocab: serde_json::Map<String, Value> =
        (0..130).map(|id| (format!("t{id}"), json!(id))).collect();
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": null,
        "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"},
    });
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    dir
}

/// Changes a field of a model's config.json.
pub(crate) fn set_config(dir: &Path, field: &str, value: Value) {
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config[field] = value;
    std::fs::write(path, config.to_string()).unwrap();
}

/// What the reference gives for a small checkpoint.
pub(crate) struct Expected {
    /// A prompt.
    pub(crate) tokens: Vec<u32>,
    /// The 16 greedy tokens after it.
    pub(crate) greedy: Vec<u32>,
    /// The logits of each position of the prompt.
    pub(crate) logits: Vec<Vec<f64>>,
}

impl Expected {
    pub(crate) fn of(name: &str) -> Self {
        let file = mlex_core::io::SafetensorsFile::open(small(name).join("expected.safetensors"));
        let file = file.unwrap();
        let words = |name| -> Vec<[u8; 4]> {
            file.bytes(name)
                .unwrap()
                .chunks(4)
                .map(|word| word.try_into().unwrap())
                .collect()
        };
        let ids = |name| {
            words(name)
                .into_iter()
                .map(u32::from_le_bytes)
                .collect::<Vec<_>>()
        };
        let tokens = ids("tokens");
        let logits: Vec<f64> = words("logits")
            .into_iter()
            .map(|word| f32::from_le_bytes(word).into())
            .collect();
        let width = logits.len() / tokens.len();
        let logits = logits.chunks(width).map(<[f64]>::to_vec).collect();
        Self {
            tokens,
            greedy: ids("greedy"),
            logits,
        }
    }

    /// `log_softmax` of the logits at a position.
    pub(crate) fn logprobs(&self, position: usize) -> Vec<f64> {
        let logits = &self.logits[position];
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();
        logits.iter().map(|logit| logit - max - sum.ln()).collect()
    }
}

/// Ids as an argument.
pub(crate) fn ids(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
}

pub(crate) fn interrupt(child: &Child) {
    let status = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .unwrap();
    assert!(status.success());
}

/// The exit code of a child that ends soon.
#[track_caller]
pub(crate) fn ends(child: &mut Child, within: Duration) -> Option<i32> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        if start.elapsed() > within {
            let _ = child.kill();
            panic!("still running after {within:?}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
