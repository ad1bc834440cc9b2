//! Speculative decoding gives what plain decoding gives: on every small checkpoint, for good and
//! bad guesses, greedy (mlx-lm's tokens, `tools/make_model_golden.py`) and sampled (the same seed;
//! a chi-square test against the probabilities that the model gives).
#![allow(clippy::unwrap_used)]

mod common;

use common::{Expected, data};
use mlex_core::{Array, Dtype};
use mlex_models::generate::{
    Dry, Guesses, Sampler, SamplerConfig, Speculation, Speculator, StreamOptions, TokenStream, Xtc,
};
use mlex_models::{Input, LoadedModel, Model, ModelFiles, load};
use mlex_nn::Cache;

/// Tokens that are generated: enough for the small models to repeat themselves.
const COUNT: usize = 48;

fn open(name: &str, dtype: Option<Dtype>) -> LoadedModel {
    let files = ModelFiles::open(data(name)).unwrap();
    load(&files, dtype, |_| {}).unwrap()
}

/// Every checkpoint with expected values.
fn names() -> Vec<String> {
    let entries = std::fs::read_dir(data("")).unwrap();
    let entries = entries.map(|entry| entry.unwrap());
    let has_values = entries.filter(|entry| entry.path().join("expected.safetensors").exists());
    let mut names: Vec<String> = has_values
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert!(names.len() >= 50, "the data are not all there: {names:?}");
    names
}

fn prompt(name: &str) -> (Vec<u32>, Vec<u32>) {
    let expected = Expected::open(&format!("{name}/expected.safetensors"));
    (expected.tokens("tokens"), expected.tokens("greedy"))
}

fn options(max_tokens: usize) -> StreamOptions {
    StreamOptions {
        max_tokens,
        prefill_step: 10.into(),
        ..StreamOptions::default()
    }
}

fn sampler(model: &dyn Model, config: &SamplerConfig, prompt: &[u32]) -> Sampler {
    Sampler::new(config.clone(), model.info().vocab_size, prompt).unwrap()
}

fn plain(model: &dyn Model, config: &SamplerConfig, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut cache = model.new_cache().unwrap();
    let sampler = sampler(model, config, prompt);
    let options = options(count);
    let stream =
        TokenStream::new(model, &mut cache, sampler, prompt, options, &mut |_| true).unwrap();
    stream.map(|id| id.unwrap()).collect()
}

/// The tokens with guesses, how many of them were right, and the cache after them.
fn guessed(
    model: &dyn Model,
    config: &SamplerConfig,
    prompt: &[u32],
    count: usize,
    speculator: Speculator<'_>,
) -> (Vec<u32>, [usize; 2], Cache) {
    let mut cache = model.new_cache().unwrap();
    let sampler = sampler(model, config, prompt);
    let mut stream = TokenStream::speculating(
        model,
        &mut cache,
        sampler,
        prompt,
        options(count),
        speculator,
    )
    .unwrap();
    let tokens = stream.by_ref().map(|id| id.unwrap()).collect();
    let counts = stream.draft_counts();
    stream.finish().unwrap();
    drop(stream);
    (tokens, [counts.checked, counts.accepted], cache)
}

fn settings(max_drafts: usize, adapt: bool) -> Speculation {
    let mut settings = Speculation::new(Guesses::Ngram);
    settings.max_drafts = max_drafts;
    settings.adapt = adapt;
    settings
}

/// A checkpoint that knows no more tokens than `model`, and guesses badly.
fn other_than(model: &LoadedModel, name: &str) -> Option<LoadedModel> {
    let names = ["qwen3_5-f32", "llama-f32", "gemma4-small"];
    let mut others = names.into_iter().filter(|other| *other != name);
    let limit = model.model.info().vocab_size;
    others.find_map(|other| {
        let other = open(other, Some(Dtype::Float32));
        (other.model.info().vocab_size == limit).then_some(other)
    })
}

