//! The files of a model: a directory as the MLX community ships it, or one GGUF file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use mlex_core::io::{Checkpoint, GgufFile, StoredDtype, f8_e5m2_to_f32};
use mlex_core::{Array, Dtype};
use mlex_nn::LazyTensor;

use crate::config::ModelConfig;
use crate::fp8::{self, Scaled, Stored};
use crate::gguf;
use crate::text::{ChatTemplate, GgufVocab, Tokenizer};
use crate::{Error, Result};

/// The tensors of a model by their names in MLX checkpoints.
pub type Tensors = BTreeMap<String, LazyTensor>;

/// A model's files, opened. Each part is read when it is asked for.
#[derive(Debug)]
pub struct ModelFiles {
    path: PathBuf,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Directory,
    Gguf(Rc<GgufFile>),
}

impl ModelFiles {
    /// Opens a model directory or a GGUF file.
    ///
    /// # Errors
    /// When there is nothing at `path`, or a file that is not GGUF.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let metadata =
            std::fs::metadata(path).map_err(|error| Error::from(error).with_path(path))?;
        let kind = if metadata.is_dir() {
            Kind::Directory
        } else {
            Kind::Gguf(Rc::new(GgufFile::open(path)?))
        };
        Ok(Self {
            path: path.to_path_buf(),
            kind,
        })
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names the file that an error of building the model is about, unless it names one:
    /// config.json for a setting of it.
    pub fn locate(&self, error: Error) -> Error {
        if !self.is_gguf() && error.is_about_config() {
            error.with_path(self.path.join("config.json"))
        } else {
            error.with_path(&self.path)
        }
    }

    /// Whether it is a GGUF file.
    pub fn is_gguf(&self) -> bool {
        matches!(self.kind, Kind::Gguf(_))
    }

    /// The configuration; one that says the same, for a GGUF file.
    ///
    /// # Errors
    /// When a file is missing or does not say what it must.
    pub fn config(&self) -> Result<ModelConfig> {
        match &self.kind {
            Kind::Directory => ModelConfig::open(&self.path),
            Kind::Gguf(file) => gguf::config(file).map_err(|error| error.with_path(&self.path)),
        }
    }

    /// The tensors, none of them read yet. Weights of 8-bit floats come as what they and their
    /// scales stand for.
    ///
    /// # Errors
    /// When a file is missing or its header is wrong.
    pub fn tensors(&self) -> Result<Tensors> {
        match &self.kind {
            Kind::Directory => {
                let block = self.config()?.fp8_block();
                checkpoint_tensors(&self.path, block.map_err(|error| self.locate(error))?)
            }
            Kind::Gguf(file) => gguf::tensors(file).map_err(|error| error.with_path(&self.path)),
        }
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// When there is none or it is broken.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        match &self.kind {
            Kind::Directory => Tokenizer::from_dir(&self.path),
            Kind::Gguf(file) => {
                let vocab = GgufVocab::from_metadata(file.metadata());
                vocab
                    .and_then(|vocab| Tokenizer::from_gguf_vocab(&vocab))
                    .map_err(|error| error.with_path(&self.path))
            }
        }
    }

    /// The licence that a GGUF file names.
    ///
    /// # Errors
    /// When it is no text.
    pub(crate) fn gguf_licence(&self) -> Result<Option<String>> {
        match &self.kind {
            Kind::Directory => Ok(None),
            Kind::Gguf(file) => {
                let licence: Option<&str> = file.get("general.license")?;
                Ok(licence.map(str::to_owned))
            }
        }
    }

    /// The chat template, where the model has one.
    ///
    /// # Errors
    /// When it does not parse.
    pub fn chat_template(&self) -> Result<Option<ChatTemplate>> {
        match &self.kind {
            Kind::Directory => ChatTemplate::from_dir(&self.path),
            Kind::Gguf(file) => ChatTemplate::from_gguf_metadata(file.metadata())
                .map_err(|error| error.with_path(&self.path)),
        }
    }
}

/// The bytes that the tensors take when they are loaded.
pub fn total_bytes(tensors: &Tensors) -> u64 {
    tensors
        .values()
        .map(|tensor| {
            let count = tensor.shape.iter().map(|&dim| dim as u64).product::<u64>();
            count * tensor.dtype.size_in_bytes() as u64
        })
        .sum()
}

