//! What there is to say of a model, from the headers of its files.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use indicatif::HumanCount;
use mlex_core::io::{Checkpoint, GgufFile};
use mlex_core::{Array, Dtype};
use mlex_models::towers::media_kinds;
use mlex_models::{Input, Model, ModelFiles, ModelInfo, Outline, outline, total_bytes};
use serde_json::{Value, json};

use super::abilities::Abilities;
use super::modules::{Group, Layout, groups};
use crate::output::size;

/// The context that the cache is estimated for where nothing says another one, and the most of
/// what a config says: nobody needs the memory of a million tokens to begin with.
const DEFAULT_CONTEXT: u32 = 32_768;

pub(super) struct Report {
    info: ModelInfo,
    groups: Vec<Group>,
    /// Bytes of the files with tensors.
    file_bytes: u64,
    /// Bytes of the tensors when loaded.
    weight_bytes: u64,
    cache: CacheSize,
    /// What reads text: the kind and the number of tokens.
    tokenizer: Option<(String, usize)>,
    abilities: Abilities,
    /// What it takes.
    inputs: Vec<String>,
}

struct CacheSize {
    context: u32,
    dtype: Dtype,
    bytes: u64,
}

impl Report {
    /// Looks at `files`.
    ///
    /// # Errors
    /// When they do not make a model.
    pub(super) fn of(files: &ModelFiles, context: Option<u32>) -> Result<Self> {
        let Outline { model, taken, .. } = outline(files)?;
        let info = model.info().clone();
        let longest = info
            .max_context
            .and_then(|longest| u32::try_from(longest).ok());
        let context =
            context.unwrap_or_else(|| longest.map_or(DEFAULT_CONTEXT, |n| n.min(DEFAULT_CONTEXT)));
        let kinds = media_kinds(files)?;
        let kinds = kinds.iter().map(ToString::to_string);
        Ok(Self {
            inputs: std::iter::once("text".to_owned()).chain(kinds).collect(),
            cache: cache_size(&*model, context)?,
            groups: groups(&taken),
            file_bytes: file_bytes(files)?,
            weight_bytes: total_bytes(&taken.tensors),
            tokenizer: tokenizer(files)?,
            abilities: Abilities::of(files.chat_template()?.as_ref()),
            info,
        })
    }

    fn parameters(&self) -> u64 {
        self.groups.iter().map(|group| group.parameters).sum()
    }

    /// Of the tensors as loaded, which is what a token has to read.
    fn bits_per_weight(&self) -> f64 {
        self.weight_bytes as f64 * 8.0 / self.parameters().max(1) as f64
    }

    /// The groups summed up by layout, the largest first.
    fn layouts(&self) -> Vec<Group> {
        let mut layouts: Vec<Group> = Vec::new();
        for group in &self.groups {
            match layouts
                .iter_mut()
                .find(|known| known.layout == group.layout)
            {
                Some(known) => {
                    known.count += group.count;
                    known.parameters += group.parameters;
                    known.bytes += group.bytes;
                }
                None => layouts.push(group.clone()),
            }
        }
        layouts.sort_by_key(|group| std::cmp::Reverse(group.bytes));
        layouts
    }

    pub(super) fn json(&self) -> Value {
        let Self { info, cache, .. } = self;
        let layers = self.groups.iter().map(|group| {
            let mut row = json!({"path": group.kind});
            row.as_object_mut()
                .into_iter()
                .for_each(|row| row.extend(layout_fields(group)));
            row
        });
        let layouts = self.layouts();
        json!({
            "model_type": info.model_type,
            "parameters": self.parameters(),
            "layers": info.num_layers,
            "hidden_size": info.hidden_size,
            "vocab_size": info.vocab_size,
            "max_context": info.max_context,
            "inputs": self.inputs,
            "abilities": self.abilities.names(),
            "file_bytes": self.file_bytes,
            "weight_bytes": self.weight_bytes,
            "bits_per_weight": self.bits_per_weight(),
            "layouts": layouts.iter().map(|group| Value::Object(layout_fields(group))).collect::<Value>(),
            "quantization": layers.collect::<Value>(),
            "memory": {
                "weight_bytes": self.weight_bytes,
                "context": cache.context,
                "cache_dtype": cache.dtype.name(),
                "cache_bytes": cache.bytes,
                "total_bytes": self.weight_bytes + cache.bytes,
            },
            "tokenizer": self.tokenizer.as_ref().map(|(kind, size)| {
                json!({"kind": kind, "vocab_size": size})
            }),
            "chat_template": self.abilities.chat,
        })
    }

