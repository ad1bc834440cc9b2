//! The towers of a session, loaded with the first medium, and the features that they have made.

use std::collections::VecDeque;
use std::path::PathBuf;

use mlex_core::Dtype;

use super::source::Media;
use crate::files::ModelFiles;
use crate::towers::{Encoded, MediaOptions, Towers, refused};
use crate::{Error, Result};

/// The most bytes of features that are kept: some hundred large images.
const MOST_BYTES: usize = 512 << 20;

/// What a feature is kept by: what the medium holds, and how it was looked at.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Key {
    digest: [u8; 32],
    kind: crate::towers::MediaKind,
    options: MediaOptions,
}

/// Makes features of media, on the model's thread.
#[derive(Debug)]
pub(crate) struct MediaEngine {
    path: PathBuf,
    model_type: String,
    dtype: Option<Dtype>,
    towers: Option<Towers>,
    /// The one that was used last is the last.
    kept: VecDeque<(Key, Encoded)>,
    most_bytes: usize,
}

impl MediaEngine {
    /// For the model of `files`, whose towers will be loaded as `dtype`.
    pub(crate) fn new(files: &ModelFiles, model_type: &str, dtype: Option<Dtype>) -> Self {
        Self {
            path: files.path().to_owned(),
            model_type: model_type.to_owned(),
            dtype,
            towers: None,
            kept: VecDeque::new(),
            most_bytes: MOST_BYTES,
        }
    }

    /// The features of media, in order.
    pub(crate) fn encode(
        &mut self,
        media: &[Media],
        options: MediaOptions,
    ) -> Result<Vec<Encoded>> {
        media.iter().map(|one| self.one(one, options)).collect()
    }

    fn one(&mut self, media: &Media, options: MediaOptions) -> Result<Encoded> {
        let digest = media.digest()?;
        let key = digest.map(|digest| Key {
            digest,
            kind: media.kind,
            options,
        });
        if let Some(key) = key
            && let Some(index) = self.kept.iter().position(|(known, _)| *known == key)
            && let Some(entry) = self.kept.remove(index)
        {
            let encoded = entry.1.clone();
            self.kept.push_back(entry);
            return Ok(encoded);
        }
        let towers = self.towers(media)?;
        towers.check(media.kind)?;
        let encoded = media.encode(towers, options)?;
        if let Some(key) = key {
            self.keep(key, encoded.clone());
        }
        Ok(encoded)
    }

    fn towers(&mut self, media: &Media) -> Result<&Towers> {
        if self.towers.is_none() {
            let files = ModelFiles::open(&self.path)?;
            self.towers = Towers::load(&files, self.dtype)?;
        }
        let none = || -> Error { refused(&self.model_type, media.kind) };
        self.towers.as_ref().ok_or_else(none)
    }

    fn keep(&mut self, key: Key, encoded: Encoded) {
        self.kept.push_back((key, encoded));
        let bytes = |kept: &VecDeque<(Key, Encoded)>| -> usize {
            let features = kept.iter().map(|(_, encoded)| &encoded.features);
            features.map(mlex_core::Array::nbytes).sum()
        };
        while self.kept.len() > 1 && bytes(&self.kept) > self.most_bytes {
            self.kept.pop_front();
        }
    }
}
