//! Conversations with files, from the files to greedy tokens, against mlx-vlm's processors and
//! models (`tools/media_sessions.py` says how the expected values are made).

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mlex_models::Error;
use mlex_models::generate::{Event, LoadOptions, Prompt, Request, Session};
use mlex_models::media::Media;
use mlex_models::text::media_parts;
use mlex_models::towers::MediaKind;
use serde_json::{Value, json};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(name)
}

/// A file of the crates below.
fn file(name: &str) -> PathBuf {
    let dir = if name.ends_with("wav") {
        "mlex-audio"
    } else {
        "mlex-vision"
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    root.join(dir).join("tests/data").join(name)
}

fn session(name: &str) -> Session {
    Session::load(data(name), LoadOptions::default()).unwrap()
}

/// The media of messages whose parts name files.
fn media(messages: &[Value]) -> Vec<Media> {
    media_parts(messages)
        .map(|(kind, part)| Media::open(kind, file(part["file"].as_str().unwrap())))
        .collect()
}

/// The ids of the prompt, and the tokens after it.
fn run(session: &Session, request: Request) -> Result<(Vec<u32>, Vec<u32>), Error> {
    let (mut prompt, mut tokens) = (Vec::new(), Vec::new());
    for event in session.generate(request) {
        match event? {
            Event::Prompt(ids) => prompt = ids,
            Event::Token { id, .. } => tokens.push(id),
            _ => {}
        }
    }
    Ok((prompt, tokens))
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().unwrap().iter();
    ids.map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn prompts_and_tokens_are_those_of_the_reference() {
    for name in [
        "media-qwen3_5",
        "media-qwen3_vl",
        "media-qwen2_5_vl",
        "media-gemma4-small",
    ] {
        let json = std::fs::read(data(name).join("media.json")).unwrap();
        let description: Value = serde_json::from_slice(&json).unwrap();
        let session = session(name);
        for case in description["sessions"].as_array().unwrap() {
            let case_name = &case["name"];
            let messages = case["messages"].as_array().unwrap().clone();
            let media = media(&messages);
            let greedy = ids(&case["greedy"]);
            // In small steps, and again: the second time the features are kept.
            for step in [512, 16] {
                let mut request = Request::new(Prompt::Messages(messages.clone()));
                request.media.clone_from(&media);
                request.max_tokens = greedy.len();
                request.ignore_eos = true;
                request.prefill_step = step;
                let (prompt, tokens) = run(&session, request).unwrap();
                assert_eq!(prompt, ids(&case["prompt"]), "{name}: {case_name}");
                assert_eq!(tokens, greedy, "{name}: {case_name}");
            }
        }
    }
}

#[test]
fn data_in_messages_is_what_a_file_is() {
    let session = session("media-qwen3_5");
    let bytes = std::fs::read(file("odd.png")).unwrap();
    let url = format!("data:image/png;base64,{}", STANDARD.encode(bytes));
    let ask = |image: Value, media: Vec<Media>| {
        let content = json!([image, {"type": "text", "text": "a"}]);
        let messages = vec![json!({"role": "user", "content": content})];
        let request = Request::new(Prompt::Messages(messages)).with_max_tokens(4);
        run(&session, request.with_media(media))
    };
    let named = vec![Media::open(MediaKind::Image, file("odd.png"))];
    let expected = ask(json!({"type": "image"}), named).unwrap();
    let part = json!({"type": "image_url", "image_url": {"url": url}});
    assert_eq!(ask(part, vec![]).unwrap(), expected);
    // A message may come from anywhere: files and other URLs are not opened.
    for url in [
        "/etc/passwd",
        "http://localhost/x.png",
        "data:,x",
        "data:image/png;base64,*",
    ] {
        let part = json!({"type": "image_url", "image_url": {"url": url}});
        let error = ask(part, vec![]).unwrap_err().to_string();
        assert!(
            error.starts_with("message part \"image_url\": expected a data: URL"),
            "{error}"
        );
    }
    let error = ask(json!({"type": "image", "image": "/etc/passwd"}), vec![]);
    assert!(
        error
            .unwrap_err()
            .to_string()
            .starts_with("message part \"image\": expected")
    );
}

#[test]
fn what_does_not_fit_is_named() {
    let session = session("media-qwen3_5");
    let ask = |content: Value, media: &[(MediaKind, PathBuf)]| {
        let messages = vec![json!({"role": "user", "content": content})];
        let media = media.iter().map(|(kind, path)| Media::open(*kind, path));
        let request = Request::new(Prompt::Messages(messages)).with_max_tokens(1);
        run(&session, request.with_media(media))
            .unwrap_err()
            .to_string()
    };
    let image = json!({"type": "image"});
    let odd = (MediaKind::Image, file("odd.png"));
    assert_eq!(
        ask(
            json!([{"type": "audio"}]),
            &[(MediaKind::Audio, file("plain.wav"))]
        ),
        "qwen3_5: input: audio is not supported"
    );
    assert_eq!(
        ask(json!([image, image]), std::slice::from_ref(&odd)),
        "media: expected image, image, found image"
    );
    assert_eq!(
        ask(json!("no part"), std::slice::from_ref(&odd)),
        "media: expected none, found image"
    );
    // A placeholder that the user has written is one too many.
    let text = json!({"type": "text", "text": "<|image_pad|>"});
    assert_eq!(
        ask(json!([image, text]), std::slice::from_ref(&odd)),
        "qwen3_5: prompt: expected 1 <|image_pad|> for as many media of the kind image, found 2"
    );
    let missing = (MediaKind::Image, PathBuf::from("/no/such.png"));
    assert!(ask(json!([image]), &[missing]).starts_with("/no/such.png: "));
    let wrong = (MediaKind::Image, file("cases.json"));
    let error = ask(json!([image]), &[wrong]);
    assert!(
        error.contains("cases.json: expected a JPEG, PNG, WebP, GIF or BMP image"),
        "{error}"
    );
    assert!(!error.contains('\n'));
}

#[test]
fn a_session_says_what_it_takes() {
    let kinds = |name| session(name).info().media.clone();
    let (image, video, audio) = (MediaKind::Image, MediaKind::Video, MediaKind::Audio);
    assert_eq!(kinds("media-qwen3_5"), [image, video]);
    assert_eq!(kinds("media-gemma4-small"), [image, video, audio]);
}
