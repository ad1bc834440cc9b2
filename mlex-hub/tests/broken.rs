//! Downloads that break off, contents that are wrong, servers that are hostile.

mod common;

use std::fs;
use std::time::{Duration, Instant};

use common::fake_hub::{COMMIT, Content};
use common::{MODEL, NEEDED, Site};
use mlex_hub::ErrorKind;

const SHARD: &str = "model-1.safetensors";

/// The ranges that were asked for where the large files are.
fn ranges(site: &Site) -> Vec<Option<String>> {
    let requests = site.hub.requests().into_iter();
    let cdn = requests.filter(|request| request.line == "GET cdn");
    cdn.map(|request| request.range).collect()
}

/// A repository with one large file.
fn one_shard() -> Content {
    Content::new([
        ("config.json", &b"{}"[..]),
        ("model-1.safetensors", MODEL[3].1),
    ])
}

#[test]
fn a_download_that_breaks_off_goes_on() {
    let mut content = one_shard();
    content.cuts.insert(SHARD.to_owned(), vec![5, 7]);
    let site = Site::new(content);
    let pulled = site.pull().unwrap();
    site.assert_pulled(&pulled, &["config.json", SHARD]);
    let from = |start: &str| Some(format!("bytes={start}-"));
    assert_eq!(ranges(&site), [None, from("5"), from("12")]);
    assert!(!site.partial(SHARD).exists());
}

#[test]
fn a_hub_that_is_busy_is_asked_again() {
    let mut content = one_shard();
    content.busy.insert("config.json".to_owned(), 5);
    content.busy.insert(SHARD.to_owned(), 3);
    let site = Site::new(content);
    let pulled = site.pull().unwrap();
    site.assert_pulled(&pulled, &["config.json", SHARD]);
    let site = Site::new(one_shard());
    site.hub.content().busy.insert(SHARD.to_owned(), 100);
    let error = site.pull().unwrap_err().to_string();
    assert!(
        error.ends_with("model-1.safetensors: HTTP status 503: busy"),
        "{error}"
    );
}

#[test]
fn the_next_pull_takes_up_what_is_left() {
    let mut content = one_shard();
    content
        .cuts
        .insert(SHARD.to_owned(), [&[5][..], &[0; 8]].concat());
    let site = Site::new(content);
    let error = site.pull().unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with("o/n: model-1.safetensors: the download broke off after 5 of 32 bytes: "),
        "{text}"
    );
    assert_eq!(fs::read(site.partial(SHARD)).unwrap(), b"the f");
    assert!(!site.blob(SHARD).exists());
    site.hub.content().cuts.clear();
    site.hub.requests();
    let pulled = site.pull().unwrap();
    site.assert_pulled(&pulled, &["config.json", SHARD]);
    assert_eq!(ranges(&site), [Some("bytes=5-".to_owned())]);
}

#[test]
fn what_is_left_may_be_whole_or_wrong_or_too_long() {
    let whole = MODEL[3].1;
    let cases: [(&[u8], &[Option<&str>]); 4] = [
        (whole, &[]),
        (b"other", &[Some("bytes=5-"), None]),
        (&[0; 32], &[None]),
        (&[0; 33], &[None]),
    ];
    for (left, expected) in cases {
        let site = Site::new(one_shard());
        let partial = site.partial(SHARD);
        fs::create_dir_all(partial.parent().unwrap()).unwrap();
        fs::write(&partial, left).unwrap();
        let pulled = site.pull().unwrap();
        site.assert_pulled(&pulled, &["config.json", SHARD]);
        let ranges = ranges(&site);
        let ranges: Vec<_> = ranges.iter().map(Option::as_deref).collect();
        assert_eq!(ranges, expected);
    }
}

#[test]
fn a_server_without_ranges_sends_all_again() {
    let mut content = one_shard();
    content.ignores_ranges = true;
    content.cuts.insert(SHARD.to_owned(), vec![5]);
    let site = Site::new(content);
    let pulled = site.pull().unwrap();
    site.assert_pulled(&pulled, &["config.json", SHARD]);
}

#[test]
fn a_download_that_stands_still_is_given_up() {
    let mut content = one_shard();
    content.stalled.insert(SHARD.to_owned());
    let mut site = Site::new(content);
    site.settings.read_timeout = Duration::from_millis(50);
    let start = Instant::now();
    let error = site.pull().unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(10));
    assert!(
        matches!(error.kind(), ErrorKind::Interrupted { received: 0, .. }),
        "{error}"
    );
}

