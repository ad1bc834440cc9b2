//! The parts of the build script that compute rather than run programs.

// The modules are written for build.rs, which uses all of them.
#![allow(dead_code, unreachable_pub, clippy::print_stdout)]
#![allow(clippy::unwrap_used)] // Clippy does not count helpers as tests

#[path = "../build/cache.rs"]
mod cache;
#[path = "../build/config.rs"]
mod config;
#[path = "../build/flags.rs"]
mod flags;
#[path = "../build/key.rs"]
mod key;
#[path = "../build/needs.rs"]
mod needs;
#[path = "../build/prefix.rs"]
mod prefix;
#[path = "../build/source.rs"]
mod source;

use cache::Cache;
use config::Config;
use key::Key;
use needs::Need;
use std::fs;
use std::path::{Path, PathBuf};

fn config(target_os: &str, target_arch: &str, folder: &Path) -> Config {
    Config {
        out_dir: folder.to_path_buf(),
        manifest_dir: PathBuf::new(),
        target: String::new(),
        target_os: target_os.to_owned(),
        target_arch: target_arch.to_owned(),
        metal: target_os == "macos",
        cuda: false,
        source: None,
        prefix: None,
        cache: Some(folder.to_string_lossy().into_owned()),
        deployment_target: "14.0".to_owned(),
    }
}

fn key_of(parts: &[(&str, &str)]) -> String {
    let mut key = Key::new("test");
    for (name, value) in parts {
        key.add(name, value);
    }
    key.finish()
}

#[test]
fn key_is_stable_and_tells_inputs_apart() {
    let one = key_of(&[("flags", "-O2"), ("target", "x")]);
    assert_eq!(one, key_of(&[("flags", "-O2"), ("target", "x")]));
    assert_eq!(one.len(), 16);
    for other in [
        key_of(&[("flags", "-O3"), ("target", "x")]),
        key_of(&[("target", "x"), ("flags", "-O2")]),
        // The same bytes, cut elsewhere.
        key_of(&[("flags", "-O2t"), ("arget", "x")]),
        key_of(&[("flags", "-O2")]),
    ] {
        assert_ne!(one, other);
    }
}

#[test]
fn key_is_the_sha256_of_length_prefixed_parts() {
    // Python: hashlib.sha256(b"".join(len(p).to_bytes(8, "little") + p
    //     for p in [b"kind", b"test", b"a", b"b"])).hexdigest()[:16]
    assert_eq!(key_of(&[("a", "b")]), "112dce8647f67c98");
}

#[test]
fn folder_key_follows_names_and_contents() {
    let folder = tempfile::tempdir().unwrap();
    let hash = || {
        let mut key = Key::new("test");
        key.add_folder("tree", folder.path()).unwrap();
        key.finish()
    };
    fs::create_dir(folder.path().join("sub")).unwrap();
    fs::write(folder.path().join("sub/a"), "1").unwrap();
    let first = hash();
    assert_eq!(first, hash());
    fs::write(folder.path().join(".hidden"), "not a source").unwrap();
    assert_eq!(first, hash());
    fs::write(folder.path().join("sub/a"), "2").unwrap();
    let changed = hash();
    assert_ne!(first, changed);
    fs::rename(folder.path().join("sub/a"), folder.path().join("sub/b")).unwrap();
    assert_ne!(changed, hash());
}

#[test]
fn cache_builds_once_and_again_after_a_failure() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(&config("linux", "x86_64", folder.path())).unwrap();
    let failed = cache.ensure("product", |to| {
        fs::write(to.join("half"), "").unwrap();
        Err("the compiler failed".to_owned())
    });
    assert_eq!(failed.unwrap_err(), "the compiler failed");
    assert!(!cache.has("product"));

    let built = cache
        .ensure("product", |to| {
            assert!(!to.join("half").exists(), "left over from the failed build");
            fs::write(to.join("whole"), "").map_err(|e| e.to_string())
        })
        .unwrap();
    assert!(built.join("whole").is_file());
    assert_eq!(
        cache.ensure("product", |_| panic!("built twice")).unwrap(),
        built
    );
}

