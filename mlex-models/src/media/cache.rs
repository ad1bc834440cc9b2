//! The towers of a session, loaded with the first medium, and the features that they have made.

use std::collections::VecDeque;
use std::path::PathBuf;

use mlex_core::Dtype;

use super::source::Media;
use crate::files::ModelFiles;
use crate::towers::{Encoded, MediaOptions, Towers, check_wanted, refused};
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
        check_wanted()?;
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
        let encoded = media.encode(self.towers(media)?, options)?;
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::towers::MediaKind;

    fn engine() -> MediaEngine {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
        let files = ModelFiles::open(data.join("media-qwen3_5")).unwrap();
        MediaEngine::new(&files, "qwen3_5", None)
    }

    fn image(name: &str) -> Media {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../mlex-vision/tests/data");
        Media::open(MediaKind::Image, root.join(name))
    }

    /// From here on only what is kept can be given.
    fn without_files(engine: &mut MediaEngine) {
        engine.towers = None;
        engine.path = "/no/such/model".into();
    }

    #[test]
    fn features_are_kept_by_what_the_media_hold() {
        let mut engine = engine();
        let options = MediaOptions::default();
        let odd = image("odd.png");
        let first = engine.encode(std::slice::from_ref(&odd), options).unwrap();
        without_files(&mut engine);
        let bytes = std::fs::read(odd.path().unwrap()).unwrap();
        let same = Media::from_bytes(MediaKind::Image, bytes);
        let second = engine.encode(&[same], options).unwrap();
        assert_eq!(
            first[0].features.to_vec::<f32>().unwrap(),
            second[0].features.to_vec::<f32>().unwrap()
        );
        // Others are not it: another file, another kind, other options.
        assert!(engine.encode(&[image("grey.png")], options).is_err());
        let video = Media::open(MediaKind::Video, odd.path().unwrap());
        assert!(engine.encode(&[video], options).is_err());
        let fewer = MediaOptions {
            image_tokens: Some(4),
            ..options
        };
        assert!(engine.encode(&[odd], fewer).is_err());
    }

    #[test]
    fn what_was_not_used_for_long_is_let_go() {
        let mut engine = engine();
        let options = MediaOptions::default();
        let [one, two] = ["odd.png", "grey.png"].map(image);
        let first = engine.encode(std::slice::from_ref(&one), options).unwrap();
        engine.most_bytes = first[0].features.nbytes() + 1;
        engine.encode(std::slice::from_ref(&two), options).unwrap();
        without_files(&mut engine);
        assert!(engine.encode(&[two], options).is_ok());
        assert!(engine.encode(&[one], options).is_err());
    }
}