#[test]
fn greedy_tokens_are_the_same_on_every_checkpoint() {
    let config = SamplerConfig::default();
    let mut right = [0; 2];
    for name in names() {
        let loaded = open(&name, Some(Dtype::Float32));
        let model = &*loaded.model;
        let (prompt, expected) = prompt(&name);
        let all = plain(model, &config, &prompt, COUNT);
        assert_eq!(all[..expected.len()], expected, "{name}");
        let mut check = |what: &str, max_drafts: usize, speculator: Speculator<'_>| {
            let (found, [checked, accepted], cache) =
                guessed(model, &config, &prompt, COUNT, speculator);
            assert_eq!(found, all, "{name}: {what}, {max_drafts} guesses");
            assert!(accepted <= checked && accepted < COUNT);
            // The cache has seen tokens of the answer, and no others.
            let seen = cache.len() as usize;
            assert!(
                (prompt.len()..prompt.len() + COUNT).contains(&seen),
                "{name}: {what}: {seen}"
            );
            right[0] += checked;
            right[1] += accepted;
        };
        for max_drafts in [1, 3, 7] {
            let settings = settings(max_drafts, false);
            check("ngram", max_drafts, Speculator::ngram(settings));
            let itself = Speculator::draft_model(model, 7, settings).unwrap();
            check("the model itself", max_drafts, itself);
        }
        if let Some(other) = other_than(&loaded, &name) {
            let settings = settings(2, false);
            let other = Speculator::draft_model(&*other.model, 512, settings).unwrap();
            check("another model", 2, other);
        }
        check("adaptive ngram", 8, Speculator::ngram(settings(8, true)));
    }
    println!("{right:?}");
    assert!(
        right[1] > right[0] / 4,
        "guesses are right at times: {right:?}"
    );
}

/// A checkpoint for each kind of cache: keys and values, a window, recurrent states.
const KINDS: [&str; 3] = ["llama-f32", "llama-sliding", "qwen3_5-f32"];

#[test]
fn sampled_tokens_are_the_same_for_a_seed() {
    let base = SamplerConfig {
        temperature: 0.8,
        seed: Some(11),
        ..SamplerConfig::default()
    };
    let configs = [
        base.clone(),
        SamplerConfig {
            top_p: 0.9,
            min_p: 0.02,
            repetition_penalty: 1.2,
            frequency_penalty: 0.1,
            ..base.clone()
        },
        SamplerConfig {
            top_k: 20,
            xtc: Some(Xtc::new(0.3, 0.1)),
            dry: Some(Dry::new(0.8)),
            ..base
        },
    ];
    for name in KINDS {
        let loaded = open(name, Some(Dtype::Float32));
        let model = &*loaded.model;
        let (prompt, _) = prompt(name);
        for (at, config) in configs.iter().enumerate() {
            let expected = plain(model, config, &prompt, COUNT);
            for max_drafts in [1, 4] {
                let settings = settings(max_drafts, false);
                let itself = Speculator::draft_model(model, 512, settings).unwrap();
                for speculator in [Speculator::ngram(settings), itself] {
                    let (found, ..) = guessed(model, config, &prompt, COUNT, speculator);
                    assert_eq!(found, expected, "{name}: config {at}, {max_drafts} guesses");
                }
            }
        }
    }
}

/// The probabilities of the token after `tokens`, at `temperature`.
fn probabilities(model: &dyn Model, tokens: &[u32], temperature: f32) -> Vec<f64> {
    let mut cache = model.new_cache().unwrap();
    let ids: Vec<i32> = tokens.iter().map(|&id| id as i32).collect();
    let ids = Array::from_slice(&ids, &[1, ids.len() as i32]).unwrap();
    let hidden = model.forward(Input::Tokens(&ids), &mut cache).unwrap();
    let logits = model.logits(&hidden.at(1, -1).unwrap()).unwrap();
    let logits: Vec<f32> = logits.as_type(Dtype::Float32).unwrap().to_vec().unwrap();
    let powers = logits.iter().map(|x| f64::from(x / temperature));
    let powers: Vec<f64> = powers.map(f64::exp).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|power| power / sum).collect()
}

#[test]
fn sampled_tokens_are_distributed_as_the_model_says() {
    // Of the second token, given the first: in most runs it is chosen in a step that checks a
    // guess, or is one. Runs are few, so tokens are put together in 8 bins.
    const RUNS: u64 = 1200;
    const BINS: usize = 8;
    let loaded = open("llama-f32", Some(Dtype::Float32));
    let other = open("qwen3-f32", Some(Dtype::Float32));
    let model = &*loaded.model;
    let (prompt, _) = prompt("llama-f32");
    let temperature = 0.7;
    let first = probabilities(model, &prompt, temperature);
    let mut expected = [0.0; BINS];
    for (token, probability) in first.iter().enumerate() {
        let after = [&prompt[..], &[token as u32]].concat();
        for (next, p) in probabilities(model, &after, temperature).iter().enumerate() {
            expected[next % BINS] += probability * p;
        }
    }
    let usable = other.model.info().vocab_size <= model.info().vocab_size;
    let guesser = if usable { &*other.model } else { model };
    let mut found = [0.0; BINS];
    let mut checked = 0;
    for seed in 0..RUNS {
        let config = SamplerConfig {
            temperature,
            seed: Some(seed),
            ..SamplerConfig::default()
        };
        let speculator = Speculator::draft_model(guesser, 512, settings(2, false)).unwrap();
        let (tokens, counts, _) = guessed(model, &config, &prompt, 3, speculator);
        found[tokens[1] as usize % BINS] += 1.0;
        checked += counts[0];
    }
    assert!(checked as u64 >= RUNS, "{checked}");
    let terms = found.iter().zip(expected).map(|(found, p): (&f64, f64)| {
        let expected = p * RUNS as f64;
        assert!(expected > 5.0, "bins are large enough");
        (found - expected).powi(2) / expected
    });
    let chi_square: f64 = terms.sum();
    // 7 degrees of freedom: 24.3 is exceeded with probability 0.001 (any table of chi-square).
    assert!(chi_square < 24.3, "{chi_square}: {found:?}");
}

