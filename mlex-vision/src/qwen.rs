//! Qwen2.5-VL, Qwen3-VL and Qwen3.5: images and videos as patches in the order of the tower.
//!
//! Source: the Qwen3-VL processors of mlx-vlm, which are those of Qwen2.5-VL there too, and of
//! transformers.

use crate::config::{Fields, ProcessorFiles};
use crate::error::{ErrorKind, Result};
use crate::normalize::Normalize;
use crate::picture::Picture;
use crate::resample::{Filter, resize};
use crate::sampling::FrameSampling;
use crate::video::Video;

/// The longest side may have so many times the length of the shortest.
const MAX_RATIO: u32 = 200;

/// The most pixels that a configuration may ask for.
const MOST_PIXELS: u64 = 1 << 30;

/// How Qwen2.5-VL, Qwen3-VL and Qwen3.5 see images and videos.
#[derive(Debug, Clone, PartialEq)]
pub struct QwenVision {
    image: Layout,
    video: Layout,
    sampling: FrameSampling,
}

/// What the tower takes of an image.
#[derive(Debug, Clone, PartialEq)]
pub struct QwenInput {
    /// Patches `[grid t * h * w, patch_len]`. They come in squares of the merge size, so that
    /// those that become one token follow each other. A patch is `[channel, t, y, x]`.
    pub patches: Vec<f32>,
    /// The length of one patch: channels * temporal patch size * patch size squared.
    pub patch_len: usize,
    /// How many patches there are in time, height and width.
    pub grid: [usize; 3],
    /// How many tokens of the language model it becomes.
    pub tokens: usize,
}

/// What the tower takes of a video.
#[derive(Debug, Clone, PartialEq)]
pub struct QwenVideo {
    /// The patches. The prompt has `tokens / grid[0]` tokens after each timestamp.
    pub input: QwenInput,
    /// For each patch in time, seconds from the beginning to its middle.
    pub timestamps: Vec<f64>,
    /// How many seconds a patch in time takes, by the rate at which frames were taken.
    pub seconds_per_patch: f64,
}

/// What the processors of a generation have where the files say nothing.
struct Defaults {
    patch: u64,
    mean: [f32; 3],
    std: [f32; 3],
}

const QWEN3: Defaults = Defaults {
    patch: 16,
    mean: [0.5; 3],
    std: [0.5; 3],
};

/// Mean and deviation of CLIP's images, as in transformers.
const QWEN2_5: Defaults = Defaults {
    patch: 14,
    mean: [0.481_454_66, 0.457_827_5, 0.408_210_73],
    std: [0.268_629_54, 0.261_302_6, 0.275_777_1],
};

/// How pictures become patches.
#[derive(Debug, Clone, PartialEq)]
struct Layout {
    patch: usize,
    temporal_patch: usize,
    merge: usize,
    min_pixels: u64,
    max_pixels: u64,
    normalize: Normalize,
}

impl QwenVision {
    /// As the files of a checkpoint say.
    ///
    /// # Errors
    ///
    /// If a field is not what it must be.
    pub fn new(files: &ProcessorFiles) -> Result<Self> {
        Self::with_defaults(files, &QWEN3)
    }

    /// As [`new`](Self::new), of Qwen2.5-VL, whose defaults are others.
    ///
    /// # Errors
    ///
    /// If a field is not what it must be.
    pub fn qwen2_5(files: &ProcessorFiles) -> Result<Self> {
        Self::with_defaults(files, &QWEN2_5)
    }

    fn with_defaults(files: &ProcessorFiles, defaults: &Defaults) -> Result<Self> {
        // Older checkpoints say of both in one place.
        let fields = match files.video() {
            fields if fields.is_empty() => files.image(),
            fields => fields,
        };
        Ok(Self {
            image: Layout::new(&files.image(), defaults, 56 * 56, 28 * 28 * 1280)?,
            video: Layout::new(&fields, defaults, 128 * 32 * 32, 32 * 32 * 768)?,
            sampling: FrameSampling {
                fps: fields.positive("fps", 2.0, 1000.0)?,
                min_frames: fields.count("min_frames", 4, 1 << 16)? as usize,
                max_frames: fields.count("max_frames", 768, 1 << 16)? as usize,
            },
        })
    }

