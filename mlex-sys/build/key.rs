//! A name for a build product that changes when anything that goes into it changes.

use sha2::{Digest, Sha256};
use std::fmt::Write;
use std::fs;
use std::path::Path;

/// Collects named inputs and hashes them.
pub struct Key(Sha256);

impl Key {
    /// A key for products of `kind`.
    pub fn new(kind: &str) -> Self {
        let mut key = Self(Sha256::new());
        key.add("kind", kind);
        key
    }

    /// Adds an input. Lengths are hashed too, so that no two lists of inputs run together.
    pub fn add(&mut self, name: &str, value: impl AsRef<[u8]>) {
        for part in [name.as_bytes(), value.as_ref()] {
            self.0.update((part.len() as u64).to_le_bytes());
            self.0.update(part);
        }
    }

    /// Adds every file below `folder`: relative path and content, in the order of the paths.
    pub fn add_folder(&mut self, name: &str, folder: &Path) -> Result<(), String> {
        self.add("folder", name);
        let mut files = Vec::new();
        list_files(folder, &mut files)?;
        files.sort();
        for file in files {
            let relative = file.strip_prefix(folder).unwrap_or(&file);
            let content =
                fs::read(&file).map_err(|e| format!("reading {}: {e}", file.display()))?;
            self.add(&relative.to_string_lossy(), content);
        }
        Ok(())
    }

    /// The first 16 hex digits of the hash.
    pub fn finish(self) -> String {
        let digest = self.0.finalize();
        digest.iter().take(8).fold(String::new(), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        })
    }
}

fn list_files(folder: &Path, files: &mut Vec<std::path::PathBuf>) -> Result<(), String> {
    let context = |e| format!("reading {}: {e}", folder.display());
    for entry in fs::read_dir(folder).map_err(context)? {
        let entry = entry.map_err(context)?;
        let name = entry.file_name();
        if name.to_string_lossy().starts_with('.') {
            continue;
        }
        if entry.file_type().map_err(context)?.is_dir() {
            list_files(&entry.path(), files)?;
        } else {
            files.push(entry.path());
        }
    }
    Ok(())
}
