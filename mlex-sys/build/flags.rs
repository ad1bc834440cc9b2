//! The CMake options for MLX.

use crate::config::Config;

/// The CMake options that do not depend on where things are.
pub fn cmake_flags(config: &Config) -> Vec<String> {
    let on = |value| if value { "ON" } else { "OFF" };
    let mut flags = vec![
        "-DCMAKE_BUILD_TYPE=Release".to_owned(),
        "-DBUILD_SHARED_LIBS=OFF".to_owned(),
        "-DCMAKE_INSTALL_LIBDIR=lib".to_owned(),
        "-DMLX_BUILD_TESTS=OFF".to_owned(),
        "-DMLX_BUILD_EXAMPLES=OFF".to_owned(),
        format!("-DMLX_BUILD_METAL={}", on(config.metal)),
        // Both formats are read in Rust.
        "-DMLX_BUILD_GGUF=OFF".to_owned(),
        "-DMLX_BUILD_SAFETENSORS=OFF".to_owned(),
        "-DUSE_SYSTEM_FMT=ON".to_owned(),
    ];
    if config.macos() {
        let arch = match config.target_arch.as_str() {
            "aarch64" => "arm64",
            other => other,
        };
        flags.push(format!("-DCMAKE_OSX_ARCHITECTURES={arch}"));
        flags.push(format!(
            "-DCMAKE_OSX_DEPLOYMENT_TARGET={}",
            config.deployment_target
        ));
        if arch == "x86_64" {
            flags.push("-DMLX_ENABLE_X64_MAC=ON".to_owned());
        }
    } else {
        flags.push("-DBLA_VENDOR=OpenBLAS".to_owned());
    }
    // Metal's C++ headers come from the network on macOS; nothing else does.
    if !config.metal {
        flags.push("-DFETCHCONTENT_FULLY_DISCONNECTED=ON".to_owned());
    }
    flags
}
