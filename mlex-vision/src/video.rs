//! Where the frames of a video come from.

use std::fs;
use std::path::{Path, PathBuf};

use crate::animation::Animation;
use crate::decode::format_of;
use crate::error::{Error, ErrorKind, Result};
use crate::ffmpeg::{self, VideoPrograms};
use crate::limits::{self, Limits};
use crate::picture::Picture;

/// What is known of a video before its frames are read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct VideoInfo {
    /// How many frames it has; at least one.
    pub frames: usize,
    /// Frames per second, on average.
    pub fps: f64,
    /// Pixels in a row of a frame.
    pub width: u32,
    /// Rows of a frame.
    pub height: u32,
}

/// A video whose frames are read as they are asked for.
#[derive(Debug)]
pub struct Video {
    info: VideoInfo,
    limits: Limits,
    path: PathBuf,
    source: Source,
}

#[derive(Debug)]
enum Source {
    Pictures(Vec<Picture>),
    Folder(Vec<PathBuf>),
    Animation(Animation),
    File(VideoPrograms),
}

/// What the file names of frames in a folder end with.
const IMAGES: [&str; 6] = ["bmp", "gif", "jpeg", "jpg", "png", "webp"];

/// The frames per second of a folder: what the families take of a video.
const FOLDER_FPS: f64 = 2.0;

impl Video {
    /// Opens an animated GIF, WebP or PNG image, a folder of frames, or a video file, which the
    /// programs `ffmpeg` and `ffprobe` read.
    ///
    /// Frames of a folder are its images in the order of their names, numbers in them by their
    /// value, two per second if [`Video::with_fps`] does not say otherwise. A still image is a
    /// video of one frame.
    ///
    /// # Errors
    ///
    /// If it cannot be read, has no frames or exceeds `limits`, or a program is not installed.
    pub fn open(path: impl AsRef<Path>, limits: &Limits) -> Result<Self> {
        Self::open_with(path, limits, &VideoPrograms::default())
    }

    /// As [`Video::open`], with these programs.
    ///
    /// # Errors
    ///
    /// As for [`Video::open`].
    pub fn open_with(
        path: impl AsRef<Path>,
        limits: &Limits,
        programs: &VideoPrograms,
    ) -> Result<Self> {
        let path = path.as_ref();
        let open = || {
            if path.is_dir() {
                return folder(path, limits);
            }
            if !fs::metadata(path)?.is_file() {
                return Err(not_a_file());
            }
            if is_image(path)? {
                return image(path, limits);
            }
            let info = ffmpeg::probe(path, programs, limits)?;
            Ok((Source::File(programs.clone()), info))
        };
        let (source, info) = open().map_err(|error: Error| error.with_path(path))?;
        Ok(Self {
            info,
            limits: *limits,
            path: path.to_owned(),
            source,
        })
    }

    /// A video of pictures, so many per second.
    ///
    /// # Errors
    ///
    /// If there are none, or `fps` is no positive number.
    pub fn from_pictures(pictures: Vec<Picture>, fps: f64) -> Result<Self> {
        let limits = Limits::default();
        limits.check_frames(pictures.len() as u64)?;
        let info = info_of(pictures.len(), &pictures[0]);
        let source = Source::Pictures(pictures);
        let video = Self {
            info,
            limits,
            path: PathBuf::new(),
            source,
        };
        video.with_fps(fps)
    }

    /// With other frames per second.
    ///
    /// # Errors
    ///
    /// If `fps` is no positive number.
    pub fn with_fps(mut self, fps: f64) -> Result<Self> {
        if !(fps > 0.0 && fps.is_finite()) {
            return Err(ErrorKind::Config {
                field: "fps".to_owned(),
                expected: "a number above 0".to_owned(),
                found: fps.to_string(),
            }
            .into());
        }
        self.info.fps = fps;
        Ok(self)
    }

    /// What is known of it.
    pub fn info(&self) -> VideoInfo {
        self.info
    }

