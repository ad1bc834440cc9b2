//! The config.json of the result.

use mlex_core::{Dtype, Quantized};
use mlex_nn::QuantizationConfig;
use serde_json::{Map, Value, json};

use crate::quantization::SECTIONS;

/// Where a config says the type of its weights.
const DTYPE_KEYS: [&str; 2] = ["torch_dtype", "dtype"];

/// What describes a tower, whose tensors may be left out.
const TOWER_KEYS: [&str; 2] = ["vision_config", "audio_config"];

/// The config of a model that is quantized so and cast to `dtype`.
pub(super) fn converted(
    config: &Map<String, Value>,
    quantization: Option<&QuantizationConfig>,
    dtype: Option<Dtype>,
    has_towers: bool,
) -> Map<String, Value> {
    let mut config = config.clone();
    // Where the weights were once; of no meaning elsewhere.
    config.shift_remove("_name_or_path");
    for key in TOWER_KEYS.iter().filter(|_| !has_towers) {
        config.shift_remove(*key);
    }
    update(&mut config, dtype);
    if let Some(Value::Object(text)) = config.get_mut("text_config") {
        update(text, dtype);
    }
    if let Some(section) = quantization.and_then(section) {
        // Twice, as mlx-lm has it: the second name is what the Hub looks at.
        for key in SECTIONS {
            config.insert(key.to_owned(), section.clone());
        }
    }
    config
}

/// Takes out what the conversion makes untrue.
fn update(config: &mut Map<String, Value>, dtype: Option<Dtype>) {
    for key in SECTIONS {
        config.shift_remove(key);
    }
    if let Some(dtype) = dtype {
        for key in DTYPE_KEYS {
            if let Some(value @ Value::String(_)) = config.get_mut(key) {
                *value = json!(dtype.name());
            }
        }
    }
}

/// The section as mlx-lm writes it.
fn section(quantization: &QuantizationConfig) -> Option<Value> {
    let settings = |layout: &Quantized| {
        Map::from_iter([
            ("group_size".to_owned(), json!(layout.group_size)),
            ("bits".to_owned(), json!(layout.bits)),
            ("mode".to_owned(), json!(layout.mode.name())),
        ])
    };
    let mut section = settings(quantization.default.as_ref()?);
    for (path, layout) in &quantization.layers {
        let value = layout.as_ref().map(settings);
        section.insert(path.clone(), value.map_or(json!(false), Value::Object));
    }
    Some(Value::Object(section))
}
