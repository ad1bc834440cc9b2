//! The layers below a session: files, a model, its cache, hidden states and logits:
//! `cargo run -p mlex-models --example logits [MODEL]`.
//!
//! Without MODEL it takes a small checkpoint of the tests, whose weights are random.
#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::path::PathBuf;

use mlex_core::{Array, Dtype};
use mlex_models::generate::{Sampler, SamplerConfig, StreamOptions, TokenStream, score};
use mlex_models::{Input, ModelFiles, Result, load};

fn main() -> Result<()> {
    let small = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/llama-f32");
    let path = std::env::args_os()
        .nth(1)
        .map_or_else(|| PathBuf::from(small), PathBuf::from);

    // The files are opened here; a model reads its tensors one by one, as float32 here.
    let files = ModelFiles::open(&path)?;
    let loaded = load(&files, Some(Dtype::Float32), |_| {})?;
    let model = &*loaded.model;
    println!("{:?}", model.info());

    // A prompt in two pieces: the cache carries what the model has seen.
    let mut cache = model.new_cache()?;
    let start = Array::from_slice(&[5, 9, 17], &[1, 3])?;
    model.forward(Input::Tokens(&start), &mut cache)?;
    let rest = Array::from_slice(&[33, 20], &[1, 2])?;
    let hidden = model.forward(Input::Tokens(&rest), &mut cache)?;
    println!(
        "{} tokens seen, hidden states {:?}",
        cache.len(),
        hidden.shape()
    );

    // Only the last position is projected, as a prefill does.
    let logits = model.logits(&hidden.at(1, -1)?)?;
    let likeliest = logits.argmax(-1, false)?.as_type(Dtype::Int32)?;
    println!(
        "logits {:?}, the largest is {}",
        logits.shape(),
        likeliest.item::<i32>()?
    );

    // The same as a stream: prefill, sampling and decoding, each step started early.
    let prompt = [5, 9, 17, 33, 20];
    let sampler = Sampler::new(SamplerConfig::default(), model.info().vocab_size, &prompt)?;
    let mut cache = model.new_cache()?;
    let options = StreamOptions {
        max_tokens: 8,
        ..StreamOptions::default()
    };
    let stream = TokenStream::new(model, &mut cache, sampler, &prompt, options, &mut |_| true)?;
    println!("greedy: {:?}", stream.collect::<Result<Vec<u32>>>()?);

    let scored = score(model, &prompt, 0)?;
    println!(
        "log-probabilities {:?}, perplexity {:?}",
        scored.logprobs,
        scored.perplexity()
    );
    Ok(())
}
