//! How config.json says that layers are quantized: what mlx-lm's `load_model` makes of it (read in
//! its `utils.py`), and the errors of what it must not say.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Copy, Header, message};
use mlex_core::{QuantizationMode, Quantized};
use mlex_models::{ModelConfig, ModelFiles, load};
use mlex_nn::QuantizationConfig;
use serde_json::{Map, Value, json};

const FILE: &str = "model.safetensors";

fn read(config: Value) -> Result<QuantizationConfig, String> {
    let Value::Object(config) = config else {
        panic!("not an object: {config}");
    };
    let read = ModelConfig::new(config).quantization();
    read.map_err(|error| error.to_string())
}

fn layout(bits: i32, group_size: i32, mode: QuantizationMode) -> Option<Quantized> {
    Some(Quantized {
        bits,
        group_size,
        mode,
    })
}

fn affine(bits: i32, group_size: i32) -> Option<Quantized> {
    layout(bits, group_size, QuantizationMode::Affine)
}

fn fails(model: &Copy) -> String {
    let result = ModelFiles::open(model.path()).and_then(|files| load(&files, None, |_| {}));
    let error = result.expect_err("a broken model was loaded");
    message(&error, model.path())
}

/// The message for a config.json that was changed.
fn config_of(name: &str, change: impl FnOnce(&mut Map<String, Value>)) -> String {
    let model = Copy::of(name);
    model.edit("config.json", change);
    let message = fails(&model);
    let message = message.strip_prefix("M/config.json: ").expect(&message);
    message.to_owned()
}

/// The message for tensors that do not fit a config.json that was changed.
fn weights_of(name: &str, change: impl FnOnce(&mut Map<String, Value>)) -> String {
    let model = Copy::of(name);
    model.edit("config.json", change);
    let message = fails(&model);
    let tensors = "M: the tensors do not fit the model: ";
    message.strip_prefix(tensors).expect(&message).to_owned()
}

#[test]
fn a_layer_has_its_own_layout_or_that_of_the_section() {
    let config = read(json!({"quantization": {
        "group_size": 32,
        "bits": 4,
        "mode": "mxfp4",
        "full": {"group_size": 128, "bits": 3, "mode": "affine"},
        "no mode": {"group_size": 64, "bits": 8},
        "no group": {"bits": 6, "mode": "affine"},
        "null group": {"bits": 6, "group_size": null},
        "mode alone": {"mode": "nvfp4"},
        "nothing": {},
        "dense": false,
        "quantized": true,
    }}))
    .unwrap();
    let mxfp4 = layout(4, 32, QuantizationMode::Mxfp4);
    for (path, expected) in [
        ("full", affine(3, 128)),
        // The settings are handed to the layer: what they leave out is the layer's default.
        ("no mode", affine(8, 64)),
        ("no group", affine(6, 64)),
        ("null group", affine(6, 64)),
        ("mode alone", layout(4, 16, QuantizationMode::Nvfp4)),
        ("nothing", affine(4, 64)),
        ("dense", None),
        ("quantized", mxfp4),
        ("not named", mxfp4),
    ] {
        assert_eq!(config.layout(path), expected, "{path}");
    }
}

#[test]
fn sections_are_looked_for_in_order() {
    let (four, eight) = (json!({"bits": 4}), json!({"bits": 8}));
    for (config, expected) in [
        (json!({}), None),
        (json!({"quantization": null}), None),
        (json!({"quantization": {}}), affine(4, 64)),
        (
            json!({"quantization": {"mode": "mxfp8"}}),
            layout(8, 32, QuantizationMode::Mxfp8),
        ),
        (
            json!({"quantization": four, "quantization_config": eight}),
            affine(4, 64),
        ),
        (
            json!({"quantization": null, "quantization_config": eight}),
            affine(8, 64),
        ),
        (
            json!({"text_config": {"quantization_config": eight}}),
            affine(8, 64),
        ),
        (
            json!({"quantization": four, "text_config": {"quantization_config": eight}}),
            affine(4, 64),
        ),
        // MLX's own section wins over what another program has left.
        (
            json!({"quantization": four, "quantization_config": {"quant_method": "gptq"}}),
            affine(4, 64),
        ),
    ] {
        assert_eq!(read(config.clone()).unwrap().default, expected, "{config}");
    }
}

