//! The parts of config.json that say how layers are quantized.

use std::collections::BTreeMap;

use mlex_core::{ErrorKind, QuantizationMode, Quantized};
use mlex_nn::QuantizationConfig;
use serde_json::{Map, Value};

use crate::config::{ModelConfig, shown};
use crate::fp8::DEFAULT_BLOCK;
use crate::{Error, Result};

/// MLX's own section, and the one that other programs write.
pub(crate) const SECTIONS: [&str; 2] = ["quantization", "quantization_config"];

impl ModelConfig {
    /// How the layers are quantized, as mlx-lm reads it: `quantization` where there is one, else
    /// `quantization_config`, which may stand in `text_config`. The section gives the layout of
    /// all layers, and those of single ones under their paths. It matters only for layers that
    /// have `.scales`.
    ///
    /// A `quantization_config` with a `quant_method` is of another program. Its 8-bit floats are
    /// read as dense weights, so that no layer is quantized then.
    ///
    /// # Errors
    /// When a setting is not one that MLX has, or the method is none that is read.
    pub fn quantization(&self) -> Result<QuantizationConfig> {
        let Some((key, value)) = self.quantization_section() else {
            return Ok(QuantizationConfig::default());
        };
        let section = object(&key, value)?;
        if !key.ends_with(SECTIONS[0])
            && let Some(method) = section.get("quant_method").filter(|value| !value.is_null())
        {
            return foreign(&key, method, section);
        }
        let default = layout(&key, section, QuantizationMode::Affine.into())?;
        let mut layers = BTreeMap::new();
        for (path, value) in section {
            match value {
                Value::Object(settings) => {
                    let key = format!("{key}.{path}");
                    // Not the section's: mlx-lm hands these to the layer as they are, whose
                    // defaults are those of the mode, and affine is the default of that.
                    let layout = layout(&key, settings, QuantizationMode::Affine.into())?;
                    layers.insert(path.clone(), Some(layout));
                }
                Value::Bool(false) => {
                    layers.insert(path.clone(), None);
                }
                // `true`, and the scalars that describe the default.
                _ => {}
            }
        }
        Ok(QuantizationConfig {
            default: Some(default),
            layers,
        })
    }

    /// Rows and columns of the blocks that share a scale, in checkpoints of 8-bit floats.
    ///
    /// # Errors
    /// When `weight_block_size` is no pair of sizes.
    pub(crate) fn fp8_block(&self) -> Result<[usize; 2]> {
        let Some((key, Value::Object(section))) = self.quantization_section() else {
            return Ok(DEFAULT_BLOCK);
        };
        let value = match section.get("weight_block_size") {
            None | Some(Value::Null) => return Ok(DEFAULT_BLOCK),
            Some(value) => value,
        };
        let size = |value: &Value| {
            let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
            size.filter(|size| (1..=1 << 24).contains(size))
        };
        let pair = match value.as_array().map(Vec::as_slice) {
            Some([rows, columns]) => size(rows).zip(size(columns)),
            _ => None,
        };
        pair.map(|(rows, columns)| [rows, columns]).ok_or_else(|| {
            let field = format!("{key}.weight_block_size");
            Error::field(field, "two sizes above 0", shown(value))
        })
    }

    /// The section that counts, and where it stands.
    fn quantization_section(&self) -> Option<(String, &Value)> {
        SECTIONS
            .iter()
            .find_map(|key| {
                let value = self.json().get(*key).filter(|value| !value.is_null())?;
                Some(((*key).to_owned(), value))
            })
            .or_else(|| {
                let text = self.json().get("text_config")?.as_object()?;
                let value = text.get(SECTIONS[1]).filter(|value| !value.is_null())?;
                Some((format!("text_config.{}", SECTIONS[1]), value))
            })
    }
}