#[test]
fn wrong_contents_are_refused() {
    let mut content = Content::new(MODEL);
    content.wrong.insert(SHARD.to_owned(), vec![b'x'; 32]);
    let site = Site::new(content);
    let error = site.pull().unwrap_err();
    // From sha256sum.
    assert_eq!(
        error.to_string(),
        "o/n: model-1.safetensors: expected SHA-256 \
         7d955a79be691a5da14c23843ccdfd7b676064265741f846e1165eb78bcad3dc, found c62e4615bd39e222572f3a1bf7c2132ea1e65b17ec805047bd6b2842c593493f"
    );
    assert!(!site.blob(SHARD).exists() && !site.partial(SHARD).exists());
    site.hub.content().wrong.clear();
    site.assert_pulled(&site.pull().unwrap(), &NEEDED);

    let site = Site::with_model();
    let wrong = ("tokenizer.json".to_owned(), vec![b'x'; 18]);
    site.hub.content().wrong.extend([wrong]);
    let error = site.pull().unwrap_err();
    let ErrorKind::Digest {
        file, algorithm, ..
    } = error.kind()
    else {
        panic!("{error}");
    };
    assert_eq!((file.as_str(), *algorithm), ("tokenizer.json", "git SHA-1"));

    let site = Site::new(one_shard());
    site.hub
        .content()
        .wrong
        .insert(SHARD.to_owned(), vec![b'x'; 33]);
    let error = site.pull().unwrap_err();
    assert_eq!(
        error.to_string(),
        "o/n: model-1.safetensors: expected 32 bytes, found more"
    );
    assert!(!site.partial(SHARD).exists());
}

/// Linux's `/dev/full` stands for a disk without space.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk() {
    let site = Site::new(one_shard());
    let partial = site.partial(SHARD);
    let folder = partial.parent().unwrap();
    fs::create_dir_all(folder).unwrap();
    std::os::unix::fs::symlink("/dev/full", &partial).unwrap();
    let error = site.pull().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::DiskFull { .. }));
    let expected = format!(
        "o/n: {}: no space left for model-1.safetensors (32 bytes)",
        folder.display()
    );
    assert_eq!(error.to_string(), expected);
}

#[test]
fn answers_that_are_not_the_hub_s() {
    let answer = |head: &str, body: &str| {
        let length = body.len();
        format!("HTTP/1.1 {head}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}")
    };
    let listing = |sha: &str| format!("{{\"sha\": \"{sha}\", \"siblings\": []}}");
    let cases = [
        (
            answer("200 OK", "<html>"),
            "expected the description of a repository",
        ),
        (answer("200 OK", "{}"), "missing field `sha`"),
        (
            answer("200 OK", &listing("../../x")),
            "found sha \"../../x\"",
        ),
        (answer("200 OK", &listing(COMMIT)), "found nothing"),
        (
            answer("302 Found\r\nLocation: /again", ""),
            "one redirect after the other",
        ),
        (answer("302 Found", ""), "expected a redirect to an address"),
        (
            answer("302 Found\r\nLocation: ftp://h/", ""),
            "found \"ftp://h/\"",
        ),
        ("nonsense\r\n\r\n".to_owned(), "cannot reach 127.0.0.1:"),
        (String::new(), "cannot reach 127.0.0.1:"),
    ];
    for (raw, expected) in cases {
        let site = Site::with_model();
        site.hub.content().raw = Some(raw.clone());
        let error = site.pull().unwrap_err().to_string();
        assert!(
            error.contains(expected) && error.starts_with("o/n: "),
            "{raw:?}: {error}"
        );
        assert!(!error.contains('\n'));
    }
    let site = Site::with_model();
    let long = format!(
        "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{}",
        " ".repeat(1 << 26)
    );
    site.hub.content().raw = Some(long);
    let error = site.pull().unwrap_err().to_string();
    assert!(error.contains("expected JSON, found more than"), "{error}");
}

#[test]
fn names_do_not_lead_out_of_the_cache() {
    let mut content = Content::new(MODEL);
    for name in ["../../evil.json", "/evil.json", "a\\..\\evil.json"] {
        content.files.insert(name.to_owned(), b"evil".to_vec());
    }
    let site = Site::new(content);
    site.assert_pulled(&site.pull().unwrap(), &NEEDED);
    let index = br#"{"weight_map": {"a": "../model-1.safetensors"}}"#;
    let site = Site::with_model();
    let index = ("model.safetensors.index.json".to_owned(), index.to_vec());
    site.hub.content().files.extend([index]);
    let error = site.pull().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Index { .. }), "{error}");
}
