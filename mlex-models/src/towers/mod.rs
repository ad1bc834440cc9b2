//! What models see and hear with: towers that make features of images, videos and sounds, each
//! feature in the place of one token.
//!
//! [`Towers`] prepares a medium as the model's processor does and runs the tower over it. The
//! features are [`Encoded`], with the [runs](Run) of tokens that stand for them in a prompt.

mod gemma_audio;
mod gemma_unified;
mod gemma_vision;
mod interrupt;
mod layers;
mod load;
mod processor;
mod qwen;
mod run;

use std::fmt;

use mlex_audio::{MelFeatures, RawFeatures, Sound};
use mlex_core::{Array, eval};
use mlex_vision::{GemmaInput, Picture, QwenInput, QwenVideo, Video};

use self::gemma_audio::GemmaAudio;
use self::gemma_unified::{PatchEmbedder, SampleEmbedder};
use self::gemma_vision::GemmaTower;
use self::qwen::QwenTower;
use crate::{Error, Result};

pub(crate) use self::interrupt::check as check_wanted;
pub use self::interrupt::interruptible;
pub(crate) use self::load::taken;
pub use self::load::{media_kinds, media_tokens};
pub(crate) use self::processor::{Prepared, Processor, refused};
pub use self::run::Run;

/// A kind of input beside text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum MediaKind {
    /// A still picture.
    Image,
    /// Moving pictures.
    Video,
    /// A sound.
    Audio,
}

impl fmt::Display for MediaKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Image => "image",
            Self::Video => "video",
            Self::Audio => "audio",
        })
    }
}

/// The ids of the tokens that stand for features.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MediaTokens {
    /// Of images.
    pub image: Option<u32>,
    /// Of videos.
    pub video: Option<u32>,
    /// Of sounds.
    pub audio: Option<u32>,
}

impl MediaTokens {
    /// The id of a kind.
    pub fn of(self, kind: MediaKind) -> Option<u32> {
        match kind {
            MediaKind::Image => self.image,
            MediaKind::Video => self.video,
            MediaKind::Audio => self.audio,
        }
    }
}

/// The features of an image, a video or a sound.
#[derive(Clone, Debug)]
pub struct Encoded {
    /// What it was.
    pub kind: MediaKind,
    /// `[tokens, D]`, for all runs. Where a model adds features behind its first layers too
    /// (deepstack), they follow in each row: `[tokens, (1 + layers) * D]`.
    pub features: Array,
    /// One for an image and a sound, one for each frame, or pair of frames, of a video.
    pub runs: Vec<Run>,
}

/// How much of media a model is given.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct MediaOptions {
    /// The most tokens of an image; the checkpoint's setting without it. Gemma 4 knows 70, 140,
    /// 280, 560 and 1120.
    pub image_tokens: Option<usize>,
    /// Frames per second that are taken of videos.
    pub video_fps: Option<f64>,
    /// The most frames that are taken of a video.
    pub video_frames: Option<usize>,
}

/// The towers of a model, and what prepares media for them.
#[derive(Debug)]
pub struct Towers {
    processor: Processor,
    family: Family,
}

#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a model has one")]
enum Family {
    Qwen(Box<QwenTower>),
    Gemma {
        vision: Option<GemmaEyes>,
        audio: Option<GemmaEars>,
    },
}

#[derive(Debug)]
enum GemmaEyes {
    Tower(Box<GemmaTower>),
    Unified(Box<PatchEmbedder>),
}

impl GemmaEyes {
    fn forward(&self, input: &GemmaInput) -> Result<Array> {
        match self {
            Self::Tower(tower) => tower.forward(input),
            Self::Unified(embedder) => embedder.forward(input),
        }
    }
}

#[derive(Debug)]
enum GemmaEars {
    Tower(Box<GemmaAudio>),
    Unified(Box<SampleEmbedder>),
}

impl Towers {
    /// The kinds that it takes.
    pub fn kinds(&self) -> Vec<MediaKind> {
        self.processor.kinds()
    }

    /// The features of a picture.
    ///
    /// # Errors
    /// When the model takes no images, the picture or the options do not fit, or MLX fails.
    pub fn image(&self, picture: &Picture, options: MediaOptions) -> Result<Encoded> {
        self.encode(&self.processor.image(picture, options)?)
    }

    /// The features of a video.
    ///
    /// # Errors
    /// When the model takes no videos, the video or the options do not fit, or MLX fails.
    pub fn video(&self, video: &Video, options: MediaOptions) -> Result<Encoded> {
        self.encode(&self.processor.video(video, options)?)
    }

    /// The features of a sound, at whatever rate it is.
    ///
    /// # Errors
    /// When the model takes no sounds, the sound is too short, or MLX fails.
    pub fn audio(&self, sound: &Sound) -> Result<Encoded> {
        self.encode(&self.processor.audio(sound)?)
    }

    /// What prepares media for the towers.
    pub(crate) fn processor(&self) -> &Processor {
        &self.processor
    }