/// What `method` of another program's section amounts to.
fn foreign(key: &str, method: &Value, section: &Map<String, Value>) -> Result<QuantizationConfig> {
    let unsupported =
        |field: &str, value: &Value| Error::unsupported(format!("{key}.{field}"), shown(value));
    // A field that must say one of `known` where it says something.
    let check = |field: &str, known: &[&str]| match section.get(field) {
        None | Some(Value::Null) => Ok(()),
        Some(Value::String(found)) if known.contains(&found.as_str()) => Ok(()),
        Some(other) => Err(unsupported(field, other)),
    };
    match method.as_str() {
        Some("fp8") => check("fmt", &["e4m3"])?,
        Some("fbgemm_fp8") => {}
        Some("compressed-tensors") => {
            check("format", &["float-quantized"])?;
            check_float_groups(key, section)?;
        }
        Some("modelopt") => check("quant_algo", &["FP8"])?,
        Some("mxfp4") => return Ok(QuantizationConfig::uniform(QuantizationMode::Mxfp4.into())),
        _ => return Err(unsupported("quant_method", method)),
    }
    Ok(QuantizationConfig::default())
}

/// Checks that the groups of a compressed-tensors section are 8-bit floats.
fn check_float_groups(key: &str, section: &Map<String, Value>) -> Result<()> {
    let Some(Value::Object(groups)) = section.get("config_groups") else {
        return Ok(());
    };
    for (name, group) in groups {
        let Some(weights) = group.get("weights").filter(|weights| !weights.is_null()) else {
            continue;
        };
        let field = |field: &str| weights.get(field).cloned().unwrap_or_default();
        let (bits, kind) = (field("num_bits"), field("type"));
        if bits.as_u64() != Some(8) || kind.as_str() != Some("float") {
            return Err(Error::field(
                format!("{key}.config_groups.{name}.weights"),
                "num_bits 8 of type \"float\"",
                format!("num_bits {} of type {}", shown(&bits), shown(&kind)),
            ));
        }
    }
    Ok(())
}

fn object<'a>(key: &str, value: &'a Value) -> Result<&'a Map<String, Value>> {
    value
        .as_object()
        .ok_or_else(|| Error::field(key, "an object", shown(value)))
}

/// The layout that `settings` describe, found under `key`. What they leave out is as in `base`,
/// or as MLX has it where they name another mode.
///
/// # Errors
/// When MLX has no such layout; the error names the field.
pub(crate) fn layout(
    key: &str,
    settings: &Map<String, Value>,
    base: Quantized,
) -> Result<Quantized> {
    let mode = match settings.get("mode") {
        None | Some(Value::Null) => base.mode,
        Some(Value::String(name)) => name.parse().map_err(|_| {
            let expected = "affine, mxfp4, mxfp8 or nvfp4";
            let found = shown(&Value::String(name.clone()));
            Error::field(format!("{key}.mode"), expected, found)
        })?,
        Some(other) => {
            let found = shown(other);
            return Err(Error::field(format!("{key}.mode"), "a string", found));
        }
    };
    let base = if mode == base.mode { base } else { mode.into() };
    let number = |name: &str, default: i32| match settings.get(name) {
        None | Some(Value::Null) => Ok(default),
        Some(value) => value
            .as_i64()
            .and_then(|number| i32::try_from(number).ok())
            .ok_or_else(|| Error::field(format!("{key}.{name}"), "a whole number", shown(value))),
    };
    let layout = Quantized {
        bits: number("bits", base.bits)?,
        group_size: number("group_size", base.group_size)?,
        mode,
    };
    check_layout(key, layout)?;
    Ok(layout)
}

/// Checks that MLX has a layout; `key` is where it was found.
///
/// # Errors
/// A [`Field`](crate::ErrorKind::Field) error that names what is wrong with it.
pub(crate) fn check_layout(key: &str, layout: Quantized) -> Result<()> {
    layout.check().map_err(|error| match error.kind() {
        ErrorKind::Argument {
            argument,
            expected,
            found,
        } => Error::field(format!("{key}.{argument}"), *expected, found.clone()),
        _ => error.into(),
    })
}
