//! The short causal convolution of recurrent layers and Canon layers: depthwise, over the last
//! positions.

use crate::error::{check, check_len, product};
use crate::simd::conv::Convolve;
use crate::simd::gated_delta::prefetch;
use crate::simd::rows::{Narrow, Widen};
use crate::simd::{Level, scratch};
use crate::threads::{Tiling, parallel_tiles};
use crate::{Element, Floats, Result};

/// The sizes of a [`causal_conv`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvShape {
    /// Rows of the batch, `B`.
    pub batch: usize,
    /// Positions, `L`.
    pub length: usize,
    /// Channels, `C`.
    pub channels: usize,
    /// Positions that the convolution sees, its own included, `K`.
    pub kernel: usize,
}

impl ConvShape {
    fn validate(&self) -> Result<()> {
        const WHAT: &str = "causal_conv: shape";
        for size in [self.channels, self.kernel] {
            check(size > 0, WHAT, "channels and a kernel", size)?;
        }
        product(WHAT, &[self.batch, self.length, self.channels])?;
        product(WHAT, &[self.batch, self.kernel, self.channels])?;
        Ok(())
    }
}

/// Rows in memory: position `t` of batch row `b` starts at `(b * L + t) * stride`.
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a, T> {
    /// All of them.
    pub data: &'a [T],
    /// From one row to the next; not less than a row.
    pub stride: usize,
}

impl<'a, T> Strided<'a, T> {
    pub(crate) fn row(&self, row: usize, width: usize) -> &'a [T] {
        &self.data[row * self.stride..][..width]
    }

    pub(crate) fn validate(&self, what: &'static str, rows: usize, width: usize) -> Result<()> {
        if rows == 0 {
            return Ok(());
        }
        check(self.stride >= width, what, "rows apart", self.stride)?;
        let needed = product(what, &[rows - 1, self.stride])?
            .checked_add(width)
            .ok_or(crate::KernelError::Overflow { what })?;
        check(
            self.data.len() >= needed,
            what,
            "a row for each position",
            self.data.len(),
        )
    }
}

/// What a [`causal_conv`] computes on.
#[derive(Debug, Clone, Copy)]
pub struct ConvInputs<'a, T> {
    /// Rows of `C`.
    pub x: Strided<'a, T>,
    /// The rows before these, `[B, K - 1, C]` or more of them; zero if empty.
    pub before: &'a [T],
    /// How many of the positions of each batch row are padding, at its start; none if empty.
    pub padding: &'a [usize],
}

impl<'a, T: Element> ConvInputs<'a, T> {
    pub(crate) fn validate(&self, shape: &ConvShape) -> Result<()> {
        let rows = shape.batch * shape.length;
        self.x.validate("causal_conv: x", rows, shape.channels)?;
        if !self.before.is_empty() {
            let needed = shape.batch * (shape.kernel - 1) * shape.channels;
            let whole = self.before.len() == shape.batch * self.kept(shape) * shape.channels;
            check(
                whole && self.before.len() >= needed,
                "causal_conv: before",
                "rows for each position that is seen",
                self.before.len(),
            )?;
        }
        if !self.padding.is_empty() {
            check_len("causal_conv: padding", shape.batch, self.padding.len())?;
        }
        Ok(())
    }

    /// Positions of padding in a batch row.
    pub(crate) fn start(&self, batch: usize, shape: &ConvShape) -> usize {
        let padding = self.padding.get(batch).copied().unwrap_or(0);
        padding.min(shape.length)
    }

    /// How many rows there are before the first position.
    fn kept(&self, shape: &ConvShape) -> usize {
        let row = shape.batch * shape.channels;
        self.before.len().checked_div(row).unwrap_or(0)
    }

