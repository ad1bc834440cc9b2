//! Models that are named: a path, or a repository on the Hugging Face Hub.

use std::path::{Path, PathBuf};

use anyhow::Result;
use mlex_hub::{Hub, MAIN, ModelId, Pulled, Settings};

use crate::failure;
use crate::output::note;
use crate::progress::ByteBar;

/// Which model.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Source {
    /// Model directory, .gguf file, or a repository on the Hugging Face Hub
    /// (organization/name, or organization/name:Q4_K_M for one of several GGUF files)
    #[arg(long, value_name = "MODEL")]
    model: PathBuf,
    /// Branch, tag or commit of the repository [default: main]
    #[arg(long, value_name = "REVISION")]
    revision: Option<String>,
}

impl Source {
    /// The repository on the Hub that it is.
    pub(crate) fn repo(&self) -> Option<String> {
        hub_id(&self.model).map(|id| id.repo().to_owned())
    }

    /// A model at its main revision.
    pub(crate) fn of(model: PathBuf) -> Self {
        Self {
            model,
            revision: None,
        }
    }

    /// The path of the model, for `command`. What is not in the cache of the Hub comes first.
    ///
    /// # Errors
    /// When it cannot be brought. Whether there is something at a path is not looked at.
    pub(crate) fn locate(&self, command: &str) -> Result<PathBuf> {
        match (hub_id(&self.model), &self.revision) {
            (Some(id), revision) => {
                let revision = revision.as_deref().unwrap_or(MAIN);
                Ok(pull(&id, revision)?.path)
            }
            (None, None) => Ok(self.model.clone()),
            (None, Some(_)) => {
                let found = self.model.display();
                let expected = "a repository on the Hub as --model, such as organization/name";
                let message = format!("--revision: expected {expected}, found {found}");
                Err(failure::usage(command, message))
            }
        }
    }
}

/// Brings a model into the cache, with a bar, and says where that was not possible and the cache
/// was enough.
///
/// # Errors
/// When it was not enough.
pub(crate) fn pull(id: &ModelId, revision: &str) -> Result<Pulled> {
    let settings = Settings::from_vars(|name| std::env::var(name).ok())?;
    let bar = ByteBar::transfer("pulling");
    let moved = bar.clone();
    let pulled = Hub::new(settings)?.pull(id, revision, &move |progress| {
        moved.set_bytes(progress.done, progress.total);
    });
    bar.finish();
    let pulled = pulled?;
    if let Some(why) = &pulled.unasked {
        note(&format!("{why}; using what is in the cache"));
    }
    Ok(pulled)
}

/// The repository that is meant, unless it is a path: what exists is one, and so is what is
/// spelled like one.
fn hub_id(model: &Path) -> Option<ModelId> {
    let text = model.to_str()?;
    let is_file = |end: &str| text.ends_with(end) && !text.contains(':');
    if model.exists() || is_file(".gguf") || is_file(".safetensors") {
        return None;
    }
    text.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repositories_and_paths() {
        let is_id = |text: &str| hub_id(Path::new(text)).is_some();
        assert!(is_id("mlx-community/Qwen3-0.6B-4bit"));
        assert!(is_id("o/n-GGUF:n-Q4_0.gguf"));
        // The last one is there, seen from where tests run.
        for path in [
            "model",
            "./model",
            "/a/b",
            "a/b/c",
            "models/x.gguf",
            "a/",
            "src/hub.rs",
        ] {
            assert!(!is_id(path), "{path}");
        }
    }
}
