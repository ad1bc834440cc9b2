//! Lets the command find an installed MLX (`MLEX_MLX_PREFIX`) when it is started directly. Cargo
//! hands no link arguments on from mlex-sys, which links it: docs/backends.md has the whole story.

use std::process::ExitCode;
use std::{env, fs};

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=MLEX_MLX_PREFIX");
    let Some(prefix) = env::var_os("MLEX_MLX_PREFIX").filter(|value| !value.is_empty()) else {
        return ExitCode::SUCCESS;
    };
    let lib = match fs::canonicalize(&prefix) {
        Ok(folder) => folder.join("lib"),
        Err(error) => {
            println!("cargo::error=MLEX_MLX_PREFIX={}: {error}", prefix.display());
            return ExitCode::FAILURE;
        }
    };
    // Word by word, since a folder's name may have the comma that separates the words of -Wl.
    for word in ["-rpath", &lib.to_string_lossy()] {
        println!("cargo::rustc-link-arg-bins=-Xlinker");
        println!("cargo::rustc-link-arg-bins={word}");
    }
    if env::var_os("CARGO_CFG_TARGET_OS").is_some_and(|system| system == "linux") {
        // A CUDA build of MLX needs libraries that this machine may not have. GNU ld minds.
        println!("cargo::rustc-link-arg-bins=-Wl,--allow-shlib-undefined");
    }
    ExitCode::SUCCESS
}
