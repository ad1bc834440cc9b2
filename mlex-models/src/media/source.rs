//! Where a medium comes from.

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mlex_audio::Sound;
use mlex_vision::{Picture, Video};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::placeholders::Counted;
use crate::towers::{Encoded, MediaKind, MediaOptions, Prepared, Processor, Towers};
use crate::{Error, Result, ResultExt};

/// Where a medium comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MediaSource {
    /// A file; of a video also a folder of frames.
    Path(PathBuf),
    /// The bytes of a file.
    Bytes(Arc<[u8]>),
}

/// An image, a video or a sound of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Media {
    /// What it is.
    pub kind: MediaKind,
    /// Where it comes from.
    pub source: MediaSource,
}

impl Media {
    /// A medium in a file.
    pub fn open(kind: MediaKind, path: impl Into<PathBuf>) -> Self {
        let source = MediaSource::Path(path.into());
        Self { kind, source }
    }

    /// A medium by the bytes of a file.
    pub fn from_bytes(kind: MediaKind, bytes: impl Into<Arc<[u8]>>) -> Self {
        let source = MediaSource::Bytes(bytes.into());
        Self { kind, source }
    }

    /// The file that it is in.
    pub fn path(&self) -> Option<&Path> {
        match &self.source {
            MediaSource::Path(path) => Some(path),
            MediaSource::Bytes(_) => None,
        }
    }

    /// The medium that a part of a message holds in the OpenAI shape: in the `url` of its
    /// `image_url` (or `video_url`, `audio_url`), a `data:` URL, or in the `data` of its
    /// `input_audio`. Files and other URLs are not opened: a message may come from anywhere.
    pub(crate) fn inline(kind: MediaKind, part: &Value) -> Result<Self> {
        let place = part.get("type").and_then(Value::as_str).unwrap_or_default();
        let inner = part.get(place);
        let wrong = |found: String| {
            let expected = "a data: URL with base64, or data of input_audio";
            Error::field(format!("message part {place:?}"), expected, found)
        };
        let data = match inner {
            Some(Value::String(url)) => Some(url.as_str()),
            Some(Value::Object(fields)) => {
                let text = fields.get("url").or_else(|| fields.get("data"));
                text.and_then(Value::as_str)
            }
            _ => None,
        };
        let data = data.ok_or_else(|| wrong("nothing".to_owned()))?;
        let encoded = match data.strip_prefix("data:") {
            Some(rest) => {
                let after = rest.split_once(";base64,").map(|(_, data)| data);
                after.ok_or_else(|| wrong("a data: URL without base64".to_owned()))?
            }
            None if place == "input_audio" => data,
            None => {
                let shown: String = data.chars().take(40).collect();
                return Err(wrong(format!("{shown:?}")));
            }
        };
        let bytes = STANDARD.decode(encoded.trim_ascii());
        let bytes = bytes.map_err(|error| wrong(format!("broken base64 ({error})")))?;
        Ok(Self::from_bytes(kind, bytes))
    }

    /// The SHA-256 of what it holds; none for a folder.
    pub(super) fn digest(&self) -> Result<Option<[u8; 32]>> {
        let mut hasher = Sha256::new();
        match &self.source {
            MediaSource::Bytes(bytes) => hasher.update(bytes),
            MediaSource::Path(path) => {
                if !path.is_file() {
                    // A missing one is named when it is opened.
                    return Ok(None);
                }
                let mut hash = || -> std::io::Result<()> {
                    let mut file = std::fs::File::open(path)?;
                    let mut buffer = vec![0; 1 << 16];
                    loop {
                        match file.read(&mut buffer)? {
                            0 => return Ok(()),
                            count => hasher.update(&buffer[..count]),
                        }
                    }
                };
                hash().with_path(path)?;
            }
        }
        Ok(Some(hasher.finalize().into()))
    }

    /// It as the towers take it, read and prepared by `processor`.
    pub(super) fn prepare(&self, processor: &Processor, options: MediaOptions) -> Result<Prepared> {
        processor.check(self.kind)?;
        match self.kind {
            MediaKind::Image => {
                let limits = mlex_vision::Limits::default();
                let picture = match &self.source {
                    MediaSource::Path(path) => Picture::open(path, &limits)?,
                    MediaSource::Bytes(bytes) => Picture::decode(bytes, &limits)?,
                };
                self.located(processor.image(&picture, options))
            }
            MediaKind::Video => match &self.source {
                MediaSource::Path(path) => self.located(video(processor, path, options)),
                MediaSource::Bytes(bytes) => {
                    // The programs that read videos read files.
                    let mut file = tempfile::NamedTempFile::new()?;
                    file.write_all(bytes)?;
                    video(processor, file.path(), options)
                }
            },
            MediaKind::Audio => {
                let limits = mlex_audio::Limits::default();
                let sound = match &self.source {
                    MediaSource::Path(path) => Sound::open(path, &limits)?,
                    MediaSource::Bytes(bytes) => Sound::decode(bytes.to_vec(), &limits)?,
                };
                self.located(processor.audio(&sound))
            }
        }
    }

    /// Its features.
    pub(super) fn encode(&self, towers: &Towers, options: MediaOptions) -> Result<Encoded> {
        let prepared = self.prepare(towers.processor(), options)?;
        self.located(towers.encode(&prepared))
    }

    /// The tokens that it becomes. It is read for that, and no tower runs.
    pub(crate) fn count(&self, processor: &Processor, options: MediaOptions) -> Result<Counted> {
        let prepared = self.prepare(processor, options)?;
        Ok(Counted {
            kind: self.kind,
            runs: processor.runs(&prepared),
        })
    }

    /// Names the file where it is one.
    fn located<T>(&self, result: Result<T>) -> Result<T> {
        match &self.source {
            MediaSource::Path(path) => result.map_err(|error| error.with_path(path)),
            MediaSource::Bytes(_) => result,
        }
    }
}

fn video(processor: &Processor, path: &Path, options: MediaOptions) -> Result<Prepared> {
    let video = Video::open(path, &mlex_vision::Limits::default())?;
    processor.video(&video, options)
}
