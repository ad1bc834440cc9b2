//! What is Gemma 4's own: windows at their edges, what the cache holds, and its config.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Copy, Expected, data, message};
use mlex_core::Array;
use mlex_models::{Input, Model, ModelFiles, load};
use mlex_nn::Cache;
use serde_json::{Value, json};

fn open(name: &str) -> Box<dyn Model> {
    let files = ModelFiles::open(data(name)).unwrap();
    load(&files, None, |_| {}).unwrap().model
}

fn forward(model: &dyn Model, tokens: &[u32], cache: &mut Cache) -> Array {
    let ids: Vec<i32> = tokens.iter().map(|&id| id as i32).collect();
    let ids = Array::from_slice(&ids, &[1, ids.len() as i32]).unwrap();
    let hidden = model.forward(Input::Tokens(&ids), cache).unwrap();
    model.logits(&hidden).unwrap().squeeze(0).unwrap()
}

/// Windows are 8 positions, the prompts 24.
#[test]
fn chunks_of_every_size_match_on_both_sides_of_the_window() {
    for name in ["gemma4-small", "gemma4-large", "gemma4-experts"] {
        let model = open(name);
        let expected = Expected::open(&format!("{name}/expected.safetensors"));
        let tokens = expected.tokens("tokens");
        let logits: Vec<f32> = expected.tensor("logits").to_vec().unwrap();
        let largest = logits.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        // A first piece, then pieces of one size.
        for first in [1, 7, 8, 9, 15] {
            for size in 1..=tokens.len() {
                let (head, rest) = tokens.split_at(first);
                let mut cache = model.new_cache().unwrap();
                let rows: Vec<Array> = std::iter::once(head)
                    .chain(rest.chunks(size))
                    .map(|piece| forward(&*model, piece, &mut cache))
                    .collect();
                let found = Array::concatenate(&rows, 0).unwrap();
                let error = found
                    .to_vec::<f32>()
                    .unwrap()
                    .iter()
                    .zip(&logits)
                    .fold(0.0f32, |max, (a, b)| max.max((a - b).abs()));
                assert!(error <= 1e-4 * largest, "{name}: {first}, {size}: {error}");
            }
        }
    }
}

#[test]
fn windowed_layers_hold_their_window_and_shared_layers_nothing() {
    // Two windowed layers with heads of 16, a full one with heads of 32, one head each, in f32;
    // three layers more that use theirs.
    let model = open("gemma4-small");
    let mut cache = model.new_cache().unwrap();
    assert_eq!(cache.layers().len(), 3);
    assert_eq!(model.info().num_layers, 6);
    assert_eq!(model.info().cache_per_token, 2 * (16 + 16 + 32));
    let chunk: Vec<u32> = (0..1000).map(|i| 3 + i % 120).collect();
    let mut full_bytes = 0;
    for step in 1..=4 {
        forward(&*model, &chunk, &mut cache).eval().unwrap();
        forward(&*model, &[5], &mut cache).eval().unwrap();
        assert_eq!(cache.len(), 1001 * step);
        // Keys and values of a head, in positions of so many entries.
        let bytes = |positions: i32, dim: i32| (2 * positions * dim * 4) as usize;
        full_bytes = bytes(1001 * step, 32);
        let most = 2 * bytes(8 + 2 * 256 + 255, 16) + bytes(1001 * step + 255, 32);
        assert!(
            (full_bytes..=most).contains(&cache.nbytes()),
            "{} bytes after {} tokens, at most {most} expected",
            cache.nbytes(),
            cache.len()
        );
    }
    // Without windows it would be twice the full layer.
    assert!(cache.nbytes() < full_bytes * 3 / 2);
}

/// The error of a checkpoint with a changed config.
fn refused(name: &str, change: impl FnOnce(&mut serde_json::Map<String, Value>)) -> String {
    let copy = Copy::of(name);
    copy.edit("config.json", change);
    let files = ModelFiles::open(copy.path()).unwrap();
    let error = load(&files, None, |_| {}).map(|_| ()).unwrap_err();
    message(&error, copy.path())
}

