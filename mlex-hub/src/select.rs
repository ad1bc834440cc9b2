//! Which files of a repository a model needs.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use crate::api::Files;
use crate::layout::is_safe_path;
use crate::{ErrorKind, Result};

/// What a model directory is described by.
pub(crate) const CONFIG: &str = "config.json";
/// Which shard has which tensor.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// The files of a model.
#[derive(Debug, PartialEq)]
pub(crate) enum Plan {
    /// A model directory.
    Directory {
        /// Config, tokenizer, templates, what belongs to media, and weights beside the model's.
        files: Vec<String>,
        weights: Weights,
    },
    /// The parts of one GGUF file; the first one is what is opened.
    Gguf(Vec<String>),
}

/// Where the weights of a model directory are.
#[derive(Debug, PartialEq)]
pub(crate) enum Weights {
    /// In the shards that [`INDEX`] names.
    Indexed,
    /// In these files.
    Files(Vec<String>),
}

/// What a model needs of `files`: a model directory where there is one and no `choice`, and
/// otherwise the GGUF file that is chosen, or the only one.
///
/// # Errors
/// [`ErrorKind::NoModel`], [`ErrorKind::Choice`].
pub(crate) fn plan(files: &Files, choice: Option<&str>) -> Result<Plan> {
    let names = || files.keys().map(String::as_str);
    if choice.is_none()
        && files.contains_key(CONFIG)
        && let Some(weights) = weights(files)
    {
        let needed = names().filter(|name| is_described(name) || is_sidecar(name));
        let needed = needed.map(str::to_owned).collect();
        return Ok(Plan::Directory {
            files: needed,
            weights,
        });
    }
    let mut models: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in names().filter(|name| is_gguf_model(name)) {
        let whole = without_part(name);
        models.entry(whole).or_default().push(name.to_owned());
    }
    if models.is_empty() {
        return Err(no_model(files));
    }
    let is_chosen = |whole: &str, parts: &[String]| {
        choice.is_none_or(|choice| {
            parts.iter().any(|part| is_file(part, choice)) || has_tag(whole, choice)
        })
    };
    let mut chosen = models
        .iter()
        .filter(|(whole, parts)| is_chosen(whole, parts))
        .map(|(_, parts)| parts);
    match (chosen.next(), chosen.next()) {
        (Some(parts), None) => Ok(Plan::Gguf(parts.clone())),
        _ => Err(ErrorKind::Choice {
            chosen: choice.map(str::to_owned),
            files: models.into_values().flatten().collect(),
        }
        .into()),
    }
}

/// The error of a repository without a model.
fn no_model(files: &Files) -> crate::Error {
    let found = files.keys().cloned().collect();
    ErrorKind::NoModel { found }.into()
}

/// The shards that an index names; all are among `files`.
///
/// # Errors
/// [`ErrorKind::Index`].
pub(crate) fn shards(index: &[u8], files: &Files) -> Result<Vec<String>> {
    let shards = named_shards(index)?;
    match shards.iter().find(|shard| !files.contains_key(*shard)) {
        Some(shard) => Err(wrong_index("files of the repository", format!("{shard:?}"))),
        None => Ok(shards),
    }
}

/// The shards that an index names, whether or not there are such files.
///
/// # Errors
/// [`ErrorKind::Index`].
pub(crate) fn named_shards(index: &[u8]) -> Result<Vec<String>> {
    let index: Index = serde_json::from_slice(index)
        .map_err(|error| wrong_index("JSON with a weight_map", error.to_string()))?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    if shards.is_empty() {
        return Err(wrong_index("at least one tensor", "none".to_owned()));
    }
    let is_elsewhere = |shard: &&String| !is_safe_path(shard) || shard.contains('/');
    if let Some(shard) = shards.iter().find(is_elsewhere) {
        let expected = "names of files without a folder";
        return Err(wrong_index(expected, format!("{shard:?}")));
    }
    Ok(shards.into_iter().collect())
}

