//! `mlex convert`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use mlex_core::{Dtype, QuantizationMode};
use mlex_models::{
    ConvertOptions, Converted, ErrorKind, LayoutSettings, ModelFiles, Quantize, Recipe, convert,
};

use crate::args::float_dtype;
use crate::failure::{self, Hinted, INTERRUPTED};
use crate::hub::Source;
use crate::interrupt::cancel_on_interrupt;
use crate::output::{note, print, size};
use crate::progress::ByteBar;

/// Convert a model: cast, quantize, dequantize
///
/// The directory that is made holds config.json, the tokenizer, the chat template, safetensors
/// and a model card, and is read by mlex and mlx-lm alike. Without further flags the weights keep
/// their values: those of a directory as they are, blocks of a GGUF file that MLX has a layout for
/// (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, MXFP4) in that layout, its other blocks as float32.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    source: Source,
    /// The directory to make; it must not exist yet
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Store floating-point tensors, scales among them, as this type [default: as in the source]
    #[arg(long, value_parser = float_dtype, value_name = "DTYPE")]
    dtype: Option<Dtype>,
    /// Make quantized layers dense; with --quantize, before they are quantized anew
    #[arg(short, long)]
    dequantize: bool,
    #[command(flatten)]
    quantize: QuantizeArgs,
}

/// How layers are quantized.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Quantizing")]
struct QuantizeArgs {
    /// Quantize the layers that are dense; the other flags here say so too
    #[arg(short, long)]
    quantize: bool,
    /// Bits per weight: for affine 2, 3, 4, 5, 6 or 8 [default: 4; of mxfp8 8]
    #[arg(long, value_name = "N")]
    bits: Option<i32>,
    /// Weights that share a scale: for affine 32, 64 or 128 [default: 64; of mxfp4 and mxfp8 32,
    /// of nvfp4 16]
    #[arg(long, value_name = "N")]
    group_size: Option<i32>,
    /// What the numbers stand for: affine, mxfp4, mxfp8 or nvfp4 [default: affine]
    #[arg(long, value_parser = mode, value_name = "MODE")]
    mode: Option<QuantizationMode>,
    /// Which layers get other settings: mixed_2_6, mixed_3_4, mixed_3_6 or mixed_4_6 as mlx-lm has
    /// them, or a JSON file of path patterns to settings
    #[arg(long, value_name = "NAME|FILE")]
    recipe: Option<String>,
}

impl QuantizeArgs {
    /// What to do, if anything.
    fn quantize(&self) -> Result<Option<Quantize>> {
        let Self {
            quantize,
            bits,
            group_size,
            mode,
            recipe,
        } = self;
        let settings = LayoutSettings {
            bits: *bits,
            group_size: *group_size,
            mode: *mode,
        };
        if !quantize && settings == LayoutSettings::default() && recipe.is_none() {
            return Ok(None);
        }
        let recipe = recipe.as_deref().map(read_recipe).transpose()?;
        let quantize = Quantize::new(settings, recipe);
        let quantize = quantize.map_err(|error| failure::usage("convert", error))?;
        Ok(Some(quantize))
    }
}

/// A recipe by its name, or that of a file.
fn read_recipe(text: &str) -> Result<Recipe> {
    if let Some(recipe) = Recipe::named(text) {
        return Ok(recipe);
    }
    Recipe::open(text).map_err(|error| match error.kind() {
        ErrorKind::Io(io) if io.kind() == io::ErrorKind::NotFound => {
            let hint = format!(
                "a recipe is a JSON file, or one of {}",
                Recipe::NAMES.join(", ")
            );
            Hinted::new(error, hint).into()
        }
        _ => error.into(),
    })
}

fn mode(text: &str) -> Result<QuantizationMode, String> {
    text.parse()
        .map_err(|_| "expected affine, mxfp4, mxfp8 or nvfp4".to_owned())
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let options = ConvertOptions::default()
        .with_dtype(args.dtype)
        .with_dequantize(args.dequantize)
        .with_quantize(args.quantize.quantize()?)
        .with_base_model(args.source.repo());
    let path = args.source.locate("convert")?;
    let files = ModelFiles::open(&path).map_err(failure::no_model)?;
    let bar = ByteBar::new("converting");
    let cancelled = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&cancelled);
    cancel_on_interrupt(move || flag.store(true, Ordering::Relaxed))?;
    let done = convert(&files, &args.out, &options, |progress| {
        bar.set(progress);
        !cancelled.load(Ordering::Relaxed)
    });
    bar.finish();
    let converted = match done {
        Err(error) if matches!(error.kind(), ErrorKind::Cancelled) => {
            return Ok(ExitCode::from(INTERRUPTED));
        }
        done => done.map_err(|error| hinted(error, args))?,
    };
    if let Some(line) = left_out(&converted) {
        note(&line);
    }
    let (count, bytes) = measure(&args.out).with_context(|| args.out.display().to_string())?;
    print(&format!(
        "{}: {count} files, {}, {:.3} bits per weight\n",
        args.out.display(),
        size(bytes),
        converted.bits_per_weight()
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// What the model does not use, in words.
fn left_out(converted: &Converted) -> Option<String> {
    const SHOWN: usize = 3;
    let names = &converted.left_out;
    let first = names[..names.len().min(SHOWN)].join(", ");
    let more = if names.len() > SHOWN { ", ..." } else { "" };
    (!names.is_empty()).then(|| {
        let count = names.len();
        format!("note: {count} tensors that the model does not use are left out ({first}{more})")
    })
}

fn hinted(error: mlex_models::Error, args: &Args) -> anyhow::Error {
    if args.out.exists() {
        return Hinted::new(error, "give another --out, or remove what is there").into();
    }
    let nothing_to_quantize =
        matches!(error.kind(), ErrorKind::Field { field, .. } if field == "quantize");
    if nothing_to_quantize && !args.dequantize {
        let hint = "layers that are quantized already stay so; --dequantize makes them dense first";
        return Hinted::new(error, hint).into();
    }
    error.into()
}

/// How many files there are below `dir`, and their bytes.
fn measure(dir: &Path) -> io::Result<(u64, u64)> {
    let (mut count, mut bytes) = (0, 0);
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        if metadata.is_dir() {
            let (inner_count, inner_bytes) = measure(&entry.path())?;
            count += inner_count;
            bytes += inner_bytes;
        } else {
            count += 1;
            bytes += metadata.len();
        }
    }
    Ok((count, bytes))
}
