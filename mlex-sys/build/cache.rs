//! A folder of build products that outlives the target folder and is shared between checkouts.

use crate::config::{Config, user_var};
use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Written last into a product's folder: without it, the folder is a build that was cut short.
const COMPLETE: &str = "complete";

/// Where native build products are kept.
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// The user's cache folder, or what `MLEX_NATIVE_CACHE` says.
    pub fn new(config: &Config) -> Result<Self, String> {
        let root = match config.cache.as_deref() {
            Some("off") => config.out_dir.join("native"),
            Some(folder) => std::path::absolute(folder)
                .map_err(|e| format!("MLEX_NATIVE_CACHE={folder}: {e}"))?,
            None => default_root().unwrap_or_else(|| config.out_dir.join("native")),
        };
        Ok(Self { root })
    }

    /// The folder that holds, or will hold, the product `name`.
    pub fn folder(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// Whether the product `name` is there.
    pub fn has(&self, name: &str) -> bool {
        self.folder(name).join(COMPLETE).is_file()
    }

    /// The folder of the product `name`, filled by `build` unless it is there.
    ///
    /// Builds happen in place, under a lock, because Metal's library path is compiled into MLX.
    pub fn ensure(
        &self,
        name: &str,
        build: impl FnOnce(&Path) -> Result<(), String>,
    ) -> Result<PathBuf, String> {
        let folder = self.folder(name);
        if self.has(name) {
            return Ok(folder);
        }
        fs::create_dir_all(&self.root)
            .map_err(|e| format!("creating {}: {e}", self.root.display()))?;
        let lock_path = self.root.join(format!("{name}.lock"));
        let context = |e| format!("locking {}: {e}", lock_path.display());
        let lock = File::create(&lock_path).map_err(context)?;
        lock.lock().map_err(context)?;
        // Another build may have finished it while this one waited for the lock.
        if self.has(name) {
            return Ok(folder);
        }
        let context = |e| format!("preparing {}: {e}", folder.display());
        if folder.exists() {
            fs::remove_dir_all(&folder).map_err(context)?;
        }
        fs::create_dir_all(&folder).map_err(context)?;
        build(&folder)?;
        mark_complete(&folder).map_err(context)?;
        Ok(folder)
    }

    /// Tells Cargo to run the script again when the product `name` is removed.
    pub fn watch(&self, name: &str) {
        let marker = self.folder(name).join(COMPLETE);
        println!("cargo::rerun-if-changed={}", marker.display());
    }
}

/// The marker is dated back: Cargo would take a watched file that is newer than the start of the
/// script for a change, and run the script once more.
fn mark_complete(folder: &Path) -> std::io::Result<()> {
    let marker = File::create(folder.join(COMPLETE))?;
    marker.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1))
}

/// `~/Library/Caches/mlex/native` on macOS, else `$XDG_CACHE_HOME` or `~/.cache` likewise.
fn default_root() -> Option<PathBuf> {
    let home = env::var_os("HOME")
        .filter(|v| !v.is_empty())
        .map(PathBuf::from);
    let base = if cfg!(target_os = "macos") {
        home?.join("Library/Caches")
    } else {
        user_var("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .filter(|p| p.is_absolute())
            .or_else(|| Some(home?.join(".cache")))?
    };
    Some(base.join("mlex").join("native"))
}