fn wrong_index(expected: &'static str, found: String) -> crate::Error {
    let file = INDEX.to_owned();
    let kind = ErrorKind::Index {
        file,
        expected,
        found,
    };
    kind.into()
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// The weights of a model directory, where they are looked for when it is loaded.
fn weights(files: &Files) -> Option<Weights> {
    if files.contains_key(INDEX) {
        return Some(Weights::Indexed);
    }
    if files.contains_key(SINGLE) {
        return Some(Weights::Files(vec![SINGLE.to_owned()]));
    }
    let is_model = |name: &&String| {
        name.starts_with("model") && name.ends_with(".safetensors") && !name.contains('/')
    };
    let found: Vec<String> = files.keys().filter(is_model).cloned().collect();
    Some(found)
        .filter(|found| !found.is_empty())
        .map(Weights::Files)
}

/// Configs, tokenizers, templates, processors.
fn is_described(path: &str) -> bool {
    match path.rsplit_once('/') {
        None => {
            path.ends_with(".json")
                || path.ends_with(".jinja")
                || path.ends_with(".model")
                || path.ends_with(".tiktoken")
                || matches!(path, "merges.txt" | "vocab.txt")
        }
        Some(("additional_chat_templates", name)) => name.ends_with(".jinja"),
        Some(("optiq", name)) => name.ends_with(".json"),
        Some(_) => false,
    }
}

/// Weights beside the model's own: media towers and prediction heads, as mlx-optiq ships them.
fn is_sidecar(path: &str) -> bool {
    let Some(path) = path.strip_suffix(".safetensors") else {
        return false;
    };
    match path.rsplit_once('/') {
        None => path.starts_with("optiq") || path.starts_with("mtp") || path == "model-mtp",
        Some((folder, _)) => matches!(folder, "optiq" | "mtp"),
    }
}

/// A GGUF file with a language model, not with what an image or a quantizer needs beside it.
fn is_gguf_model(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path).to_ascii_lowercase();
    name.ends_with(".gguf") && !name.contains("mmproj") && !name.contains("imatrix")
}

/// The name of all parts of a split GGUF file, `x-00001-of-00003.gguf`, without `.gguf`.
fn without_part(path: &str) -> String {
    let stem = &path[..path.len() - ".gguf".len()];
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let whole = stem.rsplit_once("-of-").and_then(|(rest, count)| {
        let (whole, part) = rest.rsplit_once('-')?;
        (is_number(part) && is_number(count)).then_some(whole)
    });
    whole.unwrap_or(stem).to_owned()
}

fn is_file(path: &str, choice: &str) -> bool {
    path == choice || path.rsplit('/').next() == Some(choice)
}

