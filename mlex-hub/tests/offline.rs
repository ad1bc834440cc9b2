//! What is done when the Hub cannot be asked, and what it refuses.

mod common;

use std::fs;

use common::fake_hub::{COMMIT, Content, LATER};
use common::{MODEL, NEEDED, Site};
use mlex_hub::{ErrorKind, MAIN};

#[test]
fn offline_takes_what_is_cached() {
    let mut site = Site::with_model();
    site.settings.offline = true;
    let error = site.pull().unwrap_err();
    let expected = format!(
        "o/n: revision \"main\" is not in the cache {}",
        site.cache().display()
    );
    assert_eq!(error.to_string(), expected);
    site.settings.offline = false;
    site.pull().unwrap();
    site.hub.requests();
    site.settings.offline = true;
    for revision in [MAIN, COMMIT] {
        let pulled = site.pull_as("o/n", revision).unwrap();
        assert!(pulled.unasked.is_none());
        site.assert_pulled(&pulled, &NEEDED);
    }
    assert_eq!(site.hub.lines(), [""; 0]);
}

#[test]
fn a_hub_that_does_not_answer_is_done_without() {
    let mut site = Site::with_model();
    site.pull().unwrap();
    site.hub.content().status = Some(503);
    let pulled = site.pull().unwrap();
    site.assert_pulled(&pulled, &NEEDED);
    let why = pulled.unasked.unwrap().to_string();
    assert!(why.starts_with("o/n: http://127.0.0.1:"), "{why}");
    assert!(
        why.ends_with("/api/models/o/n/revision/main: HTTP status 503"),
        "{why}"
    );

    // Nobody listens at the discard port.
    site.settings.endpoint = "http://127.0.0.1:9".to_owned();
    let pulled = site.pull().unwrap();
    site.assert_pulled(&pulled, &NEEDED);
    let why = pulled.unasked.unwrap();
    assert!(matches!(why.kind(), ErrorKind::Unreachable { .. }), "{why}");

    // What is not whole is no way out: the error is the Hub's.
    fs::remove_file(site.blob("model-2.safetensors")).unwrap();
    let error = site.pull().unwrap_err().to_string();
    assert!(
        error.starts_with("o/n: cannot reach 127.0.0.1:9: "),
        "{error}"
    );
}

#[test]
fn what_is_missing_is_named() {
    let mut site = Site::with_model();
    let pulled = site.pull().unwrap();
    site.settings.offline = true;
    fs::remove_file(site.blob("model-2.safetensors")).unwrap();
    let error = site.pull().unwrap_err();
    let expected = format!(
        "o/n: {}: incomplete, without model-2.safetensors",
        pulled.path.display()
    );
    assert_eq!(error.to_string(), expected);
    fs::remove_file(pulled.path.join("config.json")).unwrap();
    let error = site.pull().unwrap_err().to_string();
    assert!(
        error.ends_with("incomplete, without config or weights"),
        "{error}"
    );
}

#[test]
fn a_pull_that_fails_leaves_the_revision_as_it_was() {
    let mut site = Site::with_model();
    let first = site.pull().unwrap();
    {
        let mut content = site.hub.content();
        content.commit = LATER.to_owned();
        let shard = "model-2.safetensors".to_owned();
        content
            .files
            .insert(shard.clone(), b"another shard".to_vec());
        content.wrong.insert(shard, b"what it is not".to_vec());
    }
    site.pull().unwrap_err();
    site.settings.offline = true;
    assert_eq!(site.pull().unwrap().path, first.path);
    let error = site.pull_as("o/n", LATER).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Incomplete { .. }),
        "{error}"
    );
}

#[test]
fn a_listing_of_huggingface_hub_tells_what_is_missing() {
    let mut site = Site::with_model();
    let pulled = site.pull().unwrap();
    site.settings.offline = true;
    fs::remove_file(pulled.path.join("tokenizer.json")).unwrap();
    // Without the listing nobody can know that there is one.
    site.pull().unwrap();
    let files = MODEL.map(|(name, bytes)| {
        let size = bytes.len();
        format!("{name:?}: {{\"size\": {size}, \"blob_id\": \"1\"}}")
    });
    let tree = format!(
        "{{\"format_version\": 1, \"files\": {{{}}}}}",
        files.join(", ")
    );
    let path = site.path("trees").join(format!("{COMMIT}.json"));
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, tree).unwrap();
    let error = site.pull().unwrap_err().to_string();
    assert!(
        error.ends_with("incomplete, without tokenizer.json"),
        "{error}"
    );
    fs::write(&path, "{").unwrap();
    site.pull().unwrap();
}

/// The Hub's status codes and `X-Error-Code`s, as huggingface_hub's `hf_raise_for_status` reads
/// them.
#[test]
fn refusals() {
    let refused = |change: &dyn Fn(&mut Content), token: Option<&str>, model: &str| {
        let mut content = Content::new(MODEL);
        change(&mut content);
        let mut site = Site::new(content);
        site.settings.token = token.map(str::to_owned);
        let error = site.pull_as(model, MAIN).unwrap_err().to_string();
        error.replace(&site.settings.endpoint.replace("http://", ""), "HUB")
    };
    let private = |content: &mut Content| content.private_token = Some("hf_me".to_owned());
    let gated = |content: &mut Content| content.gate_token = Some("hf_me".to_owned());
    let nothing = |_: &mut Content| {};
    let error = refused(&nothing, None, "o/other");
    assert_eq!(
        error,
        "o/other: no such repository on HUB, or it is private"
    );
    for token in [None, Some("hf_you")] {
        let error = refused(&private, token, "o/n");
        assert_eq!(error, "o/n: no such repository on HUB, or it is private");
    }
    assert_eq!(
        refused(&gated, None, "o/n"),
        "o/n: the repository is gated, and no token was sent"
    );
    assert_eq!(
        refused(&gated, Some("hf_you"), "o/n"),
        "o/n: the repository is gated, and the token gives no access to it"
    );
    assert_eq!(
        refused(&nothing, Some("hf_bad"), "o/n"),
        "o/n: HUB refused the token"
    );
    for (status, found) in [
        (401, "no such repository on HUB, or it is private"),
        (404, "no such repository on HUB, or it is private"),
        (
            403,
            "http://HUB/api/models/o/n/revision/main: HTTP status 403",
        ),
        (
            429,
            "http://HUB/api/models/o/n/revision/main: HTTP status 429",
        ),
    ] {
        let plain = |content: &mut Content| content.status = Some(status);
        assert_eq!(refused(&plain, None, "o/n"), format!("o/n: {found}"));
    }
}
