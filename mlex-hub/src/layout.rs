//! The Hub's shared cache on disk, as `huggingface_hub` lays it out:
//!
//! ```text
//! models--org--name/blobs/ETAG                 a file's content, by the Hub's name for it
//! models--org--name/snapshots/COMMIT/FILE      a link to its content
//! models--org--name/refs/REVISION              the commit that a branch or tag stands for
//! models--org--name/trees/COMMIT.json          the files of a commit, if huggingface_hub listed them
//! .locks/models--org--name/ETAG.lock           held by who downloads the content
//! ```

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};
use std::thread;
use std::time::Duration;

use hf_hub::{Cache, CacheRepo, Repo, RepoType};
use serde::Deserialize;

use crate::api::Files;
use crate::{Error, ErrorKind, Result};

/// Far above any index or listing, far below what hurts.
const MAX_JSON_BYTES: u64 = 1 << 26;
/// Another download of a small file ends within these.
const LOCK_TRIES: u32 = 10;
const LOCK_PAUSE: Duration = Duration::from_millis(100);
/// Deeper than any folder with a model's files.
const MAX_DEPTH: usize = 3;

/// One repository's part of the cache, seen from one revision.
#[derive(Debug)]
pub(crate) struct RepoCache {
    hub: PathBuf,
    folder_name: String,
    repo: CacheRepo,
    revision: String,
}

/// A commit's full name.
pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == 40
        && text
            .bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Whether a name of the Hub is a path that stays below a folder, on every system.
pub(crate) fn is_safe_path(text: &str) -> bool {
    !text.contains(|c: char| c.is_control() || matches!(c, '\\' | ':'))
        && !text.is_empty()
        && text.split('/').all(|part| !matches!(part, "" | "." | ".."))
}

impl RepoCache {
    /// The part of the repository `repo`.
    ///
    /// # Errors
    /// [`ErrorKind::Value`] when `revision` cannot be one.
    pub(crate) fn new(cache_dir: &Path, repo: &str, revision: &str) -> Result<Self> {
        if !is_safe_path(revision) {
            return Err(Error::new(ErrorKind::Value {
                what: "revision",
                expected: "a branch, tag or commit",
                found: revision.to_owned(),
            }));
        }
        let repo = Repo::with_revision(repo.to_owned(), RepoType::Model, revision.to_owned());
        Ok(Self {
            hub: cache_dir.to_path_buf(),
            folder_name: repo.folder_name(),
            repo: Cache::new(cache_dir.to_path_buf()).repo(repo),
            revision: revision.to_owned(),
        })
    }

    /// The cache of all repositories.
    pub(crate) fn hub(&self) -> &Path {
        &self.hub
    }

    fn folder(&self) -> PathBuf {
        self.hub.join(&self.folder_name)
    }

    /// Where a content is.
    pub(crate) fn blob(&self, etag: &str) -> PathBuf {
        self.folder().join("blobs").join(etag)
    }

