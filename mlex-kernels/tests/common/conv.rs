//! Random inputs of a short causal convolution, and the convolution by its definition.

use mlex_kernels::{ConvInputs, ConvShape, Element, Floats, Strided};

use super::{Random, Values};

/// A convolution, its inputs and those before them.
pub(crate) struct ConvProblem<T> {
    pub(crate) shape: ConvShape,
    /// Each row of the inputs has so many elements more than are used.
    pub(crate) gap: usize,
    pub(crate) x: Vec<T>,
    pub(crate) before: Vec<T>,
    pub(crate) padding: Vec<usize>,
    pub(crate) taps: Values,
    pub(crate) bias: Option<Values>,
}

impl<T: Element> ConvProblem<T> {
    /// With up to `extra` more rows before the first than are needed, or none; parameters of the
    /// `kind` of [`Values`].
    pub(crate) fn new(
        shape: ConvShape,
        gap: usize,
        extra: usize,
        kind: usize,
        r: &mut Random,
    ) -> Self {
        let ConvShape {
            batch,
            length,
            channels,
            kernel,
        } = shape;
        let before = match r.below(3) {
            0 => vec![],
            _ => {
                let kept = kernel - 1 + r.below(extra + 1);
                r.floats(batch * kept * channels)
            }
        };
        let padding = match r.below(2) {
            0 => vec![],
            _ => (0..batch).map(|_| r.below(length + 2)).collect(),
        };
        let has_bias = r.below(2) == 0;
        Self {
            x: r.floats(batch * length * (channels + gap)),
            taps: Values::new(kind, &r.floats::<f32>(channels * kernel)),
            bias: has_bias.then(|| Values::new(kind, &r.floats::<f32>(channels))),
            shape,
            gap,
            before,
            padding,
        }
    }

    pub(crate) fn inputs(&self) -> ConvInputs<'_, T> {
        ConvInputs {
            x: rows(&self.x, self.shape.channels + self.gap),
            before: &self.before,
            padding: &self.padding,
        }
    }

    pub(crate) fn bias(&self) -> Option<Floats<'_>> {
        self.bias.as_ref().map(Values::view)
    }

    /// The first position of a row of the batch that is not padding.
    pub(crate) fn start(&self, b: usize) -> usize {
        let padding = self.padding.get(b).copied().unwrap_or(0);
        padding.min(self.shape.length)
    }

    /// The input at a position, which may lie before the first.
    pub(crate) fn input(&self, b: usize, position: isize, channel: usize) -> f64 {
        let ConvShape {
            batch,
            length,
            channels,
            ..
        } = self.shape;
        let value = match usize::try_from(position) {
            Ok(t) if t < self.start(b) => return 0.0,
            Ok(t) => self.x[(b * length + t) * (channels + self.gap) + channel],
            Err(_) => {
                let kept = self.before.len() / (batch * channels);
                let Some(row) = kept.checked_add_signed(position) else {
                    return 0.0;
                };
                self.before[(b * kept + row) * channels + channel]
            }
        };
        f64::from(value.to_f32())
    }

    /// The output at a position.
    pub(crate) fn output(&self, b: usize, position: usize, channel: usize) -> f64 {
        let (kernel, channels) = (self.shape.kernel, self.shape.channels);
        let taps = (0..kernel).map(|j| {
            let position = (position + j) as isize - (kernel as isize - 1);
            let tap = f64::from(self.taps.view().get(j * channels + channel));
            tap * self.input(b, position, channel)
        });
        let bias = self.bias().map_or(0.0, |bias| f64::from(bias.get(channel)));
        taps.sum::<f64>() + bias
    }

    /// Checks what the next call is to be given, `[B, .., C]`.
    pub(crate) fn check_tail(&self, tail: &[T], what: &str) {
        let (batch, channels) = (self.shape.batch, self.shape.channels);
        let kept = tail.len().checked_div(batch * channels).unwrap_or(0);
        for (i, found) in tail.iter().enumerate() {
            let (b, row) = (i / (kept * channels), i / channels % kept);
            let position = (self.shape.length + row) as isize - kept as isize;
            let expected = self.input(b, position, i % channels);
            assert!(
                f64::from(found.to_f32()) == expected,
                "{what}: tail [{i}]: {} for {expected}",
                found.to_f32()
            );
        }
    }
}

/// Rows that are `stride` apart.
pub(crate) fn rows<T>(data: &[T], stride: usize) -> Strided<'_, T> {
    Strided { data, stride }
}

pub(crate) fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}