fn checkpoint_tensors(dir: &Path, fp8_block: [usize; 2]) -> Result<Tensors> {
    let checkpoint = Rc::new(Checkpoint::open(dir)?);
    let scaled = Scaled::find(&checkpoint);
    let names: Vec<String> = checkpoint
        .names()
        .filter(|name| !scaled.is_consumed(name))
        .map(str::to_owned)
        .collect();
    let tensor = |name: String| {
        // `names` are the checkpoint's own, so the info is there.
        let info = checkpoint
            .info(&name)
            .ok_or_else(|| Error::missing(format!("{name:?}")))?;
        let shape = dims(&name, &info.shape)?;
        let dtype = match info.dtype {
            StoredDtype::F8E4M3 | StoredDtype::F8E5M2 => Dtype::Bfloat16,
            other => other.dtype(),
        };
        let checkpoint = Rc::clone(&checkpoint);
        let scales = scaled.scales(&name).map(str::to_owned);
        if let Some(scales) = &scales {
            check_scaled(&checkpoint, &name, scales, fp8_block)?;
        }
        let source = name.clone();
        let load = move || match scales {
            Some(scales) => read_scaled(&checkpoint, &source, &scales, fp8_block),
            None => read(&checkpoint, &source),
        };
        Ok((
            name,
            LazyTensor {
                shape,
                dtype,
                load: Box::new(load),
            },
        ))
    };
    names.into_iter().map(tensor).collect()
}

/// The tensor as an array.
fn read(checkpoint: &Checkpoint, name: &str) -> mlex_core::Result<Array> {
    let array = array(stored(checkpoint, name)?);
    checkpoint.release(name);
    array.map_err(|error| error.with_path(file_of(checkpoint, name)))
}

/// Checks what [`read_scaled`] needs, from the headers alone.
fn check_scaled(
    checkpoint: &Checkpoint,
    name: &str,
    scales: &str,
    block: [usize; 2],
) -> mlex_core::Result<()> {
    let (weight, info) = (
        stored(checkpoint, name)?.info,
        stored(checkpoint, scales)?.info,
    );
    let checked = fp8::check(weight, info, block);
    checked.map_err(|error| {
        error
            .with_tensor(scales)
            .with_path(file_of(checkpoint, scales))
    })
}

/// The weight that 8-bit floats and their scales stand for.
fn read_scaled(
    checkpoint: &Checkpoint,
    name: &str,
    scales: &str,
    block: [usize; 2],
) -> mlex_core::Result<Array> {
    let weight = stored(checkpoint, name)?;
    let array = fp8::dequantize(weight, stored(checkpoint, scales)?, block);
    checkpoint.release(name);
    checkpoint.release(scales);
    array.map_err(|error| {
        error
            .with_tensor(scales)
            .with_path(file_of(checkpoint, scales))
    })
}

fn stored<'a>(checkpoint: &'a Checkpoint, name: &str) -> mlex_core::Result<Stored<'a>> {
    let bytes = checkpoint.bytes(name)?;
    let info = checkpoint.info(name).ok_or_else(|| {
        mlex_core::Error::new(mlex_core::ErrorKind::MissingTensor).with_tensor(name)
    })?;
    Ok(Stored { info, bytes })
}

fn file_of<'a>(checkpoint: &'a Checkpoint, name: &str) -> &'a Path {
    checkpoint
        .file(name)
        .map_or(checkpoint.path(), |file| file.path())
}

/// The array of a tensor's bytes; 8-bit floats become bfloat16, which holds them exactly.
fn array(Stored { info, bytes }: Stored<'_>) -> mlex_core::Result<Array> {
    // The shape was checked when the header was read.
    let shape: Vec<i32> = info.shape.iter().map(|&dim| dim as i32).collect();
    match info.dtype {
        StoredDtype::F8E4M3 => {
            Array::from_bytes(bytes, &shape, Dtype::Uint8)?.from_fp8(Dtype::Bfloat16)
        }
        StoredDtype::F8E5M2 => {
            let values: Vec<_> = bytes
                .iter()
                .map(|&byte| half::bf16::from_f32(f8_e5m2_to_f32(byte)))
                .collect();
            Array::from_slice(&values, &shape)
        }
        stored => Array::from_bytes(bytes, &shape, stored.dtype()),
    }
}

/// A shape as MLX takes it.
pub(crate) fn dims(name: &str, shape: &[usize]) -> Result<Vec<i32>> {
    let dim = |&dim: &usize| {
        i32::try_from(dim).map_err(|_| {
            Error::field(
                format!("shape of {name:?}"),
                "sizes below 2^31",
                dim.to_string(),
            )
        })
    };
    shape.iter().map(dim).collect()
}
