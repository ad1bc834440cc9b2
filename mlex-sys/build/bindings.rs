//! Rust declarations for mlx-c's headers.

use std::path::Path;

/// The generated file's name.
pub const FILE: &str = "bindings.rs";

/// Part of the key: raise it when the options below change.
pub const SCHEMA: &str = "2";

/// Generates `folder/bindings.rs` from `folder/include/mlx/c/mlx.h` and the header `own`.
pub fn generate(folder: &Path, own: &Path) -> Result<(), String> {
    let include = folder.join("include");
    let header = include.join("mlx/c/mlx.h");
    let bindings = bindgen::Builder::default()
        .header(header.to_string_lossy())
        .header(own.to_string_lossy())
        .clang_arg(format!("-I{}", include.display()))
        .rust_edition(bindgen::RustEdition::Edition2024)
        .allowlist_item("_?(mlx|MLX)_.*")
        // A C variadic that only mlx-c itself calls.
        .blocklist_function("_mlx_error")
        // Declared where the C compiler has half types, so on some targets only; the 16-bit
        // integer accessors read the same bytes everywhere.
        .blocklist_function("mlx_array_(item|data)_b?float16")
        .opaque_type("FILE|_IO_FILE|__sFILE")
        .prepend_enum_name(false)
        .derive_copy(true)
        .derive_debug(true)
        .layout_tests(false)
        .generate_comments(false)
        .generate()
        .map_err(|e| format!("bindgen on {}: {e}", header.display()))?;
    let file = folder.join(FILE);
    bindings
        .write_to_file(&file)
        .map_err(|e| format!("writing {}: {e}", file.display()))
}
