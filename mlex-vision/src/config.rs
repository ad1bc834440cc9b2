//! The processor configurations of a checkpoint.

use std::path::Path;

use serde_json::Value;

use crate::error::{Error, ErrorKind, Result};
use crate::limits;

/// The files of a checkpoint that say how media are prepared. A checkpoint has some of them, or
/// none; what they leave open has the default of the family's Python processor.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ProcessorFiles {
    /// `preprocessor_config.json`
    pub preprocessor: Option<Value>,
    /// `processor_config.json`
    pub processor: Option<Value>,
    /// `video_preprocessor_config.json`
    pub video_preprocessor: Option<Value>,
}

impl ProcessorFiles {
    /// Reads those of the files that the directory of a checkpoint has.
    ///
    /// # Errors
    ///
    /// If one is there and cannot be read, is longer than 1 MiB or is no JSON object.
    pub fn read(directory: impl AsRef<Path>) -> Result<Self> {
        let directory = directory.as_ref();
        let read = |name: &str| {
            let path = directory.join(name);
            if !path.exists() {
                return Ok(None);
            }
            let bytes = limits::read(&path, 1 << 20)?;
            let found = match serde_json::from_slice(&bytes) {
                Ok(value @ Value::Object(_)) => return Ok(Some(value)),
                Ok(value) => kind_of(&value),
                Err(error) => error.to_string(),
            };
            Err(config_error(name, "a JSON object", found).with_path(path))
        };
        Ok(Self {
            preprocessor: read("preprocessor_config.json")?,
            processor: read("processor_config.json")?,
            video_preprocessor: read("video_preprocessor_config.json")?,
        })
    }

    /// What is said of images.
    pub(crate) fn image(&self) -> Fields<'_> {
        let inner = self
            .processor
            .as_ref()
            .and_then(|p| p.get("image_processor"));
        Fields(vec![
            ("image_processor", inner),
            ("preprocessor_config.json", self.preprocessor.as_ref()),
        ])
    }

    /// What is said of videos.
    pub(crate) fn video(&self) -> Fields<'_> {
        let inner = self
            .processor
            .as_ref()
            .and_then(|p| p.get("video_processor"));
        Fields(vec![
            ("video_processor", inner),
            (
                "video_preprocessor_config.json",
                self.video_preprocessor.as_ref(),
            ),
        ])
    }
}

/// Sections of which the first that has a field counts.
pub(crate) struct Fields<'a>(Vec<(&'static str, Option<&'a Value>)>);

impl<'a> Fields<'a> {
    /// The value of a field, a path of keys with dots, and where it stands.
    fn find(&self, field: &str) -> Option<(String, &'a Value)> {
        self.0.iter().find_map(|(section, value)| {
            let value = field
                .split('.')
                .try_fold((*value)?, |value, key| value.get(key))?;
            (!value.is_null()).then(|| (format!("{section}: {field}"), value))
        })
    }

    /// Whether there is no section at all.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(|(_, value)| value.is_none())
    }

    /// Whether a field is there and not null.
    pub(crate) fn has(&self, field: &str) -> bool {
        self.find(field).is_some()
    }

    /// A whole number of 1 to `most`.
    pub(crate) fn count(&self, field: &str, default: u64, most: u64) -> Result<u64> {
        let Some((name, value)) = self.find(field) else {
            return Ok(default);
        };
        // 65536.0 is a whole number too.
        let whole = |number: f64| (number.fract() == 0.0).then_some(number as u64);
        match value.as_u64().or_else(|| value.as_f64().and_then(whole)) {
            Some(count) if (1..=most).contains(&count) => Ok(count),
            _ => Err(config_error(
                name,
                &format!("a whole number of 1 to {most}"),
                value,
            )),
        }
    }

    /// A positive number of at most `most`.
    pub(crate) fn positive(&self, field: &str, default: f64, most: f64) -> Result<f64> {
        let Some((name, value)) = self.find(field) else {
            return Ok(default);
        };
        match value.as_f64() {
            Some(number) if number > 0.0 && number <= most => Ok(number),
            _ => Err(config_error(
                name,
                &format!("a number above 0 and up to {most}"),
                value,
            )),
        }
    }

    /// True or false.
    pub(crate) fn flag(&self, field: &str, default: bool) -> Result<bool> {
        match self.find(field) {
            None => Ok(default),
            Some((_, Value::Bool(flag))) => Ok(*flag),
            Some((name, value)) => Err(config_error(name, "true or false", value)),
        }
    }

    /// A number per colour; `positive` if they must be above zero.
    pub(crate) fn colours(
        &self,
        field: &str,
        default: [f32; 3],
        positive: bool,
    ) -> Result<[f32; 3]> {
        let Some((name, value)) = self.find(field) else {
            return Ok(default);
        };
        let numbers: Option<Vec<f32>> = value
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default()
            .iter()
            .map(|number| number.as_f64().map(|number| number as f32))
            .collect();
        match numbers.as_deref() {
            Some(&[r, g, b]) if !positive || (r > 0.0 && g > 0.0 && b > 0.0) => Ok([r, g, b]),
            _ => Err(config_error(
                name,
                if positive {
                    "three numbers above 0"
                } else {
                    "three numbers"
                },
                value,
            )),
        }
    }
}

/// What a JSON value is, briefly.
fn kind_of(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("a list of {}", items.len()),
        Value::Object(_) => "an object".to_owned(),
        Value::String(text) if text.len() > 40 => "a long text".to_owned(),
        other => other.to_string(),
    }
}

fn config_error(field: impl Into<String>, expected: &str, found: impl Found) -> Error {
    ErrorKind::Config {
        field: field.into(),
        expected: expected.to_owned(),
        found: found.text(),
    }
    .into()
}

trait Found {
    fn text(self) -> String;
}

impl Found for &Value {
    fn text(self) -> String {
        kind_of(self)
    }
}

impl Found for String {
    fn text(self) -> String {
        self
    }
}
