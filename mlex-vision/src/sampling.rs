//! Which frames of a video are looked at.

/// Which frames of a video are looked at: so many per second, within bounds.
///
/// Source: mlx-vlm's `load_video`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FrameSampling {
    /// Frames per second.
    pub fps: f64,
    /// At least so many frames, if the video has them.
    pub min_frames: usize,
    /// At most so many frames.
    pub max_frames: usize,
}

impl FrameSampling {
    /// The indices of frames to take of `total`, evenly from the first to the last. Their
    /// number is even, unless there is only one frame.
    pub fn indices(&self, total: usize, source_fps: f64) -> Vec<usize> {
        const FACTOR: usize = 2;
        if total < FACTOR {
            return (0..total).collect();
        }
        let most = (self.max_frames.min(total) / FACTOR * FACTOR).max(FACTOR);
        let least = self.min_frames.div_ceil(FACTOR) * FACTOR;
        let wanted = total as f64 / source_fps * self.fps;
        // The cast saturates, and gives zero for what is not a number.
        let count = (wanted.max(least as f64).min(most as f64) as usize) / FACTOR * FACTOR;
        let count = count.clamp(FACTOR, most);
        let step = (total - 1) as f64 / (count - 1) as f64;
        let index = |n: usize| ((n as f64 * step).round_ties_even() as usize).min(total - 1);
        (0..count).map(index).collect()
    }
}
