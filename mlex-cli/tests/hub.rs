//! `mlex pull`, and models that are named as on the Hub.
// The helpers are not in a test function, which clippy would let unwrap.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "../../mlex-hub/tests/common/fake_hub.rs"]
mod fake_hub;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::{
    Expected, document, fails, ids, small, small_with_tokenizer, stderr, stdout, succeeds,
};
use fake_hub::{COMMIT, Content, FakeHub};
use serde_json::Value;
use tempfile::TempDir;

/// A Hub with one repository, and a cache.
struct Site {
    hub: FakeHub,
    home: TempDir,
}

impl Site {
    fn new(content: Content) -> Self {
        Self {
            hub: FakeHub::start(content),
            home: tempfile::tempdir().unwrap(),
        }
    }

    /// With the small checkpoint llama-f32.
    fn with_model() -> Self {
        Self::new(files_of(small_with_tokenizer().path()))
    }

    /// The command, as it is for a user who has set these places.
    fn mlex<const N: usize>(&self, args: [&str; N]) -> Command {
        let mut command = common::mlex(args);
        for variable in [
            "HF_HUB_CACHE",
            "HF_HUB_OFFLINE",
            "HF_TOKEN",
            "HTTP_PROXY",
            "http_proxy",
        ] {
            command.env_remove(variable);
        }
        command.env("HF_ENDPOINT", self.hub.endpoint());
        command.env("HF_HOME", self.home.path());
        command
    }

    fn snapshot(&self) -> String {
        let path = format!("hub/models--o--n/snapshots/{COMMIT}");
        self.home.path().join(path).to_str().unwrap().to_owned()
    }
}

/// A repository with the files of a folder.
fn files_of(folder: &Path) -> Content {
    let entries = fs::read_dir(folder).unwrap().map(Result::unwrap);
    let files: Vec<(String, Vec<u8>)> = entries
        .map(|entry| {
            let name = entry.file_name().into_string().unwrap();
            (name, fs::read(entry.path()).unwrap())
        })
        .collect();
    Content::new(
        files
            .iter()
            .map(|(name, bytes)| (name.as_str(), &bytes[..])),
    )
}

/// The expected tokens are mlx-lm's, as for the same checkpoint in a directory.
#[test]
fn every_command_takes_a_repository() {
    let site = Site::with_model();
    let expected = Expected::of("llama-f32");
    let prompt = expected.tokens.iter().map(|id| format!("t{id}"));
    let prompt = prompt.collect::<Vec<_>>().join(" ");
    let mut command = site.mlex(["generate", "--raw", "--json", "--max-tokens", "16"]);
    let generated = document(command.args(["--ignore-eos", "--model", "o/n", "--prompt", &prompt]));
    let tokens: Vec<u32> = serde_json::from_value(generated["tokens"].clone()).unwrap();
    assert_eq!(tokens, expected.greedy);
    assert!(site.hub.lines().iter().any(|line| line == "GET cdn"));

    let tokens = ids(&expected.tokens);
    let mut command = site.mlex(["score", "--json", "--model", "o/n", "--tokens", &tokens]);
    let score = document(&mut command);
    assert_eq!(
        score["tokens"].as_array().unwrap().len(),
        expected.tokens.len()
    );
    let report = document(&mut site.mlex(["inspect", "--json", "--model", "o/n"]));
    assert_eq!(report["model_type"], "llama");
    let mut command = site.mlex(["bench", "--json", "--model", "o/n", "--prompt-tokens", "2"]);
    let speeds: Value = document(command.args(["--gen-tokens", "1", "--repeats", "1"]));
    assert!(speeds["decode_tps"].as_f64().unwrap() > 0.0);
    // Only the first one fetched files.
    assert!(!site.hub.lines().iter().any(|line| line == "GET cdn"));
}

#[test]
fn pull_prints_where_the_model_is() {
    let site = Site::with_model();
    let output = site.mlex(["pull", "o/n"]).output().unwrap();
    assert_eq!(stdout(&output), site.snapshot() + "\n");
    assert_eq!(stderr(&output), "");
    let path = succeeds(&mut site.mlex(["pull", "o/n", "--revision", COMMIT]));
    assert_eq!(path, site.snapshot() + "\n");
}

#[test]
fn a_gguf_file_is_chosen() {
    let gguf = fs::read(small("gguf/llama.gguf")).unwrap();
    let site = Site::new(Content::new([
        ("n-Q8_0.gguf", &b"another one"[..]),
        ("n-Q4_0.gguf", &gguf),
    ]));
    let (error, hint) = fails(&mut site.mlex(["inspect", "--model", "o/n"]));
    assert_eq!(
        error,
        "o/n: several GGUF files; the repository has n-Q4_0.gguf, n-Q8_0.gguf"
    );
    assert_eq!(hint, "choose one: o/n:FILE, or o/n:Q4_K_M");
    let report = document(&mut site.mlex(["inspect", "--json", "--model", "o/n:Q4_0"]));
    assert_eq!(report["model_type"], "llama");
    let out = site.home.path().join("out");
    let out = out.to_str().unwrap();
    succeeds(&mut site.mlex(["convert", "--model", "o/n:n-Q4_0.gguf", "--out", out]));
    assert!(Path::new(out).join("config.json").exists());
}

