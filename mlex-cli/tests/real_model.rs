//! The commands on SmolLM2-135M-Instruct. Expected values are mlx-lm's
//! (`tools/make_smollm2_golden.py`).
#![allow(clippy::unwrap_used)]

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use common::{document, fails, mlex, small, succeeds};
use serde_json::{Value, json};

fn model() -> PathBuf {
    std::env::var_os("MLEX_TEST_MODEL")
        .expect("MLEX_TEST_MODEL is set")
        .into()
}

/// The GGUF file as an MLX directory, made once for all tests.
fn converted() -> &'static Path {
    static CONVERTED: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let make = || {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("smollm2");
        let text = succeeds(
            mlex(["convert", "--model"])
                .arg(model())
                .arg("--out")
                .arg(&out),
        );
        assert!(
            text.starts_with(out.to_str().unwrap()) && text.ends_with(" bits per weight\n"),
            "{text}"
        );
        (dir, out)
    };
    &CONVERTED.get_or_init(make).1
}

fn golden() -> Value {
    let text = std::fs::read(small("smollm2-golden.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

fn generate(model: &Path) -> Command {
    let mut command = mlex(["generate", "--json", "--model"]);
    command.arg(model);
    command
}

/// Checks the greedy tokens of a prompt of the golden file.
fn greedy(name: &str, model: &Path) {
    let golden = golden();
    let prompts = golden["prompts"].as_array().unwrap();
    let prompt = prompts
        .iter()
        .find(|prompt| prompt["name"] == name)
        .unwrap();
    let mut command = generate(model);
    command.args(["--ignore-eos", "--dtype", "float32"]);
    command.args([
        "--max-tokens",
        &prompt["greedy"].as_array().unwrap().len().to_string(),
    ]);
    match &prompt["messages"] {
        Value::Null => command.args(["--raw", "--prompt", prompt["text"].as_str().unwrap()]),
        messages => command.args(["--prompt", messages[0]["content"].as_str().unwrap()]),
    };
    let answer = document(&mut command);
    assert_eq!(answer["prompt_tokens"], prompt["ids"], "{name}");
    assert_eq!(answer["tokens"], prompt["greedy"], "{name}");
}

#[test]
#[ignore = "needs MLEX_TEST_MODEL"]
fn the_capital_of_france() {
    let question = [
        "--prompt",
        "What is the capital of France?",
        "--max-tokens",
        "24",
    ];
    let answer = document(generate(&model()).args(question));
    assert!(
        answer["text"].as_str().unwrap().contains("Paris"),
        "{answer}"
    );
    assert_eq!(answer["finish_reason"], "stop");
    // The end-of-text token counts, and is not in the text.
    let last = answer["tokens"].as_array().unwrap().last().unwrap();
    assert_eq!(last, &json!(2));
    assert!(!answer["text"].as_str().unwrap().contains("<|"), "{answer}");
    let again = document(generate(converted()).args(question));
    assert_eq!(again["tokens"], answer["tokens"]);
    assert_eq!(again["prompt_tokens"], answer["prompt_tokens"]);
    assert_eq!(again["text"], answer["text"]);
    // Streamed, it is the same text.
    let streamed = succeeds(
        mlex(["generate", "--model"])
            .arg(converted())
            .args(question),
    );
    assert_eq!(streamed.strip_suffix('\n'), answer["text"].as_str());
}

#[test]
#[ignore = "needs MLEX_TEST_MODEL"]
fn greedy_tokens_of_a_chat_are_the_references() {
    greedy("france", converted());
}

#[test]
#[ignore = "needs MLEX_TEST_MODEL"]
fn greedy_tokens_of_code_are_the_references() {
    greedy("code", converted());
}

#[test]
#[ignore = "needs MLEX_TEST_MODEL"]
fn greedy_tokens_of_a_long_prompt_are_the_references() {
    greedy("story", &model());
}

#[test]
#[ignore = "needs MLEX_TEST_MODEL"]
fn scores_are_the_references() {
    let golden = &golden()["score"];
    let mut command = mlex(["score", "--json", "--top", "3", "--model"]);
    command
        .arg(converted())
        .args(["--text", golden["text"].as_str().unwrap()]);
    let score = document(&mut command);
    assert_eq!(score["tokens"], golden["ids"]);
    let near = |found: &Value, wanted: &Value, tolerance: f64| {
        let (found, wanted) = (found.as_f64().unwrap(), wanted.as_f64().unwrap());
        assert!((found - wanted).abs() < tolerance, "{found}, not {wanted}");
    };
    let count = golden["ids"].as_array().unwrap().len();
    assert_eq!(score["logprobs"].as_array().unwrap().len(), count);
    assert_eq!(score["logprobs"][0], Value::Null);
    for position in 1..count {
        near(
            &score["logprobs"][position],
            &golden["logprobs"][position],
            1e-3,
        );
        for (found, wanted) in score["top"][position]
            .as_array()
            .unwrap()
            .iter()
            .zip(golden["top"][position].as_array().unwrap())
        {
            near(&found["logprob"], &wanted["logprob"], 1e-3);
        }
    }
    near(&score["perplexity"], &golden["perplexity"], 0.02);
}

#[test]
#[ignore = "needs MLEX_TEST_MODEL"]
fn inspect_says_the_same_of_both() {
    let [file, directory] = [model().as_path(), converted()]
        .map(|model| document(mlex(["inspect", "--json", "--model"]).arg(model)));
    // 49152 x 576 embedding, also the head; 30 layers of 9 heads of 64 with 3 for keys and
    // values, 1536 wide inside; norms.
    let layer = 2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576 + 2 * 576;
    assert_eq!(file["parameters"], 49152 * 576 + 30 * layer + 576);
    assert_eq!(
        file["file_bytes"],
        std::fs::metadata(model()).unwrap().len()
    );
    for field in [
        "model_type",
        "parameters",
        "weight_bytes",
        "quantization",
        "memory",
    ] {
        assert_eq!(file[field], directory[field], "{field}");
    }
    assert_eq!(file["chat_template"], true);
    assert_eq!(directory["chat_template"], true);
    assert_eq!(file["tokenizer"]["vocab_size"], 49152);
    let rows = file["quantization"].as_array().unwrap();
    let row = |path: &str| rows.iter().find(|row| row["path"] == path).unwrap();
    assert_eq!(row("model.embed_tokens")["bits"], 8);
    assert_eq!(row("model.layers.*.mlp.up_proj")["bits"], 4);
    assert_eq!(row("model.layers.*.mlp.up_proj")["count"], 30);
}

#[test]
#[ignore = "needs MLEX_TEST_MODEL"]
fn what_is_there_is_not_overwritten() {
    let mut command = mlex(["convert", "--model"]);
    let (error, hint) = fails(command.arg(model()).arg("--out").arg(converted()));
    assert!(error.ends_with("it exists"), "{error}");
    assert!(hint.contains("another --out"), "{hint}");
}

#[test]
#[ignore = "needs MLEX_TEST_MODEL"]
fn a_truncated_file_is_named() {
    let whole = std::fs::read(model()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    // Within the metadata, and within the tensors.
    for length in [100_000, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole[..length]).unwrap();
        let (error, _) = fails(mlex(["inspect", "--model"]).arg(&path));
        assert!(error.starts_with(path.to_str().unwrap()), "{error}");
    }
}
