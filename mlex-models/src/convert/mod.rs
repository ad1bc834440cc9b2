//! From a model of any kind that is read to a directory that mlex and mlx-lm load: cast,
//! quantized, dequantized, or as it is.

mod card;
mod carry;
mod choose;
mod config;
mod job;
mod partial;
mod plan;
mod recipe;
mod write;

use std::fs;
use std::path::Path;

use mlex_core::{Device, Dtype, Stream};
use mlex_nn::QuantizationConfig;
use serde_json::{Map, Value};

use crate::files::ModelFiles;
use crate::load::{LoadProgress, Outline, check_dtype, outline};
use crate::towers::media_kinds;
use crate::{Error, Result, ResultExt};
use card::{Card, FrontMatter};
use partial::Partial;

pub use recipe::{LayoutSettings, Quantize, Recipe};

/// The most bytes of tensors in one file, as the Hub has it.
const SHARD_BYTES: u64 = 5_000_000_000;

/// How a model is converted.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct ConvertOptions {
    /// Floating-point tensors become this; otherwise they stay as the file has them.
    pub dtype: Option<Dtype>,
    /// Layers that are dense are quantized so.
    pub quantize: Option<Quantize>,
    /// Layers that are quantized become dense; with `quantize`, before they are quantized anew.
    pub dequantize: bool,
    /// The Hub's name of the source, for the model card.
    pub base_model: Option<String>,
    /// The most bytes of tensors in one file; 5 GB without it.
    pub shard_bytes: Option<u64>,
}

impl ConvertOptions {
    /// Sets what floating-point tensors become.
    #[must_use]
    pub fn with_dtype(mut self, dtype: Option<Dtype>) -> Self {
        self.dtype = dtype;
        self
    }

    /// Sets how dense layers are quantized.
    #[must_use]
    pub fn with_quantize(mut self, quantize: Option<Quantize>) -> Self {
        self.quantize = quantize;
        self
    }

    /// Sets whether quantized layers become dense.
    #[must_use]
    pub fn with_dequantize(mut self, dequantize: bool) -> Self {
        self.dequantize = dequantize;
        self
    }

    /// Sets the Hub's name of the source.
    #[must_use]
    pub fn with_base_model(mut self, base_model: Option<String>) -> Self {
        self.base_model = base_model;
        self
    }

    /// Sets the most bytes of tensors in one file.
    #[must_use]
    pub fn with_shard_bytes(mut self, shard_bytes: Option<u64>) -> Self {
        self.shard_bytes = shard_bytes;
        self
    }
}

/// What a conversion has made.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Converted {
    /// Weights, each counted once however it is packed.
    pub parameters: u64,
    /// Bytes of the tensors.
    pub bytes: u64,
    /// How many files they are in.
    pub files: usize,
    /// Tensors of the source that the model does not use, and which were left out.
    pub left_out: Vec<String>,
}

impl Converted {
    /// The bits that a weight takes, scales and biases included.
    pub fn bits_per_weight(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.parameters.max(1) as f64
    }
}

/// Converts a model directory or a GGUF file to a directory that mlex and mlx-lm load.
///
/// Tensors come under the names that the architecture has for them, those that it does not use
/// are left out. Each is read, changed and written by itself, on the CPU. Blocks of GGUF files
/// that MLX has a layout for keep their exact values; others become f32. Quantized weights have the
/// bits that `mx.quantize` gives on a CPU, and so mlx-lm. Dequantized weights are computed in f32
/// and rounded once.
///
/// The directory appears when all of it is written. `on_progress` is called while tensors are
/// written; returning `false` from it ends the conversion and leaves nothing behind.
///
/// # Errors
/// When it was cancelled, the source is no model of a known architecture, the options do not fit
/// it, `out` exists already, or writing fails.
pub fn convert(
    files: &ModelFiles,
    out: &Path,
    options: &ConvertOptions,
    mut on_progress: impl FnMut(LoadProgress) -> bool,
) -> Result<Converted> {
    // Where the bits are those of mlx-lm, and no memory of a GPU is taken.
    let cpu = Stream::default_of(Device::Cpu)?;
    cpu.scope(|| run(files, out, options, &mut on_progress))
}

