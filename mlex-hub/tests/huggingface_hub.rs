//! The shared cache is that of Python's huggingface_hub. `data/cache.json` is what
//! huggingface_hub 2.4.0 has made of the repository in `data/repo.json`
//! (tools/make_hub_golden.py). With the programs themselves (the same script with `--mlex`)
//! each has found what the other had downloaded, without a request for a file, and mlex has
//! waited for a lock that huggingface_hub held.
#![cfg(unix)]
// The helpers are not in a test function, which clippy would let unwrap.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use common::fake_hub::Content;
use common::{Site, names};
use serde_json::Value;

fn data(file: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    serde_json::from_slice(&fs::read(path.join(file)).unwrap()).unwrap()
}

fn texts(list: &Value) -> Vec<&str> {
    let list = list.as_array().unwrap().iter();
    list.map(|text| text.as_str().unwrap()).collect()
}

/// The repository that both have downloaded.
fn site(repo: &Value) -> Site {
    let files = repo["files"].as_object().unwrap().iter();
    let files = files.map(|(name, text)| (name.as_str(), text.as_str().unwrap().as_bytes()));
    let mut content = Content::new(files);
    content.repo = repo["repo"].as_str().unwrap().to_owned();
    content.commit = repo["commit"].as_str().unwrap().to_owned();
    let owned = |list| texts(list).into_iter().map(str::to_owned);
    content.revisions = owned(&repo["revisions"]).collect();
    content.large = owned(&repo["large"]).collect();
    Site::new(content)
}

/// What is in the repository's part of the cache, as the golden file has it.
fn entries(site: &Site) -> BTreeMap<String, (bool, String)> {
    let mut found = Vec::new();
    names(&site.path(""), "", &mut found);
    let entry = |name: String| {
        let path = site.path(&name);
        let text = match fs::read_link(&path) {
            Ok(target) => (true, target.to_str().unwrap().to_owned()),
            Err(_) => (false, fs::read_to_string(&path).unwrap()),
        };
        (name, text)
    };
    found.into_iter().map(entry).collect()
}

/// Whether it is a link, and what it leads to or says.
fn expected() -> BTreeMap<String, (bool, String)> {
    let golden = data("cache.json");
    let entry = |(name, entry): (&String, &Value)| {
        let link = entry.get("link");
        let text = link.or(entry.get("text")).and_then(Value::as_str).unwrap();
        (name.clone(), (link.is_some(), text.to_owned()))
    };
    golden["entries"]
        .as_object()
        .unwrap()
        .iter()
        .map(entry)
        .collect()
}

#[test]
fn it_would_have_made_the_same_cache() {
    let repo = data("repo.json");
    let site = site(&repo);
    let commit = repo["commit"].as_str().unwrap();
    let revisions = texts(&repo["revisions"]);
    for revision in [&["main", commit][..], &revisions].concat() {
        let pulled = site.pull_as("o/n", revision).unwrap();
        site.assert_pulled(&pulled, &texts(&repo["needed"]));
    }
    let mut expected = expected();
    // Its own list of all files, by which a download of the needed ones would be incomplete.
    expected.retain(|name, _| !name.starts_with("trees/"));
    assert_eq!(entries(&site), expected);
}

#[test]
fn its_cache_is_used() {
    let repo = data("repo.json");
    let site = site(&repo);
    for (name, (is_link, text)) in expected() {
        let path = site.path(&name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        if is_link {
            std::os::unix::fs::symlink(text, path).unwrap();
        } else {
            fs::write(path, text).unwrap();
        }
    }
    let before = entries(&site);
    let commit = repo["commit"].as_str().unwrap();
    for revision in [&["main", commit][..], &texts(&repo["revisions"])].concat() {
        let id = "o/n".parse().unwrap();
        let cached = site.client().cached(&id, revision).unwrap();
        site.assert_pulled(&cached, &texts(&repo["needed"]));
        assert_eq!(site.hub.lines(), [""; 0]);
        let pulled = site.pull_as("o/n", revision).unwrap();
        assert_eq!(pulled.path, cached.path);
        let only_listings = |line: &String| line.contains("/api/models/");
        assert!(site.hub.lines().iter().all(only_listings));
    }
    assert_eq!(entries(&site), before);
}
