//! `mlex cache`, and prompts that begin with what is known.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::Write;
use std::process::Stdio;

use common::{copy_of, document, fails, mlex, refuses, small, small_with_tokenizer, stderr};
use serde_json::json;

const TEXT: &str = "t5 t6 t7 t8 t9 t10 t11 t12";

#[test]
fn what_was_saved_is_begun_with() {
    let model = small_with_tokenizer();
    let file = model.path().join("prompt.safetensors");
    let text = model.path().join("prompt.txt");
    std::fs::write(&text, TEXT).unwrap();
    let mut save = mlex(["cache", "save", "--raw", "--json", "--prompt-file"]);
    save.arg(&text).arg("--output").arg(&file);
    let saved = document(save.arg("--model").arg(model.path()));
    assert_eq!(saved["tokens"], 8);
    assert_eq!(saved["model_type"], "llama");
    assert_eq!(saved["kv_bits"], json!(null));

    // In a folder with other files, which are left out.
    let listed = document(mlex(["cache", "list", "--json"]).arg(model.path()));
    let mut expected = saved.clone();
    expected["file"] = json!(file.display().to_string());
    assert_eq!(listed, json!([expected]));
    let named = document(mlex(["cache", "list", "--json"]).arg(&file));
    assert_eq!(named, listed);

    for (prompt, cached) in [
        (format!("{TEXT} t13 t14"), 8),
        // With the hidden state of the last token.
        (TEXT.to_owned(), 8),
        ("t5 t6 t7 t20".to_owned(), 3),
    ] {
        let generate = || {
            let mut command = mlex(["generate", "--raw", "--json", "--max-tokens", "8"]);
            command
                .args(["--prompt", &prompt, "--model"])
                .arg(model.path());
            command
        };
        let cold = document(&mut generate());
        let warm = document(generate().arg("--prompt-cache").arg(&file));
        assert_eq!(warm["tokens"], cold["tokens"]);
        assert_eq!(warm["usage"]["cached_tokens"], cached);
        assert_eq!(cold["usage"].get("cached_tokens"), None);
    }

    // Another model.
    let other = copy_of("llama-tied");
    std::fs::copy(
        model.path().join("tokenizer.json"),
        other.path().join("tokenizer.json"),
    )
    .unwrap();
    let mut generate = mlex(["generate", "--raw", "--prompt", TEXT, "--prompt-cache"]);
    let (error, _) = fails(generate.arg(&file).arg("--model").arg(other.path()));
    assert!(
        error.contains("prompt.safetensors: model: expected "),
        "{error}"
    );
    let weights = small("llama-f32").join("model.safetensors");
    let (error, _) = fails(mlex(["cache", "list"]).arg(weights));
    assert!(error.contains("model.safetensors: missing "), "{error}");
}

#[test]
fn limits_and_packing_are_flags() {
    let model = small_with_tokenizer();
    let generate = |flags: &[&str]| {
        let mut command = mlex(["generate", "--raw", "--json", "--ignore-eos"]);
        command.args(["--max-tokens", "30", "--prompt", TEXT, "--model"]);
        command.arg(model.path()).args(flags);
        command
    };
    let plain = document(&mut generate(&[]));
    let limited = document(&mut generate(&["--max-kv-size", "10"]));
    assert_eq!(plain["tokens"][0], limited["tokens"][0]);
    assert_ne!(plain["tokens"], limited["tokens"]);
    let wide = document(&mut generate(&["--max-kv-size", "1000"]));
    assert_eq!(plain["tokens"], wide["tokens"]);
    // Not reached.
    let late = document(&mut generate(&["--kv-bits", "4"]));
    assert_eq!(plain["tokens"], late["tokens"]);
    let (error, _) = fails(&mut generate(&[
        "--kv-bits",
        "4",
        "--quantized-kv-start",
        "9",
    ]));
    assert!(
        error.contains("kv_group_size: expected a divisor of "),
        "{error}"
    );
    for wrong in [
        &["--max-kv-size", "4"][..],
        &["--kv-bits", "7"],
        &["--kv-group-size", "16"],
        &["--quantized-kv-start", "-1"],
        &["--max-kv-size", "10", "--kv-bits", "4"],
        &["--max-kv-size", "10", "--prompt-cache", "x"],
    ] {
        refuses(&mut generate(wrong));
    }
}

#[test]
fn a_chat_begins_its_next_turn_with_what_it_has() {
    let model = small_with_tokenizer();
    let template = "{% for message in messages %}{{ message.content }} {% endfor %}";
    std::fs::write(model.path().join("chat_template.jinja"), template).unwrap();
    let mut child = mlex(["chat", "--max-tokens", "3", "--model"])
        .arg(model.path())
        .env("RUST_LOG", "mlex_models=debug")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"t5 t6 t7\nt8 t9\n").unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    let text = stderr(&output);
    let known = text.lines().filter(|line| line.contains("known=")).count();
    assert_eq!(known, 1, "{text}");
}
