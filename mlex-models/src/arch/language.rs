//! Where the tensors of a language model are, which may have towers for images and audio beside it.

use mlex_nn::Weights;

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
