//! A directory that appears when all of it is written.

use std::fs;
use std::path::{Path, PathBuf};

use crate::{Error, Result, ResultExt};

/// A directory beside the one that is wanted, removed unless it is published.
pub(super) struct Partial {
    path: PathBuf,
}

impl Partial {
    /// Makes the directory, for `out` in the end.
    pub(super) fn create(out: &Path) -> Result<Self> {
        let mut name = out
            .file_name()
            .ok_or_else(|| Error::field("output directory", "a name", out.display().to_string()))?
            .to_owned();
        name.push(format!(".partial-{}", std::process::id()));
        let path = out.with_file_name(name);
        // Of a process that had the same number and was killed.
        if path.exists() {
            fs::remove_dir_all(&path).with_path(&path)?;
        }
        fs::create_dir_all(&path).with_path(&path)?;
        Ok(Self { path })
    }

    /// Where to write.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the directory its name.
    pub(super) fn publish(self, out: &Path) -> Result<()> {
        fs::rename(&self.path, out).with_path(out)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After `publish` there is nothing under this name.
        let _ = fs::remove_dir_all(&self.path);
    }
}