    pub(super) fn text(&self) -> String {
        let Self { info, cache, .. } = self;
        let count = |n: u64| HumanCount(n).to_string();
        let context = info
            .max_context
            .map_or("unknown".to_owned(), |n| count(n.unsigned_abs().into()));
        let tokenizer = self
            .tokenizer
            .as_ref()
            .map_or("none".to_owned(), |(kind, size)| {
                format!("{kind}, {} tokens", count(*size as u64))
            });
        let abilities = match self.abilities.names() {
            names if names.is_empty() => "none: no chat template".to_owned(),
            names => names.join(", "),
        };
        let rows = [
            ("architecture", info.model_type.clone()),
            ("parameters", count(self.parameters())),
            (
                "layers",
                format!("{} of width {}", info.num_layers, info.hidden_size),
            ),
            ("vocabulary", count(info.vocab_size.unsigned_abs().into())),
            ("longest context", context),
            ("takes", self.inputs.join(", ")),
            ("tokenizer", tokenizer),
            ("abilities", abilities),
            ("files", size(self.file_bytes)),
            ("memory, weights", size(self.weight_bytes)),
            (
                "memory, cache",
                format!(
                    "{} for {} tokens in {}",
                    size(cache.bytes),
                    count(cache.context.into()),
                    cache.dtype
                ),
            ),
            ("memory, both", size(self.weight_bytes + cache.bytes)),
            ("bits per weight", format!("{:.3}", self.bits_per_weight())),
        ];
        let mut out = String::new();
        // Writing to a String does not fail.
        for (name, value) in rows {
            let _ = writeln!(out, "{name:<16} {value}");
        }
        let width = self
            .groups
            .iter()
            .map(|group| group.kind.len())
            .max()
            .unwrap_or_default();
        let _ = writeln!(
            out,
            "\n{:<width$}  {:>5}  {:>10}  stored as",
            "layers", "count", "size"
        );
        for group in &self.groups {
            let Group {
                kind,
                layout,
                count,
                bytes,
                ..
            } = group;
            let bytes = size(*bytes);
            let _ = writeln!(out, "{kind:<width$}  {count:>5}  {bytes:>10}  {layout}");
        }
        out
    }
}

/// A layout with its counts, as JSON fields.
fn layout_fields(group: &Group) -> serde_json::Map<String, Value> {
    let (mode, bits, group_size) = match group.layout {
        Layout::Dense(_) => (None, None, None),
        Layout::Quantized(layout) => (
            Some(layout.mode.name()),
            Some(layout.bits),
            Some(layout.group_size),
        ),
    };
    let dtype = match group.layout {
        Layout::Dense(dtype) => Some(dtype.name()),
        Layout::Quantized(_) => None,
    };
    [
        ("dtype", json!(dtype)),
        ("mode", json!(mode)),
        ("bits", json!(bits)),
        ("group_size", json!(group_size)),
        ("count", json!(group.count)),
        ("parameters", json!(group.parameters)),
        ("bytes", json!(group.bytes)),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into_iter()
    .collect()
}

/// What the cache takes for `context` tokens: as much of them as each layer keeps.
fn cache_size(model: &dyn Model, context: u32) -> Result<CacheSize> {
    // The state of a token that is never computed: its size and dtype are known without.
    let mut cache = model.new_cache()?;
    let token = Array::zeros(&[1, 1], Dtype::Int32)?;
    model.forward(Input::Tokens(&token), &mut cache)?;
    let first = || cache.arrays().next().map(Array::dtype);
    Ok(CacheSize {
        context,
        dtype: cache.dtype().or_else(first).unwrap_or(Dtype::Float32),
        bytes: cache.estimate(context.into()),
    })
}

/// The bytes of the files that hold tensors.
fn file_bytes(files: &ModelFiles) -> Result<u64> {
    let path = files.path();
    let measure = |path: &Path| {
        fs::metadata(path)
            .map(|file| file.len())
            .with_context(|| path.display().to_string())
    };
    if files.is_gguf() {
        return measure(path);
    }
    Checkpoint::open(path)?
        .files()
        .iter()
        .map(|file| measure(file.path()))
        .sum()
}

/// The tokenizer's kind and size, where there is one.
fn tokenizer(files: &ModelFiles) -> Result<Option<(String, usize)>> {
    let path = files.path();
    let kind = if files.is_gguf() {
        let file = GgufFile::open(path)?;
        match file.get::<&str>("tokenizer.ggml.model")? {
            Some(model) => format!("{model} of the GGUF file"),
            None => return Ok(None),
        }
    } else if path.join("tokenizer.json").exists() {
        "tokenizer.json".to_owned()
    } else {
        return Ok(None);
    };
    Ok(Some((kind, files.tokenizer()?.vocab_size())))
}
