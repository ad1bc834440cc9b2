//! `mlex chat` on a small model, and what `mlex generate` shows of typed answers.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::Duration;

use common::{document, ends, fails, interrupt, mlex, small_with_tokenizer, stderr, stdout};
use serde_json::{Value, json};

/// A model whose template writes the contents, and spaces between them.
fn model() -> tempfile::TempDir {
    let dir = small_with_tokenizer();
    let template = "{% for message in messages %}{{ message.content }} {% endfor %}";
    std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    dir
}

fn start(model: &Path, flags: &[&str]) -> Child {
    mlex(["chat", "--model"])
        .arg(model)
        .args(flags)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn chat(model: &Path, flags: &[&str], input: &str) -> Output {
    let mut child = start(model, flags);
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(input.as_bytes()).unwrap();
    drop(stdin);
    child.wait_with_output().unwrap()
}

fn saved(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn a_conversation_goes_on_and_can_be_saved_and_loaded() {
    let model = model();
    let file = model.path().join("chat.json");
    let file = file.to_str().unwrap();
    let input = format!("/system t5\nt1 t2\nt3\\\nt4\n/save {file}\n");
    let output = chat(model.path(), &["--max-tokens", "3"], &input);
    assert!(output.status.success(), "{}", stderr(&output));
    let chat = saved(Path::new(file));
    let messages = chat["messages"].as_array().unwrap();
    let roles: Vec<&str> = messages
        .iter()
        .map(|m| m["role"].as_str().unwrap())
        .collect();
    assert_eq!(roles, ["system", "user", "assistant", "user", "assistant"]);
    assert_eq!(messages[3]["content"], "t3\nt4");
    // What was printed is what the conversation has, and what `generate` gives for it.
    let said = |at: usize| messages[at]["content"].as_str().unwrap();
    assert_eq!(stdout(&output), format!("{}\n{}\n", said(2), said(4)));
    std::fs::write(file, json!(messages[..4]).to_string()).unwrap();
    let again = document(
        mlex([
            "generate",
            "--json",
            "--max-tokens",
            "3",
            "--messages",
            file,
            "--model",
        ])
        .arg(model.path()),
    );
    assert_eq!(again["text"], messages[4]["content"]);
    // Loaded, it goes on as it would have.
    std::fs::write(file, json!(messages[..3]).to_string()).unwrap();
    let input = format!("/load {file}\nt3\\\nt4\n/save {file}\n/reset\n/exit\nt9\n");
    let output = self::chat(model.path(), &["--max-tokens", "3"], &input);
    assert_eq!(stdout(&output), format!("{}\n", said(4)));
    assert_eq!(saved(Path::new(file)), chat);
}

#[test]
fn what_goes_wrong_is_told_and_the_chat_goes_on() {
    let model = model();
    let template = "{% for message in messages %}{{ message.content }} {% endfor %}\
        {% if messages | length > 2 %}{{ raise_exception('too long') }}{% endif %}";
    std::fs::write(model.path().join("chat_template.jinja"), template).unwrap();
    let input = "/nothing\n/params temp=x\n/load /no/file\nt1\nt2\n/params max_tokens=1\n/params\n";
    let output = chat(model.path(), &["--max-tokens", "2"], input);
    assert!(output.status.success());
    let told = stderr(&output);
    for part in [
        "error: /nothing: no such command",
        "error: /params: temp: expected a number",
        "error: /no/file: ",
        "error: chat template: default, line 1: too long",
        "max_tokens=1 temp=0 seed=off",
    ] {
        assert!(told.contains(part), "{told}");
    }
    assert_eq!(stdout(&output).lines().count(), 1);
}

#[test]
fn ctrl_c_ends_an_answer_and_keeps_the_chat() {
    let model = model();
    let file = model.path().join("chat.json");
    let mut child = start(
        model.path(),
        &["--max-tokens", "1000000", "--logit-bias", "2=-inf"],
    );
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"t1\n").unwrap();
    let mut first = [0; 20];
    child
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut first)
        .unwrap();
    interrupt(&child);
    write!(stdin, "/save {}\n/exit\n", file.display()).unwrap();
    assert_eq!(ends(&mut child, Duration::from_secs(60)), Some(0));
    let messages = saved(&file);
    let said = messages["messages"][1]["content"].as_str().unwrap();
    assert!(said.as_bytes().starts_with(&first), "{said}");
}

#[test]
fn a_chat_needs_a_template() {
    let model = small_with_tokenizer();
    let (error, hint) = fails(mlex(["chat", "--model"]).arg(model.path()));
    assert_eq!(error, "the model has no chat template for a conversation");
    assert!(hint.contains("--raw"), "{hint}");
}

/// [`model`] with markers of reasoning and tool calls as tokens 127 to 129.
fn typed_model(template: &str) -> tempfile::TempDir {
    let dir = model();
    let path = dir.path().join("tokenizer.json");
    let json = std::fs::read_to_string(&path).unwrap();
    let json = json
        .replace("\"t128\"", "\"<think>\"")
        .replace("\"t129\"", "\"</think>\"");
    std::fs::write(path, json).unwrap();
    std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    dir
}

#[test]
fn reasoning_is_shown_apart_or_hidden() {
    let model = typed_model("{{ messages[0].content }} <think>");
    let run = |flags: &[&str]| {
        mlex(["generate", "--prompt", "t1", "--max-tokens", "6", "--model"])
            .arg(model.path())
            .args(["--logit-bias", "2=-inf", "--logit-bias", "129=-inf"])
            .args(["--reasoning-budget", "2"])
            .args(flags)
            .output()
            .unwrap()
    };
    let answer: Value = serde_json::from_str(&stdout(&run(&["--json"]))).unwrap();
    let reasoning = answer["reasoning"].as_str().unwrap().trim().to_owned();
    let text = answer["text"].as_str().unwrap();
    assert_eq!(reasoning.split(' ').count(), 2, "{answer}");
    assert_eq!(answer["tokens"][2], 129);
    assert_eq!(text.split_whitespace().count(), 3, "{answer}");
    let shown = run(&[]);
    assert_eq!(stdout(&shown).trim_end(), text.trim_end());
    assert!(stderr(&shown).contains(&reasoning));
    let hidden = run(&["--hide-reasoning"]);
    assert_eq!(stdout(&hidden), stdout(&shown));
    assert!(!stderr(&hidden).contains(&reasoning));
}

#[test]
fn several_answers_and_log_probabilities_in_json() {
    let model = model();
    let run = |flags: &[&str]| {
        document(
            mlex([
                "generate",
                "--json",
                "--prompt",
                "t1",
                "--max-tokens",
                "4",
                "--model",
            ])
            .arg(model.path())
            .args(["--temp", "1", "--logit-bias", "2=-inf"])
            .args(flags),
        )
    };
    let answer = run(&["--seed", "3", "-n", "2", "--logprobs", "2"]);
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 2);
    assert_eq!(choices[0]["tokens"], answer["tokens"]);
    assert_eq!(choices[1]["tokens"], run(&["--seed", "4"])["tokens"]);
    let logprobs = choices[1]["logprobs"].as_array().unwrap();
    assert_eq!(logprobs.len(), 4);
    for token in logprobs {
        let top = token["top"].as_array().unwrap();
        assert_eq!(top.len(), 2);
        assert!(top[0]["logprob"].as_f64() >= token["logprob"].as_f64());
    }
}
