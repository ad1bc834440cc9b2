//! `mlex bench`.

use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use mlex_core::{Device, Dtype, Stream, memory, random};
use mlex_models::generate::{
    PrefillProgress, PrefillStep, Sampler, SamplerConfig, StreamOptions, TokenStream,
};
use mlex_models::{Model, ModelFiles, compute, load};
use serde_json::{Value, json};

use crate::args::ModelArgs;
use crate::failure;
use crate::output::{note, print, print_json, size};
use crate::progress::ByteBar;

/// The first run of a process finds cold caches and no threads: a short one goes before.
const WARM_UP: Lengths = Lengths {
    prompt: 16,
    generated: 2,
};

/// Measure how fast a model reads a prompt and generates
///
/// The prompt is random tokens, the same each time; generation is greedy and goes on after
/// end-of-text tokens. No tokenizer is needed.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Tokens of the prompt
    #[arg(long, default_value_t = 512, value_parser = count(), value_name = "N")]
    prompt_tokens: u32,
    /// Tokens that are generated after the first one
    #[arg(long, default_value_t = 128, value_parser = count(), value_name = "N")]
    gen_tokens: u32,
    /// How many prompt tokens are computed at once; by default 512 on a CPU and 2048 on a GPU,
    /// where less in long contexts
    #[arg(long, value_name = "N")]
    prefill_step: Option<NonZeroUsize>,
    /// How many times it is measured; the medians are printed
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..), value_name = "N")]
    repeats: u16,
    /// Print one JSON document in place of the table
    #[arg(long)]
    json: bool,
}

/// A number of tokens that MLX's shapes and a computer's memory may hold.
fn count() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=1 << 24)
}

/// How long a run is.
#[derive(Clone, Copy, Debug)]
struct Lengths {
    prompt: usize,
    /// Steps after the token that the prompt gives.
    generated: usize,
}

/// Tokens per second of one run.
#[derive(Clone, Copy, Debug)]
struct Rates {
    prefill: f64,
    decode: f64,
}

/// What was measured.
struct Report {
    lengths: Lengths,
    runs: Vec<Rates>,
    load_s: f64,
    peak_memory_bytes: usize,
    model_bytes: u64,
    device: Device,
    dtype: Option<Dtype>,
    kernels: bool,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let path = args.model.source.locate("bench")?;
    let files = ModelFiles::open(&path).map_err(failure::no_model)?;
    let device = args.model.set_up()?;
    Stream::default_of(device)?.set_current();
    let bar = ByteBar::new("loading");
    let moved = bar.clone();
    let start = Instant::now();
    let loaded = load(&files, args.model.dtype, move |progress| {
        moved.set(progress)
    });
    let load_s = start.elapsed().as_secs_f64();
    bar.finish();
    let loaded = loaded?;
    let model = &*loaded.model;

    let lengths = Lengths {
        prompt: args.prompt_tokens as usize,
        generated: args.gen_tokens as usize,
    };
    let prompt = random_tokens(args.prompt_tokens, model.info().vocab_size)?;
    let step = args.prefill_step.map(|step| step.get().into());
    let step = step.unwrap_or_default();
    measure(model, &prompt, WARM_UP.within(lengths), step)?;
    let mut runs = Vec::with_capacity(args.repeats.into());
    for _ in 0..args.repeats {
        let rates = measure(model, &prompt, lengths, step)?;
        if !args.json {
            note(&format!(
                "prefill {:.2}, decode {:.2} tokens/s",
                rates.prefill, rates.decode
            ));
        }
        runs.push(rates);
    }
    let report = Report {
        lengths,
        runs,
        load_s,
        peak_memory_bytes: memory::peak()?,
        model_bytes: loaded.file_bytes,
        device,
        dtype: args.model.dtype,
        kernels: !args.model.no_kernels,
    };
    if args.json {
        print_json(&report.json())?;
    } else {
        print(&report.table())?;
    }
    Ok(ExitCode::SUCCESS)
}

impl Lengths {
    fn within(self, limit: Self) -> Self {
        Self {
            prompt: self.prompt.min(limit.prompt),
            generated: self.generated.min(limit.generated),
        }
    }
}

/// The same ids each time.
fn random_tokens(tokens: u32, vocab_size: i32) -> Result<Vec<u32>> {
    // At most 2^24, as the arguments are checked.
    let shape = [tokens as i32];
    let ids = random::integers(0, vocab_size, &shape, Dtype::Uint32, &random::key(0)?)?;
    Ok(ids.to_vec()?)
}

/// Reads the start of `prompt` and generates, with a new cache.
fn measure(
    model: &dyn Model,
    prompt: &[u32],
    lengths: Lengths,
    prefill_step: PrefillStep,
) -> Result<Rates> {
    let prompt = &prompt[..lengths.prompt];
    let mut cache = model.new_cache()?;
    let sampler = Sampler::new(SamplerConfig::default(), model.info().vocab_size, prompt)?;
    let options = StreamOptions {
        max_tokens: lengths.generated + 1,
        prefill_step,
        ..StreamOptions::default()
    };
    let mut go_on = |_: PrefillProgress| true;
    let start = Instant::now();
    let mut stream = TokenStream::new(model, &mut cache, sampler, prompt, options, &mut go_on)?;
    stream.next().context("no token was generated")??;
    let first = Instant::now();
    for id in stream {
        id?;
    }
    let rate = |tokens: usize, seconds: f64| tokens as f64 / seconds.max(f64::MIN_POSITIVE);
    Ok(Rates {
        prefill: rate(prompt.len(), (first - start).as_secs_f64()),
        decode: rate(lengths.generated, first.elapsed().as_secs_f64()),
    })
}

/// The middle one; of an even number, the mean of the two in the middle.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n => (values[(n - 1) / 2] + values[n / 2]) / 2.0,
    }
}

impl Report {
    fn prefill(&self) -> f64 {
        median(self.runs.iter().map(|run| run.prefill))
    }

    fn decode(&self) -> f64 {
        median(self.runs.iter().map(|run| run.decode))
    }

    /// Tokens in the cache at the end of a run.
    fn context(&self) -> usize {
        self.lengths.prompt + self.lengths.generated
    }

    fn json(&self) -> Value {
        let run = |run: &Rates| json!({"prefill_tps": run.prefill, "decode_tps": run.decode});
        json!({
            "prefill_tps": self.prefill(),
            "decode_tps": self.decode(),
            "load_s": self.load_s,
            "peak_memory_bytes": self.peak_memory_bytes,
            "model_bytes": self.model_bytes,
            "prompt_tokens": self.lengths.prompt,
            "gen_tokens": self.lengths.generated,
            "context": self.context(),
            "device": self.device.to_string(),
            "threads": compute::threads(),
            "kernels": self.kernels,
            "dtype": self.dtype.map(|dtype| dtype.to_string()),
            "runs": self.runs.iter().map(run).collect::<Value>(),
        })
    }

    fn table(&self) -> String {
        let Lengths { prompt, generated } = self.lengths;
        let weights = self.model_bytes as f64 * self.decode() / 1e9;
        format!(
            "prefill      {:.2} tokens/s ({prompt} tokens)\n\
             decode       {:.2} tokens/s ({generated} tokens; weights at {weights:.2} GB/s)\n\
             load         {:.2} s\n\
             peak memory  {}\n\
             weights      {}\n",
            self.prefill(),
            self.decode(),
            self.load_s,
            size(self.peak_memory_bytes as u64),
            size(self.model_bytes),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        let of = |values: &[f64]| median(values.iter().copied());
        assert_eq!(of(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(of(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(of(&[7.0]), 7.0);
    }
}
