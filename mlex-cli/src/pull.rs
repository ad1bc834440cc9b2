//! `mlex pull`.

use std::process::ExitCode;

use anyhow::Result;
use mlex_hub::{MAIN, ModelId};

use crate::hub;
use crate::output::print;

/// Bring a model from the Hugging Face Hub into its shared cache
///
/// Only the files that a model needs come: config, tokenizer, chat templates, processors and
/// safetensors, or one GGUF file. What is there is not fetched again, and a download that broke
/// off goes on. The path is printed.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// organization/name, or organization/name:CHOICE: the name of a GGUF file or the
    /// quantization that it ends with, such as Q4_K_M
    #[arg(value_name = "REPO")]
    repo: ModelId,
    /// Branch, tag or commit
    #[arg(long, default_value = MAIN, value_name = "REVISION")]
    revision: String,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let pulled = hub::pull(&args.repo, &args.revision)?;
    print(&format!("{}\n", pulled.path.display()))?;
    Ok(ExitCode::SUCCESS)
}