    /// The folder with the files of a commit.
    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.repo.pointer_path(commit)
    }

    /// The commit that the cache has for the revision.
    pub(crate) fn cached_commit(&self) -> Option<String> {
        if is_commit(&self.revision) {
            return Some(self.revision.clone());
        }
        let text = fs::read_to_string(self.ref_path()).ok()?;
        Some(text.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    fn ref_path(&self) -> PathBuf {
        self.folder().join("refs").join(&self.revision)
    }

    /// Remembers which commit the revision stands for.
    pub(crate) fn set_commit(&self, commit: &str) -> Result<()> {
        let path = self.ref_path();
        if self.cached_commit().as_deref() == Some(commit) {
            return Ok(());
        }
        // Another program may read it: beside it first, then in its place.
        let mut beside = path.clone().into_os_string();
        beside.push(format!(".{}.tmp", std::process::id()));
        let beside = PathBuf::from(beside);
        create_parent(&path)?;
        let written = fs::write(&beside, commit).and_then(|()| fs::rename(&beside, &path));
        if written.is_err() {
            // What failed is told; a leftover that cannot be removed adds nothing to it.
            let _ = fs::remove_file(&beside);
        }
        written.map_err(|error| Error::io(path, error))
    }

    /// Makes a content a file of the commit.
    pub(crate) fn link(&self, commit: &str, file: &str, etag: &str) -> Result<()> {
        let path = self.snapshot(commit).join(file);
        create_parent(&path)?;
        // A link that leads nowhere is in the way.
        if path.symlink_metadata().is_ok() && !path.exists() {
            fs::remove_file(&path).map_err(|error| Error::io(&path, error))?;
        }
        match self.link_at(&path, file, etag) {
            // Another program was faster.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.exists() => Ok(()),
            linked => linked.map_err(|error| Error::io(path, error)),
        }
    }

    #[cfg(unix)]
    fn link_at(&self, path: &Path, file: &str, etag: &str) -> io::Result<()> {
        // Relative, so that the cache can be moved: out of the file's folders, the commit's and
        // that of the snapshots.
        let up = "../".repeat(2 + file.matches('/').count());
        std::os::unix::fs::symlink(format!("{up}blobs/{etag}"), path)
    }

    // Links need a privilege on Windows.
    #[cfg(not(unix))]
    fn link_at(&self, path: &Path, _file: &str, etag: &str) -> io::Result<()> {
        fs::copy(self.blob(etag), path).map(|_| ())
    }

    /// Waits until nobody else downloads the content. The lock ends with the file.
    pub(crate) fn lock(&self, etag: &str) -> Result<Option<File>> {
        let folder = self.hub.join(".locks").join(&self.folder_name);
        let path = folder.join(format!("{etag}.lock"));
        create_parent(&path)?;
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let file = file.map_err(|error| Error::io(&path, error))?;
        match wait_for(&file, &path) {
            Ok(()) => Ok(Some(file)),
            // The digest is checked in any case.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(None),
            Err(error) => Err(Error::io(path, error)),
        }
    }

    /// The files of a commit: as `huggingface_hub` has listed them, or those that are there.
    /// `None` when there is nothing of it.
    pub(crate) fn files(&self, commit: &str) -> Result<Option<Files>> {
        let snapshot = self.snapshot(commit);
        if !snapshot.is_dir() {
            return Ok(None);
        }
        let tree = self.folder().join("trees").join(format!("{commit}.json"));
        // It is only a help: one that is broken or of another version counts as none.
        let listed = read_json(&tree).ok();
        let listed = listed.and_then(|json| serde_json::from_slice::<Tree>(&json).ok());
        if let Some(tree) = listed.filter(|tree| tree.format_version == 1) {
            let files = tree.files.into_iter();
            return Ok(Some(
                files
                    .filter(|(name, _)| is_safe_path(name))
                    .map(|(name, file)| (name, Some(file.size)))
                    .collect(),
            ));
        }
        let mut files = Files::new();
        add_files(&snapshot, &snapshot, &mut files).map_err(|error| Error::io(snapshot, error))?;
        Ok(Some(files))
    }
}

/// Locks the file, and says so where that takes long.
fn wait_for(file: &File, path: &Path) -> io::Result<()> {
    for _ in 0..LOCK_TRIES {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) => thread::sleep(LOCK_PAUSE),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    let path = path.display();
    tracing::warn!("waiting for another download, which holds {path}");
    file.lock()
}

/// `trees/COMMIT.json`.
#[derive(Deserialize)]
struct Tree {
    format_version: u32,
    files: BTreeMap<String, TreeFile>,
}

#[derive(Deserialize)]
struct TreeFile {
    size: u64,
}

fn create_parent(path: &Path) -> Result<()> {
    match path.parent() {
        Some(folder) => fs::create_dir_all(folder).map_err(|error| Error::io(folder, error)),
        None => Ok(()),
    }
}

/// The files below `folder`, by their paths in `root`.
fn add_files(root: &Path, folder: &Path, files: &mut Files) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        // Those of which nothing is known but the name are not there either.
        let Ok(metadata) = fs::metadata(&path) else {
            continue;
        };
        let Some(name) = relative(root, &path) else {
            continue;
        };
        if metadata.is_file() {
            files.insert(name, Some(metadata.len()));
        } else if metadata.is_dir() && name.split('/').count() < MAX_DEPTH {
            add_files(root, &path, files)?;
        }
    }
    Ok(())
}