    /// Calls `take` with the frames of these indices, which must ascend, and returns how many
    /// there were. Where a video file has fewer frames than its header says there are fewer,
    /// but at least one.
    ///
    /// # Errors
    ///
    /// If a frame cannot be read or has another size than the first, or `take` fails.
    pub fn frames(
        &self,
        indices: &[usize],
        take: &mut dyn FnMut(Picture) -> Result<()>,
    ) -> Result<usize> {
        let mut count = 0;
        let mut counted = |picture: Picture| {
            let index = indices.get(count).copied().unwrap_or(count);
            self.check_size(index, &picture)?;
            count += 1;
            take(picture)
        };
        match &self.source {
            Source::Pictures(pictures) => indices
                .iter()
                .filter_map(|&index| pictures.get(index))
                .try_for_each(|picture| counted(picture.clone())),
            Source::Folder(paths) => indices
                .iter()
                .filter_map(|&index| paths.get(index))
                .try_for_each(|path| {
                    let picture = Picture::open(path, &self.limits)?;
                    counted(picture).map_err(|error| error.with_path(path))
                }),
            Source::Animation(animation) => animation.frames(indices, &self.limits, &mut counted),
            Source::File(programs) => {
                ffmpeg::frames(&self.path, indices, programs, &self.limits, &mut counted)
            }
        }
        .and_then(|()| self.limits.check_frames(count as u64))
        .map_err(|error| self.named(error))?;
        Ok(count)
    }

    fn named(&self, error: Error) -> Error {
        match self.source {
            Source::Pictures(_) => error,
            _ => error.with_path(&self.path),
        }
    }

    fn check_size(&self, index: usize, picture: &Picture) -> Result<()> {
        let (width, height) = (picture.width(), picture.height());
        if (width, height) == (self.info.width, self.info.height) {
            return Ok(());
        }
        Err(ErrorKind::FrameSize {
            index,
            expected_width: self.info.width,
            expected_height: self.info.height,
            width,
            height,
        }
        .into())
    }
}

fn info_of(frames: usize, first: &Picture) -> VideoInfo {
    VideoInfo {
        frames,
        fps: FOLDER_FPS,
        width: first.width(),
        height: first.height(),
    }
}

/// Whether the first bytes of a file are those of an image.
fn is_image(path: &Path) -> Result<bool> {
    use std::io::Read as _;
    let mut start = Vec::new();
    fs::File::open(path)?.take(64).read_to_end(&mut start)?;
    Ok(format_of(&start).is_ok())
}

fn image(path: &Path, limits: &Limits) -> Result<(Source, VideoInfo)> {
    let bytes = limits::read(path, limits.bytes)?;
    let animation = Animation::new(&bytes, format_of(&bytes)?, limits)?;
    if let Some((animation, info)) = animation {
        return Ok((Source::Animation(animation), info));
    }
    let picture = Picture::decode(&bytes, limits)?;
    let info = info_of(1, &picture);
    Ok((Source::Pictures(vec![picture]), info))
}

fn folder(path: &Path, limits: &Limits) -> Result<(Source, VideoInfo)> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(path)? {
        let path = entry?.path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        let extension = extension.unwrap_or_default().to_ascii_lowercase();
        if IMAGES.contains(&extension.as_str()) && path.is_file() {
            paths.push(path);
            // An endless folder is not read to its end.
            if paths.len() as u64 > limits.frames {
                break;
            }
        }
    }
    limits.check_frames(paths.len() as u64)?;
    paths.sort_by_cached_key(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        (by_value(&name), name.into_owned())
    });
    let first = Picture::open(&paths[0], limits)?;
    let info = info_of(paths.len(), &first);
    Ok((Source::Folder(paths), info))
}

/// The name with its numbers at one length, so that 9 comes before 10.
fn by_value(name: &str) -> String {
    const DIGITS: usize = 20;
    let mut key = String::new();
    let mut rest = name;
    while let Some(start) = rest.find(|c: char| c.is_ascii_digit()) {
        key.push_str(&rest[..start]);
        rest = &rest[start..];
        let end = rest.find(|c: char| !c.is_ascii_digit());
        let (number, after) = rest.split_at(end.unwrap_or(rest.len()));
        let number = number.trim_start_matches('0');
        key.extend(std::iter::repeat_n(
            '0',
            DIGITS.saturating_sub(number.len()),
        ));
        key.push_str(number);
        rest = after;
    }
    key.push_str(rest);
    key
}

fn not_a_file() -> Error {
    let kind = std::io::ErrorKind::InvalidInput;
    std::io::Error::new(kind, "expected a file or a folder, found something else").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_ordered_by_their_numbers() {
        let mut names = ["f10.png", "f9.png", "f010b.png", "f1.png", "a2"];
        names.sort_by_key(|name| by_value(name));
        assert_eq!(names, ["a2", "f1.png", "f9.png", "f10.png", "f010b.png"]);
    }
}
