//! Images, videos and sounds on the command line, on small checkpoints with towers. Expected
//! prompts and tokens are mlx-vlm's (`tools/media_sessions.py`).
#![allow(clippy::unwrap_used)]

mod common;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use common::{document, fails, mlex, small, small_with_tokenizer, stderr, stdout, succeeds};
use serde_json::{Value, json};

fn file(name: &str) -> PathBuf {
    let dir = if name.ends_with("wav") {
        "mlex-audio"
    } else {
        "mlex-vision"
    };
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .join(dir)
        .join("tests/data")
        .join(name)
}

/// The conversation `name` of a checkpoint.
fn expected(model: &str, name: &str) -> Value {
    let text = std::fs::read(small(model).join("media.json")).unwrap();
    let media: Value = serde_json::from_slice(&text).unwrap();
    let sessions = media["sessions"].as_array().unwrap();
    let session = sessions.iter().find(|session| session["name"] == name);
    session.unwrap().clone()
}

/// Runs `mlex generate --json` for as many tokens as are expected, and compares.
fn check(model: &str, expected: &Value, args: &[&str]) {
    let greedy = expected["greedy"].as_array().unwrap();
    let mut command = mlex(["generate", "--json", "--ignore-eos", "--model"]);
    command.arg(small(model)).args(args);
    command.args(["--max-tokens", &greedy.len().to_string()]);
    let found = document(&mut command);
    assert_eq!(found["prompt_tokens"], expected["prompt"]);
    assert_eq!(found["tokens"], expected["greedy"]);
}

#[test]
fn flags_show_and_play() {
    let path = |name| file(name).display().to_string();
    let odd = path("odd.png");
    let image = expected("media-qwen3_5", "image");
    let args = ["--image", &odd, "--prompt", "what is it"];
    check("media-qwen3_5", &image, &args);
    let video = expected("media-qwen3_5", "video");
    let args = ["--video", &path("moving.png"), "--prompt", "what moves"];
    check("media-qwen3_5", &video, &args);
    let all = expected("media-gemma4-small", "all");
    let [plain, moving] = ["plain.wav", "moving.png"].map(path);
    let args = [
        "--image", &odd, "--audio", &plain, "--video", &moving, "--prompt", "and now",
    ];
    check("media-gemma4-small", &all, &args);
}

#[test]
fn a_conversation_in_a_file_names_its_media() {
    let expected = expected("media-qwen3_5", "turns");
    let mut messages = expected["messages"].clone();
    for message in messages.as_array_mut().unwrap() {
        for part in message["content"].as_array_mut().unwrap() {
            if let Some(name) = part["file"].as_str() {
                part["image"] = file(name).display().to_string().into();
            }
        }
    }
    let mut saved = tempfile::NamedTempFile::new().unwrap();
    write!(saved, "{messages}").unwrap();
    let name = saved.path().display().to_string();
    check("media-qwen3_5", &expected, &["--messages", &name]);
}

#[test]
fn a_chat_shows_images_in_many_turns() {
    let dir = tempfile::tempdir().unwrap();
    let saved = dir.path().join("chat.json");
    let input = format!(
        "/audio {}\n/image /no/such.png\n/image {}\nwhat is it\nand\n/image {}\nthis\n/save {}\n",
        file("plain.wav").display(),
        file("odd.png").display(),
        file("grey.png").display(),
        saved.display(),
    );
    let mut child = mlex(["chat", "--max-tokens", "2", "--model"])
        .arg(small("media-qwen3_5"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(input.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    let notes = stderr(&output);
    assert!(output.status.success(), "{notes}");
    assert!(
        notes.contains("qwen3_5: input: audio is not supported"),
        "{notes}"
    );
    assert!(notes.contains("/no/such.png"), "{notes}");
    let chat: Value = serde_json::from_slice(&std::fs::read(&saved).unwrap()).unwrap();
    let messages = chat["messages"].as_array().unwrap();
    assert_eq!(messages.len(), 6, "{}", stdout(&output));
    let odd = file("odd.png").display().to_string();
    let content = json!([{"type": "image", "image": odd}, {"type": "text", "text": "what is it"}]);
    assert_eq!(messages[0]["content"], content);
    assert_eq!(messages[2]["content"], "and");
    assert_eq!(messages[4]["content"][0]["type"], "image");
}

#[test]
fn what_a_model_cannot_take_is_named() {
    let generate = |model: &Path, args: &[&str]| {
        let mut command = mlex(["generate", "--prompt", "a", "--max-tokens", "1", "--model"]);
        command.arg(model).args(args);
        fails(&mut command).0
    };
    let odd = file("odd.png").display().to_string();
    let text = small_with_tokenizer();
    std::fs::write(
        text.path().join("chat_template.jinja"),
        "{{ messages[0].content }}",
    )
    .unwrap();
    assert_eq!(
        generate(text.path(), &["--image", &odd]),
        "llama: input: image is not supported"
    );
    let qwen = small("media-qwen3_5");
    let sound = file("plain.wav").display().to_string();
    assert_eq!(
        generate(&qwen, &["--audio", &sound]),
        "qwen3_5: input: audio is not supported"
    );
    let broken = tempfile::Builder::new().suffix(".jpg").tempfile().unwrap();
    let whole = std::fs::read(file("plain.jpg")).unwrap();
    std::fs::write(broken.path(), &whole[..whole.len() / 2]).unwrap();
    let name = broken.path().display().to_string();
    let error = generate(&qwen, &["--image", &name]);
    assert!(error.starts_with(&name), "{error}");
    let error = generate(
        &small("media-gemma4-small"),
        &["--image", &odd, "--image-tokens", "100"],
    );
    assert!(
        error.contains("expected 70, 140, 280, 560 or 1120, found 100"),
        "{error}"
    );
}

#[test]
fn inspect_says_what_a_model_takes() {
    let inputs = |model: &str| {
        let found = document(mlex(["inspect", "--json", "--model"]).arg(small(model)));
        found["inputs"].clone()
    };
    assert_eq!(inputs("media-qwen3_5"), json!(["text", "image", "video"]));
    let all = json!(["text", "image", "video", "audio"]);
    assert_eq!(inputs("media-gemma4-small"), all);
    assert_eq!(inputs("llama-f32"), json!(["text"]));
    let text = succeeds(mlex(["inspect", "--model"]).arg(small("media-qwen3_5")));
    assert!(text.contains("text, image, video"), "{text}");
}
