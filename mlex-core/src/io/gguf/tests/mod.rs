//! Golden data: tests/data/gguf, made by tools/make_gguf_golden.py with the `gguf` package.

mod hostile;
mod values;

use std::path::PathBuf;

fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/gguf")
        .join(name)
}
