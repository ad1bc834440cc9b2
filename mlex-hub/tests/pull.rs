//! Pulling from a Hub that behaves.

mod common;

use std::fs;
use std::thread;

use common::fake_hub::{COMMIT, Content, LATER};
use common::{MODEL, NEEDED, Site, names};
use mlex_hub::{ErrorKind, MAIN, Progress};

#[test]
fn only_the_needed_files_come() {
    let site = Site::with_model();
    let pulled = site.pull().unwrap();
    assert!(pulled.unasked.is_none());
    assert_eq!(pulled.path, site.path("snapshots").join(COMMIT));
    site.assert_pulled(&pulled, &NEEDED);
    assert_eq!(fs::read_to_string(site.path("refs/main")).unwrap(), COMMIT);
    let requests = site.hub.lines();
    assert_eq!(requests[0], "GET /api/models/o/n/revision/main?blobs=true");
    // The config last: a snapshot that has one is whole.
    let of_config = requests.iter().map(|line| line.contains("config.json"));
    let of_config: Vec<bool> = of_config.collect();
    assert!(
        of_config.is_sorted() && of_config.contains(&true),
        "{requests:?}"
    );
    for other in ["README", "gitattributes", "pytorch"] {
        assert!(!requests.iter().any(|line| line.contains(other)));
    }
    let mut blobs = Vec::new();
    names(&site.path("blobs"), "", &mut blobs);
    assert_eq!(blobs.len(), NEEDED.len(), "{blobs:?}");
}

#[test]
fn what_is_there_is_not_fetched_again() {
    let site = Site::with_model();
    site.pull().unwrap();
    site.hub.requests();
    let (pulled, seen) = site.pull_watched();
    site.assert_pulled(&pulled.unwrap(), &NEEDED);
    assert_eq!(
        site.hub.lines(),
        ["GET /api/models/o/n/revision/main?blobs=true"]
    );
    assert_eq!(seen, []);

    // A commit cannot change: nobody is asked.
    let pulled = site.pull_as("o/n", COMMIT).unwrap();
    site.assert_pulled(&pulled, &NEEDED);
    assert_eq!(site.hub.lines(), [""; 0]);
    assert!(!site.path("refs").join(COMMIT).exists());

    // One that is missing comes again, as does one whose content is gone.
    fs::remove_file(pulled.path.join("tokenizer.json")).unwrap();
    fs::remove_file(site.blob("model-2.safetensors")).unwrap();
    let pulled = site.pull_as("o/n", COMMIT).unwrap();
    site.assert_pulled(&pulled, &NEEDED);
    let requests = site.hub.lines();
    let count = |start: &str| {
        requests
            .iter()
            .filter(|line| line.starts_with(start))
            .count()
    };
    assert_eq!(count("HEAD /o/n/resolve/"), 2);
    // The content of the first was still there.
    assert_eq!(count("GET /o/n/resolve/"), 1);
    assert_eq!(count("GET cdn"), 1);
}

#[test]
fn a_branch_that_moves_brings_what_has_changed() {
    let site = Site::with_model();
    let first = site.pull().unwrap();
    {
        let mut content = site.hub.content();
        content.commit = LATER.to_owned();
        let files = &mut content.files;
        files.insert("config.json".to_owned(), b"{\"new\": 1}".to_vec());
    }
    site.hub.requests();
    let second = site.pull().unwrap();
    site.assert_pulled(&second, &NEEDED);
    assert_ne!(first.path, second.path);
    assert_eq!(fs::read(first.path.join("config.json")).unwrap(), b"{}");
    assert_eq!(fs::read_to_string(site.path("refs/main")).unwrap(), LATER);
    let fetched = |line: &String| line.starts_with("GET /o/n/resolve/");
    let fetched: Vec<_> = site.hub.lines().into_iter().filter(fetched).collect();
    assert_eq!(fetched, [format!("GET /o/n/resolve/{LATER}/config.json")]);
}

#[test]
fn other_revisions() {
    let mut content = Content::new(MODEL);
    content.revisions = vec!["refs/pr/1".to_owned(), "v1.0".to_owned()];
    let site = Site::new(content);
    for revision in ["refs/pr/1", "v1.0"] {
        let pulled = site.pull_as("o/n", revision).unwrap();
        site.assert_pulled(&pulled, &NEEDED);
        let path = site.path("refs").join(revision);
        assert_eq!(fs::read_to_string(path).unwrap(), COMMIT);
    }
    let listing = "GET /api/models/o/n/revision/refs%2Fpr%2F1?blobs=true";
    assert_eq!(site.hub.lines()[0], listing);
    let error = site.pull_as("o/n", "v2").unwrap_err();
    assert_eq!(error.to_string(), "o/n: no revision \"v2\"");
}

