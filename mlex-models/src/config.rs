//! `config.json`: what is common to all architectures, and typed reading of the rest.

use std::ops::RangeInclusive;
use std::path::Path;

use mlex_nn::{RopeConfig, RopeScaling};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use serde_path_to_error::Segment;

use crate::{Error, Result, ResultExt};

/// The largest config file that is read.
const MAX_CONFIG_BYTES: u64 = 64 << 20;
/// More than any model has; what a hostile file may make us loop over.
const MAX_LAYERS: i32 = 1024;
/// The same for widths, heads and vocabularies.
const MAX_SIZE: i32 = 1 << 24;

/// A model's configuration as a JSON object.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    json: Map<String, Value>,
    /// `repetition_penalty` of generation_config.json.
    repetition_penalty: Option<Value>,
}

impl ModelConfig {
    /// A configuration from a JSON object.
    pub fn new(json: Map<String, Value>) -> Self {
        Self {
            json,
            repetition_penalty: None,
        }
    }

    /// Reads `config.json` of a model directory; `eos_token_id` of `generation_config.json`
    /// wins, as in mlx-lm.
    ///
    /// # Errors
    /// When a file is missing, too large or not a JSON object; the error names it.
    pub fn open(dir: &Path) -> Result<Self> {
        let mut json = read_json_object(&dir.join("config.json"))?;
        let mut repetition_penalty = None;
        let path = dir.join("generation_config.json");
        if path.exists() {
            let generation = read_json_object(&path)?;
            if let Some(ids) = generation.get("eos_token_id").filter(|ids| !ids.is_null()) {
                // Here, where it is known which file they are from.
                token_ids("eos_token_id", ids).with_path(&path)?;
                json.insert("eos_token_id".to_owned(), ids.clone());
            }
            repetition_penalty = generation.get("repetition_penalty").cloned();
        }
        Ok(Self {
            json,
            repetition_penalty,
        })
    }

    /// `repetition_penalty` of `generation_config.json`, where it has one.
    ///
    /// # Errors
    /// When it is not a positive number.
    pub fn repetition_penalty(&self) -> Result<Option<f32>> {
        let Some(value) = self.repetition_penalty.as_ref().filter(|x| !x.is_null()) else {
            return Ok(None);
        };
        let penalty = value.as_f64().map(|penalty| penalty as f32);
        match penalty.filter(|penalty| penalty.is_finite() && *penalty > 0.0) {
            Some(penalty) => Ok(Some(penalty)),
            None => Err(Error::field(
                "repetition_penalty of generation_config.json",
                "a positive number",
                shown(value),
            )),
        }
    }

    /// The JSON object.
    pub fn json(&self) -> &Map<String, Value> {
        &self.json
    }

    /// The name of the architecture.
    ///
    /// # Errors
    /// When there is none.
    pub fn model_type(&self) -> Result<&str> {
        match self.json.get("model_type") {
            Some(Value::String(name)) => Ok(name),
            Some(other) => Err(Error::field("model_type", "a string", shown(other))),
            None => Err(Error::missing("field model_type")),
        }
    }

    /// The fields that an architecture names, with their types and defaults. A field that is
    /// `null` counts as absent.
    ///
    /// # Errors
    /// When a field is missing or of another type; the error names it.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T> {
        let present = self.json.iter().filter(|(_, value)| !value.is_null());
        let object: Map<String, Value> = present
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect();
        parse(&Value::Object(object))
    }

    /// As [`parse`](Self::parse), for an architecture where a field that is `null` is not the same
    /// as one that is absent.
    pub(crate) fn parse_with_nulls<T: DeserializeOwned>(&self) -> Result<T> {
        parse(&Value::Object(self.json.clone()))
    }

    /// The ids that end a text: a number or a list under `eos_token_id`.
    ///
    /// # Errors
    /// When they are something else.
    pub fn eos_token_ids(&self) -> Result<Vec<u32>> {
        match self.json.get("eos_token_id") {
            None | Some(Value::Null) => Ok(Vec::new()),
            Some(ids) => token_ids("eos_token_id", ids),
        }
    }
}

/// A token id, or a list of them.
fn token_ids(field: &str, value: &Value) -> Result<Vec<u32>> {
    let id = |value: &Value| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| Error::field(field, "a token id or a list of them", shown(value)))
    };
    match value {
        Value::Array(ids) => ids.iter().map(id).collect(),
        value => Ok(vec![id(value)?]),
    }
}

