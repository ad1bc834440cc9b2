//! What models see and hear with: towers that make features of images, videos and sounds, each
//! feature in the place of one token.
//!
//! [`Towers`] prepares a medium as the model's processor does and runs the tower over it. The
//! features are [`Encoded`], with the [runs](Run) of tokens that stand for them in a prompt.

mod gemma_audio;
mod gemma_unified;
mod gemma_vision;
mod layers;
mod load;
mod qwen;

use std::fmt;

use mlex_audio::{MelExtractor, MelFeatures, RawExtractor, RawFeatures, Sound};
use mlex_core::{Array, eval};
use mlex_vision::{
    FrameSampling, GemmaInput, GemmaVision, Picture, QwenInput, QwenVideo, QwenVision, Video,
};

use self::gemma_audio::GemmaAudio;
use self::gemma_unified::{PatchEmbedder, SampleEmbedder};
use self::gemma_vision::GemmaTower;
use self::qwen::QwenTower;
use crate::{Error, Result};

pub(crate) use self::load::taken;
pub use self::load::{media_kinds, media_tokens};

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

/// Tokens of a prompt, one after the other, that stand for features.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// How many there are.
    pub tokens: usize,
    /// Steps in time, height and width in tokens, where positions have several directions.
    pub grid: Option<[usize; 3]>,
    /// How many positions a step in time takes.
    pub time_step: f64,
    /// Seconds from the beginning of a video.
    pub timestamp: Option<f64>,
    /// They all see each other, not those before alone.
    pub together: bool,
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
    /// The architecture's name, for errors.
    model_type: String,
    family: Family,
}

#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a model has one")]
enum Family {
    Qwen {
        processor: QwenVision,
        tower: Box<QwenTower>,
        time: VideoTime,
    },
    Gemma {
        processor: GemmaVision,
        vision: Option<GemmaEyes>,
        audio: Option<GemmaEars>,
        /// Some checkpoints have no token for videos.
        has_video: bool,
        /// The tokens of a picture see each other.
        together: bool,
    },
}

/// How the time of a video is told to the language model.
#[derive(Clone, Copy, Debug)]
enum VideoTime {
    /// By text before each pair of frames, which is a run of its own.
    Text,
    /// By positions, so many for a second.
    Positions(f64),
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
    Tower(MelExtractor, Box<GemmaAudio>),
    Unified(RawExtractor, Box<SampleEmbedder>),
}