#[test]
fn without_the_hub_the_cache_is_enough() {
    let site = Site::with_model();
    let inspect = || site.mlex(["inspect", "--json", "--model", "o/n"]);
    let (error, hint) = fails(inspect().env("HF_HUB_OFFLINE", "1"));
    assert!(
        error.starts_with("o/n: revision \"main\" is not in the cache "),
        "{error}"
    );
    assert_eq!(hint, "`mlex pull o/n` brings it, without HF_HUB_OFFLINE");
    succeeds(&mut inspect());
    site.hub.requests();
    document(inspect().env("HF_HUB_OFFLINE", "1"));
    assert_eq!(site.hub.lines(), [""; 0]);
    // Nobody listens at the discard port.
    let output = inspect()
        .env("HF_ENDPOINT", "http://127.0.0.1:9")
        .output()
        .unwrap();
    assert!(output.status.success());
    let note = stderr(&output);
    assert!(
        note.starts_with("o/n: cannot reach 127.0.0.1:9: "),
        "{note}"
    );
    assert!(note.ends_with("; using what is in the cache\n"), "{note}");
    assert_eq!(note.lines().count(), 1);
}

#[test]
fn errors_say_what_to_do() {
    let hinted = |change: &dyn Fn(&mut Content), arguments: &[&str]| {
        let mut content = files_of(small_with_tokenizer().path());
        change(&mut content);
        let site = Site::new(content);
        let mut command = site.mlex(["pull"]);
        fails(command.args(arguments))
    };
    let nothing = |_: &mut Content| {};
    let (error, hint) = hinted(&nothing, &["o/other"]);
    assert!(
        error.starts_with("o/other: no such repository on 127.0.0.1:"),
        "{error}"
    );
    assert!(hint.contains("HF_TOKEN"), "{hint}");
    let (error, _) = hinted(&nothing, &["o/n", "--revision", "v2"]);
    assert_eq!(error, "o/n: no revision \"v2\"");
    let gated = |content: &mut Content| content.gate_token = Some("hf_me".to_owned());
    let (error, hint) = hinted(&gated, &["o/n"]);
    assert_eq!(error, "o/n: the repository is gated, and no token was sent");
    assert!(hint.contains("https://huggingface.co/o/n"), "{hint}");
    let wrong = |content: &mut Content| {
        let file = "tokenizer.json".to_owned();
        let wrong = vec![b'x'; content.files[&file].len()];
        content.wrong.insert(file, wrong);
    };
    let (error, hint) = hinted(&wrong, &["o/n"]);
    assert!(error.starts_with("o/n: tokenizer.json: "), "{error}");
    assert!(!hint.is_empty());
    let no_weights = |content: &mut Content| {
        content
            .files
            .retain(|name, _| !name.ends_with(".safetensors"));
    };
    let (error, _) = hinted(&no_weights, &["o/n"]);
    assert!(
        error.starts_with("o/n: expected config.json with model.safetensors"),
        "{error}"
    );
}

#[test]
fn the_token_opens_a_gate() {
    let mut content = files_of(small_with_tokenizer().path());
    content.gate_token = Some("hf_me".to_owned());
    let site = Site::new(content);
    succeeds(site.mlex(["pull", "o/n"]).env("HF_TOKEN", "hf_me"));
    // The file is where `hf auth login` writes it.
    let site = Site::new(site.hub.content().clone());
    fs::write(site.home.path().join("token"), "hf_me\n").unwrap();
    succeeds(&mut site.mlex(["pull", "o/n"]));
    // As for huggingface_hub, a refusal does not take away what is in the cache.
    let mut command = site.mlex(["pull", "o/n"]);
    let output = command.env("HF_TOKEN", "hf_bad").output().unwrap();
    assert_eq!(stdout(&output), site.snapshot() + "\n");
    let note = stderr(&output);
    assert!(
        note.ends_with(" refused the token; using what is in the cache\n"),
        "{note}"
    );
    fs::remove_dir_all(site.snapshot()).unwrap();
    let (error, hint) = fails(site.mlex(["pull", "o/n"]).env("HF_TOKEN", "hf_bad"));
    assert!(error.ends_with("refused the token"), "{error}");
    assert!(hint.starts_with("set HF_TOKEN"), "{hint}");
}
