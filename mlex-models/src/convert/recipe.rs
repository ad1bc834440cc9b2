//! How layers are quantized: one layout for all, or a recipe that tells them apart.

use std::path::Path;

use mlex_core::{QuantizationMode, Quantized};
use serde_json::{Map, Value};

use crate::config::{read_json_object, shown};
use crate::quantization::layout;
use crate::{Error, Result};

/// Settings of a layout that may be left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayoutSettings {
    /// Bits per weight.
    pub bits: Option<i32>,
    /// Weights per scale.
    pub group_size: Option<i32>,
    /// What the numbers stand for.
    pub mode: Option<QuantizationMode>,
}

impl LayoutSettings {
    /// The layout; what is left out is as in `base`, or as MLX has it for another mode.
    fn over(self, base: Quantized) -> Result<Quantized> {
        let base = match self.mode {
            Some(mode) if mode != base.mode => mode.into(),
            _ => base,
        };
        let layout = Quantized {
            bits: self.bits.unwrap_or(base.bits),
            group_size: self.group_size.unwrap_or(base.group_size),
            mode: base.mode,
        };
        layout.check()?;
        Ok(layout)
    }
}

/// How a model is quantized.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantize {
    layout: Quantized,
    recipe: Option<Recipe>,
}

impl Quantize {
    /// Layers become what `recipe` says, otherwise the layout of `settings`. What these leave
    /// out is what the recipe says of all layers, or else as MLX has it for the mode.
    ///
    /// # Errors
    /// When MLX has no such layout, or the recipe is for another mode.
    pub fn new(settings: LayoutSettings, recipe: Option<Recipe>) -> Result<Self> {
        let base = match recipe.as_ref().map(|recipe| &recipe.0) {
            Some(Kind::Rules { base, .. }) => *base,
            _ => QuantizationMode::Affine.into(),
        };
        let layout = settings.over(base)?;
        if let Some(Kind::Mixed { .. }) = recipe.as_ref().map(|recipe| &recipe.0)
            && layout.mode != QuantizationMode::Affine
        {
            let expected = "affine, which the mixed recipes are for";
            return Err(Error::field("mode", expected, layout.mode.name()));
        }
        Ok(Self { layout, recipe })
    }

    /// The layout of layers that nothing else is said of.
    pub fn layout(&self) -> Quantized {
        self.layout
    }

    /// The recipe.
    pub(super) fn recipe(&self) -> Option<&Recipe> {
        self.recipe.as_ref()
    }
}

/// Which layers get which layout.
#[derive(Clone, Debug, PartialEq)]
pub struct Recipe(pub(super) Kind);

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Kind {
    /// mlx-lm's: more bits for some layers.
    Mixed { low_bits: i32, high_bits: i32 },
    /// The first rule whose pattern a layer's path matches counts.
    Rules { base: Quantized, rules: Vec<Rule> },
}

/// What layers become whose path matches a pattern.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Rule {
    pub(super) pattern: String,
    pub(super) setting: Setting,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Setting {
    /// As all layers.
    Default,
    /// Not quantized.
    Dense,
    /// Of this layout, as far as it is told.
    Layout(Map<String, Value>),
}

impl Recipe {
    /// The names of mlx-lm's recipes.
    pub const NAMES: [&str; 4] = ["mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"];

    /// A recipe of mlx-lm by its name.
    pub fn named(name: &str) -> Option<Self> {
        let (low_bits, high_bits) = match name {
            "mixed_2_6" => (2, 6),
            "mixed_3_4" => (3, 4),
            "mixed_3_6" => (3, 6),
            "mixed_4_6" => (4, 6),
            _ => return None,
        };
        Some(Self(Kind::Mixed {
            low_bits,
            high_bits,
        }))
    }

