//! Reading and writing the small text files of a model directory.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

use serde_json::Value;

use crate::error::{Error, Result, ResultExt};

/// Far above any tokenizer or template, far below what hurts.
const MAX_BYTES: u64 = 1 << 29;

/// The text of a file, or `None` if there is no such file.
pub(super) fn read_optional(path: &Path) -> Result<Option<String>> {
    // Looked at before it is opened: opening a pipe would wait for its writer.
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => {}
        Ok(_) => {
            return Err(Error::field("the file", "a regular file", "another kind")).with_path(path);
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_path(path),
    }
    let mut text = String::new();
    let file = File::open(path).with_path(path)?;
    file.take(MAX_BYTES + 1)
        .read_to_string(&mut text)
        .with_path(path)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(Error::field("size", "at most 512 MiB", "more")).with_path(path);
    }
    Ok(Some(text))
}

/// The object in a JSON file, or `None` if there is no such file.
pub(super) fn read_optional_object(path: &Path) -> Result<Option<serde_json::Map<String, Value>>> {
    let Some(text) = read_optional(path)? else {
        return Ok(None);
    };
    match serde_json::from_str(&text).with_path(path)? {
        Value::Object(object) => Ok(Some(object)),
        other => Err(Error::field("the file", "an object", describe(&other))).with_path(path),
    }
}

/// A short description of a JSON value for an error message.
pub(super) fn describe(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("a list of {}", items.len()),
        Value::Object(_) => "an object".to_owned(),
        Value::String(text) if text.chars().count() > 40 => {
            format!("{:?}...", text.chars().take(40).collect::<String>())
        }
        other => other.to_string(),
    }
}

/// Writes a file as a whole: beside it first, then in its place.
pub(super) fn write(path: &Path, text: &str) -> Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}.tmp", std::process::id()));
    let beside = Path::new(&beside);
    let written = File::create(beside)
        .and_then(|mut file| {
            file.write_all(text.as_bytes())
                .and_then(|()| file.sync_all())
        })
        .and_then(|()| fs::rename(beside, path));
    if written.is_err() {
        // What failed is told; a leftover that cannot be removed adds nothing to it.
        let _ = fs::remove_file(beside);
    }
    written.with_path(path)
}

/// A JSON document as the Hugging Face libraries write it: two spaces, a line break at the end.
pub(super) fn write_json(path: &Path, value: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(value).with_path(path)?;
    write(path, &(text + "\n"))
}
