//! Scores against the log-softmax of the logits that mlx-lm computes for the same tokens.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Expected, data};
use mlex_models::generate::score;
use mlex_models::{LoadedModel, ModelFiles, load};

fn model(name: &str) -> LoadedModel {
    load(&ModelFiles::open(data(name)).unwrap(), None, |_| {}).unwrap()
}

/// The logarithms of the probabilities of a row of logits, in f64.
fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits
        .iter()
        .fold(f64::MIN, |max, &x| max.max(f64::from(x)));
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
    logits
        .iter()
        .map(|&x| f64::from(x) - max - sum.ln())
        .collect()
}

#[test]
fn log_probabilities_and_likeliest_tokens_are_those_of_the_reference() {
    for name in [
        "llama-f32",
        "llama-4bit",
        "qwen2-f32",
        "qwen3-tied-4bit",
        "llama-sliding",
    ] {
        let expected = Expected::open(&format!("{name}/expected.safetensors"));
        let tokens = expected.tokens("tokens");
        let rows: Vec<Vec<f64>> = expected
            .rows("logits")
            .iter()
            .map(|row| log_softmax(row))
            .collect();
        let scored = score(&*model(name).model, &tokens, 5).unwrap();
        assert_eq!(scored.tokens, tokens);
        assert_eq!(
            (scored.logprobs.len(), scored.top.len()),
            (tokens.len(), tokens.len())
        );
        assert_eq!((scored.logprobs[0], scored.top[0].len()), (None, 0));

        let mut sum = 0.0;
        for (place, row) in rows[..tokens.len() - 1].iter().enumerate() {
            let found = f64::from(scored.logprobs[place + 1].unwrap());
            let wanted = row[tokens[place + 1] as usize];
            assert!(
                (found - wanted).abs() < 1e-3,
                "{name}, {place}: {found} {wanted}"
            );
            sum += wanted;
            let mut best = row.clone();
            best.sort_by(|a, b| b.total_cmp(a));
            assert_eq!(scored.top[place + 1].len(), 5);
            for (rank, top) in scored.top[place + 1].iter().enumerate() {
                let found = f64::from(top.logprob);
                assert!((found - best[rank]).abs() < 1e-3, "{name}, {place}, {rank}");
                assert!(
                    (found - row[top.id as usize]).abs() < 1e-3,
                    "{name}, {place}, {rank}"
                );
            }
        }
        let perplexity = (-sum / (tokens.len() - 1) as f64).exp();
        let found = scored.perplexity().unwrap();
        assert!(
            (found / perplexity - 1.0).abs() < 1e-3,
            "{name}: {found} {perplexity}"
        );
    }
}

#[test]
fn long_texts_are_scored_in_pieces_without_a_seam() {
    let model = model("llama-f32");
    // More than two pieces of the 128 positions that are projected at once.
    let tokens: Vec<u32> = (0..300).map(|n| 3 + (n * 7919) % 127).collect();
    let whole = score(&*model.model, &tokens, 2).unwrap();
    assert_eq!(whole.logprobs.len(), 300);
    let start = score(&*model.model, &tokens[..129], 2).unwrap();
    assert_eq!(start.logprobs.len(), 129);
    for (place, (long, short)) in whole
        .logprobs
        .iter()
        .zip(&start.logprobs)
        .enumerate()
        .skip(1)
    {
        assert!((long.unwrap() - short.unwrap()).abs() < 1e-4, "{place}");
    }
    // A position in the third piece has seen everything before it: the same last 130 tokens
    // after another beginning score differently.
    let mut other = tokens.clone();
    other[0] = 50;
    let other = score(&*model.model, &other, 0).unwrap();
    assert!((other.logprobs[280].unwrap() - whole.logprobs[280].unwrap()).abs() > 1e-7);
}

#[test]
fn borders_of_the_input() {
    let model = model("llama-f32");
    let one = score(&*model.model, &[5], 3).unwrap();
    assert_eq!(
        (one.logprobs.as_slice(), one.perplexity()),
        ([None].as_slice(), None)
    );
    let two = score(&*model.model, &[5, 6], 0).unwrap();
    assert_eq!(two.top, [vec![], vec![]]);
    // More alternatives than tokens: all of them, and their probabilities sum to 1.
    let all = score(&*model.model, &[5, 6], usize::MAX).unwrap();
    assert_eq!(all.top[1].len(), 130);
    let sum: f64 = all.top[1]
        .iter()
        .map(|top| f64::from(top.logprob).exp())
        .sum();
    assert!((sum - 1.0).abs() < 1e-5, "{sum}");
    assert!(all.top[1].is_sorted_by(|a, b| a.logprob >= b.logprob));
}