/// Whether the name ends with `tag`, as a word and in any case.
fn has_tag(whole: &str, tag: &str) -> bool {
    let (whole, tag) = (whole.to_ascii_lowercase(), tag.to_ascii_lowercase());
    whole
        .strip_suffix(&tag)
        .is_some_and(|before| before.is_empty() || before.ends_with(['-', '_', '.', '/']))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[&str]) -> Files {
        names.iter().map(|&name| (name.to_owned(), None)).collect()
    }

    fn gguf(names: &[&str], choice: Option<&str>) -> Result<Vec<String>> {
        match plan(&files(names), choice)? {
            Plan::Gguf(parts) => Ok(parts),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn only_what_a_model_needs() {
        let needed = [
            "added_tokens.json",
            "additional_chat_templates/tool_use.jinja",
            "chat_template.jinja",
            CONFIG,
            "generation_config.json",
            "merges.txt",
            INDEX,
            "mtp/weights.safetensors",
            "optiq/kv_config.json",
            "optiq/optiq_vision.safetensors",
            "preprocessor_config.json",
            "qwen.tiktoken",
            "tokenizer.json",
            "tokenizer.model",
            "tokenizer_config.json",
        ];
        let others = [
            ".gitattributes",
            "LICENSE.txt",
            "README.md",
            "consolidated.safetensors",
            "flax_model.msgpack",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "modeling.py",
            "onnx/config.json",
            "onnx/model.onnx",
            "original/params.json",
            "pytorch_model.bin",
            "x.gguf",
            "x.pt",
        ];
        let plan = plan(&files(&[&needed[..], &others].concat()), None).unwrap();
        let expected = Plan::Directory {
            files: needed.map(str::to_owned).to_vec(),
            weights: Weights::Indexed,
        };
        assert_eq!(plan, expected);
    }

    #[test]
    fn weights_are_those_that_loading_takes() {
        let some = |names: &[&str]| {
            Some(Weights::Files(
                names.iter().map(|&n| n.to_owned()).collect(),
            ))
        };
        let of = |names: &[&str]| weights(&files(names));
        assert_eq!(of(&[INDEX, SINGLE]), Some(Weights::Indexed));
        assert_eq!(of(&[SINGLE, "model-1.safetensors"]), some(&[SINGLE]));
        let two = ["model-1.safetensors", "model-2.safetensors"];
        assert_eq!(of(&two), some(&two));
        assert_eq!(of(&["x.safetensors", "a/model.safetensors"]), None);
    }

    #[test]
    fn no_model() {
        for names in [
            &["README.md", "pytorch_model.bin", CONFIG][..],
            &[SINGLE],
            &["mmproj-F16.gguf"],
            &[],
        ] {
            let error = plan(&files(names), None).unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::NoModel { .. }),
                "{names:?}"
            );
        }
        let error = plan(&files(&[CONFIG, "pytorch_model.bin"]), None).unwrap_err();
        assert_eq!(
            error.to_string(),
            "expected config.json with model.safetensors or its shards, or a .gguf file; \
             found config.json, pytorch_model.bin"
        );
    }

    #[test]
    fn shards_of_an_index() {
        let listed = files(&["a.safetensors", "b.safetensors", "c.safetensors"]);
        let index = br#"{"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}"#;
        assert_eq!(
            shards(index, &listed).unwrap(),
            ["a.safetensors", "b.safetensors"]
        );
        for (index, found) in [
            (
                &br#"{"weight_map": {"x": "d.safetensors"}}"#[..],
                "found \"d.safetensors\"",
            ),
            (
                br#"{"weight_map": {"x": "../a.safetensors"}}"#,
                "\"../a.safetensors\"",
            ),
            (br#"{"weight_map": {}}"#, "at least one tensor, found none"),
            (b"{}", "missing field `weight_map`"),
            (b"<html>", "expected JSON with a weight_map"),
        ] {
            let error = shards(index, &listed).unwrap_err().to_string();
            assert!(error.starts_with(INDEX) && error.contains(found), "{error}");
        }
    }

    #[test]
    fn gguf_choices() {
        let one = ["README.md", "mmproj-x.gguf", "m-Q4_0.gguf"];
        assert_eq!(gguf(&one, None).unwrap(), ["m-Q4_0.gguf"]);
        let many = [
            "m-Q4_K_M.gguf",
            "m-UD-Q4_K_XL.gguf",
            "BF16/m-BF16-00001-of-00002.gguf",
            "BF16/m-BF16-00002-of-00002.gguf",
            CONFIG,
        ];
        let cases: &[(&str, &[&str])] = &[
            ("q4_k_m", &["m-Q4_K_M.gguf"]),
            ("m-Q4_K_M.gguf", &["m-Q4_K_M.gguf"]),
            ("Q4_K_XL", &["m-UD-Q4_K_XL.gguf"]),
            ("bf16", &many[2..4]),
            ("BF16/m-BF16-00002-of-00002.gguf", &many[2..4]),
        ];
        for (choice, expected) in cases {
            assert_eq!(gguf(&many, Some(choice)).unwrap(), *expected, "{choice}");
        }
        for choice in [None, Some("Q4_K"), Some("Q8_0")] {
            let error = gguf(&many, choice).unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::Choice { .. }),
                "{choice:?}"
            );
        }
        let error = gguf(&["m-Q4_0.gguf", "n-Q4_0.gguf"], Some("Q4_0")).unwrap_err();
        assert_eq!(
            error.to_string(),
            "\"Q4_0\" is not one GGUF file; the repository has m-Q4_0.gguf, n-Q4_0.gguf"
        );
    }
}
