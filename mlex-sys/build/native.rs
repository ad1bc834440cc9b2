//! Compiles MLX and mlx-c, or takes them from the cache.

use crate::bindings;
use crate::cache::Cache;
use crate::config::{Config, user_var};
use crate::flags::cmake_flags;
use crate::key::Key;
use crate::prefix::{Prefix, show};
use crate::source::{Source, Trees};
use crate::tools::{Tools, ninja};
use std::cell::OnceCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Part of every key: raise it when the build changes in a way that no other input shows.
const SCHEMA: &str = "1";

/// Our own extension, compiled beside mlx-c.
const HOST_OP_H: &str = "host_op.h";
const HOST_OP_CPP: &str = "host_op.cpp";

/// What was built or found.
pub struct Built {
    /// Folder of MLX: `include/`, `lib/`.
    pub mlx: PathBuf,
    /// Folder of mlx-c: `include/`, `lib/`, `bindings.rs`.
    pub mlxc: PathBuf,
    /// Set when `mlx` is an installed MLX, to be linked dynamically.
    pub prefix: Option<Prefix>,
}

/// Builds what the cache does not hold.
pub fn build(config: &Config) -> Result<Built, String> {
    if config.cuda && config.prefix.is_none() {
        println!(
            "cargo::warning=feature cuda has no effect without MLEX_MLX_PREFIX; MLX is built for the CPU"
        );
    }
    let cache = Cache::new(config)?;
    let tools = Tools::find(config);
    let source = Source::new(config);
    let prefix = config
        .prefix
        .as_deref()
        .map(|folder| Prefix::open(folder, config.macos(), config.cuda))
        .transpose()?;

    let mut common = Vec::new();
    common.push(("schema", SCHEMA.to_owned()));
    common.push(("target", config.target.clone()));
    common.push(("compiler", tools.compiler_version.clone()));
    for name in ["CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "SDKROOT"] {
        common.push((name, user_var(name).unwrap_or_default()));
    }
    if config.macos() {
        common.push(("deployment target", config.deployment_target.clone()));
    }
    let key = |kind: &str| {
        let mut key = Key::new(kind);
        for (name, value) in &common {
            key.add(name, value);
        }
        key
    };

    let flags = cmake_flags(config);
    let mlx_name = match &prefix {
        Some(_) => None,
        None => {
            let mut key = key("mlx");
            source.add_to(&mut key)?;
            key.add("flags", flags.join("\n"));
            Some(format!("mlx-{}", key.finish()))
        }
    };
    let headers = forced_headers(config, prefix.is_some());
    let mut key = key("mlxc");
    source.add_to(&mut key)?;
    let own = [HOST_OP_H, HOST_OP_CPP].map(|name| config.manifest_dir.join("csrc").join(name));
    for file in headers.iter().chain(&own) {
        let text = fs::read(file).map_err(|e| format!("reading {}: {e}", file.display()))?;
        key.add("source", text);
    }
    if let Some(prefix) = &prefix {
        key.add("prefix", prefix.folder.to_string_lossy().as_bytes());
        key.add("version", show(prefix.version));
    }
    key.add("mlx", mlx_name.as_deref().unwrap_or_default());
    key.add("bindings", bindings::SCHEMA);
    let mlxc_name = format!("mlxc-{}", key.finish());

    let mlx_missing = mlx_name.as_ref().is_some_and(|name| !cache.has(name));
    if mlx_missing || !cache.has(&mlxc_name) {
        tools.check(config, mlx_missing)?;
    }
    let trees = OnceCell::new();
    let fetch = || match trees.get() {
        Some(trees) => Ok::<&Trees, String>(trees),
        None => {
            let fetched = source.fetch(config)?;
            Ok(trees.get_or_init(|| fetched))
        }
    };
    let mlx = match (&prefix, &mlx_name) {
        (None, Some(name)) => cache.ensure(name, |folder| {
            build_mlx(config, &tools, &flags, &fetch()?.mlx, folder)
        })?,
        (prefix, _) => prefix
            .as_ref()
            .map(|prefix| prefix.folder.clone())
            .unwrap_or_default(),
    };
    let mlxc = cache.ensure(&mlxc_name, |folder| {
        build_mlxc(config, &fetch()?.mlxc, &mlx, &headers, &own[1], folder)?;
        bindings::generate(folder, &own[0])
    })?;
    for name in mlx_name.iter().chain([&mlxc_name]) {
        cache.watch(name);
    }
    Ok(Built { mlx, mlxc, prefix })
}

