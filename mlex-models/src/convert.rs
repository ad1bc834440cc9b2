//! From a GGUF file to an MLX directory.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use mlex_core::Dtype;
use mlex_core::io::{StoredDtype, TensorSpec, write_safetensors};
use serde_json::{Map, Value, json};

use crate::files::{ModelFiles, Tensors, total_bytes};
use crate::load::{LoadProgress, check_dtype};
use crate::{Error, ErrorKind, Result, ResultExt};

/// The most bytes of tensors in one file, as the Hub has it.
const SHARD_BYTES: u64 = 5_000_000_000;

/// How a model is converted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConvertOptions {
    /// Floating-point tensors become this; otherwise they stay as the file has them.
    pub dtype: Option<Dtype>,
}

impl ConvertOptions {
    /// Sets what floating-point tensors become.
    #[must_use]
    pub fn with_dtype(mut self, dtype: Option<Dtype>) -> Self {
        self.dtype = dtype;
        self
    }
}

/// Converts a GGUF file to a directory that mlex and mlx-lm load, tensor by tensor.
///
/// Blocks that MLX has a layout for keep their exact values; other quantized tensors become
/// f32. The directory appears when all of it is written. `on_progress` is called after every
/// tensor; returning `false` from it ends the conversion and leaves nothing behind.
///
/// # Errors
/// When it was cancelled, the file is not a GGUF of a known architecture, `out` exists already,
/// or writing fails.
pub fn convert(
    files: &ModelFiles,
    out: &Path,
    options: ConvertOptions,
    mut on_progress: impl FnMut(LoadProgress) -> bool,
) -> Result<()> {
    if !files.is_gguf() {
        let error = Error::unsupported("convert", "a model directory as the source");
        return Err(error.with_path(files.path()));
    }
    if out.exists() {
        let error = Error::field("output directory", "one that does not exist", "it exists");
        return Err(error.with_path(out));
    }
    check_dtype(options.dtype)?;
    let config = files.config()?;
    let tensors = files.tensors()?;
    let tokenizer = files.tokenizer()?;
    let chat_template = files.chat_template()?;

    let partial = Partial::create(out)?;
    let dir = &partial.path;
    write_json(&dir.join("config.json"), config.json())?;
    tokenizer.save(dir)?;
    if let Some(chat_template) = chat_template {
        chat_template.save(dir)?;
    }
    write_tensors(dir, tensors, options.dtype, &mut on_progress)?;
    partial.publish(out)
}

/// A directory beside the one that is wanted, removed unless it is published.
struct Partial {
    path: PathBuf,
}

impl Partial {
    fn create(out: &Path) -> Result<Self> {
        let mut name = out
            .file_name()
            .ok_or_else(|| Error::field("output directory", "a name", out.display().to_string()))?
            .to_owned();
        name.push(format!(".partial-{}", std::process::id()));
        let path = out.with_file_name(name);
        fs::create_dir_all(&path).with_path(&path)?;
        Ok(Self { path })
    }

