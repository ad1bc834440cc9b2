//! Streams a model's answer to a question:
//! `cargo run --release -p mlex-models --example generate -- MODEL [QUESTION]`.
//!
//! MODEL is a directory with config.json, tokenizer.json and safetensors files, or a GGUF file.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an example shows what it does"
)]

use std::io::{Write, stdout};

use mlex_models::Result;
use mlex_models::generate::{Event, LoadOptions, Prompt, Request, SamplerConfig, Session};
use mlex_models::text::Part;

const USAGE: &str = "usage: generate MODEL [QUESTION]
  MODEL     a model directory or a GGUF file
  QUESTION  what is asked; \"What is the capital of France?\" without it";

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let Some(model) = args.next() else {
        println!("{USAGE}");
        return Ok(());
    };
    let question = args.next();
    let question = question
        .as_deref()
        .unwrap_or("What is the capital of France?");

    // Loads on a thread of its own; the session can be used from any thread, and cloned.
    let session = Session::load(&model, LoadOptions::default())?;
    let info = session.info();
    eprintln!(
        "{}: {} layers, loaded in {:.1?}",
        info.model.model_type, info.model.num_layers, info.load_time
    );

    let request = if session.has_chat_template() {
        Request::chat(question)
    } else {
        Request::new(Prompt::Raw(question.to_owned()))
    };
    // Repeatable, since it has a seed.
    let sampler = SamplerConfig {
        temperature: 0.7,
        top_p: 0.9,
        seed: Some(1),
        ..SamplerConfig::default()
    };
    for event in session.generate(request.with_max_tokens(128).with_sampler(sampler)) {
        let event = event?;
        for part in event.parts() {
            // There are reasoning and tool calls too.
            if let Part::Text(text) = part {
                print!("{text}");
                stdout().flush()?;
            }
        }
        if let Event::Done(done) = event {
            eprintln!(
                "\n{}: {} prompt tokens at {:.0}/s, {} tokens at {:.0}/s",
                done.finish_reason,
                done.usage.prompt_tokens,
                done.prefill_tps(),
                done.usage.completion_tokens,
                done.decode_tps()
            )
        }
    }
    Ok(())
}
