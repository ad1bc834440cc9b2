//! What is asked for: the target, the features and the `MLEX_*` variables.

use std::env;
use std::path::PathBuf;

/// The oldest macOS that MLX supports.
const MACOS_DEPLOYMENT_TARGET: &str = "14.0";

/// The inputs of the build that do not come from files.
pub struct Config {
    /// Cargo's folder for this build script's output.
    pub out_dir: PathBuf,
    /// This crate's folder.
    pub manifest_dir: PathBuf,
    /// Target triple.
    pub target: String,
    /// `CARGO_CFG_TARGET_OS`.
    pub target_os: String,
    /// `CARGO_CFG_TARGET_ARCH`.
    pub target_arch: String,
    /// Whether MLX gets its Metal backend: the feature, on macOS.
    pub metal: bool,
    /// The feature `cuda`.
    pub cuda: bool,
    /// `MLEX_MLX_SOURCE`: a folder with `mlx/` and `mlx-c/`.
    pub source: Option<PathBuf>,
    /// `MLEX_MLX_PREFIX`: an installed MLX.
    pub prefix: Option<PathBuf>,
    /// `MLEX_NATIVE_CACHE`: `off` or a folder.
    pub cache: Option<String>,
    /// The macOS version to build for.
    pub deployment_target: String,
}

impl Config {
    /// Reads Cargo's and mlex's variables, and tells Cargo to rerun the script when one changes.
    pub fn from_env() -> Result<Self, String> {
        let target_os = cargo_var("CARGO_CFG_TARGET_OS")?;
        Ok(Self {
            out_dir: cargo_var("OUT_DIR")?.into(),
            manifest_dir: cargo_var("CARGO_MANIFEST_DIR")?.into(),
            target: cargo_var("TARGET")?,
            target_arch: cargo_var("CARGO_CFG_TARGET_ARCH")?,
            metal: target_os == "macos" && env::var_os("CARGO_FEATURE_METAL").is_some(),
            cuda: env::var_os("CARGO_FEATURE_CUDA").is_some(),
            source: user_var("MLEX_MLX_SOURCE").map(PathBuf::from),
            prefix: user_var("MLEX_MLX_PREFIX").map(PathBuf::from),
            cache: user_var("MLEX_NATIVE_CACHE"),
            deployment_target: user_var("MACOSX_DEPLOYMENT_TARGET")
                .unwrap_or_else(|| MACOS_DEPLOYMENT_TARGET.to_owned()),
            target_os,
        })
    }

    /// Whether the target is macOS.
    pub fn macos(&self) -> bool {
        self.target_os == "macos"
    }
}

fn cargo_var(name: &str) -> Result<String, String> {
    env::var(name).map_err(|_| format!("{name} is not set: this build script runs under Cargo"))
}

/// A variable of the user's; empty counts as not set.
pub fn user_var(name: &str) -> Option<String> {
    println!("cargo::rerun-if-env-changed={name}");
    env::var(name).ok().filter(|v| !v.is_empty())
}
