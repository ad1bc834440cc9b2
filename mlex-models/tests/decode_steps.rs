//! Decode steps that are recorded once and done again for other tokens: they are what one pass over
//! all tokens gives (whose logits `goldens.rs` compares with mlx-lm's), whatever other caches the
//! model serves in between, while caches grow, and after tokens were taken back.
#![allow(clippy::unwrap_used)]

mod common;

use common::data;
use mlex_core::Array;
use mlex_models::{Input, Model, ModelFiles, load};
use mlex_nn::Cache;

fn open(name: &str) -> Box<dyn Model> {
    let files = ModelFiles::open(data(name)).unwrap();
    load(&files, None, |_| {}).unwrap().model
}

/// Some ids of any model.
fn tokens(count: usize, seed: usize) -> Vec<i32> {
    let ids = (0..count).map(|i| ((i * i + 7 * i + seed) % 50) as i32);
    ids.collect()
}

/// The logits of `rows` of as many tokens each, `[B * L * V]`.
fn logits(model: &dyn Model, rows: &[&[i32]], cache: &mut Cache) -> Vec<f32> {
    let shape = [rows.len() as i32, rows[0].len() as i32];
    let ids = Array::from_slice(&rows.concat(), &shape).unwrap();
    let hidden = model.forward(Input::Tokens(&ids), cache).unwrap();
    model.logits(&hidden).unwrap().to_vec().unwrap()
}

fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    let largest = expected.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    let pairs = found.iter().zip(expected);
    let error = pairs.fold(0.0f32, |max, (a, b)| max.max((a - b).abs()));
    assert!(found.len() == expected.len(), "{what}");
    assert!(error <= 1e-4 * largest, "{what}: {error} of {largest}");
}

const MODELS: [&str; 4] = ["llama-f32", "llama-sliding", "qwen3-f32", "llama-4bit"];

/// Memory of a cache grows in steps of 256 positions.
#[test]
fn two_caches_in_turns_give_what_one_pass_gives() {
    for name in MODELS {
        let model = open(name);
        let prompts = [tokens(300, 3), tokens(300, 11)];
        let whole = prompts.each_ref().map(|prompt| {
            let all = logits(&*model, &[prompt], &mut model.new_cache().unwrap());
            let vocab = all.len() / prompt.len();
            all.chunks_exact(vocab)
                .map(<[f32]>::to_vec)
                .collect::<Vec<_>>()
        });
        // The second one begins later, with a prompt of five tokens.
        let mut caches = [(); 2].map(|()| model.new_cache().unwrap());
        for step in 0..prompts[0].len() {
            let row = logits(&*model, &[&prompts[0][step..=step]], &mut caches[0]);
            assert_close(&row, &whole[0][step], &format!("{name}, first, {step}"));
            let other = &prompts[1];
            let row = match step {
                0..5 => continue,
                5 => logits(&*model, &[&other[..=5]], &mut caches[1]),
                _ => logits(&*model, &[&other[step..=step]], &mut caches[1]),
            };
            let last = row.len() - whole[1][step].len();
            assert_close(
                &row[last..],
                &whole[1][step],
                &format!("{name}, second, {step}"),
            );
        }
    }
}

#[test]
fn batches_in_between_have_steps_of_their_own() {
    for name in MODELS {
        let model = open(name);
        let prompts = [tokens(20, 3), tokens(20, 11)];
        let rows = [&prompts[0][..], &prompts[1][..]];
        let whole = logits(&*model, &rows, &mut model.new_cache().unwrap());
        let vocab = whole.len() / 40;
        let [mut one, mut both] = [(); 2].map(|()| model.new_cache().unwrap());
        for step in 0..20 {
            let row = logits(&*model, &[&prompts[0][step..=step]], &mut one);
            assert_close(&row, &whole[step * vocab..][..vocab], name);
            let pair = prompts.each_ref().map(|prompt| &prompt[step..=step]);
            let row = logits(&*model, &pair, &mut both);
            assert_close(&row[..vocab], &whole[step * vocab..][..vocab], name);
            assert_close(&row[vocab..], &whole[(20 + step) * vocab..][..vocab], name);
        }
    }
}

#[test]
fn tokens_that_were_taken_back_are_forgotten() {
    for name in ["llama-f32", "qwen3-f32", "llama-4bit"] {
        let model = open(name);
        let prompt = tokens(30, 3);
        let whole = logits(&*model, &[&prompt], &mut model.new_cache().unwrap());
        let vocab = whole.len() / prompt.len();
        let mut cache = model.new_cache().unwrap();
        for step in 0..prompt.len() {
            // Others first, whose results nobody has waited for.
            for other in [[1], [2], [3]] {
                let ids = Array::from_slice(&other, &[1, 1]).unwrap();
                model.forward(Input::Tokens(&ids), &mut cache).unwrap();
            }
            cache.trim(3).unwrap();
            let row = logits(&*model, &[&prompt[step..=step]], &mut cache);
            assert_close(&row, &whole[step * vocab..][..vocab], name);
        }
    }
}
