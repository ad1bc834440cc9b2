//! Texts as token ids and back: `cargo run -p mlex-models --example tokens [FOLDER]`, with a JSON
//! array of texts on stdin.
//!
//! FOLDER has a tokenizer.json; without one it is that of a small checkpoint of the tests, and the
//! text is its own. Prints a JSON array of `{"ids": .., "text": ..}`.
#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::path::PathBuf;

use mlex_models::text::Tokenizer;
use serde_json::json;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args_os().nth(1).map(PathBuf::from);
    let texts: Vec<String> = match &folder {
        Some(_) => serde_json::from_reader(std::io::stdin())?,
        None => vec!["t5 t6 t7".to_owned()],
    };
    let small = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/media-qwen3_5");
    let tokenizer = Tokenizer::from_dir(folder.unwrap_or_else(|| PathBuf::from(small)))?;
    let rows = texts.iter().map(|text| {
        let ids = tokenizer.encode(text, true)?;
        let text = tokenizer.decode(&ids, false)?;
        Ok(json!({"ids": ids, "text": text}))
    });
    let rows = rows.collect::<mlex_models::Result<Vec<_>>>()?;
    println!("{}", json!(rows));
    Ok(())
}
