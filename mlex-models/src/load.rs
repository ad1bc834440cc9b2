//! From files to a model in memory.

use mlex_core::Dtype;
use mlex_nn::{Taken, Weights};

use crate::config::ModelConfig;
use crate::files::{ModelFiles, total_bytes};
use crate::model::MtpHead;
use crate::{Error, Model, Result, registry, towers};

/// How far a load is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes of the tensors that have been read.
    pub loaded: u64,
    /// Bytes of all tensors.
    pub total: u64,
}

/// A model in memory and what its files say of it.
pub struct LoadedModel {
    /// The configuration.
    pub config: ModelConfig,
    /// The model.
    pub model: Box<dyn Model>,
    /// The bytes of its tensors as the files have them.
    pub file_bytes: u64,
}

impl std::fmt::Debug for LoadedModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LoadedModel")
            .field("info", self.model.info())
            .finish_non_exhaustive()
    }
}

/// Checks what floating-point tensors shall become.
pub(crate) fn check_dtype(dtype: Option<Dtype>) -> Result<()> {
    match dtype.filter(|dtype| !dtype.is_float()) {
        Some(other) => {
            let expected = "a floating-point type";
            Err(Error::field("dtype", expected, other.to_string()))
        }
        None => Ok(()),
    }
}

/// Loads the model of `files` on the current stream's device. Floating-point tensors become
/// `dtype` where one is given. Tensors are read one at a time.
///
/// # Errors
/// When a file, a field of the config or a tensor is missing or wrong; the error names it. When
/// `dtype` is not floating-point.
pub fn load(
    files: &ModelFiles,
    dtype: Option<Dtype>,
    mut on_progress: impl FnMut(LoadProgress) + 'static,
) -> Result<LoadedModel> {
    check_dtype(dtype)?;
    let config = files.config()?;
    let build = || {
        let tensors = files.tensors()?;
        let total = total_bytes(&tensors);
        let mut loaded = 0;
        let weights = Weights::new(tensors, config.quantization()?)
            .with_dtype(dtype)
            .with_progress(Box::new(move |bytes| {
                loaded += bytes as u64;
                on_progress(LoadProgress {
                    loaded: loaded.min(total),
                    total,
                });
            }));
        Ok((registry::build(&config, &weights)?, total))
    };
    let (model, file_bytes) = build().map_err(|error: Error| files.locate(error))?;
    tracing::debug!(?config, file_bytes, "loaded a model");
    Ok(LoadedModel {
        config,
        model,
        file_bytes,
    })
}

/// Loads the head for further tokens of the model of `files`, as [`load`] does the model.
///
/// # Errors
/// As [`load`], and when the model has none.
pub fn load_mtp(files: &ModelFiles, dtype: Option<Dtype>) -> Result<Box<dyn MtpHead>> {
    check_dtype(dtype)?;
    let config = files.config()?;
    let build = || {
        let weights = Weights::new(files.tensors()?, config.quantization()?).with_dtype(dtype);
        registry::build_mtp(&config, &weights)
    };
    build().map_err(|error: Error| files.locate(error))
}

/// A model as its files describe it, none of its weights read.
pub struct Outline {
    /// The configuration.
    pub config: ModelConfig,
    /// The model, with zeros for weights: it can say what it is, not compute.
    pub model: Box<dyn Model>,
    /// What it and its towers take of the checkpoint.
    pub taken: Taken,
}

impl std::fmt::Debug for Outline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Outline")
            .field("info", self.model.info())
            .finish_non_exhaustive()
    }
}

/// Looks at the headers of `files`, and checks them as loading would.
///
/// # Errors
/// When a file, a field of the config or a tensor is missing or wrong; the error names it.
pub fn outline(files: &ModelFiles) -> Result<Outline> {
    let config = files.config()?;
    let build = || {
        let weights = Weights::new(files.tensors()?, config.quantization()?).recording();
        let model = registry::build(&config, &weights)?;
        let mut taken = weights.taken();
        if let Some(towers) = towers::taken(files, &config)? {
            let left = |path: &String| !towers.tensors.contains_key(path);
            taken.discarded.retain(left);
            taken.tensors.extend(towers.tensors);
            taken.layers.extend(towers.layers);
        }
        Ok((model, taken))
    };
    let (model, taken) = build().map_err(|error: Error| files.locate(error))?;
    Ok(Outline {
        config,
        model,
        taken,
    })
}