    /// The features of a medium that the processor has prepared.
    pub(crate) fn encode(&self, prepared: &Prepared) -> Result<Encoded> {
        match prepared {
            Prepared::QwenImage(input) => self.qwen_image(input),
            Prepared::QwenVideo(video) => self.qwen_video(video),
            Prepared::GemmaImage(input) => self.gemma_image(input),
            Prepared::GemmaVideo(video) => self.gemma_video(&video.frames, &video.timestamps),
            Prepared::GemmaSound(input) => self.gemma_sound(input),
            Prepared::GemmaSamples(input) => self.gemma_samples(input),
        }
    }

    /// The features of an image that Qwen's processor has prepared.
    ///
    /// # Errors
    /// When the model is another one, the patches do not fit, or MLX fails.
    pub fn qwen_image(&self, input: &QwenInput) -> Result<Encoded> {
        let tower = self.qwen(MediaKind::Image)?;
        let runs = Run::of_qwen_image(input);
        self.encoded(MediaKind::Image, tower.forward(input)?, runs)
    }

    /// The features of a video that Qwen's processor has prepared.
    ///
    /// # Errors
    /// As [`qwen_image`](Self::qwen_image).
    pub fn qwen_video(&self, video: &QwenVideo) -> Result<Encoded> {
        let tower = self.qwen(MediaKind::Video)?;
        let runs = Run::of_qwen_video(video, self.processor.video_time());
        let features = tower.forward(&video.input)?;
        self.encoded(MediaKind::Video, features, runs)
    }

    /// The features of an image that Gemma 4's processor has prepared.
    ///
    /// # Errors
    /// As [`qwen_image`](Self::qwen_image).
    pub fn gemma_image(&self, input: &GemmaInput) -> Result<Encoded> {
        let eyes = self.eyes(MediaKind::Image)?;
        let runs = Run::of_gemma_image(input, self.processor.sees_together());
        self.encoded(MediaKind::Image, eyes.forward(input)?, runs)
    }

    /// The features of frames that Gemma 4's processor has prepared, a timestamp for each.
    ///
    /// # Errors
    /// As [`qwen_image`](Self::qwen_image).
    pub fn gemma_video(&self, frames: &[GemmaInput], timestamps: &[f64]) -> Result<Encoded> {
        let eyes = self.eyes(MediaKind::Video)?;
        let mut features = Vec::with_capacity(frames.len());
        for frame in frames {
            check_wanted()?;
            let frame = eyes.forward(frame)?;
            // One frame after the other, so that no more memory is taken than one needs.
            frame.eval()?;
            features.push(frame);
        }
        let runs = Run::of_gemma_video(frames, timestamps, self.processor.sees_together());
        let features = Array::concatenate(&features, 0)?;
        self.encoded(MediaKind::Video, features, runs)
    }

    /// The features of a sound that Gemma 4's extractor has prepared.
    ///
    /// # Errors
    /// As [`qwen_image`](Self::qwen_image).
    pub fn gemma_sound(&self, input: &MelFeatures) -> Result<Encoded> {
        match &self.family {
            Family::Gemma {
                audio: Some(GemmaEars::Tower(tower)),
                ..
            } => self.encoded(
                MediaKind::Audio,
                tower.forward(input)?,
                Run::of_sound(input),
            ),
            _ => Err(self.processor.refused(MediaKind::Audio)),
        }
    }

    /// The features of samples that the extractor of the variants without encoders has prepared.
    ///
    /// # Errors
    /// As [`qwen_image`](Self::qwen_image).
    pub fn gemma_samples(&self, input: &RawFeatures) -> Result<Encoded> {
        match &self.family {
            Family::Gemma {
                audio: Some(GemmaEars::Unified(embedder)),
                ..
            } => {
                let runs = Run::of_samples(input);
                self.encoded(MediaKind::Audio, embedder.forward(input)?, runs)
            }
            _ => Err(self.processor.refused(MediaKind::Audio)),
        }
    }

    /// Computed features, of which there must be as many as the runs have tokens.
    fn encoded(&self, kind: MediaKind, features: Array, runs: Vec<Run>) -> Result<Encoded> {
        eval([&features])?;
        let expected: usize = runs.iter().map(|run| run.tokens).sum();
        let found = features.dim(0)?;
        if usize::try_from(found) != Ok(expected) {
            let expected = format!("{expected} features");
            return Err(Error::field(kind.to_string(), expected, found.to_string()));
        }
        Ok(Encoded {
            kind,
            features,
            runs,
        })
    }

    fn qwen(&self, kind: MediaKind) -> Result<&QwenTower> {
        match &self.family {
            Family::Qwen(tower) => Ok(tower),
            Family::Gemma { .. } => Err(self.processor.refused(kind)),
        }
    }

    fn eyes(&self, kind: MediaKind) -> Result<&GemmaEyes> {
        self.check(kind)?;
        match &self.family {
            Family::Gemma {
                vision: Some(eyes), ..
            } => Ok(eyes),
            _ => Err(self.processor.refused(kind)),
        }
    }

    /// Refuses a kind that the model does not take.
    ///
    /// # Errors
    /// When it does not; the error names both.
    pub fn check(&self, kind: MediaKind) -> Result<()> {
        self.processor.check(kind)
    }
}