#[test]
fn a_renamed_repository_is_followed() {
    let mut content = Content::new(MODEL);
    content.old_name = Some("before/it".to_owned());
    content.private_token = Some("hf_me".to_owned());
    let mut site = Site::new(content);
    site.settings.token = Some("hf_me".to_owned());
    let pulled = site.pull_as("before/it", MAIN).unwrap();
    site.assert_pulled(&pulled, &NEEDED);
    // As huggingface_hub has it, under the name that was asked for.
    assert!(
        pulled
            .path
            .starts_with(site.cache().join("models--before--it"))
    );
}

#[test]
fn the_token_stays_with_the_hub() {
    let mut content = Content::new(MODEL);
    content.private_token = Some("hf_me".to_owned());
    content.gate_token = Some("hf_me".to_owned());
    let mut site = Site::new(content);
    site.settings.token = Some("hf_me".to_owned());
    site.assert_pulled(&site.pull().unwrap(), &NEEDED);
    for request in site.hub.requests() {
        let is_cdn = request.line == "GET cdn";
        assert_eq!(request.token.is_none(), is_cdn, "{request:?}");
    }
}

#[test]
fn lengths_that_the_listing_does_not_tell() {
    let mut content = Content::new(MODEL);
    content.no_sizes = true;
    let site = Site::new(content);
    let (pulled, seen) = site.pull_watched();
    site.assert_pulled(&pulled.unwrap(), &NEEDED);
    let size: usize = NEEDED
        .map(|file| site.hub.content().files[file].len())
        .iter()
        .sum();
    let size = size as u64;
    let end = Progress {
        done: size,
        total: size,
    };
    assert!(seen.contains(&end), "{seen:?}");
}

#[test]
fn progress_ends_with_all_bytes() {
    let site = Site::with_model();
    let partial = site.partial("model-1.safetensors");
    fs::create_dir_all(partial.parent().unwrap()).unwrap();
    fs::write(&partial, b"the first").unwrap();
    let (pulled, seen) = site.pull_watched();
    pulled.unwrap();
    let size: usize = NEEDED
        .map(|file| site.hub.content().files[file].len())
        .iter()
        .sum();
    let size = size as u64;
    assert!(
        seen.contains(&Progress {
            done: size,
            total: size
        }),
        "{seen:?}"
    );
    assert!(
        seen.iter()
            .all(|seen| seen.done <= size && seen.total <= size)
    );
}

#[test]
fn gguf_files_are_chosen() {
    let site = Site::new(Content::new([
        ("README.md", &b"# Files"[..]),
        ("mmproj-n-F16.gguf", b"a projector"),
        ("n-Q4_K_M.gguf", b"four bits"),
        ("n-Q8_0.gguf", b"eight bits"),
    ]));
    let error = site.pull().unwrap_err();
    assert_eq!(
        error.to_string(),
        "o/n: several GGUF files; the repository has n-Q4_K_M.gguf, n-Q8_0.gguf"
    );
    for choice in ["q4_k_m", "n-Q4_K_M.gguf"] {
        let pulled = site.pull_as(&format!("o/n:{choice}"), MAIN).unwrap();
        assert_eq!(pulled.path.file_name().unwrap(), "n-Q4_K_M.gguf");
        assert_eq!(fs::read(&pulled.path).unwrap(), b"four bits");
    }
    assert!(!site.blob("n-Q8_0.gguf").exists());
    // Without the Hub, the one that is there is the only one.
    let cached = site.client().cached(&"o/n".parse().unwrap(), MAIN).unwrap();
    assert_eq!(fs::read(&cached.path).unwrap(), b"four bits");
}

#[test]
fn two_pulls_at_a_time_fetch_each_file_once() {
    let site = Site::with_model();
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| site.assert_pulled(&site.pull().unwrap(), &NEEDED));
        }
    });
    let mut fetched = site.hub.lines();
    fetched
        .retain(|line| line.starts_with("GET /o/n/resolve/") && line.contains("/tokenizer.json"));
    assert_eq!(fetched.len(), 1, "{fetched:?}");
}

#[test]
fn repositories_without_a_model() {
    let site = Site::new(Content::new([
        ("config.json", &b"{}"[..]),
        ("pytorch_model.bin", b"pickled"),
    ]));
    let error = site.pull().unwrap_err();
    assert_eq!(
        error.to_string(),
        "o/n: expected config.json with model.safetensors or its shards, or a .gguf file; \
         found config.json, pytorch_model.bin"
    );
    let site = Site::with_model();
    site.hub.content().files.remove("model-2.safetensors");
    let error = site.pull().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Index { .. }));
    assert_eq!(
        error.to_string(),
        "o/n: model.safetensors.index.json: expected files of the repository, \
         found \"model-2.safetensors\""
    );
    assert!(!site.path("refs/main").exists());
}
