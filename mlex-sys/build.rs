//! Builds MLX and mlx-c, or finds an installed MLX, and generates the bindings.
//!
//! The steps are in `build/`; docs/backends.md describes the environment variables.

#![allow(unreachable_pub)] // the modules are also compiled into tests

#[path = "build/bindings.rs"]
mod bindings;
#[path = "build/cache.rs"]
mod cache;
#[path = "build/config.rs"]
mod config;
#[path = "build/flags.rs"]
mod flags;
#[path = "build/key.rs"]
mod key;
#[path = "build/link.rs"]
mod link;
#[path = "build/native.rs"]
mod native;
#[path = "build/needs.rs"]
mod needs;
#[path = "build/prefix.rs"]
mod prefix;
#[path = "build/source.rs"]
mod source;
#[path = "build/tools.rs"]
mod tools;

use std::process::ExitCode;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            for line in message.lines() {
                println!("cargo::error={line}");
            }
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build");
    println!("cargo::rerun-if-changed=csrc");
    let config = config::Config::from_env()?;
    let built = native::build(&config)?;
    std::fs::copy(
        built.mlxc.join(bindings::FILE),
        config.out_dir.join(bindings::FILE),
    )
    .map_err(|e| format!("copying {}: {e}", bindings::FILE))?;
    link::emit(&config, &built)
}
