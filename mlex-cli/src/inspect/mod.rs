//! `mlex inspect`.

mod abilities;
mod modules;
mod report;

use std::process::ExitCode;

use anyhow::Result;
use mlex_core::{Device, Stream};
use mlex_models::ModelFiles;

use crate::failure;
use crate::hub::Source;
use crate::output::{print, print_json};
use report::Report;

/// Show what a model is, how it is quantized and what memory it takes
///
/// Reads the headers of the files, not the weights.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    source: Source,
    /// The context that the cache's memory is estimated for [default: the model's longest, or
    /// 32768 when that is longer]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    context: Option<u32>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    Stream::default_of(Device::Cpu)?.set_current();
    let path = args.source.locate("inspect")?;
    let files = ModelFiles::open(path).map_err(failure::no_model)?;
    let report = Report::of(&files, args.context)?;
    if args.json {
        print_json(&report.json())?;
    } else {
        print(&report.text())?;
    }
    Ok(ExitCode::SUCCESS)
}
