//! The tokens that stand for media in a prompt.

use mlex_audio::{MelFeatures, RawFeatures};
use mlex_vision::{GemmaInput, QwenInput, QwenVideo};

/// How the time of a video is told to the language model.
#[derive(Clone, Copy, Debug)]
pub(super) enum VideoTime {
    /// By text before each pair of frames, which is a run of its own.
    Text,
    /// By positions, so many for a second.
    Positions(f64),
}

/// Tokens of a prompt, one after the other, that stand for features.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// How many there are.
    pub tokens: usize,
    /// Steps in time, height and width in tokens, where positions have several directions.
    pub grid: Option<[usize; 3]>,
    /// How many positions a step in time takes.
    pub time_step: f64,
    /// Seconds from the beginning of a video.
    pub timestamp: Option<f64>,
    /// They all see each other, not those before alone.
    pub together: bool,
}

impl Run {
    fn new(tokens: usize) -> Self {
        Self {
            tokens,
            grid: None,
            time_step: 1.0,
            timestamp: None,
            together: false,
        }
    }

    /// That of an image of Qwen's models.
    pub(super) fn of_qwen_image(input: &QwenInput) -> Vec<Self> {
        let [rows, columns] = merged(input);
        vec![Self {
            grid: Some([1, rows, columns]),
            ..Self::new(input.tokens)
        }]
    }

    /// Those of a video of Qwen's models: one for each patch in time where text tells the time,
    /// else one for all.
    pub(super) fn of_qwen_video(video: &QwenVideo, time: VideoTime) -> Vec<Self> {
        /// More than any video has, whatever its file says.
        const LONGEST_STEP: f64 = 1000.0;
        let (input, [rows, columns]) = (&video.input, merged(&video.input));
        let run = |steps: usize| Self {
            grid: Some([steps, rows, columns]),
            ..Self::new(input.tokens / input.grid[0].max(1) * steps)
        };
        match time {
            VideoTime::Text => {
                let at = |&seconds: &f64| Self {
                    timestamp: Some(seconds),
                    ..run(1)
                };
                video.timestamps.iter().map(at).collect()
            }
            VideoTime::Positions(per_second) => vec![Self {
                time_step: (video.seconds_per_patch * per_second).clamp(0.0, LONGEST_STEP),
                ..run(input.grid[0])
            }],
        }
    }

    /// That of an image of Gemma 4.
    pub(super) fn of_gemma_image(input: &GemmaInput, together: bool) -> Vec<Self> {
        let run = Self::new(input.tokens);
        vec![Self { together, ..run }]
    }

    /// Those of a video of Gemma 4, one for each frame.
    pub(super) fn of_gemma_video(
        frames: &[GemmaInput],
        timestamps: &[f64],
        together: bool,
    ) -> Vec<Self> {
        let run = |(frame, &seconds): (&GemmaInput, &f64)| Self {
            timestamp: Some(seconds),
            together,
            ..Self::new(frame.tokens)
        };
        frames.iter().zip(timestamps).map(run).collect()
    }

    /// That of a sound.
    pub(super) fn of_sound(input: &MelFeatures) -> Vec<Self> {
        vec![Self::new(input.tokens)]
    }

    /// That of samples.
    pub(super) fn of_samples(input: &RawFeatures) -> Vec<Self> {
        vec![Self::new(input.tokens)]
    }
}

/// Height and width of a grid of patches in tokens.
fn merged(input: &QwenInput) -> [usize; 2] {
    let [t, h, w] = input.grid;
    // As many patches become one token in each direction.
    let square = (t * h * w).checked_div(input.tokens).unwrap_or(1);
    let merge = square.isqrt().max(1);
    [h / merge, w / merge]
}
