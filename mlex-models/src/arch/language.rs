//! Where the settings and the tensors of a language model are, which may have towers for images
//! and audio beside it.

use mlex_nn::Weights;
use serde_json::Value;

use crate::config::ModelConfig;
use crate::{Error, Result};

/// The section of the config that the settings may be in.
const SECTION: &str = "text_config";

/// What `read` makes of the settings of the language model, and of what the outer config says of
/// whether the head is the embedding.
pub(super) fn settings<T>(
    config: &ModelConfig,
    read: impl Fn(&ModelConfig, Option<bool>) -> Result<T>,
) -> Result<T> {
    let tied = config.json().get("tie_word_embeddings");
    let tied = tied.and_then(Value::as_bool);
    let section = config.json().get(SECTION);
    match section.filter(|section| !section.is_null()) {
        Some(Value::Object(section)) => read(&ModelConfig::new(section.clone()), tied)
            .map_err(|error| error.in_section(SECTION)),
        Some(_) => Err(Error::field(SECTION, "an object", "something else")),
        None => read(config, tied),
    }
}

/// Drops the tensors of vision towers.
pub(super) fn discard_vision(weights: &Weights) {
    weights.discard(|path| {
        let towers = ["vision_tower", "model.visual", "visual."];
        towers.iter().any(|tower| path.starts_with(tower))
    });
}

/// The places of the decoder and of the head. Hugging Face's names of a model with towers become
/// mlx-lm's.
pub(super) fn places(weights: &Weights) -> (Weights, Weights) {
    let language = weights.pp("language_model");
    if weights.any(|path, _| path.starts_with("model.language_model.")) {
        weights.rename(name);
    }
    if language.pp("model").pp("embed_tokens").contains("weight") {
        (language.pp("model"), language.pp("lm_head"))
    } else {
        (weights.pp("model"), weights.pp("lm_head"))
    }
}

/// The name that mlx-lm has for a tensor of the language model.
fn name(path: &str) -> Option<String> {
    if let Some(rest) = path.strip_prefix("model.language_model.") {
        return Some(format!("language_model.model.{rest}"));
    }
    path.starts_with("lm_head.")
        .then(|| format!("language_model.{path}"))
}
