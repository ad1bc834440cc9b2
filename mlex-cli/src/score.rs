//! `mlex score`.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use mlex_core::Stream;
use mlex_models::generate::{Score, TokenLogprob, score};
use mlex_models::text::Tokenizer;
use mlex_models::{ModelFiles, load};
use serde_json::{Value, json};

use crate::args::{ModelArgs, TokenIds};
use crate::failure;
use crate::output::{number, print, print_json};
use crate::progress::ByteBar;

/// Score a text: the log-probability of each token after those before it
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    input: Input,
    /// Also give this many of the likeliest tokens at each position
    #[arg(long, default_value_t = 0, value_name = "K")]
    top: usize,
    /// Print one JSON document in place of the table
    #[arg(long)]
    json: bool,
}

/// What is scored: one of these.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct Input {
    /// The text
    #[arg(long, value_name = "TEXT")]
    text: Option<String>,
    /// A file with the text; `-` is stdin
    #[arg(long, value_name = "FILE")]
    text_file: Option<PathBuf>,
    /// The text as token ids, such as "1 2 3"; needs no tokenizer
    #[arg(long, value_name = "IDS")]
    tokens: Option<TokenIds>,
}

impl Input {
    /// The text, unless tokens were given.
    fn text(&self) -> Result<Option<String>> {
        let Some(path) = &self.text_file else {
            return Ok(self.text.clone());
        };
        let (name, text) = if path.as_os_str() == "-" {
            (
                "stdin".to_owned(),
                std::io::read_to_string(std::io::stdin().lock()),
            )
        } else {
            (path.display().to_string(), fs::read_to_string(path))
        };
        text.context(name).map(Some)
    }
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let text = args.input.text()?;
    let path = args.model.source.locate("score")?;
    let files = ModelFiles::open(&path).map_err(failure::no_model)?;
    let (tokens, tokenizer) = match (text, &args.input.tokens) {
        (Some(text), _) => {
            let tokenizer = files.tokenizer()?;
            (tokenizer.encode(&text, true)?, Some(tokenizer))
        }
        // The table then shows no texts where there is no tokenizer.
        (None, ids) => (
            ids.clone().unwrap_or(TokenIds(Vec::new())).0,
            files.tokenizer().ok(),
        ),
    };
    Stream::default_of(args.model.set_up()?)?.set_current();
    let bar = ByteBar::new("loading");
    let moved = bar.clone();
    let loaded = load(&files, args.model.dtype, move |progress| {
        moved.set(progress)
    });
    bar.finish();
    let score = score(&*loaded?.model, &tokens, args.top)?;
    if args.json {
        print_json(&document(&score))?;
    } else {
        print(&table(&score, tokenizer.as_ref()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn document(score: &Score) -> Value {
    let likely =
        |likely: &TokenLogprob| json!({"id": likely.id, "logprob": number(likely.logprob)});
    let top = |top: &Vec<TokenLogprob>| top.iter().map(likely).collect::<Value>();
    let logprobs = score
        .logprobs
        .iter()
        .map(|logprob| logprob.and_then(number));
    json!({
        "tokens": score.tokens,
        "logprobs": logprobs.collect::<Vec<_>>(),
        "top": score.top.iter().map(top).collect::<Value>(),
        "perplexity": score.perplexity(),
    })
}

/// One line per token, with its likeliest rivals, and the perplexity below.
fn table(score: &Score, tokenizer: Option<&Tokenizer>) -> String {
    let spelled = |id: u32| {
        let text = tokenizer.and_then(|tokenizer| tokenizer.decode(&[id], false).ok());
        text.map(|text| format!("{text:?}")).unwrap_or_default()
    };
    let mut out = format!("{:>10}  {:>8}  {}\n", "logprob", "token", "text");
    let rows = score.tokens.iter().zip(&score.logprobs).zip(&score.top);
    for ((&id, logprob), top) in rows {
        let logprob = logprob.map_or_else(|| "-".to_owned(), |logprob| format!("{logprob:.4}"));
        // Writing to a String does not fail.
        let _ = writeln!(out, "{logprob:>10}  {id:>8}  {}", spelled(id));
        for TokenLogprob { id, logprob } in top {
            let _ = writeln!(out, "{logprob:>10.4}  {id:>8}    or {}", spelled(*id));
        }
    }
    if let Some(perplexity) = score.perplexity() {
        let _ = writeln!(out, "perplexity: {perplexity:.4}");
    }
    out
}