#[test]
fn what_was_not_given_out_is_taken_back() {
    let config = SamplerConfig::default();
    for name in KINDS {
        let loaded = open(name, Some(Dtype::Float32));
        let model = &*loaded.model;
        let (prompt, _) = prompt(name);
        let all = plain(model, &config, &prompt, 24);
        let mut went_on = 0;
        for given in 1..10 {
            let mut cache = model.new_cache().unwrap();
            let speculator = Speculator::draft_model(model, 512, settings(6, false)).unwrap();
            let sampler = sampler(model, &config, &prompt);
            let options = options(usize::MAX);
            let mut stream =
                TokenStream::speculating(model, &mut cache, sampler, &prompt, options, speculator)
                    .unwrap();
            let found: Vec<u32> = stream.by_ref().take(given).map(|id| id.unwrap()).collect();
            assert_eq!(found, all[..given], "{name}");
            stream.finish().unwrap();
            assert!(stream.next().is_none());
            drop(stream);
            // What the cache holds is the start of prompt and answer: going on from it is the same.
            let text = [&prompt[..], &found].concat();
            let seen = cache.len() as usize;
            assert!(
                (prompt.len()..=text.len()).contains(&seen),
                "{name}: {seen}"
            );
            // To go on the last one is needed again.
            let extra = seen + 1 - text.len().min(seen + 1);
            if !cache.can_trim(extra as i32) {
                continue;
            }
            cache.trim(extra as i32).unwrap();
            let seen = seen - extra;
            went_on += 1;
            let sampler = self::sampler(model, &config, &text);
            let mut options = self::options(24 - given);
            options.prefill_step = 512.into();
            let rest = TokenStream::new(
                model,
                &mut cache,
                sampler,
                &text[seen..],
                options,
                &mut |_| true,
            )
            .unwrap();
            let rest: Vec<u32> = rest.map(|id| id.unwrap()).collect();
            assert_eq!(rest, all[given..], "{name}: after {given}");
        }
        assert!(went_on > 5, "{name}: {went_on}");
    }
}

#[test]
fn tokens_can_be_put_in_between_guesses() {
    let config = SamplerConfig {
        temperature: 0.9,
        seed: Some(3),
        repetition_penalty: 1.3,
        ..SamplerConfig::default()
    };
    for name in KINDS {
        let loaded = open(name, Some(Dtype::Float32));
        let model = &*loaded.model;
        let (prompt, _) = prompt(name);
        // Two at once after 5 tokens, one after 12.
        let put_in = [(5, 60), (6, 61), (12, 62)];
        let run = |stream: TokenStream<'_>| -> Vec<u32> {
            let mut stream = stream;
            let mut found = Vec::new();
            for at in 0..24 {
                if let Some((_, id)) = put_in.iter().find(|(place, _)| *place == at) {
                    stream.put_in(*id).unwrap();
                }
                found.push(stream.next().unwrap().unwrap());
            }
            found
        };
        let mut cache = model.new_cache().unwrap();
        let first = sampler(model, &config, &prompt);
        let options = options(24);
        let expected =
            run(
                TokenStream::new(model, &mut cache, first, &prompt, options, &mut |_| true)
                    .unwrap(),
            );
        for max_drafts in [1, 5] {
            let settings = settings(max_drafts, false);
            let itself = Speculator::draft_model(model, 512, settings).unwrap();
            for speculator in [Speculator::ngram(settings), itself] {
                let mut cache = model.new_cache().unwrap();
                let first = sampler(model, &config, &prompt);
                let stream = TokenStream::speculating(
                    model, &mut cache, first, &prompt, options, speculator,
                );
                let found = run(stream.unwrap());
                // Where guesses were taken back the random numbers are others.
                assert_eq!(found[..5], expected[..5], "{name}");
                for (place, id) in put_in {
                    assert_eq!(found[place], id, "{name}");
                }
            }
        }
    }
}
