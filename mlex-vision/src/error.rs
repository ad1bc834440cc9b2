//! The error of this crate: an opaque [`Error`] with an [`ErrorKind`] that holds the data of
//! the failure, and the file it concerns.

use std::fmt::{self, Write as _};
use std::io;
use std::path::{Path, PathBuf};

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, and with which file.
///
/// `Display` is one line, outermost context first:
/// `cat.jpg: expected a JPEG, PNG, WebP, GIF or BMP image, found bytes 89 41 42 43`.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    path: Option<PathBuf>,
}

/// What kind of failure an [`Error`] is, with the values that show it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Reading failed.
    #[error("{0}")]
    Io(io::Error),
    /// A file holds more bytes than are read.
    #[error("expected at most {limit} bytes, found {found}")]
    FileSize {
        /// The most that is read.
        limit: u64,
        /// The size of the file.
        found: u64,
    },
    /// The bytes are of no image format that is read here.
    #[error("expected a JPEG, PNG, WebP, GIF or BMP image, found {found}")]
    Format {
        /// What the file starts with.
        found: String,
    },
    /// The bytes of an image are broken.
    #[error("broken {format} image: {cause}")]
    Decode {
        /// The image format.
        format: &'static str,
        /// What the decoder says.
        cause: String,
    },
    /// An image has more pixels than are decoded.
    #[error("expected at most {limit} pixels, found {width}x{height}")]
    Pixels {
        /// The most that is decoded.
        limit: u64,
        /// Width that the header gives.
        width: u32,
        /// Height that the header gives.
        height: u32,
    },
    /// An image without pixels.
    #[error("expected at least one pixel, found {width}x{height}")]
    Empty {
        /// Width of the image.
        width: u32,
        /// Height of the image.
        height: u32,
    },
    /// A buffer does not hold what its dimensions say.
    #[error("{width}x{height} pixels: expected {expected} bytes, found {found}")]
    Buffer {
        /// Width of the image.
        width: u32,
        /// Height of the image.
        height: u32,
        /// Three bytes per pixel.
        expected: u64,
        /// The length of the buffer.
        found: u64,
    },
    /// An image is too long for its width, or too wide for its height.
    #[error("expected sides of a ratio of at most {limit}, found {width}x{height}")]
    Ratio {
        /// The largest ratio of the sides.
        limit: u32,
        /// Width of the image.
        width: u32,
        /// Height of the image.
        height: u32,
    },
    /// A field of a configuration is not of the form that it must have.
    #[error("{field}: expected {expected}, found {found}")]
    Config {
        /// The name of the field, with the file or section it is in.
        field: String,
        /// What is allowed there.
        expected: String,
        /// What it holds.
        found: String,
    },
    /// A video has no frames, or more than are read.
    #[error("expected 1 to {limit} frames, found {found}")]
    Frames {
        /// The most that are read.
        limit: u64,
        /// How many there are.
        found: u64,
    },
    /// The frames of an animation are more pixels than are decoded.
    #[error("expected at most {limit} pixels in all frames, found {width}x{height} in {frames}")]
    AnimationPixels {
        /// The most that is decoded.
        limit: u64,
        /// Width of a frame.
        width: u32,
        /// Height of a frame.
        height: u32,
        /// How many frames were decoded.
        frames: u64,
    },
    /// The frames of a video are not all of one size.
    #[error("frame {index}: expected {expected_width}x{expected_height}, found {width}x{height}")]
    FrameSize {
        /// The frame, from zero.
        index: usize,
        /// Width of the first frame.
        expected_width: u32,
        /// Height of the first frame.
        expected_height: u32,
        /// Width of this frame.
        width: u32,
        /// Height of this frame.
        height: u32,
    },
    /// A program that reads videos is not installed.
    #[error(
        "reading a video file needs the program {program}, which is not installed; animated GIF, \
         WebP and PNG files and folders of frames are read without it"
    )]
    NoProgram {
        /// The program.
        program: String,
    },
    /// A program that reads videos failed.
    #[error("{program}: {cause}")]
    Program {
        /// The program.
        program: String,
        /// What it says, or what it gave.
        cause: String,
    },
}

impl Error {
    /// An error of the given kind, without context.
    pub fn new(kind: ErrorKind) -> Self {
        Self(Box::new(Inner { kind, path: None }))
    }

    /// Names the file, unless one is named already.
    #[must_use]
    pub fn with_path(mut self, path: impl AsRef<Path>) -> Self {
        self.0.path.get_or_insert_with(|| path.as_ref().to_owned());
        self
    }

    /// What went wrong.
    pub fn kind(&self) -> &ErrorKind {
        &self.0.kind
    }

    /// The file it went wrong with.
    pub fn path(&self) -> Option<&Path> {
        self.0.path.as_deref()
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Self {
        Self::new(kind)
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self::new(ErrorKind::Io(error))
    }
}

/// Writes what files and programs hold without control characters, so that a message stays on
/// its line.
struct OneLine<'a, 'b>(&'a mut fmt::Formatter<'b>);

impl fmt::Write for OneLine<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.chars().try_for_each(|character| {
            if character.is_control() {
                write!(self.0, "{}", character.escape_default())
            } else {
                self.0.write_char(character)
            }
        })
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = OneLine(f);
        if let Some(path) = &self.0.path {
            write!(line, "{}: ", path.display())?;
        }
        write!(line, "{}", self.0.kind)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("kind", &self.0.kind)
            .field("path", &self.0.path)
            .finish()
    }
}

// No `source`: every kind's `Display` already says what its cause says.
impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_is_one_line_with_the_file_first() {
        let error = Error::new(ErrorKind::Decode {
            format: "PNG",
            cause: "a\nb".to_owned(),
        });
        assert_eq!(
            error.with_path("x.png").with_path("outer").to_string(),
            "x.png: broken PNG image: a\\nb"
        );
    }
}