fn build_mlx(
    config: &Config,
    tools: &Tools,
    flags: &[String],
    source: &Path,
    folder: &Path,
) -> Result<(), String> {
    let build = folder.join("build");
    let json = json_source(tools, &build.join("json"))?;
    let mut configure = Command::new("cmake");
    configure
        .arg("-S")
        .arg(source)
        .arg("-B")
        .arg(&build)
        .args(flags)
        .arg(format!("-DFETCHCONTENT_SOURCE_DIR_JSON={}", json.display()))
        .arg(format!(
            "-DCMAKE_CXX_COMPILER={}",
            tools.compiler().display()
        ))
        .arg(format!("-DCMAKE_INSTALL_PREFIX={}", folder.display()));
    if ninja() {
        configure.args(["-G", "Ninja"]);
    }
    if config.metal {
        // This path is compiled into MLX, so it must last. The Metal linker does not make it.
        let metal = folder.join("metal");
        fs::create_dir_all(&metal).map_err(|e| format!("creating {}: {e}", metal.display()))?;
        configure.arg(format!("-DMLX_METAL_PATH={}", metal.display()));
    }
    run("configuring MLX", &mut configure)?;
    let jobs = std::env::var("NUM_JOBS").unwrap_or_else(|_| "2".to_owned());
    run(
        "compiling MLX",
        Command::new("cmake")
            .arg("--build")
            .arg(&build)
            .args(["--parallel", &jobs]),
    )?;
    run(
        "installing MLX",
        Command::new("cmake").arg("--install").arg(&build),
    )?;
    let jaccl = build.join("jaccl/libjaccl.a");
    if jaccl.is_file() {
        let to = folder.join("lib/libjaccl.a");
        fs::copy(&jaccl, &to).map_err(|e| format!("copying {}: {e}", jaccl.display()))?;
    }
    fs::remove_dir_all(&build).map_err(|e| format!("removing {}: {e}", build.display()))
}

/// A folder laid out like the JSON library's sources, around the installed header.
fn json_source(tools: &Tools, folder: &Path) -> Result<PathBuf, String> {
    let json = tools
        .json_folder()
        .ok_or("nlohmann/json.hpp expected, not found")?;
    let include = folder.join("single_include");
    fs::create_dir_all(&include)
        .and_then(|()| std::os::unix::fs::symlink(&json, include.join("nlohmann")))
        .map_err(|e| format!("preparing {}: {e}", folder.display()))?;
    Ok(folder.to_path_buf())
}

/// The headers of ours that each file of mlx-c includes first.
fn forced_headers(config: &Config, installed: bool) -> Vec<PathBuf> {
    let csrc = config.manifest_dir.join("csrc");
    let mut headers = Vec::new();
    if installed {
        headers.push(csrc.join("mlxc_compat.h"));
    }
    headers.push(csrc.join("mlxc_error.h"));
    headers
}

fn build_mlxc(
    config: &Config,
    source: &Path,
    mlx: &Path,
    forced: &[PathBuf],
    own: &Path,
    folder: &Path,
) -> Result<(), String> {
    let code = source.join("mlx/c");
    let context = |e: std::io::Error| format!("reading {}: {e}", code.display());
    let headers = folder.join("include/mlx/c");
    fs::create_dir_all(&headers).map_err(context)?;
    let mut files = Vec::new();
    for entry in fs::read_dir(&code).map_err(context)? {
        let path = entry.map_err(context)?.path();
        match path.extension().and_then(|e| e.to_str()) {
            Some("cpp") => files.push(path),
            Some("h") => {
                let to = headers.join(path.file_name().unwrap_or_default());
                fs::copy(&path, to).map_err(context)?;
            }
            _ => {}
        }
    }
    files.sort();
    files.push(own.to_path_buf());
    let lib = folder.join("lib");
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .cpp_link_stdlib(None)
        .cargo_metadata(false)
        .cargo_warnings(false)
        .inherit_rustflags(false)
        .warnings(false)
        .debug(false)
        .opt_level(2)
        .pic(true)
        .std("gnu++20")
        .include(source)
        .include(mlx.join("include"))
        .files(&files)
        .out_dir(&lib);
    for header in forced {
        build.flag("-include").flag(header);
    }
    if config.prefix.is_none() {
        build.define("MLX_STATIC", None);
    }
    if config.macos() {
        build.env("MACOSX_DEPLOYMENT_TARGET", &config.deployment_target);
    }
    build
        .try_compile("mlxc")
        .map_err(|e| format!("compiling mlx-c: {e}"))?;
    for entry in fs::read_dir(&lib).map_err(context)? {
        let path = entry.map_err(context)?.path();
        if path.extension().is_some_and(|e| e == "o") {
            fs::remove_file(path).map_err(context)?;
        }
    }
    Ok(())
}

/// Runs a command; its output is shown only when it fails.
fn run(what: &str, command: &mut Command) -> Result<(), String> {
    let output = command
        .output()
        .map_err(|e| format!("{what}: {}: {e}", command.get_program().to_string_lossy()))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!(
        "{what} failed ({}):\n{}",
        output.status,
        last_lines(&output.stdout, &output.stderr)
    ))
}

/// The end of a failed command's output: compilers print their errors last.
fn last_lines(stdout: &[u8], stderr: &[u8]) -> String {
    const LINES: usize = 40;
    let text = format!(
        "{}\n{}",
        String::from_utf8_lossy(stdout).trim_end(),
        String::from_utf8_lossy(stderr).trim_end()
    );
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}