    /// `width` channels from `channel` on at a position, which may lie before the first one;
    /// `None` where they are 0.
    fn at(
        &self,
        shape: &ConvShape,
        batch: usize,
        position: isize,
        channel: usize,
        width: usize,
    ) -> Option<&'a [T]> {
        if let Ok(position) = usize::try_from(position) {
            if position < self.start(batch, shape) {
                return None;
            }
            let row = self.x.row(batch * shape.length + position, shape.channels);
            return Some(&row[channel..channel + width]);
        }
        let kept = self.kept(shape);
        let row = batch * kept + kept.checked_add_signed(position)?;
        Some(&self.before[row * shape.channels + channel..][..width])
    }
}

/// The parameters of a [`causal_conv`].
#[derive(Debug, Clone, Copy)]
pub struct ConvLayer<'a> {
    /// `[K, C]`, the tap of the position itself last.
    pub taps: Floats<'a>,
    /// `[C]`
    pub bias: Option<Floats<'a>>,
    /// The output goes through `x * sigmoid(x)`.
    pub activate: bool,
    /// The input is added to the output.
    pub residual: bool,
}

impl ConvLayer<'_> {
    pub(crate) fn validate(&self, shape: &ConvShape) -> Result<()> {
        let taps = product("causal_conv: taps", &[shape.kernel, shape.channels])?;
        check_len("causal_conv: taps", taps, self.taps.len())?;
        match &self.bias {
            Some(bias) => check_len("causal_conv: bias", shape.channels, bias.len()),
            None => Ok(()),
        }
    }
}

/// Channels of a convolution that are computed together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Channels {
    pub(crate) first: usize,
    /// How many there are, and with those that make them whole vectors.
    pub(crate) count: usize,
    pub(crate) padded: usize,
}

/// A convolution, to be computed in parts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Convolution<'a, T> {
    pub(crate) level: Level,
    pub(crate) inputs: ConvInputs<'a, T>,
    pub(crate) layer: ConvLayer<'a>,
    pub(crate) shape: ConvShape,
}

impl<T: Element> Convolution<'_, T> {
    /// How many numbers [`taps`](Self::taps) makes of channels of a padded width.
    pub(crate) fn taps_len(&self, padded: usize) -> usize {
        (self.shape.kernel + 1) * padded
    }

    /// The taps of some channels, `[K, padded]`, and then their bias; 0 where there are no
    /// channels.
    pub(crate) fn taps(&self, channels: Channels, taps: &mut [f32]) {
        let ConvShape {
            kernel,
            channels: all,
            ..
        } = self.shape;
        let rows = taps.chunks_exact_mut(channels.padded);
        for (j, taps) in rows.enumerate().take(kernel + 1) {
            let (to, rest) = taps.split_at_mut(channels.count);
            rest.fill(0.0);
            let place = |first: usize| first + channels.first..first + channels.first + to.len();
            let from = match self.layer.bias {
                _ if j < kernel => self.layer.taps.slice(place(j * all)),
                Some(bias) => bias.slice(place(0)),
                None => {
                    to.fill(0.0);
                    continue;
                }
            };
            match from {
                Floats::F32(from) => to.copy_from_slice(from),
                Floats::F16(from) => self.level.dispatch(Widen { from, to }),
                Floats::Bf16(from) => self.level.dispatch(Widen { from, to }),
            }
        }
    }

    /// Brings near what the `rows` positions from `first` on take of some channels.
    pub(crate) fn prefetch(&self, channels: Channels, batch: usize, [first, rows]: [usize; 2]) {
        let end = self.shape.length.min(first + rows);
        for position in first..end {
            let row = batch * self.shape.length + position;
            let row = self.inputs.x.row(row, self.shape.channels);
            prefetch(&row[channels.first..channels.first + channels.count]);
        }
    }

    /// Some channels of `rows` positions from `first` on: `[rows, padded]`. `window` has room for
    /// `K - 1` rows more.
    pub(crate) fn run(
        &self,
        channels: Channels,
        batch: usize,
        [first, rows]: [usize; 2],
        taps: &[f32],
        window: &mut [f32],
        out: &mut [f32],
    ) {
        let (kernel, dim) = (self.shape.kernel, channels.padded);
        let needed = rows + kernel - 1;
        for (index, row) in window.chunks_exact_mut(dim).enumerate().take(needed) {
            let position = (first + index) as isize - (kernel as isize - 1);
            let (to, rest) = row.split_at_mut(channels.count);
            rest.fill(0.0);
            let Channels { first, count, .. } = channels;
            match self.inputs.at(&self.shape, batch, position, first, count) {
                Some(from) => self.level.dispatch(Widen { from, to }),
                None => to.fill(0.0),
            }
        }
        self.level.dispatch(Convolve {
            window,
            taps,
            out,
            rows,
            kernel,
            dim,
            activate: self.layer.activate,
            residual: self.layer.residual,
        });
    }
}

