//! Resizing with antialiasing, to the byte as Pillow does it.
//!
//! Source: the algorithm of Pillow's `Image.resize` for 8-bit images. An output pixel is a
//! weighted mean of the input pixels around its centre; when the image gets smaller, the filter
//! gets wider by the same factor. One direction first, then the other, each rounded to 8 bits;
//! weights are fixed-point numbers with 22 bits behind the point. The order is that of Pillow 13;
//! earlier versions always begin with the width, and differ by one step in some pixels.

use std::collections::VecDeque;

use crate::error::{ErrorKind, Result};
use crate::picture::Picture;

/// The shape of the weights around a pixel's centre.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filter {
    /// A triangle: 0 at a distance of one pixel.
    Bilinear,
    /// Keys' cubic with a = -0.5: 0 at a distance of two pixels.
    Bicubic,
}

impl Filter {
    /// The distance beyond which weights are zero.
    fn support(self) -> f64 {
        match self {
            Self::Bilinear => 1.0,
            Self::Bicubic => 2.0,
        }
    }

    fn weight(self, x: f64) -> f64 {
        const A: f64 = -0.5;
        let x = x.abs();
        match self {
            Self::Bilinear => (1.0 - x).max(0.0),
            Self::Bicubic if x < 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
            Self::Bicubic if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * A,
            Self::Bicubic => 0.0,
        }
    }
}

/// How many bits the weights have behind the point.
const BITS: u32 = 22;

/// The weights of one output position: of input positions from `start` on.
struct Window {
    start: usize,
    weights: Vec<i32>,
}

/// The windows of a line of `from` pixels that becomes `to` pixels long; none if it stays as it
/// is.
fn windows(from: u32, to: u32, filter: Filter) -> Option<Vec<Window>> {
    if from == to {
        return None;
    }
    let scale = f64::from(from) / f64::from(to);
    let filter_scale = scale.max(1.0);
    let support = filter.support() * filter_scale;
    let window = |position: u32| {
        let centre = (f64::from(position) + 0.5) * scale;
        // Casts of floats saturate, so what lies before the line starts at zero.
        let start = (centre - support + 0.5) as u32;
        let end = ((centre + support + 0.5) as u32).min(from);
        let weights: Vec<f64> = (start..end)
            .map(|x| filter.weight((f64::from(x) - centre + 0.5) * (1.0 / filter_scale)))
            .collect();
        let sum: f64 = weights.iter().sum();
        let fixed = |weight: &f64| {
            let weight = if sum == 0.0 { *weight } else { weight / sum };
            let scaled = weight * f64::from(1 << BITS);
            (scaled + if weight < 0.0 { -0.5 } else { 0.5 }) as i32
        };
        Window {
            start: start as usize,
            weights: weights.iter().map(fixed).collect(),
        }
    };
    Some((0..to).map(window).collect())
}

fn round(sum: i32) -> u8 {
    (sum >> BITS).clamp(0, 255) as u8
}

const HALF: i32 = 1 << (BITS - 1);

/// One row `[from, 3]` as `[to, 3]`.
fn resize_row(row: &[u8], windows: &[Window]) -> Vec<u8> {
    let mut out = Vec::with_capacity(windows.len() * 3);
    for window in windows {
        let pixels = row[window.start * 3..].chunks_exact(3);
        let mut sums = [HALF; 3];
        for (pixel, &weight) in pixels.zip(&window.weights) {
            for (sum, &byte) in sums.iter_mut().zip(pixel) {
                *sum += i32::from(byte) * weight;
            }
        }
        out.extend(sums.map(round));
    }
    out
}

/// The picture with another width and height, byte for byte as Pillow's `resize` gives it.
///
/// Beside the result, only as many rows are held as one output row is made of.
///
/// # Errors
///
/// If a side is zero.
pub fn resize(picture: &Picture, width: u32, height: u32, filter: Filter) -> Result<Picture> {
    if width == 0 || height == 0 {
        return Err(ErrorKind::Empty { width, height }.into());
    }
    let across = |row: &[u8], columns: &Option<Vec<Window>>| match columns {
        Some(windows) => resize_row(row, windows),
        None => row.to_vec(),
    };
    let columns = windows(picture.width(), width, filter);
    let (before, after) = match across_first(picture, width, height) {
        true => (columns, None),
        false => (None, columns),
    };
    let row = |y: usize| across(picture.row(y), &before);
    let mut rgb = Vec::with_capacity(width as usize * height as usize * 3);
    let Some(windows) = windows(picture.height(), height, filter) else {
        for y in 0..height as usize {
            rgb.extend(across(&row(y), &after));
        }
        return Picture::new(width, height, rgb);
    };
    // The rows from `first` on that are still needed.
    let mut rows: VecDeque<Vec<u8>> = VecDeque::new();
    let mut first = 0;
    for window in &windows {
        while first < window.start {
            rows.pop_front();
            first += 1;
        }
        let end = window.start + window.weights.len();
        for y in first + rows.len()..end {
            rows.push_back(row(y));
        }
        let mut sums = vec![HALF; rows.front().map_or(0, Vec::len)];
        for (row, &weight) in rows.iter().zip(&window.weights) {
            for (sum, &byte) in sums.iter_mut().zip(row) {
                *sum += i32::from(byte) * weight;
            }
        }
        let down: Vec<u8> = sums.into_iter().map(round).collect();
        rgb.extend(across(&down, &after));
    }
    Picture::new(width, height, rgb)
}

/// Whether the width is resized before the height: unless the height shrinks by more than twice as many
/// pixels as the width does.
fn across_first(picture: &Picture, width: u32, height: u32) -> bool {
    let shrink = |from: u32, to: u32| i64::from(from) - i64::from(to);
    let down = shrink(picture.height(), height);
    !(down > 0 && down > 2 * shrink(picture.width(), width))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_colour_stays_that_colour() {
        let picture = Picture::new(5, 7, [9, 200, 255].repeat(35)).unwrap();
        for filter in [Filter::Bilinear, Filter::Bicubic] {
            for (width, height) in [(5, 7), (1, 1), (3, 11), (64, 2)] {
                let resized = resize(&picture, width, height, filter).unwrap();
                let expected = [9, 200, 255].repeat((width * height) as usize);
                assert_eq!(resized.rgb(), expected);
            }
        }
    }

    #[test]
    fn a_side_of_zero_is_an_error() {
        let picture = Picture::new(1, 1, vec![0; 3]).unwrap();
        let error = resize(&picture, 0, 3, Filter::Bicubic).unwrap_err();
        assert_eq!(error.to_string(), "expected at least one pixel, found 0x3");
    }
}