/// A typed value out of JSON.
fn parse<T: DeserializeOwned>(json: &Value) -> Result<T> {
    serde_path_to_error::deserialize(json).map_err(|error| {
        let path = error.path().to_string();
        let message = error.inner().to_string();
        if let Some(field) = message.strip_prefix("missing field ") {
            return Error::missing(format!("field {}", field.trim_matches('`')));
        }
        let mut found = Some(json);
        for segment in error.path() {
            found = found.and_then(|value| match segment {
                Segment::Map { key } => value.get(key),
                Segment::Seq { index } => value.get(index),
                _ => None,
            });
        }
        let found = found.map_or_else(|| message.clone(), shown);
        let expected = message.rsplit_once(", expected ").map(|(_, name)| name);
        Error::field(path, expected.map_or("a valid value", in_words), found)
    })
}

/// What serde names by a Rust type, as the file's author knows it.
fn in_words(expected: &str) -> &str {
    match expected {
        "i32" | "u8" => "a whole number",
        "f32" => "a number",
        "a boolean" => "true or false",
        "a sequence" => "a list",
        other if other.starts_with("struct ") => "an object",
        other => other,
    }
}

/// A value as an error shows it, however large it is.
pub(crate) fn shown(value: &Value) -> String {
    const MAX: usize = 60;
    match value {
        Value::Array(items) => format!("a list of {}", items.len()),
        Value::Object(_) => "an object".to_owned(),
        Value::String(text) if text.chars().count() > MAX => {
            let start: String = text.chars().take(MAX).collect();
            format!("{start:?}...")
        }
        Value::String(text) => format!("{text:?}"),
        other => other.to_string(),
    }
}

/// Reads a JSON object of a reasonable size.
pub(crate) fn read_json_object(path: &Path) -> Result<Map<String, Value>> {
    let read = || -> Result<Map<String, Value>> {
        let size = std::fs::metadata(path)?.len();
        if size > MAX_CONFIG_BYTES {
            let expected = format!("at most {MAX_CONFIG_BYTES} bytes");
            return Err(Error::field("file size", expected, format!("{size} bytes")));
        }
        match serde_json::from_slice(&std::fs::read(path)?)? {
            Value::Object(object) => Ok(object),
            other => Err(Error::field("content", "a JSON object", shown(&other))),
        }
    };
    read().map_err(|error| error.with_path(path))
}

/// Checks that a number of a config is within `range`.
pub(crate) fn check(field: &str, value: i32, range: RangeInclusive<i32>) -> Result<()> {
    if range.contains(&value) {
        return Ok(());
    }
    let expected = format!("a number from {} to {}", range.start(), range.end());
    Err(Error::field(field, expected, value.to_string()))
}

/// Checks a width, a count of heads or a vocabulary.
pub(crate) fn check_size(field: &str, value: i32) -> Result<()> {
    check(field, value, 1..=MAX_SIZE)
}

/// Checks a count of layers.
pub(crate) fn check_layers(field: &str, value: i32) -> Result<()> {
    check(field, value, 1..=MAX_LAYERS)
}

/// The width of a head where the config gives none: the heads share the hidden size, which they
/// must divide.
pub(crate) fn head_dim(hidden_size: i32, num_heads: i32) -> Result<i32> {
    check_size("hidden_size", hidden_size)?;
    check_size("num_attention_heads", num_heads)?;
    if hidden_size % num_heads != 0 {
        let expected = format!("a divisor of the hidden_size {hidden_size}");
        return Err(Error::field(
            "num_attention_heads",
            expected,
            num_heads.to_string(),
        ));
    }
    Ok(hidden_size / num_heads)
}

/// Checks that a number is positive and finite.
pub(crate) fn check_positive(field: &str, value: f32) -> Result<()> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(Error::field(field, "a positive number", value.to_string()))
}

/// The `rope_scaling` section, or the newer `rope_parameters`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct RopeSection {
    #[serde(rename = "type")]
    kind: Option<String>,
    rope_type: Option<String>,
    /// The base, in `rope_parameters`.
    pub(crate) rope_theta: Option<f32>,
    factor: Option<f32>,
    low_freq_factor: Option<f32>,
    high_freq_factor: Option<f32>,
    original_max_position_embeddings: Option<f32>,
    beta_fast: Option<f32>,
    beta_slow: Option<f32>,
    mscale: Option<f32>,
    mscale_all_dim: Option<f32>,
    long_factor: Option<Vec<f32>>,
    partial_rotary_factor: Option<f32>,
}

