//! From the bytes of an image file to a [`Picture`].

use std::io::Cursor;
use std::path::Path;

use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader};

use crate::error::{Error, ErrorKind, Result};
use crate::limits::{self, Limits};
use crate::{Picture, jpeg};

impl Picture {
    /// Reads an image file: JPEG, PNG, WebP, GIF or BMP, by its content and not by its name. Of
    /// an animation it is the first frame.
    ///
    /// As in the Python processors the image is turned as its Exif orientation says, an alpha
    /// channel is dropped and the colour profile left alone. Of 16 bits the higher 8 are taken.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is no such image, is broken or cut off, or exceeds `limits`,
    /// which is seen from its header.
    pub fn open(path: impl AsRef<Path>, limits: &Limits) -> Result<Self> {
        let path = path.as_ref();
        let bytes = limits::read(path, limits.bytes)?;
        Self::decode(&bytes, limits).map_err(|error| error.with_path(path))
    }

    /// As [`Picture::open`], from the bytes of a file.
    ///
    /// # Errors
    ///
    /// As for [`Picture::open`].
    pub fn decode(bytes: &[u8], limits: &Limits) -> Result<Self> {
        let format = format_of(bytes)?;
        let name = name_of(format);
        let broken = |error: image::ImageError| broken(name, &error);
        if format == ImageFormat::Jpeg && !jpeg::is_whole(bytes) {
            return Err(ErrorKind::Decode {
                format: name,
                cause: "the file is cut off".to_owned(),
            }
            .into());
        }
        let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
        reader.limits(memory(limits));
        let mut decoder = reader.into_decoder().map_err(broken)?;
        let (width, height) = decoder.dimensions();
        limits.check_pixels(width, height)?;
        // Broken metadata does not make an image unreadable.
        let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
        let mut image = DynamicImage::from_decoder(decoder).map_err(broken)?;
        image.apply_orientation(orientation);
        from_image(image)
    }
}

/// The format that the first bytes show.
pub(crate) fn format_of(bytes: &[u8]) -> Result<ImageFormat> {
    match image::guess_format(bytes) {
        Ok(
            format @ (ImageFormat::Jpeg
            | ImageFormat::Png
            | ImageFormat::WebP
            | ImageFormat::Gif
            | ImageFormat::Bmp),
        ) => Ok(format),
        _ => Err(ErrorKind::Format {
            found: first_bytes(bytes),
        }
        .into()),
    }
}

/// What a format is called.
pub(crate) fn name_of(format: ImageFormat) -> &'static str {
    match format {
        ImageFormat::Jpeg => "JPEG",
        ImageFormat::Png => "PNG",
        ImageFormat::WebP => "WebP",
        ImageFormat::Gif => "GIF",
        _ => "BMP",
    }
}

/// The limits of the decoders. They count bytes, of which a pixel has 8 at most; whether an
/// image has too many pixels is asked before.
pub(crate) fn memory(limits: &Limits) -> image::Limits {
    let mut memory = image::Limits::no_limits();
    memory.max_alloc = Some(limits.pixels.saturating_mul(8).saturating_add(1 << 26));
    memory
}

pub(crate) fn broken(format: &'static str, error: &image::ImageError) -> Error {
    ErrorKind::Decode {
        format,
        cause: error.to_string(),
    }
    .into()
}

fn first_bytes(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return "an empty file".to_owned();
    }
    let hex: Vec<String> = bytes[..bytes.len().min(4)]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("bytes {}", hex.join(" "))
}

fn from_image(image: DynamicImage) -> Result<Picture> {
    let (width, height) = (image.width(), image.height());
    let rgb = match image {
        DynamicImage::ImageLuma16(image) => triple(image.as_raw(), 1),
        DynamicImage::ImageLumaA16(image) => triple(image.as_raw(), 2),
        DynamicImage::ImageRgb16(image) => high_bytes(image.as_raw(), 3),
        DynamicImage::ImageRgba16(image) => high_bytes(image.as_raw(), 4),
        other => other.into_rgb8().into_raw(),
    };
    Picture::new(width, height, rgb)
}

/// RGB of pixels of 16 bits whose first sample is grey.
fn triple(samples: &[u16], channels: usize) -> Vec<u8> {
    samples
        .chunks_exact(channels)
        .flat_map(|pixel| [(pixel[0] >> 8) as u8; 3])
        .collect()
}

/// RGB of pixels of 16 bits whose first three samples are that.
fn high_bytes(samples: &[u16], channels: usize) -> Vec<u8> {
    samples
        .chunks_exact(channels)
        .flat_map(|pixel| [pixel[0], pixel[1], pixel[2]].map(|sample| (sample >> 8) as u8))
        .collect()
}