impl Towers {
    /// The kinds that it takes.
    pub fn kinds(&self) -> Vec<MediaKind> {
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

    /// The features of a picture.
    ///
    /// # Errors
    /// When the model takes no images, the picture or the options do not fit, or MLX fails.
    pub fn image(&self, picture: &Picture, options: MediaOptions) -> Result<Encoded> {
        match &self.family {
            Family::Qwen { processor, .. } => {
                let processor = match options.image_tokens {
                    Some(tokens) => &processor.clone().with_max_image_tokens(tokens),
                    None => processor,
                };
                self.qwen_image(&processor.image(picture)?)
            }
            Family::Gemma { processor, .. } => {
                let processor = match options.image_tokens {
                    Some(tokens) => &processor.clone().with_max_image_tokens(tokens)?,
                    None => processor,
                };
                self.gemma_image(&processor.image(picture)?)
            }
        }
    }

    /// The features of a video.
    ///
    /// # Errors
    /// When the model takes no videos, the video or the options do not fit, or MLX fails.
    pub fn video(&self, video: &Video, options: MediaOptions) -> Result<Encoded> {
        match &self.family {
            Family::Qwen { processor, .. } => {
                let sampling = sampling(processor.sampling(), options)?;
                let processor = processor.clone().with_sampling(sampling);
                let input = processor.video(video)?;
                self.qwen_video(&input)
            }
            Family::Gemma { processor, .. } => {
                self.check(MediaKind::Video)?;
                let sampling = sampling(processor.sampling(), options)?;
                let processor = processor.clone().with_sampling(sampling);
                let input = processor.video(video)?;
                self.gemma_video(&input.frames, &input.timestamps)
            }
        }
    }

    /// The features of a sound, at whatever rate it is.
    ///
    /// # Errors
    /// When the model takes no sounds, the sound is too short, or MLX fails.
    pub fn audio(&self, sound: &Sound) -> Result<Encoded> {
        match &self.family {
            Family::Gemma {
                audio: Some(GemmaEars::Tower(extractor, _)),
                ..
            } => {
                let sound = sound.clone().resampled(extractor.sampling_rate())?;
                self.gemma_sound(&extractor.features(&sound)?)
            }
            Family::Gemma {
                audio: Some(GemmaEars::Unified(extractor, _)),
                ..
            } => {
                let sound = sound.clone().resampled(extractor.sampling_rate())?;
                self.gemma_samples(&extractor.features(&sound)?)
            }
            _ => Err(self.refused(MediaKind::Audio)),
        }
    }

    /// The features of an image that Qwen's processor has prepared.
    ///
    /// # Errors
    /// When the model is another one, the patches do not fit, or MLX fails.
    pub fn qwen_image(&self, input: &QwenInput) -> Result<Encoded> {
        let (tower, _) = self.qwen(MediaKind::Image)?;
        let [rows, columns] = merged(input);
        let run = Run {
            tokens: input.tokens,
            grid: Some([1, rows, columns]),
            time_step: 1.0,
            timestamp: None,
            together: false,
        };
        self.encoded(MediaKind::Image, tower.forward(input)?, vec![run])
    }

    /// The features of a video that Qwen's processor has prepared.
    ///
    /// # Errors
    /// As [`qwen_image`](Self::qwen_image).
    pub fn qwen_video(&self, video: &QwenVideo) -> Result<Encoded> {
        /// More than any video has, whatever its file says.
        const LONGEST_STEP: f64 = 1000.0;
        let (tower, time) = self.qwen(MediaKind::Video)?;
        let (input, [rows, columns]) = (&video.input, merged(&video.input));
        let run = |steps: usize| Run {
            tokens: input.tokens / input.grid[0].max(1) * steps,
            grid: Some([steps, rows, columns]),
            time_step: 1.0,
            timestamp: None,
            together: false,
        };
        let runs = match time {
            VideoTime::Text => {
                let times = video.timestamps.iter();
                times
                    .map(|&seconds| Run {
                        timestamp: Some(seconds),
                        ..run(1)
                    })
                    .collect()
            }
            VideoTime::Positions(per_second) => vec![Run {
                time_step: (video.seconds_per_patch * per_second).clamp(0.0, LONGEST_STEP),
                ..run(input.grid[0])
            }],
        };
        self.encoded(MediaKind::Video, tower.forward(input)?, runs)
    }

    /// The features of an image that Gemma 4's processor has prepared.
    ///
    /// # Errors
    /// As [`qwen_image`](Self::qwen_image).
    pub fn gemma_image(&self, input: &GemmaInput) -> Result<Encoded> {
        let eyes = self.eyes(MediaKind::Image)?;
        let run = Run {
            tokens: input.tokens,
            grid: None,
            time_step: 1.0,
            timestamp: None,
            together: self.sees_together(),
        };
        self.encoded(MediaKind::Image, eyes.forward(input)?, vec![run])
    }

    /// The features of frames that Gemma 4's processor has prepared, a timestamp for each.
    ///
    /// # Errors
    /// As [`qwen_image`](Self::qwen_image).
    pub fn gemma_video(&self, frames: &[GemmaInput], timestamps: &[f64]) -> Result<Encoded> {
        let eyes = self.eyes(MediaKind::Video)?;
        let mut features = Vec::with_capacity(frames.len());
        for frame in frames {
            let frame = eyes.forward(frame)?;
            // One frame after the other, so that no more memory is taken than one needs.
            frame.eval()?;
            features.push(frame);
        }
        let run = |(frame, &seconds): (&GemmaInput, &f64)| Run {
            tokens: frame.tokens,
            grid: None,
            time_step: 1.0,
            timestamp: Some(seconds),
            together: self.sees_together(),
        };
        let runs = frames.iter().zip(timestamps).map(run).collect();
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
                audio: Some(GemmaEars::Tower(_, tower)),
                ..
            } => self.sound(tower.forward(input)?, input.tokens),
            _ => Err(self.refused(MediaKind::Audio)),
        }
    }

    /// The features of samples that the extractor of the variants without encoders has prepared.
    ///
    /// # Errors
    /// As [`qwen_image`](Self::qwen_image).
    pub fn gemma_samples(&self, input: &RawFeatures) -> Result<Encoded> {
        match &self.family {
            Family::Gemma {
                audio: Some(GemmaEars::Unified(_, embedder)),
                ..
            } => self.sound(embedder.forward(input)?, input.tokens),
            _ => Err(self.refused(MediaKind::Audio)),
        }
    }

    fn sound(&self, features: Array, tokens: usize) -> Result<Encoded> {
        let run = Run {
            tokens,
            grid: None,
            time_step: 1.0,
            timestamp: None,
            together: false,
        };
        self.encoded(MediaKind::Audio, features, vec![run])
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

    fn qwen(&self, kind: MediaKind) -> Result<(&QwenTower, VideoTime)> {
        match &self.family {
            Family::Qwen { tower, time, .. } => Ok((tower, *time)),
            Family::Gemma { .. } => Err(self.refused(kind)),
        }
    }

    fn eyes(&self, kind: MediaKind) -> Result<&GemmaEyes> {
        self.check(kind)?;
        match &self.family {
            Family::Gemma {
                vision: Some(eyes), ..
            } => Ok(eyes),
            _ => Err(self.refused(kind)),
        }
    }

    /// Whether the tokens of a picture see each other.
    fn sees_together(&self) -> bool {
        matches!(self.family, Family::Gemma { together: true, .. })
    }

    /// Refuses a kind that the model does not take.
    ///
    /// # Errors
    /// When it does not; the error names both.
    pub fn check(&self, kind: MediaKind) -> Result<()> {
        if self.kinds().contains(&kind) {
            return Ok(());
        }
        Err(self.refused(kind))
    }

    fn refused(&self, kind: MediaKind) -> Error {
        refused(&self.model_type, kind)
    }
}

/// That a model does not take a kind.
pub(crate) fn refused(model_type: &str, kind: MediaKind) -> Error {
    Error::unsupported(format!("{model_type}: input"), kind.to_string())
}

/// Height and width of a grid of patches in tokens.
fn merged(input: &QwenInput) -> [usize; 2] {
    let [t, h, w] = input.grid;
    // As many patches become one token in each direction.
    let square = (t * h * w).checked_div(input.tokens).unwrap_or(1);
    let merge = square.isqrt().max(1);
    [h / merge, w / merge]
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