    /// Reads a recipe from a JSON file, as [`from_json`](Self::from_json).
    ///
    /// # Errors
    /// When the file cannot be read or is no recipe; the error names it.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::from_json(&read_json_object(path)?).map_err(|error| error.with_path(path))
    }

    /// A recipe from patterns of paths, in which `*` stands for any text, and settings: an object
    /// with `bits`, `group_size` or `mode`, a number of bits, `false` for a dense layer, `true`
    /// for a layer like the others. The first pattern that matches a path counts. `bits`,
    /// `group_size` and `mode` beside the patterns are those of the other layers, so that the
    /// `quantization` section of a config.json is a recipe.
    ///
    /// # Errors
    /// When a setting is of no use; the error names the pattern.
    pub fn from_json(json: &Map<String, Value>) -> Result<Self> {
        let base = layout("recipe", json, QuantizationMode::Affine.into())?;
        let mut rules = Vec::new();
        for (pattern, value) in json {
            if ["bits", "group_size", "mode"].contains(&pattern.as_str()) {
                continue;
            }
            let setting = match value {
                Value::Bool(true) => Setting::Default,
                Value::Bool(false) => Setting::Dense,
                Value::Number(_) => {
                    Setting::Layout(Map::from_iter([("bits".to_owned(), value.clone())]))
                }
                Value::Object(settings) => Setting::Layout(settings.clone()),
                other => {
                    let expected = "an object, a number of bits, true or false";
                    return Err(Error::field(field(pattern), expected, shown(other)));
                }
            };
            if let Setting::Layout(settings) = &setting {
                check_keys(pattern, settings)?;
            }
            rules.push(Rule {
                pattern: pattern.clone(),
                setting,
            });
        }
        Ok(Self(Kind::Rules { base, rules }))
    }
}

/// How an error names a rule.
pub(super) fn field(pattern: &str) -> String {
    format!("recipe[{}]", shown(&Value::String(pattern.to_owned())))
}

/// A key that is misspelt would change nothing, in silence.
fn check_keys(pattern: &str, settings: &Map<String, Value>) -> Result<()> {
    match settings
        .keys()
        .find(|key| !["bits", "group_size", "mode"].contains(&key.as_str()))
    {
        None => Ok(()),
        Some(key) => {
            let expected = "bits, group_size or mode";
            let found = shown(&Value::String(key.clone()));
            Err(Error::field(field(pattern), expected, found))
        }
    }
}

/// Whether `path` is what `pattern` says, in which `*` stands for any text.
pub(super) fn matches(pattern: &str, path: &str) -> bool {
    let mut parts = pattern.split('*');
    // The first part is where the path begins; `split` gives at least one.
    let Some(mut rest) = parts.next().and_then(|first| path.strip_prefix(first)) else {
        return false;
    };
    let mut parts = parts.peekable();
    if parts.peek().is_none() {
        return rest.is_empty();
    }
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            // The last part is where it ends.
            return rest.ends_with(part);
        }
        let Some(at) = rest.find(part) else {
            return false;
        };
        rest = &rest[at + part.len()..];
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_any_text() {
        let path = "model.layers.10.mlp.down_proj";
        for pattern in [
            path,
            "*",
            "**",
            "*down_proj",
            "model.*",
            "model.layers.*.mlp.down_proj",
            "*.1*.*down*",
            "*.down_proj*",
        ] {
            assert!(matches(pattern, path), "{pattern}");
        }
        for pattern in [
            "",
            "model",
            "down_proj",
            "*down",
            "model.layers.1.*",
            "*.mlp.*.mlp.*",
            "*proj*proj",
        ] {
            assert!(!matches(pattern, path), "{pattern}");
        }
        assert!(matches("", ""));
    }

    #[test]
    fn recipes_that_say_nothing_of_use() {
        let refused = |json: Value| {
            let json = json.as_object().unwrap().clone();
            Recipe::from_json(&json).unwrap_err().to_string()
        };
        use serde_json::json;
        assert_eq!(
            refused(json!({"a.*": "4"})),
            "recipe[\"a.*\"]: expected an object, a number of bits, true or false, found \"4\""
        );
        assert_eq!(
            refused(json!({"a.*": {"bit": 4}})),
            "recipe[\"a.*\"]: expected bits, group_size or mode, found \"bit\""
        );
        assert_eq!(
            refused(json!({"bits": 7})),
            "recipe.bits: expected 2, 3, 4, 5, 6 or 8 for affine, found 7"
        );
        let quantize = Quantize::new(
            LayoutSettings {
                mode: Some(QuantizationMode::Mxfp4),
                ..LayoutSettings::default()
            },
            Recipe::named("mixed_3_6"),
        );
        assert_eq!(
            quantize.unwrap_err().to_string(),
            "mode: expected affine, which the mixed recipes are for, found mxfp4"
        );
    }
}