#[test]
fn concurrent_builds_of_one_product_wait_for_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let config = config("linux", "x86_64", folder.path());
    let builds = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                Cache::new(&config)
                    .unwrap()
                    .ensure("product", |_| {
                        builds.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                        std::thread::sleep(std::time::Duration::from_millis(50));
                        Ok(())
                    })
                    .unwrap();
            });
        }
    });
    assert_eq!(builds.into_inner(), 1);
}

#[test]
fn cache_can_be_turned_off() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config("linux", "x86_64", folder.path());
    config.cache = Some("off".to_owned());
    let cache = Cache::new(&config).unwrap();
    assert_eq!(
        cache.folder("product"),
        folder.path().join("native/product")
    );
}

#[test]
fn missing_tools_are_named_together_with_both_commands() {
    let text = needs::report(&[Need::CMake, Need::Libclang, Need::Fmt]);
    assert_eq!(
        text,
        "not found, needed to build MLX: cmake 3.25 or newer, libclang, fmt/format.h\n\
         Debian, Ubuntu: sudo apt-get install cmake libclang-dev libfmt-dev\n\
         macOS: brew install cmake llvm fmt"
    );
}

#[test]
fn missing_tools_without_a_formula_get_no_brew_line() {
    let text = needs::report(&[Need::Blas]);
    assert!(text.contains("apt-get install libopenblas-dev liblapacke-dev"));
    assert!(!text.contains("brew"));
}

#[test]
fn cmake_versions_compare_as_numbers() {
    let parse = |version: &str| {
        needs::parse_cmake_version(&format!("cmake version {version}\n\nCMake suite"))
    };
    assert_eq!(parse("3.25.1"), Some((3, 25)));
    assert_eq!(parse("4.1.0-rc1"), Some((4, 1)));
    assert!(parse("3.9.6") < Some(needs::CMAKE));
    assert_eq!(needs::parse_cmake_version("not cmake"), None);
}

const VERSION_H: &str = "#pragma once\n#define MLX_VERSION_MAJOR 0\n#define MLX_VERSION_MINOR 32\n\
    #define MLX_VERSION_PATCH 4\n#define MLX_VERSION_NUMERIC \\\n  (100000 * MLX_VERSION_MAJOR)\n";

#[test]
fn version_header_is_read() {
    assert_eq!(prefix::parse_version(VERSION_H), Some((0, 32, 4)));
    assert_eq!(prefix::parse_version(""), None);
    assert_eq!(
        prefix::parse_version(&VERSION_H.replace("MLX_VERSION_PATCH 4", "MLX_VERSION_PATCH x")),
        None
    );
}

fn installed(version: (u32, u32, u32)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("include/mlx")).unwrap();
    fs::create_dir_all(folder.path().join("lib")).unwrap();
    fs::write(folder.path().join("lib/libmlx.so"), "").unwrap();
    let header = format!(
        "#define MLX_VERSION_MAJOR {}\n#define MLX_VERSION_MINOR {}\n#define MLX_VERSION_PATCH {}\n",
        version.0, version.1, version.2
    );
    fs::write(folder.path().join("include/mlx/version.h"), header).unwrap();
    folder
}

#[test]
fn installed_versions_outside_the_range_are_refused() {
    for version in [(0, 31, 2), (0, 32, 0), (0, 32, 4)] {
        let folder = installed(version);
        assert_eq!(
            prefix::Prefix::open(folder.path(), false, false)
                .unwrap()
                .version,
            version
        );
    }
    for version in [(0, 31, 1), (0, 32, 5), (1, 0, 0)] {
        let folder = installed(version);
        let error = prefix::Prefix::open(folder.path(), false, false)
            .err()
            .unwrap();
        let found = prefix::show(version);
        assert!(
            error.ends_with(&format!("MLX 0.31.2 to 0.32.4 expected, found {found}")),
            "{error}"
        );
        assert!(error.starts_with("MLEX_MLX_PREFIX="), "{error}");
    }
}