impl RopeSection {
    /// The scaling that it describes, defaults as in mlx-lm (`rope_utils.initialize_rope`).
    pub(crate) fn scaling(&self, max_position_embeddings: Option<i32>) -> Result<RopeScaling> {
        let need = |field: &str, value: Option<f32>| {
            value.ok_or_else(|| Error::missing(format!("field rope_scaling.{field}")))
        };
        let kind = self
            .kind
            .as_deref()
            .or(self.rope_type.as_deref())
            .unwrap_or("default");
        Ok(match kind {
            "default" | "mrope" => RopeScaling::None,
            "linear" => RopeScaling::Linear {
                factor: need("factor", self.factor)?,
            },
            "llama3" => RopeScaling::Llama3 {
                factor: need("factor", self.factor)?,
                low_freq_factor: self.low_freq_factor.unwrap_or(1.0),
                high_freq_factor: self.high_freq_factor.unwrap_or(4.0),
                original_max_position_embeddings: self
                    .original_max_position_embeddings
                    .unwrap_or(8192.0),
            },
            "yarn" | "deepseek_yarn" | "telechat3-yarn" => RopeScaling::Yarn {
                factor: need("factor", self.factor)?,
                original_max_position_embeddings: self
                    .original_max_position_embeddings
                    .unwrap_or(4096.0),
                beta_fast: self.beta_fast.unwrap_or(32.0),
                beta_slow: self.beta_slow.unwrap_or(1.0),
                mscale: self.mscale.unwrap_or(1.0),
                mscale_all_dim: self.mscale_all_dim.unwrap_or(0.0),
            },
            "longrope" | "su" => RopeScaling::Long {
                long_factor: self
                    .long_factor
                    .clone()
                    .ok_or_else(|| Error::missing("field rope_scaling.long_factor"))?,
                max_position_embeddings: max_position_embeddings
                    .map(|positions| positions as f32)
                    .ok_or_else(|| Error::missing("field max_position_embeddings"))?,
                original_max_position_embeddings: need(
                    "original_max_position_embeddings",
                    self.original_max_position_embeddings,
                )?,
            },
            "proportional" => RopeScaling::Proportional {
                factor: self.factor.unwrap_or(1.0),
                partial_rotary_factor: self.partial_rotary_factor.unwrap_or(1.0),
            },
            other => {
                return Err(Error::unsupported(
                    "rope_scaling.type",
                    shown(&Value::String(other.to_owned())),
                ));
            }
        })
    }
}

/// The fields about rotary embedding that most architectures have.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct RopeFields {
    rope_theta: Option<f32>,
    rope_traditional: bool,
    rope_scaling: Option<RopeSection>,
    rope_parameters: Option<RopeSection>,
    max_position_embeddings: Option<i32>,
}

impl RopeFields {
    /// The settings of a rotary embedding over the `dims` entries of a head.
    pub(crate) fn rope(&self, dims: i32, default_theta: f32) -> Result<RopeConfig> {
        if dims <= 0 || dims % 2 != 0 {
            let expected = "a positive even number";
            return Err(Error::field("head_dim", expected, dims.to_string()));
        }
        let theta = self.theta();
        let scaling = match self.section() {
            Some(section) => section.scaling(self.max_position_embeddings)?,
            None => RopeScaling::None,
        };
        Ok(RopeConfig {
            dims,
            base: theta.unwrap_or(default_theta),
            traditional: self.rope_traditional,
            scaling,
        })
    }

    /// As [`rope`](Self::rope), for an architecture that has no base of its own.
    pub(crate) fn rope_required(&self, dims: i32) -> Result<RopeConfig> {
        self.rope(
            dims,
            self.theta()
                .ok_or_else(|| Error::missing("field rope_theta"))?,
        )
    }

    fn section(&self) -> Option<&RopeSection> {
        self.rope_scaling.as_ref().or(self.rope_parameters.as_ref())
    }

    fn theta(&self) -> Option<f32> {
        self.rope_theta
            .or(self.section().and_then(|section| section.rope_theta))
    }

    /// The longest context that the model was made for.
    pub(crate) fn max_position_embeddings(&self) -> Option<i32> {
        self.max_position_embeddings
    }
}