    /// With at most `tokens` tokens per image, at least one. Where an image is much longer than
    /// wide there can be more, as no side gets shorter than one token.
    #[must_use]
    pub fn with_max_image_tokens(mut self, tokens: usize) -> Self {
        let image = &mut self.image;
        let pixels = (image.factor() * image.factor()).saturating_mul(tokens.max(1) as u64);
        image.max_pixels = pixels.min(MOST_PIXELS);
        image.min_pixels = image.min_pixels.min(image.max_pixels);
        self
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
    /// If a side is zero or more than 200 times as long as the other.
    pub fn image_tokens(&self, width: u32, height: u32) -> Result<usize> {
        let (width, height) = self.image.image_size(width, height)?;
        let factor = self.image.factor() as usize;
        Ok(width as usize / factor * (height as usize / factor))
    }

    /// The patches of an image.
    ///
    /// # Errors
    ///
    /// If a side is more than 200 times as long as the other.
    pub fn image(&self, picture: &Picture) -> Result<QwenInput> {
        let layout = &self.image;
        let (width, height) = layout.image_size(picture.width(), picture.height())?;
        let resized = resize(picture, width, height, Filter::Bicubic)?;
        let mut patches = Vec::with_capacity(layout.len(1, width, height));
        layout.push(&vec![&resized; layout.temporal_patch], &mut patches);
        Ok(layout.input(patches, 1, width, height))
    }

    /// The patches of a video's frames, and when they are.
    ///
    /// # Errors
    ///
    /// If a frame cannot be read, or a side is more than 200 times as long as the other.
    pub fn video(&self, video: &Video) -> Result<QwenVideo> {
        let info = video.info();
        self.video_of(video, &self.sampling.indices(info.frames, info.fps))
    }

    /// Width and height to which so many frames of a video are resized.
    ///
    /// # Errors
    ///
    /// If a side is zero or more than 200 times as long as the other.
    pub fn video_frame_size(&self, frames: usize, width: u32, height: u32) -> Result<(u32, u32)> {
        self.video.video_size(frames.max(1), width, height)
    }

    /// As [`QwenVision::video`], of these frames, whose indices must ascend.
    ///
    /// # Errors
    ///
    /// As for [`QwenVision::video`].
    pub fn video_of(&self, video: &Video, indices: &[usize]) -> Result<QwenVideo> {
        let layout = &self.video;
        let info = video.info();
        let (width, height) = self.video_frame_size(indices.len(), info.width, info.height)?;
        let groups = indices.len().div_ceil(layout.temporal_patch);
        let mut patches = Vec::with_capacity(layout.len(groups, width, height));
        let mut group = Vec::with_capacity(layout.temporal_patch);
        let found = video.frames(indices, &mut |frame| {
            group.push(resize(&frame, width, height, Filter::Bicubic)?);
            if group.len() == layout.temporal_patch {
                layout.push(&group.iter().collect::<Vec<_>>(), &mut patches);
                group.clear();
            }
            Ok(())
        })?;
        // The last frame fills up the last group.
        if let Some(last) = group.last() {
            let mut pictures: Vec<&Picture> = group.iter().collect();
            pictures.resize(layout.temporal_patch, last);
            layout.push(&pictures, &mut patches);
        }
        let timestamps: Vec<f64> = indices[..found.min(indices.len())]
            .chunks(layout.temporal_patch)
            .filter_map(|group| group.first().zip(group.last()))
            .map(|(&first, &last)| (first as f64 / info.fps + last as f64 / info.fps) / 2.0)
            .collect();
        let rate = info.fps * indices.len() as f64 / info.frames as f64;
        Ok(QwenVideo {
            input: layout.input(patches, timestamps.len(), width, height),
            timestamps,
            seconds_per_patch: layout.temporal_patch as f64 / rate,
        })
    }
}

impl Layout {
    fn new(
        fields: &Fields<'_>,
        defaults: &Defaults,
        min_pixels: u64,
        max_pixels: u64,
    ) -> Result<Self> {
        let pixels = |name: &str, edge: &str, default| {
            let name = if fields.has(name) { name } else { edge };
            fields.count(name, default, MOST_PIXELS)
        };
        let scale = fields.positive("rescale_factor", 1.0 / 255.0, 1.0)? as f32;
        let mean = fields.colours("image_mean", defaults.mean, false)?;
        let std = fields.colours("image_std", defaults.std, true)?;
        let rescale = fields.flag("do_rescale", true)?;
        let normalize = fields.flag("do_normalize", true)?;
        Ok(Self {
            patch: fields.count("patch_size", defaults.patch, 256)? as usize,
            temporal_patch: fields.count("temporal_patch_size", 2, 16)? as usize,
            merge: fields.count("merge_size", 2, 16)? as usize,
            min_pixels: pixels("min_pixels", "size.shortest_edge", min_pixels)?,
            max_pixels: pixels("max_pixels", "size.longest_edge", max_pixels)?,
            normalize: Normalize::new(
                if rescale { scale } else { 1.0 },
                if normalize { mean } else { [0.0; 3] },
                if normalize { std } else { [1.0; 3] },
            ),
        })
    }