fn run(
    files: &ModelFiles,
    out: &Path,
    options: &ConvertOptions,
    on_progress: &mut dyn FnMut(LoadProgress) -> bool,
) -> Result<Converted> {
    if out.exists() {
        let error = Error::field("output directory", "one that does not exist", "it exists");
        return Err(error.with_path(out));
    }
    check_dtype(options.dtype)?;
    let Outline {
        config,
        model,
        taken,
    } = outline(files)?;
    let quantization = config.quantization().map_err(|error| files.locate(error))?;
    let left_out = taken.discarded.clone();
    let has_towers = !media_kinds(files)?.is_empty();
    let plan = plan::plan(taken, model.info(), quantization.default, options)?;

    let partial = Partial::create(out)?;
    let dir = partial.path();
    let front_matter = carry_along(files, dir)?;
    let parameters = plan.parameters;
    let shard_bytes = options.shard_bytes.unwrap_or(SHARD_BYTES);
    let written = write::write_units(dir, plan.units, parameters, shard_bytes, on_progress)?;
    let converted = Converted {
        parameters,
        bytes: written.bytes,
        files: written.files,
        left_out,
    };
    let name = out.file_name().unwrap_or_default().to_string_lossy();
    let card = Card {
        name: &name,
        base_model: options.base_model.as_deref(),
        stored: &stored_as(&converted, plan.quantization.as_ref(), options.dtype),
        quantized: plan.quantization.is_some(),
    };
    let path = dir.join("README.md");
    fs::write(&path, card.text(&front_matter)).with_path(&path)?;
    // Last, so that what a killed conversion leaves is no model under any name.
    let json = config::converted(
        config.json(),
        plan.quantization.as_ref(),
        options.dtype,
        has_towers,
    );
    write_json(&dir.join("config.json"), &json)?;
    partial.publish(out)?;
    Ok(converted)
}

/// Writes what belongs to the model beside its weights; returns what the source's card says.
fn carry_along(files: &ModelFiles, dir: &Path) -> Result<FrontMatter> {
    if !files.is_gguf() {
        carry::carry(files.path(), dir)?;
        return Ok(FrontMatter::of_dir(files.path()));
    }
    files.tokenizer()?.save(dir)?;
    if let Some(chat_template) = files.chat_template()? {
        chat_template.save(dir)?;
    }
    Ok(FrontMatter::of_licence(files.gguf_licence()?.as_deref()))
}

/// How the weights are stored, in words.
fn stored_as(
    converted: &Converted,
    quantization: Option<&QuantizationConfig>,
    dtype: Option<Dtype>,
) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(QuantizationConfig {
        default: Some(default),
        layers,
    }) = quantization
    {
        lines.push(default.to_string());
        let mut others: Vec<(String, usize)> = Vec::new();
        for layout in layers.values().flatten() {
            let layout = layout.to_string();
            match others.iter_mut().find(|(known, _)| *known == layout) {
                Some((_, count)) => *count += 1,
                None => others.push((layout, 1)),
            }
        }
        let other = |(layout, count)| format!("{layout}, in {count} layers");
        lines.extend(others.into_iter().map(other));
    }
    if let Some(dtype) = dtype {
        lines.push(format!("floating-point tensors in {dtype}"));
    }
    lines.push(format!(
        "{:.3} bits per weight",
        converted.bits_per_weight()
    ));
    lines
}

fn write_json(path: &Path, object: &Map<String, Value>) -> Result<()> {
    let mut text = serde_json::to_string_pretty(object)?;
    text.push('\n');
    fs::write(path, text).with_path(path)
}
