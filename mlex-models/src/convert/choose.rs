//! Which layout each layer gets.
//!
//! Sources: mlx-lm's `utils.quantize_model` (what is quantized at all), `convert.py` (the mixed
//! recipes) and the `quant_predicate` of its models.

use std::cell::Cell;

use mlex_core::{QuantizationMode, Quantized};
use serde_json::{Map, Value};

use super::recipe::{self, Kind, Quantize, Rule, Setting};
use crate::quantization::layout;
use crate::{Error, Result};

/// Layers that mlx-lm gives 8 bits in groups of 64 whatever the rest has: what routes tokens to
/// experts. By the architectures, and the ends of the layers' paths.
const ROUTERS: &[(&[&str], &[&str])] = &[
    (&["qwen3_moe", "qwen3_vl_moe"], &["mlp.gate"]),
    (
        &[
            "qwen3_next",
            "qwen3_5",
            "qwen3_5_text",
            "qwen3_5_moe",
            "qwen3_5_moe_text",
        ],
        &["mlp.gate", "shared_expert_gate"],
    ),
    (
        &[
            "gemma4",
            "gemma4_text",
            "gemma4_unified",
            "gemma4_unified_text",
        ],
        &["router.proj"],
    ),
];

/// Parts of paths that are no language model: what mlx-vlm leaves dense.
const TOWERS: [&str; 5] = [
    "vision_tower",
    "vision_model",
    "visual",
    "audio_tower",
    "audio_model",
];

/// Decides for the layers of one model.
pub(super) struct Chooser<'a> {
    quantize: &'a Quantize,
    model_type: &'a str,
    num_layers: usize,
    /// Which part of a path is the layer's number.
    number_at: usize,
    /// Which rules a layer has matched.
    used: Vec<Cell<bool>>,
}

impl<'a> Chooser<'a> {
    /// For a model of `num_layers` layers, whose parts have `paths`.
    ///
    /// # Errors
    /// When the recipe is not for such a model.
    pub(super) fn new<'p>(
        quantize: &'a Quantize,
        model_type: &'a str,
        num_layers: usize,
        mut paths: impl Iterator<Item = &'p str>,
    ) -> Result<Self> {
        let mut number_at = 0;
        let mut rules = 0;
        match quantize.recipe().map(|recipe| &recipe.0) {
            Some(Kind::Mixed { .. }) => {
                let path = paths
                    .find(|path| path.contains("down_proj"))
                    .ok_or_else(|| {
                        Error::unsupported("recipe", "a mixed one for a model without down_proj")
                    })?;
                let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
                let parts = path.split('.').count();
                number_at = path.split('.').position(is_number).unwrap_or(parts - 1);
            }
            Some(Kind::Rules { rules: all, .. }) => rules = all.len(),
            None => {}
        }
        Ok(Self {
            quantize,
            model_type,
            num_layers,
            number_at,
            used: vec![Cell::new(false); rules],
        })
    }

    /// The layout for the layer at `path`, whose weight has `columns`; none leaves it dense.
    ///
    /// # Errors
    /// When a rule that names the layer does not fit it.
    pub(super) fn choose(&self, path: &str, columns: i32) -> Result<Option<Quantized>> {
        let fits = |layout: &Quantized| columns % layout.group_size == 0;
        let default = self.quantize.layout();
        match self.quantize.recipe().map(|recipe| &recipe.0) {
            Some(Kind::Rules { rules, .. }) => {
                if let Some(index) = rules
                    .iter()
                    .position(|rule| recipe::matches(&rule.pattern, path))
                {
                    self.used[index].set(true);
                    return self.ruled(&rules[index], path, columns);
                }
            }
            Some(Kind::Mixed {
                low_bits,
                high_bits,
            }) => {
                let bits = if self.gets_more(path) {
                    *high_bits
                } else {
                    *low_bits
                };
                let layout = Quantized { bits, ..default };
                return Ok(Some(layout).filter(|_| fits(&default) && !is_tower(path)));
            }
            None => {}
        }
        if is_tower(path) {
            return Ok(None);
        }
        let layout = if self.is_router(path) {
            Quantized {
                bits: 8,
                group_size: 64,
                mode: QuantizationMode::Affine,
            }
        } else {
            default
        };
        Ok(Some(layout).filter(fits))
    }

    /// Checks, after all layers, that every rule was of use: one that is not is misspelt.
    ///
    /// # Errors
    /// When it was not.
    pub(super) fn finish(&self) -> Result<()> {
        let Some(Kind::Rules { rules, .. }) = self.quantize.recipe().map(|recipe| &recipe.0) else {
            return Ok(());
        };
        match rules.iter().zip(&self.used).find(|(_, used)| !used.get()) {
            None => Ok(()),
            Some((rule, _)) => Err(Error::field(
                recipe::field(&rule.pattern),
                "a layer that it matches, and no earlier pattern does",
                "none",
            )),
        }
    }

    fn ruled(&self, rule: &Rule, path: &str, columns: i32) -> Result<Option<Quantized>> {
        let none = Map::<String, Value>::new();
        let settings = match &rule.setting {
            Setting::Dense => return Ok(None),
            Setting::Default => &none,
            Setting::Layout(settings) => settings,
        };
        let field = recipe::field(&rule.pattern);
        let layout = layout(&field, settings, self.quantize.layout())?;
        if columns % layout.group_size == 0 {
            return Ok(Some(layout));
        }
        if layout.group_size == self.quantize.layout().group_size {
            // The rule asks for nothing else than the rest has.
            return Ok(None);
        }
        let expected = format!("a group size that divides the {columns} columns of {path}");
        Err(Error::field(field, expected, layout.group_size.to_string()))
    }

    /// Whether a mixed recipe gives the layer more bits: the head, and down and value
    /// projections of the first and last eighth and of every third layer between.
    fn gets_more(&self, path: &str) -> bool {
        if path.contains("lm_head") {
            return true;
        }
        let is_value = ["v_proj", "v_a_proj", "v_b_proj"]
            .iter()
            .any(|name| path.contains(name));
        if !is_value && !path.contains("down_proj") {
            return false;
        }
        let number = path.split('.').nth(self.number_at);
        let number: usize = number.and_then(|part| part.parse().ok()).unwrap_or(0);
        let eighth = self.num_layers / 8;
        number < eighth || number >= 7 * self.num_layers / 8 || (number - eighth) % 3 == 2
    }

    fn is_router(&self, path: &str) -> bool {
        ROUTERS.iter().any(|(models, ends)| {
            models.contains(&self.model_type) && ends.iter().any(|end| path.ends_with(end))
        })
    }
}