#[test]
fn methods_of_other_programs() {
    let method = |section: Value| read(json!({"quantization_config": section}));
    let mxfp4 = layout(4, 32, QuantizationMode::Mxfp4);
    let float8 = json!({"weights": {"num_bits": 8, "type": "float"}});
    for (section, expected) in [
        (
            json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}),
            None,
        ),
        (json!({"quant_method": "fbgemm_fp8"}), None),
        (
            json!({"quant_method": "modelopt", "quant_algo": "FP8"}),
            None,
        ),
        (
            json!({"quant_method": "compressed-tensors", "format": "float-quantized",
                   "config_groups": {"group_0": float8}}),
            None,
        ),
        (json!({"quant_method": "mxfp4"}), mxfp4),
        (json!({"quant_method": null, "bits": 8}), affine(8, 64)),
    ] {
        assert_eq!(
            method(section.clone()).unwrap().default,
            expected,
            "{section}"
        );
    }
    for (section, expected) in [
        (
            json!({"quant_method": "gptq"}),
            "quant_method: \"gptq\" is not supported",
        ),
        (
            json!({"quant_method": "awq", "bits": 4, "group_size": 128}),
            "quant_method: \"awq\" is not supported",
        ),
        (
            json!({"quant_method": 3}),
            "quant_method: 3 is not supported",
        ),
        (
            json!({"quant_method": "fp8", "fmt": "e5m2"}),
            "fmt: \"e5m2\" is not supported",
        ),
        (
            json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}),
            "quant_algo: \"NVFP4\" is not supported",
        ),
        (
            json!({"quant_method": "compressed-tensors", "format": "pack-quantized"}),
            "format: \"pack-quantized\" is not supported",
        ),
        (
            json!({"quant_method": "compressed-tensors", "format": "float-quantized",
                   "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}}),
            "config_groups.group_0.weights: expected num_bits 8 of type \"float\", \
             found num_bits 4 of type \"int\"",
        ),
    ] {
        let expected = format!("quantization_config.{expected}");
        assert_eq!(method(section.clone()), Err(expected), "{section}");
    }
}

#[test]
fn quantizations_that_mlx_does_not_have() {
    let section = |section: Value| {
        config_of("llama-4bit", |config| {
            config.insert("quantization".into(), section);
        })
    };
    let bits = "expected 2, 3, 4, 5, 6 or 8 for affine";
    assert_eq!(
        section(json!({"bits": 7, "group_size": 32})),
        format!("quantization.bits: {bits}, found 7")
    );
    assert_eq!(
        section(json!({"bits": 4, "group_size": 48})),
        "quantization.group_size: expected 32, 64 or 128 for affine, found 48"
    );
    assert_eq!(
        section(json!({"bits": 4, "group_size": 32, "mode": "turbo"})),
        "quantization.mode: expected affine, mxfp4, mxfp8 or nvfp4, found \"turbo\""
    );
    assert_eq!(
        section(json!({"bits": 8, "group_size": 32, "mode": "mxfp4"})),
        "quantization.bits: expected 4 for mxfp4, found 8"
    );
    assert_eq!(
        section(json!({"bits": "4", "group_size": 32})),
        "quantization.bits: expected a whole number, found \"4\""
    );
    assert_eq!(
        section(json!(4)),
        "quantization: expected an object, found 4"
    );
    let layer = json!({"bits": 4, "group_size": 32, "model.embed_tokens": {"bits": 9}});
    assert_eq!(
        section(layer),
        format!("quantization.model.embed_tokens.bits: {bits}, found 9")
    );
    // The hidden size 64 has no groups of 128.
    assert_eq!(
        section(json!({"bits": 4, "group_size": 128})),
        "model.embed_tokens: group_size: expected a divisor of the 64 columns, found 128"
    );
    assert_eq!(
        config_of("llama-4bit", |config| {
            config.remove("quantization");
            config.remove("quantization_config");
        }),
        "model.embed_tokens: quantization: expected a layout for the layer's scales, found none"
    );
    assert_eq!(
        config_of("llama-f32", |config| {
            config.insert(
                "quantization_config".into(),
                json!({"quant_method": "gptq"}),
            );
        }),
        "quantization_config.quant_method: \"gptq\" is not supported"
    );
    // Bits that do not fit the packed tensors.
    let message = weights_of("llama-4bit", |config| {
        config.insert("quantization".into(), json!({"bits": 8, "group_size": 32}));
    });
    assert!(
        message.contains("model.embed_tokens.weight: expected shape [130, 16], found [130, 8]"),
        "{message}"
    );
}

