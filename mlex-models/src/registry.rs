//! The architectures by the `model_type` of their config.json.

use mlex_nn::Weights;

use crate::arch;
use crate::config::ModelConfig;
use crate::model::MtpHead;
use crate::{Error, ErrorKind, Model, Result};

/// An architecture.
pub(crate) struct Entry {
    /// The names that it goes by in config.json.
    pub(crate) model_types: &'static [&'static str],
    /// Builds a model. The weights are checked for left-overs afterwards, by the caller.
    pub(crate) build: fn(&ModelConfig, &Weights) -> Result<Box<dyn Model>>,
}

const ENTRIES: &[&Entry] = &[
    &arch::dhara_ar::ENTRY,
    &arch::gemma4::ENTRY,
    &arch::llama::ENTRY,
    &arch::minicpm::ENTRY,
    &arch::nemotron_h::ENTRY,
    &arch::qwen2::ENTRY,
    &arch::qwen2_5_vl::ENTRY,
    &arch::qwen3::ENTRY,
    &arch::qwen3_5::ENTRY,
    &arch::qwen3_moe::ENTRY,
    &arch::qwen3_next::ENTRY,
    &arch::qwen3_vl::ENTRY,
    &arch::smollm3::ENTRY,
];

/// The names of all architectures.
pub fn model_types() -> impl Iterator<Item = &'static str> {
    ENTRIES.iter().flat_map(|entry| entry.model_types).copied()
}

/// Builds the model that `config` describes from `weights`.
///
/// # Errors
/// When the architecture is not known, a field is wrong or the tensors do not fit; the last
/// error lists all of them.
pub fn build(config: &ModelConfig, weights: &Weights) -> Result<Box<dyn Model>> {
    let name = config.model_type()?;
    let entry = ENTRIES
        .iter()
        .find(|entry| entry.model_types.contains(&name))
        .ok_or_else(|| {
            Error::new(ErrorKind::UnknownModelType {
                found: name.chars().take(100).collect(),
                known: model_types().collect(),
            })
        })?;
    let model = (entry.build)(config, weights)?;
    weights.finish()?;
    Ok(model)
}

/// Builds the head for further tokens of the model that `config` describes.
///
/// # Errors
/// When the architecture or the checkpoint has none, a field is wrong or the tensors do not fit.
pub(crate) fn build_mtp(config: &ModelConfig, weights: &Weights) -> Result<Box<dyn MtpHead>> {
    let name = config.model_type()?;
    let heads = [
        (&arch::qwen3_5::ENTRY, arch::qwen3_5::build_mtp as BuildMtp),
        (&arch::qwen3_next::ENTRY, arch::qwen3_next::build_mtp),
    ];
    let mut heads = heads.iter();
    let found = heads.find(|(entry, _)| entry.model_types.contains(&name));
    let (_, build) = found.ok_or_else(|| Error::unsupported("MTP head", name))?;
    let head = build(config, weights)?;
    weights.finish()?;
    Ok(head)
}

type BuildMtp = fn(&ModelConfig, &Weights) -> Result<Box<dyn MtpHead>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_is_taken_twice() {
        let mut names: Vec<_> = model_types().collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