/// Whether a tensor or layer is of a tower for images or audio.
fn is_tower(path: &str) -> bool {
    path.split('.').any(|part| TOWERS.contains(&part))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::convert::recipe::{LayoutSettings, Recipe};

    /// By arithmetic from the rule: of 16 layers the first 2 and the last 2, and 4, 7, 10, 13.
    #[test]
    fn a_mixed_recipe_gives_more_to_these_layers() {
        let quantize =
            Quantize::new(LayoutSettings::default(), Recipe::named("mixed_3_6")).unwrap();
        let paths = ["model.embed_tokens", "model.layers.0.mlp.down_proj"];
        let chooser = Chooser::new(&quantize, "llama", 16, paths.into_iter()).unwrap();
        let bits = |path: &str| chooser.choose(path, 64).unwrap().unwrap().bits;
        for layer in 0..16 {
            let more = [0, 1, 4, 7, 10, 13, 14, 15].contains(&layer);
            let expected = if more { 6 } else { 3 };
            for part in ["mlp.down_proj", "self_attn.v_proj"] {
                assert_eq!(bits(&format!("model.layers.{layer}.{part}")), expected);
            }
            assert_eq!(bits(&format!("model.layers.{layer}.mlp.up_proj")), 3);
        }
        assert_eq!(bits("lm_head"), 6);
        assert_eq!(bits("model.embed_tokens"), 3);
        assert_eq!(chooser.choose("lm_head", 96).unwrap(), None);
        let error = Chooser::new(&quantize, "llama", 16, ["a"].into_iter());
        assert!(error.is_err_and(|error| error.to_string().contains("down_proj")));
    }

    #[test]
    fn routers_and_towers_are_told_apart() {
        let quantize = Quantize::new(LayoutSettings::default(), None).unwrap();
        let chooser = |model| Chooser::new(&quantize, model, 2, std::iter::empty()).unwrap();
        let gate = "model.layers.0.mlp.gate";
        let bits = |model, path| chooser(model).choose(path, 64).unwrap().map(|l| l.bits);
        assert_eq!(bits("qwen3_moe", gate), Some(8));
        assert_eq!(bits("llama", gate), Some(4));
        assert_eq!(bits("qwen3_moe", "model.layers.0.mlp.gate_proj"), Some(4));
        assert_eq!(bits("qwen3_5", "vision_tower.blocks.0.attn.qkv"), None);
    }
}
