//! Heads for further tokens (MTP). Expected logits are those of mlx-lm's layers put together as vLLM
//! does (`tools/make_mtp_golden.py`); guesses of a head change nothing.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Copy, Expected, data};
use mlex_core::{Array, Device, Dtype};
use mlex_models::generate::{
    Guesses, LoadOptions, Prompt, Request, Sampler, SamplerConfig, Session, Speculation,
    Speculator, StreamOptions, TokenStream,
};
use mlex_models::{Input, ModelFiles, load, load_mtp};

const CHECKPOINT: &str = "qwen3_5-mtp";

fn files() -> ModelFiles {
    ModelFiles::open(data(CHECKPOINT)).unwrap()
}

fn ids(tokens: &[u32]) -> Array {
    let ids: Vec<i32> = tokens.iter().map(|&id| id as i32).collect();
    Array::from_slice(&ids, &[1, ids.len() as i32]).unwrap()
}

#[test]
fn a_head_says_what_the_reference_says() {
    let loaded = load(&files(), None, |_| {}).unwrap();
    let (model, head) = (&*loaded.model, load_mtp(&files(), None).unwrap());
    let expected = Expected::open(&format!("{CHECKPOINT}/mtp.safetensors"));
    let tokens = expected.tokens("tokens");
    let rows = expected.rows("logits");
    let mut cache = model.new_cache().unwrap();
    let hidden = model
        .forward(Input::Tokens(&ids(&tokens)), &mut cache)
        .unwrap();
    let embedded = model.embed(&ids(&tokens[1..])).unwrap();
    // In one go, and in pieces.
    for pieces in [vec![rows.len()], vec![5, 1, 1, rows.len() - 7]] {
        let mut cache = head.new_cache().unwrap();
        let (mut start, mut found) = (0, Vec::new());
        for length in pieces {
            let end = start + length as i32;
            let part = |array: &Array| array.slice_axis(1, start, end).unwrap();
            let states = head
                .forward(&part(&embedded), &part(&hidden), &mut cache)
                .unwrap();
            let logits = model.logits(&states.squeeze(0).unwrap()).unwrap();
            found.extend(
                logits
                    .as_type(Dtype::Float32)
                    .unwrap()
                    .to_vec::<f32>()
                    .unwrap(),
            );
            start = end;
        }
        let expected = rows.concat();
        let largest = expected.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            assert!(
                (found - expected).abs() <= 1e-4 * largest,
                "{found} {expected}"
            );
        }
    }
}

#[test]
fn guesses_of_a_head_change_nothing() {
    let loaded = load(&files(), None, |_| {}).unwrap();
    let (model, head) = (&*loaded.model, load_mtp(&files(), None).unwrap());
    let expected = Expected::open(&format!("{CHECKPOINT}/expected.safetensors"));
    let (prompt, greedy) = (expected.tokens("tokens"), expected.tokens("greedy"));
    let sampled = SamplerConfig {
        temperature: 0.8,
        seed: Some(5),
        ..SamplerConfig::default()
    };
    let mut checked = 0;
    for config in [SamplerConfig::default(), sampled] {
        let sampler = || Sampler::new(config.clone(), 64, &prompt).unwrap();
        let options = StreamOptions {
            max_tokens: 40,
            ..StreamOptions::default()
        };
        let mut cache = model.new_cache().unwrap();
        let plain = TokenStream::new(model, &mut cache, sampler(), &prompt, options, &mut |_| {
            true
        });
        let plain: Vec<u32> = plain.unwrap().map(|id| id.unwrap()).collect();
        if config.temperature == 0.0 {
            assert_eq!(plain[..greedy.len()], greedy);
        }
        for (max_drafts, adapt) in [(1, false), (4, false), (4, true)] {
            let mut speculation = Speculation::new(Guesses::Mtp);
            (speculation.max_drafts, speculation.adapt) = (max_drafts, adapt);
            let speculator = Speculator::mtp(model, &*head, speculation).unwrap();
            let mut cache = model.new_cache().unwrap();
            let mut stream = TokenStream::speculating(
                model,
                &mut cache,
                sampler(),
                &prompt,
                options,
                speculator,
            )
            .unwrap();
            let found: Vec<u32> = stream.by_ref().map(|id| id.unwrap()).collect();
            assert_eq!(found, plain, "{max_drafts} guesses");
            checked += stream.draft_counts().checked;
        }
    }
    assert!(checked > 100, "{checked}");
}

#[test]
fn a_session_has_a_head_where_it_is_asked_for() {
    let model = Copy::of(CHECKPOINT).with_tokenizer(64);
    let load = |model: &Copy, mtp| {
        let mut options = LoadOptions::default();
        options.device = Some(Device::Cpu);
        options.mtp = mtp;
        Session::load(model.path(), options)
    };
    let mut request = Request::new(Prompt::Tokens(vec![5, 6, 7, 8])).with_max_tokens(20);
    request.ignore_eos = true;
    request.speculation = Speculation::new(Guesses::Mtp);
    request.speculation.adapt = false;
    let run = |session: &Session, request: &Request| {
        let events = session.generate(request.clone());
        events
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| error.to_string())
    };
    let error = run(&load(&model, false).unwrap(), &request).unwrap_err();
    assert_eq!(
        error,
        "missing an MTP head, which was not loaded with the session"
    );
    run(&load(&model, true).unwrap(), &request).unwrap();
    // Checkpoints and architectures without.
    let none = Copy::of("qwen3_5-f32").with_tokenizer(64);
    let error = load(&none, true).unwrap_err();
    let error = common::message(&error, none.path());
    assert!(
        error.ends_with("missing the tensors of an MTP head (mtp.fc.weight)"),
        "{error}"
    );
    let llama = Copy::of("llama-f32").with_tokenizer(130);
    let error = common::message(&load(&llama, true).unwrap_err(), llama.path());
    assert!(
        error.ends_with("MTP head: llama is not supported"),
        "{error}"
    );
}