    fn publish(self, out: &Path) -> Result<()> {
        fs::rename(&self.path, out).with_path(out)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After `publish` there is nothing under this name.
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn write_json(path: &Path, object: &Map<String, Value>) -> Result<()> {
    let mut text = serde_json::to_string_pretty(object)?;
    text.push('\n');
    fs::write(path, text).with_path(path)
}

/// Writes the tensors into as many files as they need, with an index for several.
fn write_tensors(
    dir: &Path,
    tensors: Tensors,
    dtype: Option<Dtype>,
    on_progress: &mut dyn FnMut(LoadProgress) -> bool,
) -> Result<()> {
    let total = total_bytes(&tensors);
    let shards = shards(tensors);
    let count = shards.len();
    let mut weight_map = Map::new();
    let mut loaded = 0;
    for (index, shard) in shards.into_iter().enumerate() {
        let name = if count == 1 {
            "model.safetensors".to_owned()
        } else {
            format!("model-{:05}-of-{count:05}.safetensors", index + 1)
        };
        weight_map.extend(shard.keys().map(|tensor| (tensor.clone(), json!(name))));
        write_shard(&dir.join(name), shard, dtype, &mut |bytes| {
            loaded += bytes as u64;
            on_progress(LoadProgress {
                loaded: loaded.min(total),
                total,
            })
        })?;
    }
    if count > 1 {
        let mut index = Map::new();
        index.insert("metadata".to_owned(), json!({"total_size": total}));
        index.insert("weight_map".to_owned(), Value::Object(weight_map));
        write_json(&dir.join("model.safetensors.index.json"), &index)?;
    }
    Ok(())
}

/// The tensors in groups of at most [`SHARD_BYTES`], in the order of their names.
fn shards(tensors: Tensors) -> Vec<Tensors> {
    let mut shards = vec![Tensors::new()];
    let mut bytes = 0;
    for (name, tensor) in tensors {
        let count: u64 = tensor.shape.iter().map(|&dim| dim as u64).product();
        let size = count * tensor.dtype.size_in_bytes() as u64;
        if bytes > 0 && bytes + size > SHARD_BYTES {
            shards.push(Tensors::new());
            bytes = 0;
        }
        bytes += size;
        if let Some(last) = shards.last_mut() {
            last.insert(name, tensor);
        }
    }
    shards
}

fn write_shard(
    path: &Path,
    tensors: Tensors,
    dtype: Option<Dtype>,
    on_written: &mut dyn FnMut(usize) -> bool,
) -> Result<()> {
    let cast = |from: Dtype| dtype.filter(|_| from.is_float()).unwrap_or(from);
    let specs: Vec<TensorSpec> = tensors
        .iter()
        .map(|(name, tensor)| TensorSpec {
            name: name.clone(),
            dtype: stored(cast(tensor.dtype)),
            shape: tensor.shape.iter().map(|&dim| dim as usize).collect(),
        })
        .collect();
    let tensors = RefCell::new(tensors);
    let cancelled = Cell::new(false);
    let metadata = BTreeMap::from([("format".to_owned(), "mlx".to_owned())]);
    let write = |spec: &TensorSpec, sink: &mut mlex_core::io::TensorSink<'_>| {
        // The writer asks once for each spec, and each has its tensor.
        let Some(tensor) = tensors.borrow_mut().remove(&spec.name) else {
            return Err(mlex_core::Error::new(mlex_core::ErrorKind::MissingTensor));
        };
        let wanted = cast(tensor.dtype);
        let mut array = (tensor.load)()?;
        if array.dtype() != wanted {
            array = array.as_type(wanted)?;
        }
        sink.write_all(array.as_bytes()?)?;
        if on_written(array.nbytes()) {
            return Ok(());
        }
        cancelled.set(true);
        Err(std::io::Error::from(std::io::ErrorKind::Interrupted).into())
    };
    let written = write_safetensors(path, specs, &metadata, write);
    if cancelled.get() {
        return Err(Error::new(ErrorKind::Cancelled));
    }
    Ok(written?)
}

fn stored(dtype: Dtype) -> StoredDtype {
    match dtype {
        Dtype::Bool => StoredDtype::Bool,
        Dtype::Uint8 => StoredDtype::U8,
        Dtype::Uint16 => StoredDtype::U16,
        Dtype::Uint32 => StoredDtype::U32,
        Dtype::Uint64 => StoredDtype::U64,
        Dtype::Int8 => StoredDtype::I8,
        Dtype::Int16 => StoredDtype::I16,
        Dtype::Int32 => StoredDtype::I32,
        Dtype::Int64 => StoredDtype::I64,
        Dtype::Float16 => StoredDtype::F16,
        Dtype::Float32 => StoredDtype::F32,
        Dtype::Float64 => StoredDtype::F64,
        Dtype::Bfloat16 => StoredDtype::BF16,
        Dtype::Complex64 => StoredDtype::C64,
    }
}
