//! From bytes to the numbers that a tower takes.

use crate::picture::Picture;

/// The value of each byte in each channel, as the processors compute it in float32:
/// `(byte * scale - mean) / std`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Normalize {
    values: [Vec<f32>; 3],
}

impl Normalize {
    pub(crate) fn new(scale: f32, mean: [f32; 3], std: [f32; 3]) -> Self {
        let values = [0, 1, 2].map(|channel| {
            (0..=255_u8)
                .map(|byte| (f32::from(byte) * scale - mean[channel]) / std[channel])
                .collect()
        });
        Self { values }
    }

    /// The values of `length` pixels of row `y` from `x` on, in one channel.
    pub(crate) fn row<'a>(
        &'a self,
        picture: &'a Picture,
        channel: usize,
        (x, y): (usize, usize),
        length: usize,
    ) -> impl Iterator<Item = f32> + 'a {
        let values = &self.values[channel];
        picture.row(y)[x * 3..(x + length) * 3]
            .chunks_exact(3)
            .map(move |pixel| values[usize::from(pixel[channel])])
    }

    /// The values of `length` pixels of row `y` from `x` on, channels innermost.
    pub(crate) fn pixels<'a>(
        &'a self,
        picture: &'a Picture,
        (x, y): (usize, usize),
        length: usize,
    ) -> impl Iterator<Item = f32> + 'a {
        picture.row(y)[x * 3..(x + length) * 3]
            .chunks_exact(3)
            .flat_map(move |pixel| {
                [0, 1, 2].map(|channel| self.values[channel][usize::from(pixel[channel])])
            })
    }
}