#[test]
fn an_incomplete_prefix_is_refused_by_the_file_that_is_missing() {
    let folder = installed((0, 32, 4));
    let error = |macos| {
        prefix::Prefix::open(folder.path(), macos, false)
            .err()
            .unwrap()
    };
    assert!(error(true).ends_with("lib/libmlx.dylib expected, not found"));
    fs::remove_file(folder.path().join("include/mlx/version.h")).unwrap();
    assert!(error(false).ends_with("include/mlx/version.h expected, not found"));
}

#[test]
fn the_cuda_feature_wants_a_cuda_build() {
    let folder = installed((0, 32, 4));
    let error = prefix::Prefix::open(folder.path(), false, true)
        .err()
        .unwrap();
    assert!(error.ends_with("a CUDA build expected (feature cuda), include/cccl not found"));
    fs::create_dir(folder.path().join("include/cccl")).unwrap();
    assert!(prefix::Prefix::open(folder.path(), false, true).is_ok());
}

#[test]
fn cmake_flags_per_target() {
    let linux = flags::cmake_flags(&config("linux", "x86_64", Path::new("")));
    for flag in [
        "-DMLX_BUILD_METAL=OFF",
        "-DFETCHCONTENT_FULLY_DISCONNECTED=ON",
        "-DBLA_VENDOR=OpenBLAS",
    ] {
        assert!(linux.iter().any(|f| f == flag), "{flag} in {linux:?}");
    }
    let macos = flags::cmake_flags(&config("macos", "aarch64", Path::new("")));
    for flag in [
        "-DMLX_BUILD_METAL=ON",
        "-DCMAKE_OSX_ARCHITECTURES=arm64",
        "-DCMAKE_OSX_DEPLOYMENT_TARGET=14.0",
    ] {
        assert!(macos.iter().any(|f| f == flag), "{flag} in {macos:?}");
    }
    assert!(!macos.iter().any(|f| f.contains("DISCONNECTED")));
}

#[test]
fn the_carrier_is_pinned() {
    let lock = include_str!("../build/carrier.lock");
    let manifest = include_str!("../build/carrier.toml");
    assert!(manifest.contains("mlxrs-sys = \"=0.1.0\""));
    assert!(lock.contains(
        "name = \"mlxrs-sys\"\nversion = \"0.1.0\"\n\
         source = \"registry+https://github.com/rust-lang/crates.io-index\"\n\
         checksum = \"b920a0ec6f7ac8d01cfdd835b00156dad40de97cf3c0116eafeec118f316d7db\""
    ));
}

#[test]
fn the_carrier_is_found_in_cargo_metadata() {
    let metadata = r#"{"packages": [
        {"name": "cc", "manifest_path": "/r/cc/Cargo.toml"},
        {"name": "mlxrs-sys", "manifest_path": "/r/mlxrs-sys-0.1.0/Cargo.toml"}]}"#;
    assert_eq!(
        source::carrier_folder(metadata).unwrap(),
        Path::new("/r/mlxrs-sys-0.1.0")
    );
    assert!(source::carrier_folder(r#"{"packages": []}"#).is_err());
    assert!(source::carrier_folder("no json").is_err());
}

#[test]
fn inner_cargo_keeps_registry_settings_alone() {
    for name in [
        "CARGO_HOME",
        "CARGO_HTTP_PROXY",
        "CARGO_NET_OFFLINE",
        "RUSTC",
        "HOME",
    ] {
        assert!(!source::disturbs_cargo(name), "{name}");
    }
    for name in [
        "CARGO_TARGET_DIR",
        "CARGO_BUILD_TARGET",
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_MANIFEST_DIR",
        "RUSTC_WRAPPER",
        "RUSTFLAGS",
        "MAKEFLAGS",
    ] {
        assert!(source::disturbs_cargo(name), "{name}");
    }
}
