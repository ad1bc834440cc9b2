//! An installed MLX: a folder with `include/` and `lib/`, as the PyPI wheels have it.

use std::fs;
use std::path::{Path, PathBuf};

/// A version of MLX: major, minor, patch.
pub type Version = (u32, u32, u32);

/// The versions that mlx-c and its compatibility header are known to compile against.
const OLDEST: Version = (0, 31, 2);
const NEWEST: Version = (0, 32, 4);

/// Headers that only a CUDA build brings: its kernels are compiled when they are first used.
const CUDA_HEADERS: &str = "include/cccl";

/// An installed MLX that was checked.
pub struct Prefix {
    /// The folder, absolute.
    pub folder: PathBuf,
    /// Its version.
    pub version: Version,
}

impl Prefix {
    /// Checks the layout, the version and, with `cuda`, that it is a CUDA build.
    pub fn open(folder: &Path, macos: bool, cuda: bool) -> Result<Self, String> {
        let error = |what: String| format!("MLEX_MLX_PREFIX={}: {what}", folder.display());
        let library = if macos { "libmlx.dylib" } else { "libmlx.so" };
        let folder_absolute = folder.canonicalize().map_err(|e| error(e.to_string()))?;
        let header = folder_absolute.join("include/mlx/version.h");
        for file in [&header, &folder_absolute.join("lib").join(library)] {
            if !file.is_file() {
                return Err(error(format!(
                    "{} expected, not found",
                    file.strip_prefix(&folder_absolute)
                        .unwrap_or(file)
                        .display()
                )));
            }
        }
        if cuda && !folder_absolute.join(CUDA_HEADERS).is_dir() {
            return Err(error(format!(
                "a CUDA build expected (feature cuda), {CUDA_HEADERS} not found"
            )));
        }
        println!("cargo::rerun-if-changed={}", header.display());
        let text = fs::read_to_string(&header).map_err(|e| error(e.to_string()))?;
        let version = parse_version(&text)
            .ok_or_else(|| error("include/mlx/version.h names no version".to_owned()))?;
        if !(OLDEST..=NEWEST).contains(&version) {
            return Err(error(format!(
                "MLX {} to {} expected, found {}",
                show(OLDEST),
                show(NEWEST),
                show(version)
            )));
        }
        Ok(Self {
            folder: folder_absolute,
            version,
        })
    }
}

/// The version in the text of `mlx/version.h`.
pub fn parse_version(header: &str) -> Option<Version> {
    let number = |name: &str| {
        header.lines().find_map(|line| {
            let mut words = line.split_whitespace();
            (words.next() == Some("#define") && words.next() == Some(name))
                .then(|| words.next()?.parse().ok())?
        })
    };
    Some((
        number("MLX_VERSION_MAJOR")?,
        number("MLX_VERSION_MINOR")?,
        number("MLX_VERSION_PATCH")?,
    ))
}

/// `major.minor.patch`.
pub fn show((major, minor, patch): Version) -> String {
    format!("{major}.{minor}.{patch}")
}
