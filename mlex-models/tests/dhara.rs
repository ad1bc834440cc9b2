//! Dhara's ways of decoding. Expected tokens are mlx-optiq's (`tools/make_dhara_golden.py`), or
//! those of another way that has to give the same.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Copy, data, message};
use mlex_core::{Device, Stream};
use mlex_models::generate::{
    BlockOptions, BlockStream, Decode, Diffusion, Event, Grammar, Guesses, LoadOptions, Prompt,
    Request, Sampler, SamplerConfig, SelfSpeculation, Session, StreamOptions, TokenStream,
};
use mlex_models::{Model, ModelFiles, load};
use serde_json::{Value, json};

fn open(name: &str) -> Box<dyn Model> {
    Stream::default_of(Device::Cpu).unwrap().set_current();
    let files = ModelFiles::open(data(name)).unwrap();
    load(&files, None, |_| {}).unwrap().model
}

fn penalized(penalty: f32) -> SamplerConfig {
    SamplerConfig {
        repetition_penalty: penalty,
        penalty_context: u32::MAX,
        ..SamplerConfig::default()
    }
}

fn blocks(
    model: &dyn Model,
    decode: Decode,
    prompt: &[u32],
    sampler: SamplerConfig,
    max_tokens: usize,
    prefill_step: usize,
) -> Vec<u32> {
    let mut cache = model.new_cache().unwrap();
    let options = BlockOptions {
        max_tokens,
        prefill_step: prefill_step.into(),
        sampler,
        eos_ids: Vec::new(),
    };
    let stream = BlockStream::new(model, &mut cache, decode, prompt, options, &mut |_| true);
    stream.unwrap().flat_map(|ids| ids.unwrap()).collect()
}

fn greedy(
    model: &dyn Model,
    prompt: &[u32],
    sampler: SamplerConfig,
    max_tokens: usize,
) -> Vec<u32> {
    let mut cache = model.new_cache().unwrap();
    let sampler = Sampler::new(sampler, model.info().vocab_size, prompt).unwrap();
    let options = StreamOptions {
        max_tokens,
        ..StreamOptions::default()
    };
    let stream = TokenStream::new(model, &mut cache, sampler, prompt, options, &mut |_| true);
    stream.unwrap().map(|id| id.unwrap()).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().unwrap().iter();
    ids.map(|id| id.as_u64().unwrap() as u32).collect()
}

fn all_blocks_are_the_references() {
    let rows = std::fs::read_to_string(data("dhara-blocks.json")).unwrap();
    let rows: Vec<Value> = serde_json::from_str(&rows).unwrap();
    let mut model: Option<(String, Box<dyn Model>)> = None;
    let (mut diffusions, mut speculations) = (0, 0);
    for row in &rows {
        let name = row["checkpoint"].as_str().unwrap();
        if model.as_ref().is_none_or(|(known, _)| known != name) {
            model = Some((name.to_owned(), open(name)));
        }
        let (_, model) = model.as_ref().unwrap();
        let size = |field: &str| row[field].as_u64().unwrap() as usize;
        let decode = match row["decode"].as_str().unwrap() {
            "diffusion" => Decode::Diffusion(Diffusion {
                block_length: size("block_length"),
                threshold: row["threshold"].as_f64().unwrap() as f32,
            }),
            _ => Decode::SelfSpeculation(SelfSpeculation {
                draft_length: size("draft_length"),
                block_length: size("block_length"),
            }),
        };
        let sampler = penalized(row["penalty"].as_f64().unwrap() as f32);
        let (prompt, expected) = (ids(&row["prompt"]), ids(&row["tokens"]));
        // The whole prompt at once, and in parts.
        for step in [512, 8] {
            let found = blocks(
                &**model,
                decode,
                &prompt,
                sampler.clone(),
                expected.len(),
                step,
            );
            assert_eq!(found, expected, "{name}, {decode:?}, {prompt:?}, {step}");
        }
        let count = match decode {
            Decode::Diffusion(_) => &mut diffusions,
            _ => &mut speculations,
        };
        *count += 1;
    }
    // 15 of each for four checkpoints.
    assert_eq!((diffusions, speculations), (60, 60));
}

#[test]
fn blocks_are_the_references() {
    all_blocks_are_the_references();
}

#[test]
fn without_kernels_too() {
    // In a process of its own: the switch is the process's.
    if std::env::var_os("MLEX_TEST_NO_KERNELS").is_some() {
        mlex_models::compute::set_kernels(false);
        all_blocks_are_the_references();
        return;
    }
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["without_kernels_too", "--exact", "--nocapture"])
        .env("MLEX_TEST_NO_KERNELS", "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}");
}

#[test]
fn self_speculation_is_greedy_decoding() {
    let model = open("dhara_ar-abcd");
    let mut state = 7u64;
    let mut random = |below: u32| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32 % below
    };
    for number in 0..50 {
        let length = 1 + random(60);
        let prompt: Vec<u32> = (0..length).map(|_| 3 + random(60)).collect();
        let draft_length = 1 + random(10) as usize;
        let block_length = 1 + random(32) as usize;
        let decode = Decode::SelfSpeculation(SelfSpeculation {
            draft_length,
            block_length,
        });
        let sampler = SamplerConfig {
            penalty_context: [5, 64, u32::MAX][number % 3],
            ..penalized([1.0, 1.3][number % 2])
        };
        let expected = greedy(&*model, &prompt, sampler.clone(), 48);
        let found = blocks(&*model, decode, &prompt, sampler, 48, 512);
        assert_eq!(found, expected, "{decode:?}, {prompt:?}");
    }
}

