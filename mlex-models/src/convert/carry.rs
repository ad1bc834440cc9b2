//! What else belongs to a model directory: tokenizer, template, generation config, licence.

use std::fs;
use std::path::{Path, PathBuf};

use crate::{Result, ResultExt};

/// Folders that belong to a tokenizer.
const FOLDERS: [&str; 1] = ["additional_chat_templates"];

/// How the names of files end that are carried along, as mlx-lm fetches them.
const ENDS: [&str; 8] = [
    ".json",
    ".jsonl",
    ".jinja",
    ".model",
    ".py",
    ".tiktoken",
    ".txt",
    ".spm",
];

/// Names of files that are written anew, or that the conversion makes untrue.
const REPLACED: [&str; 4] = [
    "config.json",
    "quantize_config.json",
    "hf_quant_config.json",
    "optiq_metadata.json",
];

/// Copies what a model directory has beside its weights and config.
///
/// # Errors
/// When a file cannot be read or written.
pub(super) fn carry(from: &Path, to: &Path) -> Result<()> {
    for path in entries(from)? {
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            continue;
        };
        // The Hub's cache has links, which are followed. A pipe or the like is not opened.
        let metadata = fs::metadata(&path).with_path(&path)?;
        if metadata.is_file() && is_carried(name) {
            fs::copy(&path, to.join(name)).with_path(&path)?;
        } else if metadata.is_dir() && FOLDERS.contains(&name) {
            let folder = to.join(name);
            fs::create_dir(&folder).with_path(&folder)?;
            carry(&path, &folder)?;
        }
    }
    Ok(())
}

fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    let read = || -> std::io::Result<Vec<PathBuf>> {
        fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect()
    };
    read().with_path(dir)
}

fn is_carried(name: &str) -> bool {
    if REPLACED.contains(&name) || name.ends_with(".safetensors.index.json") {
        return false;
    }
    let is_legal = ["LICENSE", "LICENCE", "NOTICE", "COPYING"]
        .iter()
        .any(|start| name.to_ascii_uppercase().starts_with(start));
    is_legal || ENDS.iter().any(|end| name.ends_with(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_carried() {
        for name in [
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "vocab.json",
            "merges.txt",
            "tokenizer.model",
            "chat_template.jinja",
            "generation_config.json",
            "preprocessor_config.json",
            "LICENSE",
            "LICENSE.md",
            "modeling_x.py",
        ] {
            assert!(is_carried(name), "{name}");
        }
        for name in [
            "config.json",
            "README.md",
            "model.safetensors",
            "model.safetensors.index.json",
            "pytorch_model.bin",
            "expected.safetensors",
            ".gitattributes",
        ] {
            assert!(!is_carried(name), "{name}");
        }
    }
}