/// The message for a checkpoint of which one field in a header was changed.
fn with_entry(name: &str, tensor: &str, field: &str, value: Value) -> String {
    let model = Copy::of(name);
    let mut header = Header::read(&model, FILE);
    header.entry(tensor)[field] = value;
    header.write(&model, FILE);
    fails(&model)
}

#[test]
fn scales_that_do_not_fit_their_weight() {
    let tensors = "M: the tensors do not fit the model: ";
    let up_proj = "model.layers.0.mlp.up_proj";
    for part in ["scales", "biases"] {
        let name = format!("{up_proj}.{part}");
        let found = with_entry("llama-4bit", &name, "shape", json!([64, 4]));
        let expected =
            format!("1 of another shape ({name}: expected shape [128, 2], found [64, 4])");
        assert_eq!(found, format!("{tensors}{expected}"));
        let found = with_entry("llama-4bit", &name, "dtype", json!("I32"));
        let expected =
            format!("1 of another dtype ({name}: expected a floating-point type, found int32)");
        assert_eq!(found, format!("{tensors}{expected}"));
    }
    let name = format!("{up_proj}.scales");
    let found = with_entry("llama-mxfp4", &name, "dtype", json!("I8"));
    let expected = format!("1 of another dtype ({name}: expected uint8, found int8)");
    assert_eq!(found, format!("{tensors}{expected}"));
    // Packed weights without their scales are no weights.
    let model = Copy::of("llama-4bit");
    let mut header = Header::read(&model, FILE);
    header.rename(&name, "elsewhere.scales");
    header.write(&model, FILE);
    let message = fails(&model);
    assert!(
        message.contains(&format!(
            "{up_proj}.weight: expected shape [128, 64], found [128, 8]"
        )),
        "{message}"
    );
}

#[test]
fn scales_of_8_bit_floats_that_do_not_fit() {
    let name = "model.layers.0.mlp.down_proj.weight_scale_inv";
    // 64 rows and 80 columns in blocks of 32 and 48.
    for (field, value, expected) in [
        (
            "shape",
            json!([4, 1]),
            "shape: expected one scale, [64, 1] or [2, 2] for a weight of shape [64, 80], \
             found [4, 1]",
        ),
        (
            "dtype",
            json!("I32"),
            "dtype: expected F32, F16, BF16 or F8_E8M0, found I32",
        ),
    ] {
        assert_eq!(
            with_entry("fp8-block", name, field, value),
            format!("M/{FILE}: tensor {name:?}: {expected}")
        );
    }
    for (value, found) in [(json!([0, 1]), "a list of 2"), (json!(128), "128")] {
        let message = config_of("fp8-block", |config| {
            config["quantization_config"]["weight_block_size"] = value;
        });
        assert_eq!(
            message,
            format!(
                "quantization_config.weight_block_size: expected two sizes above 0, found {found}"
            )
        );
    }
    // Other blocks than the scales were made for.
    let model = Copy::of("fp8-block");
    model.edit("config.json", |config| {
        config["quantization_config"]["weight_block_size"] = json!([128, 128]);
    });
    let message = fails(&model);
    assert!(message.contains("expected one scale, "), "{message}");
}