#[test]
fn settings_that_do_not_fit_are_named() {
    let model = open("dhara_ar-none");
    let llama = open("llama-f32");
    let refused = |model: &dyn Model, decode: Decode, sampler: SamplerConfig| {
        let mut cache = model.new_cache().unwrap();
        let options = BlockOptions {
            sampler,
            ..BlockOptions::default()
        };
        let stream = BlockStream::new(model, &mut cache, decode, &[3], options, &mut |_| true);
        stream.unwrap_err().to_string()
    };
    let diffusion = |block_length, threshold| {
        Decode::Diffusion(Diffusion {
            block_length,
            threshold,
        })
    };
    let plain = SamplerConfig::default;
    assert_eq!(
        refused(&*llama, diffusion(8, 0.5), plain()),
        "decode: other than autoregressive for a model of type llama is not supported"
    );
    assert_eq!(
        refused(&*model, diffusion(0, 0.5), plain()),
        "block_length: expected a number from 1 to 4096, found 0"
    );
    assert_eq!(
        refused(&*model, diffusion(8, 1.5), plain()),
        "threshold: expected a number from 0 to 1, found 1.5"
    );
    let speculation = Decode::SelfSpeculation(SelfSpeculation {
        draft_length: 5000,
        block_length: 8,
    });
    assert_eq!(
        refused(&*model, speculation, plain()),
        "draft_length: expected a number from 1 to 4096, found 5000"
    );
    let warm = SamplerConfig {
        temperature: 0.7,
        ..plain()
    };
    assert_eq!(
        refused(&*model, diffusion(8, 0.5), warm),
        "temperature: expected 0, since blocks are decoded greedily, found 0.7"
    );
}

#[test]
fn the_penalty_of_generation_config_wins() {
    let penalty = |text: Option<&str>| {
        let copy = Copy::of("dhara_ar-none");
        if let Some(text) = text {
            copy.write("generation_config.json", text);
        }
        let files = ModelFiles::open(copy.path()).unwrap();
        match load(&files, None, |_| {}) {
            Ok(loaded) => Ok(loaded.model.repetition_penalty()),
            Err(error) => Err(message(&error, copy.path())),
        }
    };
    Stream::default_of(Device::Cpu).unwrap().set_current();
    assert_eq!(penalty(None), Ok(Some(1.3)));
    let config = json!({"repetition_penalty": 1.1}).to_string();
    assert_eq!(penalty(Some(&config)), Ok(Some(1.1)));
    let null = json!({"repetition_penalty": null}).to_string();
    assert_eq!(penalty(Some(&null)), Ok(Some(1.3)));
    let wrong = json!({"repetition_penalty": -1}).to_string();
    assert_eq!(
        penalty(Some(&wrong)),
        Err(
            "M/config.json: repetition_penalty of generation_config.json: expected a positive \
             number, found -1"
                .to_owned()
        )
    );
}

#[test]
fn a_session_sends_blocks() {
    let model = Copy::of("dhara_ar-abcd").with_tokenizer(64);
    let mut options = LoadOptions::default();
    options.device = Some(Device::Cpu);
    let session = Session::load(model.path(), options).unwrap();
    assert!(session.info().fills_blocks);
    assert_eq!(session.info().repetition_penalty, Some(1.3));
    let prompt = [5, 9, 20, 33];
    let tokens = |decode: Decode| -> Vec<u32> {
        let mut request = Request::new(Prompt::Tokens(prompt.to_vec())).with_max_tokens(20);
        request.ignore_eos = true;
        request.decode = decode;
        let events = session.generate(request).map(|event| event.unwrap());
        let ids = events.filter_map(|event| match event {
            Event::Token { id, .. } => Some(id),
            _ => None,
        });
        ids.collect()
    };
    let alone = tokens(Decode::Autoregressive);
    assert_eq!(
        tokens(Decode::SelfSpeculation(SelfSpeculation::default())),
        alone
    );
    let diffusion = Decode::Diffusion(Diffusion::default());
    let plain = open("dhara_ar-abcd");
    let expected = blocks(
        &*plain,
        diffusion,
        &prompt,
        SamplerConfig::default(),
        20,
        512,
    );
    assert_eq!(tokens(diffusion), expected);

    // What only works token by token is refused.
    let refused = |change: &dyn Fn(&mut Request)| {
        let mut request = Request::new(Prompt::Tokens(prompt.to_vec()));
        request.decode = diffusion;
        change(&mut request);
        let mut events = session.generate(request);
        events.find_map(Result::err).unwrap().to_string()
    };
    assert_eq!(
        refused(&|request| request.grammar = Some(Grammar::JsonObject)),
        "grammar: expected none where tokens come in blocks, found one"
    );
    assert_eq!(
        refused(&|request| request.speculation.guesses = Guesses::Ngram),
        "guesses: expected none where tokens come in blocks, found Ngram"
    );
}
