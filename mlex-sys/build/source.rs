//! Where the sources of MLX and mlx-c come from.
//!
//! The registry crate `mlxrs-sys` carries both trees unchanged. It is fetched by Cargo through a
//! manifest and a lock file of our own, which pins its checksum, and is never compiled.

use crate::config::Config;
use crate::key::Key;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const CARRIER: &str = "mlxrs-sys";
const MANIFEST: &str = include_str!("carrier.toml");
const LOCK: &str = include_str!("carrier.lock");

/// Source trees, not yet looked up on disk.
pub enum Source {
    /// The carrier crate.
    Carrier,
    /// `MLEX_MLX_SOURCE`.
    Folder(PathBuf),
}

/// Source trees on disk.
pub struct Trees {
    /// MLX.
    pub mlx: PathBuf,
    /// mlx-c.
    pub mlxc: PathBuf,
}

impl Source {
    /// Chooses by the configuration.
    pub fn new(config: &Config) -> Self {
        match &config.source {
            Some(folder) => Self::Folder(folder.clone()),
            None => Self::Carrier,
        }
    }

    /// Adds what identifies the trees: the pinned lock file, or the content of the folder.
    pub fn add_to(&self, key: &mut Key) -> Result<(), String> {
        match self {
            Self::Carrier => {
                key.add("carrier", LOCK);
                Ok(())
            }
            Self::Folder(folder) => {
                let trees = Trees::below(folder)?;
                println!(
                    "cargo::rerun-if-changed={}",
                    trees.mlx.join("mlx").display()
                );
                println!(
                    "cargo::rerun-if-changed={}",
                    trees.mlxc.join("mlx").display()
                );
                key.add_folder("mlx", &trees.mlx.join("mlx"))?;
                key.add_folder("mlx/cmake", &trees.mlx.join("cmake"))?;
                key.add_folder("mlx-c", &trees.mlxc.join("mlx"))
            }
        }
    }

    /// Brings the trees to disk.
    pub fn fetch(&self, config: &Config) -> Result<Trees, String> {
        match self {
            Self::Folder(folder) => Trees::below(folder),
            Self::Carrier => fetch_carrier(&config.out_dir.join("carrier")),
        }
    }
}

impl Trees {
    fn below(folder: &Path) -> Result<Self, String> {
        let trees = Self {
            mlx: folder.join("mlx"),
            mlxc: folder.join("mlx-c"),
        };
        for file in [
            trees.mlx.join("CMakeLists.txt"),
            trees.mlxc.join("mlx/c/mlx.h"),
        ] {
            if !file.is_file() {
                return Err(format!(
                    "MLX sources: {} expected, not found (a source folder holds mlx/ and mlx-c/)",
                    file.display()
                ));
            }
        }
        Ok(trees)
    }
}

fn fetch_carrier(folder: &Path) -> Result<Trees, String> {
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        fs::write(&path, text).map_err(|e| format!("writing {}: {e}", path.display()))
    };
    fs::create_dir_all(folder).map_err(|e| format!("creating {}: {e}", folder.display()))?;
    write("Cargo.toml", MANIFEST)?;
    write("Cargo.lock", LOCK)?;
    write("lib.rs", "")?;

    // Without the network first: after the first build the crate is in Cargo's own cache.
    let metadata = match metadata(folder) {
        Ok(metadata) => metadata,
        Err(_) => {
            let host = env::var("HOST").unwrap_or_default();
            cargo(folder, &["fetch", "--locked", "--target", &host]).map_err(|e| {
                format!(
                    "fetching the MLX sources (crate {CARRIER}) with Cargo: {e}\n\
                     Without a network, set MLEX_MLX_SOURCE to a folder with mlx/ and mlx-c/."
                )
            })?;
            metadata(folder)?
        }
    };
    Trees::below(&carrier_folder(&metadata)?.join("vendor"))
}

fn metadata(folder: &Path) -> Result<String, String> {
    let host = env::var("HOST").unwrap_or_default();
    cargo(
        folder,
        &[
            "metadata",
            "--locked",
            "--offline",
            "--format-version=1",
            "--filter-platform",
            &host,
        ],
    )
}

/// The carrier's folder, out of `cargo metadata`'s JSON.
pub fn carrier_folder(metadata: &str) -> Result<PathBuf, String> {
    let json: serde_json::Value =
        serde_json::from_str(metadata).map_err(|e| format!("cargo metadata: {e}"))?;
    json["packages"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|package| package["name"] == CARRIER)
        .and_then(|package| Path::new(package["manifest_path"].as_str()?).parent())
        .map(Path::to_path_buf)
        .ok_or_else(|| format!("cargo metadata names no package {CARRIER}"))
}

/// Runs Cargo in `folder`, free of what the outer Cargo and its user set for the outer build.
fn cargo(folder: &Path, args: &[&str]) -> Result<String, String> {
    let program = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.args(args).current_dir(folder);
    for (name, _) in env::vars_os() {
        if name.to_str().is_some_and(disturbs_cargo) {
            command.env_remove(name);
        }
    }
    let output = command.output().map_err(|e| format!("cargo: {e}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = stderr
        .lines()
        .map(str::trim)
        .filter(|l| !l.is_empty())
        .collect();
    Err(lines.join("; "))
}

/// Whether a variable belongs to the outer build rather than to Cargo's access to the registry.
pub fn disturbs_cargo(name: &str) -> bool {
    const KEPT: [&str; 6] = [
        "CARGO_HOME",
        "CARGO_HTTP_",
        "CARGO_NET_",
        "CARGO_REGISTR",
        "CARGO_SOURCE_",
        "CARGO_TERM_",
    ];
    let outer = name.starts_with("CARGO_")
        || name.starts_with("RUSTC")
        || name == "RUSTFLAGS"
        || name == "RUSTDOCFLAGS"
        || name == "MAKEFLAGS"
        || name == "MFLAGS";
    outer && name != "RUSTC" && !KEPT.iter().any(|prefix| name.starts_with(prefix))
}
