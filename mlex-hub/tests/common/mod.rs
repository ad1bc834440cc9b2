//! What the tests share.
// The helpers are not in a test function, which clippy would let unwrap.
#![allow(dead_code, clippy::unwrap_used)]

pub(crate) mod fake_hub;

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use fake_hub::{Content, FakeHub};
use mlex_hub::{Hub, MAIN, ModelId, Progress, Pulled, Result, Settings};

/// A Hub, a cache, and who asks.
pub(crate) struct Site {
    pub(crate) hub: FakeHub,
    pub(crate) settings: Settings,
    cache: tempfile::TempDir,
}

impl Site {
    pub(crate) fn new(content: Content) -> Self {
        let hub = FakeHub::start(content);
        let cache = tempfile::tempdir().unwrap();
        let mut settings = Settings::new(cache.path());
        settings.endpoint = hub.endpoint();
        settings.retry_delay = Duration::from_millis(1);
        Self {
            hub,
            settings,
            cache,
        }
    }

    /// With a small model directory.
    pub(crate) fn with_model() -> Self {
        Self::new(Content::new(MODEL))
    }

    pub(crate) fn client(&self) -> Hub {
        Hub::new(self.settings.clone()).unwrap()
    }

    pub(crate) fn pull(&self) -> Result<Pulled> {
        self.pull_as("o/n", MAIN)
    }

    pub(crate) fn pull_as(&self, model: &str, revision: &str) -> Result<Pulled> {
        let id: ModelId = model.parse().unwrap();
        self.client().pull(&id, revision, &|_| {})
    }

    /// Pulls, and says how that went on.
    pub(crate) fn pull_watched(&self) -> (Result<Pulled>, Vec<Progress>) {
        let seen = Mutex::new(Vec::new());
        let id: ModelId = "o/n".parse().unwrap();
        let watch = |progress| seen.lock().unwrap().push(progress);
        let pulled = self.client().pull(&id, MAIN, &watch);
        (pulled, seen.into_inner().unwrap())
    }

    /// A path in the repository's part of the cache.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.cache.path().join("models--o--n").join(path)
    }

    pub(crate) fn cache(&self) -> &Path {
        self.cache.path()
    }

    /// Where a file's content is.
    pub(crate) fn blob(&self, file: &str) -> PathBuf {
        let etag = self.hub.content().etag(file);
        self.path("blobs").join(etag)
    }

    /// Where it is until it is whole.
    pub(crate) fn partial(&self, file: &str) -> PathBuf {
        let etag = self.hub.content().etag(file);
        self.path("blobs").join(etag + ".incomplete")
    }

    /// The files of a pulled directory are those of the Hub.
    #[track_caller]
    pub(crate) fn assert_pulled(&self, pulled: &Pulled, files: &[&str]) {
        let content = self.hub.content();
        assert_eq!(pulled.commit, content.commit);
        let mut found = Vec::new();
        names(&pulled.path, "", &mut found);
        assert_eq!(found, files);
        for file in files {
            let bytes = std::fs::read(pulled.path.join(file)).unwrap();
            assert_eq!(bytes, content.files[*file], "{file}");
        }
    }
}

/// The files below a folder, sorted.
pub(crate) fn names(folder: &Path, prefix: &str, found: &mut Vec<String>) {
    let mut entries: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    entries.sort();
    for entry in entries {
        let path = folder.join(&entry);
        if path.symlink_metadata().unwrap().is_dir() {
            names(&path, &format!("{prefix}{entry}/"), found);
        } else {
            found.push(format!("{prefix}{entry}"));
        }
    }
}

/// A model directory in two shards, and what does not belong to it.
pub(crate) const MODEL: [(&str, &[u8]); 8] = [
    (".gitattributes", b"*.safetensors filter=lfs"),
    ("README.md", b"# A model"),
    ("config.json", b"{}"),
    ("model-1.safetensors", b"the first shard, with many bytes"),
    ("model-2.safetensors", b"the second shard"),
    (
        "model.safetensors.index.json",
        br#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#,
    ),
    ("pytorch_model.bin", b"pickled"),
    ("tokenizer.json", b"{\"version\": \"1.0\"}"),
];

/// What a model needs of it.
pub(crate) const NEEDED: [&str; 5] = [
    "config.json",
    "model-1.safetensors",
    "model-2.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
];