/// A path as the Hub writes it.
fn relative(root: &Path, path: &Path) -> Option<String> {
    let parts = path.strip_prefix(root).ok()?.components();
    let parts = parts.map(|part| match part {
        Component::Normal(name) => name.to_str(),
        _ => None,
    });
    Some(parts.collect::<Option<Vec<_>>>()?.join("/"))
}

/// The bytes of a JSON file that is not too long.
pub(crate) fn read_json(path: &Path) -> io::Result<Vec<u8>> {
    let mut json = Vec::new();
    File::open(path)?
        .take(MAX_JSON_BYTES + 1)
        .read_to_end(&mut json)?;
    if json.len() as u64 > MAX_JSON_BYTES {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    Ok(json)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    #[test]
    fn paths_that_leave_their_folder_are_refused() {
        for path in ["a", "a/b.json", ".x", "refs/pr/1", "a b"] {
            assert!(is_safe_path(path), "{path}");
        }
        for path in [
            "", "/a", "a/", "a//b", "..", "a/../b", "./a", "a\\b", "c:a", "a\nb",
        ] {
            assert!(!is_safe_path(path), "{path}");
            assert!(RepoCache::new(Path::new("/c"), "o/n", path).is_err());
        }
    }

    #[test]
    fn revisions_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let cache = RepoCache::new(dir.path(), "o/n", "refs/pr/1").unwrap();
        assert_eq!(cache.cached_commit(), None);
        cache.set_commit(COMMIT).unwrap();
        let path = dir.path().join("models--o--n/refs/refs/pr/1");
        assert_eq!(fs::read_to_string(&path).unwrap(), COMMIT);
        assert_eq!(cache.cached_commit().as_deref(), Some(COMMIT));
        fs::write(&path, "../../elsewhere").unwrap();
        assert_eq!(cache.cached_commit(), None);
        let pinned = RepoCache::new(dir.path(), "o/n", COMMIT).unwrap();
        assert_eq!(pinned.cached_commit().as_deref(), Some(COMMIT));
    }

    #[cfg(unix)]
    #[test]
    fn links_lead_to_their_content() {
        let dir = tempfile::tempdir().unwrap();
        let cache = RepoCache::new(dir.path(), "o/n", "main").unwrap();
        assert_eq!(cache.files(COMMIT).unwrap(), None);
        let blob = cache.blob("e1");
        create_parent(&blob).unwrap();
        fs::write(&blob, "one").unwrap();
        for file in ["a.json", "b/c/d.gguf"] {
            // One that leads nowhere is replaced, one that is right is kept.
            let path = cache.snapshot(COMMIT).join(file);
            create_parent(&path).unwrap();
            std::os::unix::fs::symlink("nowhere", &path).unwrap();
            for _ in 0..2 {
                cache.link(COMMIT, file, "e1").unwrap();
                assert_eq!(fs::read_to_string(&path).unwrap(), "one");
            }
        }
        let files = cache.files(COMMIT).unwrap().unwrap();
        let names: Vec<_> = files.keys().map(String::as_str).collect();
        assert_eq!(names, ["a.json", "b/c/d.gguf"]);
    }

    #[test]
    fn a_lock_is_held_by_one() {
        let dir = tempfile::tempdir().unwrap();
        let cache = RepoCache::new(dir.path(), "o/n", "main").unwrap();
        let held = cache.lock("e1").unwrap();
        let other = File::open(dir.path().join(".locks/models--o--n/e1.lock")).unwrap();
        assert!(matches!(other.try_lock(), Err(TryLockError::WouldBlock)));
        drop(held);
        other.try_lock().unwrap();
    }
}
