//! What is linked, and what crates that depend on this one are told.

use crate::config::Config;
use crate::native::Built;
use crate::tools::output;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Prints the instructions for Cargo.
pub fn emit(config: &Config, built: &Built) -> Result<(), String> {
    // Archives stay outside the rlib: they are large, and Cargo hands the search path on.
    println!(
        "cargo::rustc-link-search=native={}",
        built.mlxc.join("lib").display()
    );
    println!("cargo::rustc-link-lib=static:-bundle=mlxc");
    match &built.prefix {
        Some(prefix) => {
            let lib = reachable_by_cargo(config, &prefix.folder)?.join("lib");
            println!("cargo::rustc-link-search=native={}", lib.display());
            println!("cargo::rustc-link-lib=dylib=mlx");
            if !config.macos() {
                // A CUDA build needs libraries that this machine may not have. For GNU ld; lld
                // does not mind.
                println!("cargo::rustc-link-arg-tests=-Wl,--allow-shlib-undefined");
            }
            println!("cargo::metadata=prefix={}", prefix.folder.display());
        }
        None => {
            let lib = built.mlx.join("lib");
            println!("cargo::rustc-link-search=native={}", lib.display());
            println!("cargo::rustc-link-lib=static:-bundle=mlx");
        }
    }
    if config.macos() {
        link_macos(config, &built.mlx);
    } else {
        if built.prefix.is_none() {
            // Dynamic: Debian's static OpenBLAS would bring in the Fortran runtime.
            println!("cargo::rustc-link-lib=dylib=openblas");
        }
        for library in ["stdc++", "dl", "pthread", "m"] {
            println!("cargo::rustc-link-lib=dylib={library}");
        }
    }
    let include = std::env::join_paths([built.mlxc.join("include"), built.mlx.join("include")])
        .map_err(|e| format!("include paths: {e}"))?;
    println!("cargo::metadata=include={}", include.to_string_lossy());
    Ok(())
}

/// A link to `prefix` inside the target folder.
///
/// `cargo test` and `cargo run` put link search paths on the loader's path when they are inside
/// the target folder, in every crate that depends on this one; a link argument with an rpath would
/// reach this crate alone. MLX finds its `include/` and its bundled libraries through the link.
fn reachable_by_cargo(config: &Config, prefix: &Path) -> Result<PathBuf, String> {
    let link = config.out_dir.join("mlx-prefix");
    let context = |e| format!("linking {} to {}: {e}", link.display(), prefix.display());
    if link.is_symlink() {
        std::fs::remove_file(&link).map_err(context)?;
    }
    std::os::unix::fs::symlink(prefix, &link).map_err(context)?;
    Ok(link)
}

fn link_macos(config: &Config, mlx: &Path) {
    println!("cargo::rustc-link-lib=dylib=c++");
    let mut frameworks = vec!["Accelerate", "Foundation"];
    if config.metal {
        frameworks.extend(["Metal", "QuartzCore"]);
    }
    if mlx.join("lib/libjaccl.a").is_file() {
        println!("cargo::rustc-link-lib=static:-bundle=jaccl");
        frameworks.extend(["IOKit", "CoreFoundation"]);
    }
    for framework in frameworks {
        println!("cargo::rustc-link-lib=framework={framework}");
    }
    // MLX uses __builtin_available; rustc links without the runtime that implements it.
    let runtime = output(Command::new("clang").arg("--print-file-name=libclang_rt.osx.a"));
    if let Some(folder) = runtime
        .as_deref()
        .and_then(|file| Path::new(file.trim()).parent())
    {
        println!("cargo::rustc-link-search=native={}", folder.display());
        println!("cargo::rustc-link-lib=static:-bundle=clang_rt.osx");
    }
}
