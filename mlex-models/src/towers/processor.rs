//! What prepares media for towers, as the Python processors do. It knows how many tokens a medium
//! becomes, and needs no tower for it.

use mlex_audio::{MelExtractor, MelFeatures, RawExtractor, RawFeatures, Sound};
use mlex_vision::{
    FrameSampling, GemmaInput, GemmaVideo, GemmaVision, Picture, QwenInput, QwenVideo, QwenVision,
    Video,
};

use super::run::VideoTime;
use super::{MediaKind, MediaOptions, Run};
use crate::{Error, Result};

/// What prepares media for the towers of a model.
#[derive(Debug)]
pub(crate) struct Processor {
    /// The architecture's name, for errors.
    pub(super) model_type: String,
    pub(super) family: Family,
}

#[derive(Debug)]
pub(super) enum Family {
    Qwen {
        vision: QwenVision,
        time: VideoTime,
    },
    Gemma {
        vision: Option<GemmaVision>,
        audio: Option<Ear>,
        /// Some checkpoints have no token for videos.
        has_video: bool,
        /// The tokens of a picture see each other.
        together: bool,
    },
}

/// What hears for Gemma 4.
#[derive(Debug)]
pub(super) enum Ear {
    Mel(MelExtractor),
    Raw(RawExtractor),
}

/// What a tower takes of a medium.
#[derive(Debug)]
pub(crate) enum Prepared {
    QwenImage(QwenInput),
    QwenVideo(QwenVideo),
    GemmaImage(GemmaInput),
    GemmaVideo(GemmaVideo),
    GemmaSound(MelFeatures),
    GemmaSamples(RawFeatures),
}

impl Processor {
    /// The kinds that it takes.
    pub(super) fn kinds(&self) -> Vec<MediaKind> {
        match &self.family {
            Family::Qwen { .. } => vec![MediaKind::Image, MediaKind::Video],
            Family::Gemma {
                vision,
                audio,
                has_video,
                ..
            } => {
                let mut kinds = Vec::new();
                if vision.is_some() {
                    kinds.push(MediaKind::Image);
                }
                if vision.is_some() && *has_video {
                    kinds.push(MediaKind::Video);
                }
                if audio.is_some() {
                    kinds.push(MediaKind::Audio);
                }
                kinds
            }
        }
    }

    /// Refuses a kind that the model does not take.
    pub(crate) fn check(&self, kind: MediaKind) -> Result<()> {
        if self.kinds().contains(&kind) {
            return Ok(());
        }
        Err(self.refused(kind))
    }

    pub(super) fn refused(&self, kind: MediaKind) -> Error {
        refused(&self.model_type, kind)
    }

    /// A picture as the tower takes it.
    pub(crate) fn image(&self, picture: &Picture, options: MediaOptions) -> Result<Prepared> {
        match &self.family {
            Family::Qwen {
                vision: processor, ..
            } => {
                let processor = match options.image_tokens {
                    Some(tokens) => &processor.clone().with_max_image_tokens(tokens),
                    None => processor,
                };
                Ok(Prepared::QwenImage(processor.image(picture)?))
            }
            Family::Gemma {
                vision: Some(processor),
                ..
            } => {
                let processor = match options.image_tokens {
                    Some(tokens) => &processor.clone().with_max_image_tokens(tokens)?,
                    None => processor,
                };
                Ok(Prepared::GemmaImage(processor.image(picture)?))
            }
            Family::Gemma { vision: None, .. } => Err(self.refused(MediaKind::Image)),
        }
    }

    /// A video as the tower takes it.
    pub(crate) fn video(&self, video: &Video, options: MediaOptions) -> Result<Prepared> {
        match &self.family {
            Family::Qwen {
                vision: processor, ..
            } => {
                let sampling = sampling(processor.sampling(), options)?;
                let processor = processor.clone().with_sampling(sampling);
                Ok(Prepared::QwenVideo(processor.video(video)?))
            }
            Family::Gemma {
                vision: Some(processor),
                has_video: true,
                ..
            } => {
                let sampling = sampling(processor.sampling(), options)?;
                let processor = processor.clone().with_sampling(sampling);
                Ok(Prepared::GemmaVideo(processor.video(video)?))
            }
            Family::Gemma { .. } => Err(self.refused(MediaKind::Video)),
        }
    }

    /// A sound, at whatever rate it is, as the tower takes it.
    pub(crate) fn audio(&self, sound: &Sound) -> Result<Prepared> {
        match &self.family {
            Family::Gemma {
                audio: Some(Ear::Mel(extractor)),
                ..
            } => {
                let sound = sound.clone().resampled(extractor.sampling_rate())?;
                Ok(Prepared::GemmaSound(extractor.features(&sound)?))
            }
            Family::Gemma {
                audio: Some(Ear::Raw(extractor)),
                ..
            } => {
                let sound = sound.clone().resampled(extractor.sampling_rate())?;
                Ok(Prepared::GemmaSamples(extractor.features(&sound)?))
            }
            _ => Err(self.refused(MediaKind::Audio)),
        }
    }

    /// The tokens that a medium becomes.
    pub(crate) fn runs(&self, prepared: &Prepared) -> Vec<Run> {
        let together = self.sees_together();
        match prepared {
            Prepared::QwenImage(input) => Run::of_qwen_image(input),
            Prepared::QwenVideo(video) => Run::of_qwen_video(video, self.video_time()),
            Prepared::GemmaImage(input) => Run::of_gemma_image(input, together),
            Prepared::GemmaVideo(video) => {
                Run::of_gemma_video(&video.frames, &video.timestamps, together)
            }
            Prepared::GemmaSound(input) => Run::of_sound(input),
            Prepared::GemmaSamples(input) => Run::of_samples(input),
        }
    }

    /// How the time of a video is told.
    pub(super) fn video_time(&self) -> VideoTime {
        match self.family {
            Family::Qwen { time, .. } => time,
            Family::Gemma { .. } => VideoTime::Text,
        }
    }

    /// Whether the tokens of a picture see each other.
    pub(super) fn sees_together(&self) -> bool {
        matches!(self.family, Family::Gemma { together: true, .. })
    }
}

/// That a model does not take a kind.
pub(crate) fn refused(model_type: &str, kind: MediaKind) -> Error {
    Error::unsupported(format!("{model_type}: input"), kind.to_string())
}

/// The frames to be taken, as the options say.
fn sampling(default: FrameSampling, options: MediaOptions) -> Result<FrameSampling> {
    let mut sampling = default;
    if let Some(fps) = options.video_fps {
        if !(fps > 0.0 && fps.is_finite()) {
            return Err(Error::field("fps", "a positive number", fps.to_string()));
        }
        sampling.fps = fps;
    }
    if let Some(frames) = options.video_frames {
        sampling.max_frames = frames.max(1);
        sampling.min_frames = sampling.min_frames.min(sampling.max_frames);
    }
    Ok(sampling)
}
