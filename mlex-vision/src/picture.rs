//! What every image becomes first.

use crate::error::{ErrorKind, Result};

/// An upright image of 8-bit RGB, rows from the top, without gaps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picture {
    width: u32,
    height: u32,
    rgb: Vec<u8>,
}

impl Picture {
    /// A picture of `rgb` bytes `[height, width, 3]`.
    ///
    /// # Errors
    ///
    /// If a side is zero, or `rgb` has another length.
    pub fn new(width: u32, height: u32, rgb: Vec<u8>) -> Result<Self> {
        if width == 0 || height == 0 {
            return Err(ErrorKind::Empty { width, height }.into());
        }
        let expected = (u64::from(width) * u64::from(height)).saturating_mul(3);
        let found = rgb.len() as u64;
        if found != expected {
            return Err(ErrorKind::Buffer {
                width,
                height,
                expected,
                found,
            }
            .into());
        }
        Ok(Self { width, height, rgb })
    }

    /// Pixels in a row.
    pub fn width(&self) -> u32 {
        self.width
    }

    /// How many rows there are.
    pub fn height(&self) -> u32 {
        self.height
    }

    /// The bytes `[height, width, 3]`.
    pub fn rgb(&self) -> &[u8] {
        &self.rgb
    }

    /// The bytes of one row.
    pub(crate) fn row(&self, y: usize) -> &[u8] {
        let length = self.width as usize * 3;
        &self.rgb[y * length..][..length]
    }
}
