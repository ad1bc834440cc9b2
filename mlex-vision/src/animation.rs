//! Frames of animated GIF, WebP and PNG images.

use std::io::Cursor;

use image::codecs::gif::GifDecoder;
use image::codecs::png::PngDecoder;
use image::codecs::webp::WebPDecoder;
use image::{AnimationDecoder, DynamicImage, Frames, ImageDecoder, ImageError, ImageFormat};

use crate::decode::{broken, memory, name_of};
use crate::error::{ErrorKind, Result};
use crate::limits::Limits;
use crate::picture::Picture;
use crate::video::VideoInfo;

/// An animated image in memory. Its frames are decoded as they are asked for.
#[derive(Debug)]
pub(crate) struct Animation {
    bytes: Vec<u8>,
    format: ImageFormat,
}

/// What calls for each frame return: whether the next one is wanted.
enum Next {
    Go,
    Stop,
}

impl Animation {
    /// The animation in the bytes of an image file, and what it is like; none if it is a still.
    ///
    /// Reads all frames once. Frames that are shown for 10 ms or less count for 100 ms, as
    /// browsers have it.
    pub(crate) fn new(
        bytes: &[u8],
        format: ImageFormat,
        limits: &Limits,
    ) -> Result<Option<(Self, VideoInfo)>> {
        let animation = Self {
            bytes: bytes.to_vec(),
            format,
        };
        let (mut frames, mut seconds, mut size) = (0, 0.0, (0, 0));
        let animated = animation.each(limits, &mut |frame| {
            let (numerator, denominator) = frame.delay().numer_denom_ms();
            let ms = f64::from(numerator) / f64::from(denominator.max(1));
            seconds += if ms <= 10.0 { 0.1 } else { ms / 1000.0 };
            size = frame.buffer().dimensions();
            frames += 1;
            Ok(Next::Go)
        })?;
        if !animated {
            return Ok(None);
        }
        limits.check_frames(frames as u64)?;
        let info = VideoInfo {
            frames,
            fps: frames as f64 / seconds,
            width: size.0,
            height: size.1,
        };
        Ok(Some((animation, info)))
    }

    /// Calls `take` with the frames of these indices, which ascend.
    pub(crate) fn frames(
        &self,
        indices: &[usize],
        limits: &Limits,
        take: &mut dyn FnMut(Picture) -> Result<()>,
    ) -> Result<()> {
        let mut wanted = indices.iter().copied().peekable();
        let mut index = 0;
        self.each(limits, &mut |frame| {
            if wanted.peek().is_none() {
                return Ok(Next::Stop);
            }
            if wanted.peek() == Some(&index) {
                let rgb = DynamicImage::ImageRgba8(frame.into_buffer()).into_rgb8();
                let picture = Picture::new(rgb.width(), rgb.height(), rgb.into_raw())?;
                while wanted.next_if_eq(&index).is_some() {
                    take(picture.clone())?;
                }
            }
            index += 1;
            Ok(Next::Go)
        })?;
        Ok(())
    }

    /// Calls `each` with the frames until it has enough; false if the image is a still.
    fn each(
        &self,
        limits: &Limits,
        each: &mut dyn FnMut(image::Frame) -> Result<Next>,
    ) -> Result<bool> {
        let Some(((width, height), frames)) = self.decoder(limits)? else {
            return Ok(false);
        };
        let pixels = u64::from(width) * u64::from(height);
        for (count, frame) in frames.enumerate() {
            let count = count as u64 + 1;
            if pixels.saturating_mul(count) > limits.animation_pixels {
                return Err(ErrorKind::AnimationPixels {
                    limit: limits.animation_pixels,
                    width,
                    height,
                    frames: count,
                }
                .into());
            }
            if count > limits.frames {
                limits.check_frames(count)?;
            }
            let frame = frame.map_err(|error| self.broken(&error))?;
            if let Next::Stop = each(frame)? {
                break;
            }
        }
        Ok(true)
    }

    /// The size and the frames of an animation; none for a still.
    #[allow(clippy::type_complexity)]
    fn decoder(&self, limits: &Limits) -> Result<Option<((u32, u32), Frames<'_>)>> {
        let broken = |error: ImageError| self.broken(&error);
        let bytes = Cursor::new(&self.bytes[..]);
        match self.format {
            ImageFormat::Gif => {
                let mut decoder = GifDecoder::new(bytes).map_err(broken)?;
                let size = decoder.dimensions();
                limits.check_pixels(size.0, size.1)?;
                decoder.set_limits(memory(limits)).map_err(broken)?;
                Ok(Some((size, decoder.into_frames())))
            }
            ImageFormat::WebP => {
                let decoder = WebPDecoder::new(bytes).map_err(broken)?;
                let size = decoder.dimensions();
                limits.check_pixels(size.0, size.1)?;
                Ok(decoder
                    .has_animation()
                    .then(|| (size, decoder.into_frames())))
            }
            ImageFormat::Png => {
                let decoder = PngDecoder::with_limits(bytes, memory(limits)).map_err(broken)?;
                let size = decoder.dimensions();
                limits.check_pixels(size.0, size.1)?;
                if !decoder.is_apng().map_err(broken)? {
                    return Ok(None);
                }
                let frames = decoder.apng().map_err(broken)?.into_frames();
                Ok(Some((size, frames)))
            }
            _ => Ok(None),
        }
    }

    fn broken(&self, error: &ImageError) -> crate::Error {
        broken(name_of(self.format), error)
    }
}
