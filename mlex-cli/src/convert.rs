//! `mlex convert`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use mlex_core::{Device, Dtype, Stream};
use mlex_models::{ConvertOptions, ErrorKind, ModelFiles, convert};

use crate::args::float_dtype;
use crate::failure::{self, Hinted, INTERRUPTED};
use crate::hub::Source;
use crate::interrupt::cancel_on_interrupt;
use crate::output::{print, size};
use crate::progress::ByteBar;

/// Convert a GGUF file to an MLX directory
///
/// The directory holds config.json, the tokenizer, the chat template and safetensors, and is
/// read by mlex and mlx-lm alike. Blocks that MLX has a layout for keep their exact values
/// (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, MXFP4); tensors in other blocks become float32.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    source: Source,
    /// The directory to make; it must not exist yet
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Store floating-point tensors, scales among them, as this type [default: as in the file]
    #[arg(long, value_parser = float_dtype, value_name = "DTYPE")]
    dtype: Option<Dtype>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    Stream::default_of(Device::Cpu)?.set_current();
    let path = args.source.locate("convert")?;
    let files = ModelFiles::open(&path).map_err(failure::no_model)?;
    let options = ConvertOptions::default().with_dtype(args.dtype);
    let bar = ByteBar::new("converting");
    let cancelled = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&cancelled);
    cancel_on_interrupt(move || flag.store(true, Ordering::Relaxed))?;
    let done = convert(&files, &args.out, options, |progress| {
        bar.set(progress);
        !cancelled.load(Ordering::Relaxed)
    });
    bar.finish();
    match done {
        Err(error) if matches!(error.kind(), ErrorKind::Cancelled) => {
            return Ok(ExitCode::from(INTERRUPTED));
        }
        done => done.map_err(|error| hinted(error, &files, args))?,
    }
    let (count, bytes) = measure(&args.out).with_context(|| args.out.display().to_string())?;
    print(&format!(
        "{}: {count} files, {}\n",
        args.out.display(),
        size(bytes)
    ))?;
    Ok(ExitCode::SUCCESS)
}

fn hinted(error: mlex_models::Error, files: &ModelFiles, args: &Args) -> anyhow::Error {
    if args.out.exists() {
        return Hinted::new(error, "give another --out, or remove what is there").into();
    }
    if !files.is_gguf() {
        let hint = "only GGUF files are converted as yet; a directory can be used as it is";
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
