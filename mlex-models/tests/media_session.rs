//! Conversations with files, from the files to greedy tokens, against mlx-vlm's processors and
//! models (`tools/media_sessions.py` says how the expected values are made).

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mlex_models::Error;
use mlex_models::generate::{
    Event, FinishReason, Generation, LoadOptions, Prompt, Request, Session,
};
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

/// What a generation has given.
#[derive(Debug, Default, PartialEq)]
struct Given {
    /// The ids of the prompt, where it came to that.
    prompt: Option<Vec<u32>>,
    tokens: Vec<u32>,
    logprobs: Vec<f32>,
    ends: Vec<FinishReason>,
}

fn given(events: Generation) -> Result<Given, Error> {
    let mut given = Given::default();
    for event in events {
        match event? {
            Event::Prompt(ids) => given.prompt = Some(ids),
            Event::Token { id, logprobs, .. } => {
                given.tokens.push(id);
                given.logprobs.extend(logprobs.map(|of| of.logprob));
            }
            Event::Done(completion) => given.ends.push(completion.finish_reason),
            _ => {}
        }
    }
    Ok(given)
}

/// The ids of the prompt, and the tokens after it.
fn run(session: &Session, request: Request) -> Result<(Vec<u32>, Vec<u32>), Error> {
    let given = given(session.generate(request))?;
    Ok((given.prompt.unwrap_or_default(), given.tokens))
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
            let logprobs = case["logprobs"].as_array().unwrap().iter();
            let logprobs: Vec<f64> = logprobs.map(|value| value.as_f64().unwrap()).collect();
            // Another decoder of JPEG files, and another filter than mlx-audio's resamples.
            let near = ["turns", "stereo", "low", "sounds"];
            let near = near.iter().any(|name| case_name == name);
            let tolerance = if near { 0.05 } else { 2e-4 };
            // In small steps, and again: the second time the features are kept.
            for step in [512, 16] {
                let mut request = Request::new(Prompt::Messages(messages.clone()));
                request.media.clone_from(&media);
                request.max_tokens = greedy.len();
                request.ignore_eos = true;
                request.prefill_step = step.into();
                request.logprobs = Some(0);
                let counted = session.prompt_tokens(&request).unwrap();
                assert_eq!(counted, ids(&case["prompt"]), "{name}: {case_name}");
                let given = given(session.generate(request)).unwrap();
                assert_eq!(given.prompt, Some(counted), "{name}: {case_name}");
                assert_eq!(given.tokens, greedy, "{name}: {case_name}");
                assert_eq!(given.logprobs.len(), logprobs.len());
                for (found, expected) in given.logprobs.iter().zip(&logprobs) {
                    let error = (f64::from(*found) - expected).abs();
                    assert!(error < tolerance, "{name}: {case_name}: off by {error}");
                }
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

/// An uncompressed image of so many pixels, whose bytes and so whose features are its own.
fn bitmap(side: u32, seed: u8) -> Media {
    let (row, pixels) = (side * 3, side * side * 3);
    assert_eq!(row % 4, 0, "rows are whole words");
    let mut bytes = b"BM".to_vec();
    let header = [
        54 + pixels,
        0,
        54,
        40,
        side,
        side,
        24 << 16 | 1,
        0,
        pixels,
        0,
        0,
        0,
        0,
    ];
    bytes.extend(header.iter().flat_map(|word| word.to_le_bytes()));
    bytes.extend((0..pixels).map(|n| (n / 7) as u8 ^ seed));
    Media::from_bytes(MediaKind::Image, bytes)
}

/// A question about so many images, none of which is known.
fn about_images(count: u8) -> Request {
    let content = vec![json!({"type": "image"}); count.into()];
    let message = json!({"role": "user", "content": content});
    let media = (0..count).map(|seed| bitmap(32, seed));
    Request::new(Prompt::Messages(vec![message]))
        .with_media(media)
        .with_max_tokens(1)
}

#[test]
fn a_generation_is_cancelled_while_towers_run() {
    let session = session("media-qwen3_5");
    let expected = given(session.generate(about_images(1))).unwrap();
    // 250 images take longer than it takes to cancel.
    let events = session.generate(about_images(250));
    events.cancel_handle().cancel();
    let ended = given(events).unwrap();
    assert_eq!(ended.ends, [FinishReason::Cancelled]);
    assert_eq!((ended.prompt, ended.tokens.len()), (None, 0));
    // Each of several answers ends.
    let mut request = about_images(250);
    request.choices = 3;
    let events = session.generate(request);
    events.cancel_handle().cancel();
    assert_eq!(given(events).unwrap().ends, [FinishReason::Cancelled; 3]);
    // One that nobody reads any more is cancelled too, and the session goes on.
    drop(session.generate(about_images(250)));
    let again = given(session.generate(about_images(1))).unwrap();
    assert_eq!(again, expected);
}

#[test]
fn what_is_counted_needs_no_tower_and_no_thread() {
    let session = session("media-gemma4-small");
    let image = about_images(2);
    let counted = session.prompt_tokens(&image).unwrap();
    assert_eq!(
        given(session.generate(image)).unwrap().prompt,
        Some(counted)
    );
    // Tokens stay as they are, and what does not fit is an error of the same words.
    let tokens = Request::new(Prompt::Tokens(vec![5, 6])).with_media([bitmap(32, 0)]);
    assert_eq!(session.prompt_tokens(&tokens).unwrap(), [5, 6]);
    let broken = Media::from_bytes(MediaKind::Image, b"no image".to_vec());
    for media in [vec![], vec![broken]] {
        let mut request = about_images(1);
        request.media = media;
        let error = session.prompt_tokens(&request).unwrap_err().to_string();
        let other = given(session.generate(request)).unwrap_err().to_string();
        assert_eq!(error, other);
    }
}
