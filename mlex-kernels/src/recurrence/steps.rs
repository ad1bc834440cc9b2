//! Few positions, one after another.

use super::panels::cut;
use super::{Part, Position, Recurrence, Rule};
use crate::Element;
use crate::simd::scratch;
use crate::threads::Tile;

impl<T: Element, R: Rule<T>> Recurrence<'_, T, R> {
    /// The positions from `start` on, one by one.
    pub(super) fn steps(&self, buffer: &mut scratch::Buffer, tile: &mut Tile<'_, T>, start: usize) {
        let (level, sizes) = (self.level, self.sizes);
        let (batch, dim) = (tile.plane, sizes.dim);
        let (first, count) = (tile.column / dim, tile.columns / dim);
        let group = first / sizes.per_group();
        let written = sizes.shared_channels(Part::Written, group);
        let read = sizes.shared_channels(Part::Read, group);
        let x = sizes.head_channels(first, count, (count * dim).next_multiple_of(16));
        let all = [written, read, x];
        let lengths = all.map(|channels| self.conv.taps_len(channels.padded));
        let widest = written.padded.max(x.padded);
        let total =
            lengths.iter().sum::<usize>() + sizes.kernel * widest + 2 * (written.padded + x.padded);
        let mut memory = &mut buffer.floats(total)[..total];
        let mut cut = |count: usize| cut(&mut memory, count);
        let mut taps = lengths.map(&mut cut);
        let window = cut(sizes.kernel * widest);
        let mut rows = all.map(|channels| cut(channels.padded));
        let y = cut(x.padded);
        for (&channels, taps) in all.iter().zip(taps.iter_mut()) {
            self.conv.taps(channels, taps);
        }
        let mut states: Vec<&mut [f32]> = (first..first + count)
            .map(|head| self.states.take(batch * sizes.heads + head))
            .collect();
        for position in start..sizes.length {
            let span = [position, 1];
            for ((&channels, taps), row) in all.iter().zip(&taps).zip(&mut rows) {
                self.conv.run(channels, batch, span, taps, window, row);
            }
            let [written_row, read_row, x_row] = &mut rows;
            self.rule.prepare(level, Part::Written, written_row);
            self.rule.prepare(level, Part::Read, read_row);
            let row = batch * sizes.length + position;
            for (index, state) in states.iter_mut().enumerate() {
                let (head, columns) = (first + index, index * dim..(index + 1) * dim);
                let step = Position {
                    gates: self.rule.gates(row, head),
                    state,
                    written: &written_row[..written.count],
                    read: &read_row[..read.count],
                    x: &x_row[columns.clone()],
                    out: &mut y[columns],
                };
                self.rule.step(level, head, step);
            }
            // Apart from the steps: a vector of numbers that were just stored one by one is
            // slow to load.
            let outputs = tile.row_mut(position).chunks_exact_mut(dim);
            for (index, (out, y)) in outputs.zip(y.chunks_exact(dim)).enumerate() {
                self.rule.finish(level, y, row, first + index, out);
            }
        }
    }
}
