//! What is NemotronH's own: the spellings of its layers, what its cache holds, and its config.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Copy, message};
use mlex_core::Array;
use mlex_models::{Input, Model, ModelFiles, load};
use mlex_nn::{Cache, LayerCache};
use serde_json::{Map, Value, json};

fn forward(model: &dyn Model, tokens: &[i32], cache: &mut Cache) -> Array {
    let ids = Array::from_slice(tokens, &[1, tokens.len() as i32]).unwrap();
    let hidden = model.forward(Input::Tokens(&ids), cache).unwrap();
    model.logits(&hidden).unwrap()
}

/// The model of a checkpoint with a changed config, or the error.
fn changed(
    name: &str,
    change: impl FnOnce(&mut Map<String, Value>),
) -> Result<Box<dyn Model>, String> {
    let copy = Copy::of(name);
    copy.edit("config.json", change);
    let files = ModelFiles::open(copy.path()).unwrap();
    match load(&files, None, |_| {}) {
        Ok(loaded) => Ok(loaded.model),
        Err(error) => Err(message(&error, copy.path())),
    }
}

#[test]
fn layers_go_by_old_and_new_names() {
    let tokens = [3, 9, 27, 11, 5];
    let logits = |model: Box<dyn Model>| -> Vec<f32> {
        let mut cache = model.new_cache().unwrap();
        forward(&*model, &tokens, &mut cache).to_vec().unwrap()
    };
    let expected = logits(changed("nemotron_h-experts", |_| {}).unwrap());
    let old = ["mamba", "moe", "attention", "moe", "mamba", "mlp"];
    let new = [
        "linear_attention",
        "moe",
        "full_attention",
        "moe",
        "linear_attention",
        "mlp",
    ];
    for (field, kinds) in [
        (
            "hybrid_override_pattern",
            json!(["M", "E", "*", "E", "M", "-"]),
        ),
        ("layers_block_type", json!(old)),
        ("layers_block_type", json!(new)),
        ("layer_types", json!(new)),
    ] {
        let model = changed("nemotron_h-experts", |config| {
            config.remove("hybrid_override_pattern");
            config.insert(field.to_owned(), kinds);
        });
        assert_eq!(logits(model.unwrap()), expected, "{field}");
    }
}

#[test]
fn a_recurrent_layer_holds_as_much_after_any_text() {
    let model = changed("nemotron_h-dense", |_| {}).unwrap();
    let mut cache = model.new_cache().unwrap();
    // Two Mamba layers and one of attention; the others have no state.
    assert_eq!(cache.layers().len(), 3);
    assert_eq!(model.info().num_layers, 5);
    assert_eq!(model.info().cache_per_token, 2 * 2 * 8);
    let tokens: Vec<i32> = (0..300).map(|i| 3 + i % 60).collect();
    for _ in 0..3 {
        forward(&*model, &tokens, &mut cache).eval().unwrap();
        let recurrent = cache.layers().iter().filter_map(|layer| match layer {
            LayerCache::Recurrent(cache) => Some(cache.arrays().map(Array::nbytes).sum::<usize>()),
            _ => None,
        });
        // The inputs of the convolution, 3 positions of 4 * 12 + 2 * 16 channels, and the state,
        // 4 heads of 12 by 16, in f32.
        let expected = 4 * (3 * 80 + 4 * 12 * 16);
        assert_eq!(recurrent.collect::<Vec<_>>(), [expected; 2]);
    }
    // What a recurrent layer has seen it cannot forget in part.
    assert!(!cache.can_trim(1));
    assert!(cache.can_trim(900));
    cache.trim(900).unwrap();
    assert!(cache.is_empty());
}

#[test]
fn a_wrong_config_is_named_by_its_field() {
    let field = |name: &str, value: Value| {
        let model = changed("nemotron_h-experts", |config| {
            config.insert(name.to_owned(), value);
        });
        model.map(|_| ()).unwrap_err()
    };
    let cases = [
        (
            field("hybrid_override_pattern", json!("MX")),
            "hybrid_override_pattern: \"X\" is not supported",
        ),
        (
            field("hybrid_override_pattern", json!("")),
            "length of hybrid_override_pattern: expected a number from 1 to 1024, found 0",
        ),
        (
            field("hybrid_override_pattern", json!(null)),
            "missing field hybrid_override_pattern",
        ),
        (
            field("n_groups", json!(3)),
            "n_groups: expected a divisor of the 4 heads, found 3",
        ),
        (
            field("n_group", json!(3)),
            "n_group: expected a divisor of the 8 experts, with two of them in a group, found 3",
        ),
        (
            field("n_group", json!(8)),
            "n_group: expected a divisor of the 8 experts, with two of them in a group, found 8",
        ),
        (
            field("topk_group", json!(5)),
            "topk_group: expected a number from 1 to 4, found 5",
        ),
        (
            field("num_experts_per_tok", json!(9)),
            "num_experts_per_tok: expected a number from 1 to 8, found 9",
        ),
        (
            field("moe_shared_expert_intermediate_size", json!(null)),
            "missing field moe_shared_expert_intermediate_size",
        ),
        (
            field("conv_kernel", json!(1_000_000)),
            "conv_kernel: expected a number from 2 to 64, found 1000000",
        ),
        (
            field("mamba_num_heads", json!(i32::MAX)),
            "mamba_num_heads: expected a number from 1 to 16777216, found 2147483647",
        ),
        (
            field("time_step_limit", json!([1.0])),
            "time_step_limit: expected a tuple of size 2, found a list of 1",
        ),
    ];
    for (found, expected) in cases {
        assert_eq!(found, format!("M/config.json: {expected}"));
    }
}