#[test]
fn a_wrong_config_is_named_by_its_field() {
    let field = |name: &str, value: Value| {
        refused("gemma4-small", |config| {
            config.insert(name.to_owned(), value);
        })
    };
    let layers = |kinds: &[&str]| field("layer_types", json!(kinds));
    let (sliding, full) = ("sliding_attention", "full_attention");
    let cases = [
        (
            layers(&[sliding, full]),
            "layer_types: expected 6 entries, found 2",
        ),
        (
            layers(&[sliding, full, sliding, full, "linear_attention", full]),
            "layer_types: \"linear_attention\" is not supported",
        ),
        (
            layers(&[sliding, sliding, sliding, full, sliding, full]),
            "num_kv_shared_layers: expected less: layer 3 has none to share with, found 3",
        ),
        (
            field("num_kv_shared_layers", json!(6)),
            "num_kv_shared_layers: expected a number from 0 to 5, found 6",
        ),
        (
            field("num_kv_shared_layers", json!(-1)),
            "num_kv_shared_layers: expected a number from 0 to 5, found -1",
        ),
        (
            field("hidden_activation", json!("silu")),
            "hidden_activation: \"silu\" is not supported",
        ),
        (
            field("use_bidirectional_attention", json!("all")),
            "use_bidirectional_attention: \"all\" is not supported",
        ),
        (
            field("final_logit_softcapping", json!(0)),
            "final_logit_softcapping: expected a positive number, found 0",
        ),
        (
            field("sliding_window", json!(0)),
            "sliding_window: expected a positive number, found 0",
        ),
        (
            field("num_key_value_heads", json!(3)),
            "num_key_value_heads: expected a divisor of the 4 query heads, found 3",
        ),
        (
            field("global_head_dim", json!(i32::MAX)),
            "global_head_dim: expected a number from 1 to 16777216, found 2147483647",
        ),
        (
            field("hidden_size_per_layer_input", json!(16_777_216)),
            "num_hidden_layers * hidden_size_per_layer_input: expected a number from 1 to \
             16777216, found 100663296",
        ),
        (
            field("enable_moe_block", json!(true)),
            "missing field num_experts",
        ),
        (
            field("rope_parameters", json!({full: {"rope_type": "spiral"}})),
            "rope_scaling.type: \"spiral\" is not supported",
        ),
        (
            field(
                "rope_parameters",
                json!({full: {"rope_type": "proportional", "partial_rotary_factor": 2}}),
            ),
            "partial_rotary_factor: expected a number from 0 to 1, found 2",
        ),
        (
            refused("gemma4-large", |config| {
                config["text_config"]["hidden_size"] = json!("wide");
            }),
            "text_config.hidden_size: expected a whole number, found \"wide\"",
        ),
        (
            refused("gemma4-experts", |config| {
                config["text_config"]["top_k_experts"] = json!(7);
            }),
            "top_k_experts: expected a number from 1 to 6, found 7",
        ),
    ];
    for (found, expected) in cases {
        assert_eq!(found, format!("M/config.json: {expected}"));
    }
}

#[test]
fn null_switches_off_what_absence_leaves_on() {
    // Heads of full layers fall back to those of the others, so that shapes do not fit.
    let found = refused("gemma4-small", |config| {
        config.insert("global_head_dim".to_owned(), Value::Null);
    });
    assert!(
        found.contains("layers.2.self_attn.k_norm.weight"),
        "{found}"
    );

    let copy = Copy::of("gemma4-small");
    copy.edit("config.json", |config| {
        config.insert("final_logit_softcapping".to_owned(), Value::Null);
    });
    let files = ModelFiles::open(copy.path()).unwrap();
    let plain = load(&files, None, |_| {}).unwrap().model;
    let capped = open("gemma4-small");
    let tokens = [5, 9, 20];
    let plain = forward(&*plain, &tokens, &mut plain.new_cache().unwrap());
    let capped = forward(&*capped, &tokens, &mut capped.new_cache().unwrap());
    // The checkpoint's cap is 8.
    for (plain, capped) in plain
        .to_vec::<f32>()
        .unwrap()
        .iter()
        .zip(capped.to_vec::<f32>().unwrap())
    {
        assert!((8.0 * (plain / 8.0).tanh() - capped).abs() < 1e-4);
    }
}

#[test]
fn embeddings_need_their_tokens_where_layers_have_embeddings() {
    let model = open("gemma4-small");
    let embeddings = Array::zeros(&[1, 2, 32], mlex_core::Dtype::Float32).unwrap();
    let mut cache = model.new_cache().unwrap();
    let error = model
        .forward(Input::Embeddings(&embeddings), &mut cache)
        .unwrap_err();
    assert!(error.to_string().starts_with("input: "), "{error}");
    let model = open("gemma4-large");
    let mut cache = model.new_cache().unwrap();
    let hidden = model
        .forward(Input::Embeddings(&embeddings), &mut cache)
        .unwrap();
    assert_eq!(hidden.shape(), [1, 2, 32]);
}