    /// Sides are multiples of this: pixels of a token.
    fn factor(&self) -> u64 {
        (self.patch * self.merge) as u64
    }

    /// How many values the patches of so many groups of frames have.
    fn len(&self, groups: usize, width: u32, height: u32) -> usize {
        groups * self.temporal_patch * 3 * width as usize * height as usize
    }

    fn image_size(&self, width: u32, height: u32) -> Result<(u32, u32)> {
        check_ratio(width, height)?;
        let (width, height) = (f64::from(width), f64::from(height));
        Ok(self.fit(1.0, 1.0, width, height))
    }

    fn video_size(&self, frames: usize, width: u32, height: u32) -> Result<(u32, u32)> {
        check_ratio(width, height)?;
        let factor = self.factor() as f64;
        let (mut width, mut height) = (f64::from(width), f64::from(height));
        if width < factor || height < factor {
            let scale = (factor / height).max(factor / width);
            (width, height) = ((width * scale).trunc(), (height * scale).trunc());
        }
        let padded = frames.next_multiple_of(self.temporal_patch);
        Ok(self.fit(frames as f64, padded as f64, width, height))
    }

    /// The nearest sides that are multiples of the factor, scaled so that the pixels of all
    /// frames are within the bounds.
    fn fit(&self, frames: f64, padded: f64, width: f64, height: f64) -> (u32, u32) {
        let factor = self.factor() as f64;
        let (min, max) = (self.min_pixels as f64, self.max_pixels as f64);
        let round = |side: f64| (side / factor).round_ties_even() * factor;
        let pixels = padded * round(width) * round(height);
        let sides = if pixels > max {
            let beta = (frames * height * width / max).sqrt();
            [width, height].map(|side| ((side / beta / factor).floor() * factor).max(factor))
        } else if pixels < min {
            let beta = (min / (frames * height * width)).sqrt();
            [width, height].map(|side| (side * beta / factor).ceil() * factor)
        } else {
            [round(width), round(height)]
        };
        (sides[0] as u32, sides[1] as u32)
    }

    /// Appends the patches of one group of resized frames.
    fn push(&self, frames: &[&Picture], patches: &mut Vec<f32>) {
        let Some(first) = frames.first() else { return };
        let (patch, merge) = (self.patch, self.merge);
        let side = patch * merge;
        for top in (0..first.height() as usize).step_by(side) {
            for left in (0..first.width() as usize).step_by(side) {
                for (row, column) in grid(merge) {
                    let (x, y) = (left + column * patch, top + row * patch);
                    for channel in 0..3 {
                        for frame in frames {
                            for y in y..y + patch {
                                patches.extend(self.normalize.row(frame, channel, (x, y), patch));
                            }
                        }
                    }
                }
            }
        }
    }

    fn input(&self, patches: Vec<f32>, groups: usize, width: u32, height: u32) -> QwenInput {
        let grid = [
            groups,
            height as usize / self.patch,
            width as usize / self.patch,
        ];
        QwenInput {
            patches,
            patch_len: 3 * self.temporal_patch * self.patch * self.patch,
            grid,
            tokens: grid.iter().product::<usize>() / (self.merge * self.merge),
        }
    }
}

/// Rows and columns of a square.
fn grid(side: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..side * side).map(move |n| (n / side, n % side))
}

fn check_ratio(width: u32, height: u32) -> Result<()> {
    let (long, short) = (width.max(height), width.min(height));
    if short == 0 {
        return Err(ErrorKind::Empty { width, height }.into());
    }
    if u64::from(long) > u64::from(short) * u64::from(MAX_RATIO) {
        return Err(ErrorKind::Ratio {
            limit: MAX_RATIO,
            width,
            height,
        }
        .into());
    }
    Ok(())
}
