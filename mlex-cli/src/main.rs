//! The `mlex` command: run, score, inspect, convert, measure and fetch language models.
#![forbid(unsafe_code)]

mod args;
mod bench;
mod cache;
mod chat;
mod convert;
mod decode;
mod failure;
mod generate;
mod hub;
mod inspect;
mod interrupt;
mod media;
mod output;
mod progress;
mod pull;
mod score;
mod show;

use std::process::ExitCode;
use std::sync::OnceLock;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// Run MLX-format language models.
#[derive(Debug, Parser)]
#[command(name = "mlex", version = version(), propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Generate(Box<generate::Args>),
    Chat(chat::Args),
    Cache(cache::Args),
    Score(score::Args),
    Inspect(inspect::Args),
    Convert(convert::Args),
    Bench(bench::Args),
    Pull(pull::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    start_logging();
    let done = match &cli.command {
        Command::Generate(args) => generate::run(args),
        Command::Chat(args) => chat::run(args),
        Command::Cache(args) => cache::run(args),
        Command::Score(args) => score::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Convert(args) => convert::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Pull(args) => pull::run(args),
    };
    done.unwrap_or_else(|error| failure::report(&error))
}

/// This program's version and MLX's.
fn version() -> &'static str {
    static VERSION: OnceLock<String> = OnceLock::new();
    VERSION.get_or_init(|| {
        let mlx = mlex_core::mlx_version().unwrap_or_else(|_| "unknown".to_owned());
        format!("{} (MLX {mlx})", env!("CARGO_PKG_VERSION"))
    })
}

/// Sends what the libraries log to stderr: warnings, or what `RUST_LOG` asks for.
fn start_logging() {
    let filter = EnvFilter::builder()
        .with_default_directive(LevelFilter::WARN.into())
        .from_env_lossy();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .without_time()
        .init();
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_flags_do_not_contradict_each_other() {
        super::Cli::command().debug_assert();
    }
}
