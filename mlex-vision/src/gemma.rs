//! Gemma 4: images and videos as patches, within a budget of soft tokens.
//!
//! Source: the Gemma 4 processors of mlx-vlm and transformers.

use crate::config::{Fields, ProcessorFiles};
use crate::error::{ErrorKind, Result};
use crate::normalize::Normalize;
use crate::picture::Picture;
use crate::resample::{Filter, resize};
use crate::sampling::FrameSampling;
use crate::video::Video;

/// The budgets that the models were trained with.
const BUDGETS: [usize; 5] = [70, 140, 280, 560, 1120];

/// How Gemma 4 sees images and videos.
#[derive(Debug, Clone, PartialEq)]
pub struct GemmaVision {
    image: Layout,
    video: Layout,
    sampling: FrameSampling,
}

/// What the tower takes of an image or of a frame.
#[derive(Debug, Clone, PartialEq)]
pub struct GemmaInput {
    /// Patches `[grid h * w, patch_len]`, rows from the top. A patch is `[y, x, channel]`.
    pub patches: Vec<f32>,
    /// The length of one patch: patch size squared * channels.
    pub patch_len: usize,
    /// How many patches there are in height and width.
    pub grid: [usize; 2],
    /// How many tokens of the language model it becomes.
    pub tokens: usize,
}

impl GemmaInput {
    /// The column and row of each patch.
    pub fn positions(&self) -> impl Iterator<Item = [usize; 2]> {
        let [height, width] = self.grid;
        (0..height * width).map(move |n| [n % width, n / width])
    }
}

/// What the tower takes of a video.
#[derive(Debug, Clone, PartialEq)]
pub struct GemmaVideo {
    /// The frames, all of one size.
    pub frames: Vec<GemmaInput>,
    /// For each frame, seconds from the beginning. The prompt has them as minutes and seconds.
    pub timestamps: Vec<f64>,
}

/// How pictures become patches.
#[derive(Debug, Clone, PartialEq)]
struct Layout {
    patch: usize,
    pooling: usize,
    max_tokens: usize,
    /// The tower has no encoder: a patch is what becomes a token.
    unified: bool,
    normalize: Normalize,
}

impl GemmaVision {
    /// As the files of a checkpoint say. The `unified` models have no encoder: they take the
    /// pixels of a whole token as one patch.
    ///
    /// # Errors
    ///
    /// If a field is not what it must be.
    pub fn new(files: &ProcessorFiles, unified: bool) -> Result<Self> {
        let fields = files.video();
        let max_frames = fields.count("num_frames", 32, 1 << 16)? as usize;
        Ok(Self {
            image: Layout::new(&files.image(), 280, unified)?,
            video: Layout::new(&fields, 70, unified)?,
            sampling: FrameSampling {
                fps: 2.0,
                min_frames: 4,
                max_frames,
            },
        })
    }

    /// With another budget of soft tokens per image.
    ///
    /// # Errors
    ///
    /// If it is none of 70, 140, 280, 560 and 1120.
    pub fn with_max_image_tokens(mut self, tokens: usize) -> Result<Self> {
        self.image.max_tokens = budget("max_soft_tokens", tokens)?;
        Ok(self)
    }

    /// With another budget of soft tokens per frame of a video.
    ///
    /// # Errors
    ///
    /// If it is none of 70, 140, 280, 560 and 1120.
    pub fn with_max_frame_tokens(mut self, tokens: usize) -> Result<Self> {
        self.video.max_tokens = budget("max_soft_tokens", tokens)?;
        Ok(self)
    }

    /// With other frames of videos.
    #[must_use]
    pub fn with_sampling(mut self, sampling: FrameSampling) -> Self {
        self.sampling = sampling;
        self
    }

    /// Which frames of videos are taken.
    pub fn sampling(&self) -> FrameSampling {
        self.sampling
    }

    /// How many tokens an image of this size becomes, without looking at its pixels.
    ///
    /// # Errors
    ///
    /// If a side is zero.
    pub fn image_tokens(&self, width: u32, height: u32) -> Result<usize> {
        let (width, height) = self.image.size(width, height)?;
        let side = self.image.side();
        Ok(width as usize / side * (height as usize / side))
    }

    /// The patches of an image.
    ///
    /// # Errors
    ///
    /// None that a [`Picture`] can bring about.
    pub fn image(&self, picture: &Picture) -> Result<GemmaInput> {
        let (width, height) = self.image.size(picture.width(), picture.height())?;
        self.image.input(picture, width, height)
    }