/// Positions and channels of a task.
const ROWS: usize = 64;
const COLUMNS: usize = 128;

/// A depthwise convolution over the last `K` positions, `out` `[B, L, C]`. Padding counts as zero.
/// Computed in f32 and rounded once.
///
/// # Errors
/// When a slice has another length than `shape` says.
pub fn causal_conv<T: Element>(
    out: &mut [T],
    inputs: &ConvInputs<'_, T>,
    layer: &ConvLayer<'_>,
    shape: &ConvShape,
) -> Result<()> {
    shape.validate()?;
    inputs.validate(shape)?;
    layer.validate(shape)?;
    let &ConvShape {
        batch,
        length,
        channels,
        kernel,
    } = shape;
    check_len("causal_conv: out", batch * length * channels, out.len())?;
    let convolution = Convolution {
        level: Level::current(),
        inputs: *inputs,
        layer: *layer,
        shape: *shape,
    };
    let tiling = Tiling {
        planes: batch,
        rows: length,
        columns: channels,
        tile_rows: ROWS,
        tile_columns: COLUMNS,
    };
    parallel_tiles(out, tiling, |mut tile| {
        let part = Channels {
            first: tile.column,
            count: tile.columns,
            padded: tile.columns.next_multiple_of(16),
        };
        let (rows, padded) = (tile.rows, part.padded);
        let taps_len = convolution.taps_len(padded);
        let total = taps_len + (2 * rows + kernel - 1) * padded;
        scratch::with(1, |[buffer, ..]| {
            let (taps, memory) = buffer.floats(total)[..total].split_at_mut(taps_len);
            let (y, window) = memory.split_at_mut(rows * padded);
            convolution.taps(part, taps);
            convolution.run(part, tile.plane, [tile.row, rows], taps, window, y);
            for (row, y) in y.chunks_exact(padded).enumerate() {
                let (from, to) = (&y[..part.count], tile.row_mut(row));
                convolution.level.dispatch(Narrow {
                    from,
                    bias: &[],
                    to,
                });
            }
        });
    });
    Ok(())
}

/// What the next call needs as `before`: the last rows, as many as `out` `[B, .., C]` takes.
///
/// # Errors
/// When a slice has another length than `shape` says, or `out` is not whole rows.
pub fn causal_conv_tail<T: Element>(
    out: &mut [T],
    inputs: &ConvInputs<'_, T>,
    shape: &ConvShape,
) -> Result<()> {
    shape.validate()?;
    inputs.validate(shape)?;
    let channels = shape.channels;
    let kept = out.len().checked_div(shape.batch * channels).unwrap_or(0);
    let whole = shape.batch * kept * channels;
    check_len("causal_conv: tail", whole, out.len())?;
    for (index, out) in out.chunks_exact_mut(channels).enumerate() {
        let (batch, row) = (index / kept, index % kept);
        let position = (shape.length + row) as isize - kept as isize;
        match inputs.at(shape, batch, position, 0, channels) {
            Some(from) => out.copy_from_slice(from),
            None => out.fill(T::from_f32(0.0)),
        }
    }
    Ok(())
}
