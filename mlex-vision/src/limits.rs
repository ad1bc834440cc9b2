//! How much is read.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::error::{Error, ErrorKind, Result};

/// How much is read of files that may be hostile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// The most pixels that an image may have, by its header: 2^27, a square of 11585.
    pub pixels: u64,
    /// The most bytes of an image file: 2^29.
    pub bytes: u64,
    /// The most frames of a video: 2^22, 19 hours at 60 frames per second.
    pub frames: u64,
    /// The most pixels that are decoded of an animation: 2^35, 11 minutes of 1080p at 25 frames
    /// per second.
    pub animation_pixels: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            pixels: 1 << 27,
            bytes: 1 << 29,
            frames: 1 << 22,
            animation_pixels: 1 << 35,
        }
    }
}

impl Limits {
    /// Refuses an image with no pixels or too many.
    pub(crate) fn check_pixels(&self, width: u32, height: u32) -> Result<()> {
        if width == 0 || height == 0 {
            return Err(ErrorKind::Empty { width, height }.into());
        }
        if u64::from(width) * u64::from(height) > self.pixels {
            let limit = self.pixels;
            return Err(ErrorKind::Pixels {
                limit,
                width,
                height,
            }
            .into());
        }
        Ok(())
    }

    /// Refuses a video with no frames or too many.
    pub(crate) fn check_frames(&self, found: u64) -> Result<()> {
        let limit = self.frames;
        if found == 0 || found > limit {
            return Err(ErrorKind::Frames { limit, found }.into());
        }
        Ok(())
    }
}

/// The bytes of a file, of which there must not be more than `limit`.
pub(crate) fn read(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let read = || {
        let file = File::open(path)?;
        let found = file.metadata()?.len();
        if found > limit {
            return Err(Error::new(ErrorKind::FileSize { limit, found }));
        }
        // A pipe or device has no length: what comes is counted.
        let mut bytes = Vec::new();
        file.take(limit + 1).read_to_end(&mut bytes)?;
        let found = bytes.len() as u64;
        if found > limit {
            return Err(ErrorKind::FileSize { limit, found }.into());
        }
        Ok(bytes)
    };
    read().map_err(|error| error.with_path(path))
}