    /// The patches of a video's frames, and when they are.
    ///
    /// # Errors
    ///
    /// If a frame cannot be read.
    pub fn video(&self, video: &Video) -> Result<GemmaVideo> {
        let info = video.info();
        self.video_of(video, &self.sampling.indices(info.frames, info.fps))
    }

    /// As [`GemmaVision::video`], of these frames, whose indices must ascend.
    ///
    /// # Errors
    ///
    /// As for [`GemmaVision::video`].
    pub fn video_of(&self, video: &Video, indices: &[usize]) -> Result<GemmaVideo> {
        let info = video.info();
        let (width, height) = self.video.size(info.width, info.height)?;
        let mut frames = Vec::with_capacity(indices.len());
        video.frames(indices, &mut |frame| {
            frames.push(self.video.input(&frame, width, height)?);
            Ok(())
        })?;
        // The reference counts in frames that are taken, evenly over the video.
        let fps = frames.len() as f64 / info.frames as f64 * info.fps;
        let timestamps = (0..frames.len()).map(|n| n as f64 / fps).collect();
        Ok(GemmaVideo { frames, timestamps })
    }
}

impl Layout {
    fn new(fields: &Fields<'_>, default_tokens: u64, unified: bool) -> Result<Self> {
        let scale = fields.positive("rescale_factor", 1.0 / 255.0, 1.0)? as f32;
        let rescale = fields.flag("do_rescale", true)?;
        let normalize = fields.flag("do_normalize", false)?;
        let mean = fields.colours("image_mean", [0.0; 3], false)?;
        let std = fields.colours("image_std", [1.0; 3], true)?;
        let tokens = fields.count("max_soft_tokens", default_tokens, 1120)? as usize;
        Ok(Self {
            patch: fields.count("patch_size", 16, 64)? as usize,
            pooling: fields.count("pooling_kernel_size", 3, 16)? as usize,
            max_tokens: budget("max_soft_tokens", tokens)?,
            unified,
            normalize: Normalize::new(
                if rescale { scale } else { 1.0 },
                if normalize { mean } else { [0.0; 3] },
                if normalize { std } else { [1.0; 3] },
            ),
        })
    }

    /// Sides are multiples of this: pixels of a token.
    fn side(&self) -> usize {
        self.patch * self.pooling
    }

    /// The largest sides of about the same ratio whose patches are within the budget.
    fn size(&self, width: u32, height: u32) -> Result<(u32, u32)> {
        if width == 0 || height == 0 {
            return Err(ErrorKind::Empty { width, height }.into());
        }
        let (width, height) = (f64::from(width), f64::from(height));
        let side = self.side() as f64;
        let pixels = self.max_tokens as f64 * side * side;
        let factor = (pixels / (height * width)).sqrt();
        let fit = |length: f64| (factor * length / side).floor();
        let along =
            |length: f64, across: f64| (length / across).floor().min(self.max_tokens as f64);
        let (columns, rows) = match (fit(width), fit(height)) {
            (_, 0.0) => (along(width, height), 1.0),
            (0.0, _) => (1.0, along(height, width)),
            both => both,
        };
        Ok(((columns * side) as u32, (rows * side) as u32))
    }

    fn input(&self, picture: &Picture, width: u32, height: u32) -> Result<GemmaInput> {
        let resized = resize(picture, width, height, Filter::Bicubic)?;
        let (width, height) = (width as usize, height as usize);
        let patch = if self.unified {
            self.side()
        } else {
            self.patch
        };
        let mut patches = Vec::with_capacity(width * height * 3);
        for top in (0..height).step_by(patch) {
            for left in (0..width).step_by(patch) {
                for y in top..top + patch {
                    patches.extend(self.normalize.pixels(&resized, (left, y), patch));
                }
            }
        }
        Ok(GemmaInput {
            patches,
            patch_len: patch * patch * 3,
            grid: [height / patch, width / patch],
            tokens: width / self.side() * (height / self.side()),
        })
    }
}

fn budget(field: &str, tokens: usize) -> Result<usize> {
    if BUDGETS.contains(&tokens) {
        return Ok(tokens);
    }
    Err(ErrorKind::Config {
        field: field.to_owned(),
        expected: "70, 140, 280, 560 or 1120".to_owned(),
        found: tokens.to_string(),
    }
    .into())
}
