//! Where chat templates are found.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use mlex_core::io::GgufMetadata;
use serde_json::Value;

use super::DEFAULT;
use crate::error::{Error, Result, ResultExt};
use crate::text::files::{describe, read_optional, read_optional_object, write};

const JINJA: &str = "chat_template.jinja";
const MORE: &str = "additional_chat_templates";
/// More templates than any model has.
const MAX_TEMPLATES: usize = 64;

/// Templates as name and source, and the file they came from.
pub(super) struct Found {
    pub(super) path: PathBuf,
    pub(super) templates: Vec<(String, String)>,
}

/// The templates of a model directory.
pub(super) fn from_dir(dir: &Path) -> Result<Option<Found>> {
    let mut templates = Vec::new();
    let path = dir.join(JINJA);
    if let Some(source) = read_optional(&path)? {
        templates.push((DEFAULT.to_owned(), source));
    }
    templates.extend(additional(&dir.join(MORE))?);
    if !templates.is_empty() {
        return Ok(Some(Found { path, templates }));
    }
    for name in ["tokenizer_config.json", "chat_template.json"] {
        let path = dir.join(name);
        let fields = read_optional_object(&path)?;
        if let Some(value) = fields.and_then(|mut fields| fields.remove("chat_template")) {
            let templates = parse(&value).with_path(&path)?;
            if !templates.is_empty() {
                return Ok(Some(Found { path, templates }));
            }
        }
    }
    Ok(None)
}

/// The templates in a folder, by the names of their files.
fn additional(folder: &Path) -> Result<Vec<(String, String)>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            return Ok(Vec::new());
        }
        Err(error) => return Err(error).with_path(folder),
    };
    let mut paths = Vec::new();
    for entry in entries.take(MAX_TEMPLATES) {
        paths.push(entry.with_path(folder)?.path());
    }
    paths.sort();
    let mut templates = Vec::new();
    for path in paths {
        let name = path
            .file_stem()
            .and_then(|name| name.to_str())
            .map(str::to_owned);
        if let Some(name) = name.filter(|_| path.extension().is_some_and(|end| end == "jinja"))
            && let Some(source) = read_optional(&path)?
        {
            templates.push((name, source));
        }
    }
    Ok(templates)
}

/// A `chat_template` field: one template, or a list of objects with `name` and `template`.
fn parse(value: &Value) -> Result<Vec<(String, String)>> {
    let wrong = |found: &Value| {
        let expected = "a string or a list of objects with name and template";
        Error::field("chat_template", expected, describe(found))
    };
    match value {
        Value::Null => Ok(Vec::new()),
        Value::String(source) => Ok(vec![(DEFAULT.to_owned(), source.clone())]),
        Value::Array(entries) => entries
            .iter()
            .map(|entry| match (&entry["name"], &entry["template"]) {
                (Value::String(name), Value::String(source)) => Ok((name.clone(), source.clone())),
                _ => Err(wrong(entry)),
            })
            .collect(),
        other => Err(wrong(other)),
    }
}

/// The templates in the metadata of a GGUF file.
pub(super) fn from_gguf(metadata: &GgufMetadata) -> Result<Vec<(String, String)>> {
    const KEY: &str = "tokenizer.chat_template";
    let mut templates = Vec::new();
    if let Some(source) = metadata.get::<&str>(KEY)? {
        templates.push((DEFAULT.to_owned(), source.to_owned()));
    }
    for (key, _) in metadata.iter() {
        let name = key
            .strip_prefix(KEY)
            .and_then(|rest| rest.strip_prefix('.'));
        if let Some(name) = name
            && let Some(source) = metadata.get::<&str>(key)?
        {
            templates.push((name.to_owned(), source.to_owned()));
        }
    }
    Ok(templates)
}

/// Writes templates where [`from_dir`] finds them.
pub(super) fn save(dir: &Path, templates: &[(String, String)]) -> Result<()> {
    for (name, source) in templates {
        if name == DEFAULT {
            write(&dir.join(JINJA), source)?;
            continue;
        }
        if name.is_empty() || name.contains(['/', '\\', '\0']) || name.starts_with('.') {
            return Err(Error::field(
                "chat_template name",
                "a file name",
                format!("{name:?}"),
            ));
        }
        let folder = dir.join(MORE);
        fs::create_dir_all(&folder).with_path(&folder)?;
        write(&folder.join(format!("{name}.jinja")), source)?;
    }
    Ok(())
}
