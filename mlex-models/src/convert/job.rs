//! What is done to a tensor, or to the tensors of one layer's weight, on their way into a file.

use std::io::Write;

use mlex_core::{Array, Dtype, Quantized, QuantizedWeight, Result};
use mlex_nn::{LazyTensor, dispatch};

/// Weights that are quantized or dequantized at once. MLX unfolds packed ones into dozens of bytes
/// each.
const CHUNK: usize = 1 << 19;

/// Called with the bytes of output that are done; an error ends the job.
pub(super) type Tick<'a> = dyn FnMut(usize) -> Result<()> + 'a;

/// What becomes of one or several tensors.
pub(super) enum Job {
    /// They are written as they are, or in another floating-point type.
    Keep(Vec<(LazyTensor, Dtype)>),
    /// A weight is written in another form.
    Change(Change),
}

/// A weight, and what it becomes.
pub(super) struct Change {
    pub(super) source: Source,
    /// The type of the dense weight, which is also that of affine scales.
    pub(super) dtype: Dtype,
    /// How it is quantized, unless it is dense.
    pub(super) layout: Option<Quantized>,
}

/// A weight as the checkpoint has it.
pub(super) enum Source {
    Dense(LazyTensor),
    Packed {
        weight: LazyTensor,
        scales: LazyTensor,
        biases: Option<LazyTensor>,
        layout: Quantized,
    },
}

impl Job {
    /// Does it: writes the bytes of the first output to `sink` as they come, and returns those of
    /// the others.
    ///
    /// # Errors
    /// When a tensor cannot be read or written, or `tick` fails.
    pub(super) fn run(self, sink: &mut dyn Write, tick: &mut Tick<'_>) -> Result<Vec<Vec<u8>>> {
        match self {
            Self::Keep(parts) => {
                let mut parts = parts.into_iter();
                if let Some((first, dtype)) = parts.next() {
                    write_as(&(first.load)()?, dtype, sink, tick)?;
                }
                let rest = parts.map(|(tensor, dtype)| {
                    let mut bytes = Vec::new();
                    write_as(&(tensor.load)()?, dtype, &mut bytes, tick)?;
                    Ok(bytes)
                });
                rest.collect()
            }
            Self::Change(change) => change.run(sink, tick),
        }
    }
}

impl Change {
    fn run(self, sink: &mut dyn Write, tick: &mut Tick<'_>) -> Result<Vec<Vec<u8>>> {
        let loaded = Loaded::of(self.source)?;
        let Some(layout) = self.layout else {
            for (start, stop) in loaded.chunks() {
                write(&loaded.rows(start, stop, self.dtype)?, sink, tick)?;
            }
            return Ok(Vec::new());
        };
        let (mut scales, mut biases) = (Vec::new(), Vec::new());
        for (start, stop) in loaded.chunks() {
            let rows = loaded.rows(start, stop, self.dtype)?;
            let packed = dispatch::quantize(&rows, layout)?;
            write(&packed.weight, sink, tick)?;
            write(&packed.scales, &mut scales, tick)?;
            if let Some(packed) = &packed.biases {
                write(packed, &mut biases, tick)?;
            }
        }
        Ok(if layout.mode.has_biases() {
            vec![scales, biases]
        } else {
            vec![scales]
        })
    }
}

/// A weight in memory, as a matrix of all its rows.
enum Loaded {
    Dense(Array),
    Packed(QuantizedWeight),
}

impl Loaded {
    fn of(source: Source) -> Result<Self> {
        Ok(match source {
            Source::Dense(weight) => Self::Dense(matrix(&(weight.load)()?)?),
            Source::Packed {
                weight,
                scales,
                biases,
                layout,
            } => Self::Packed(QuantizedWeight {
                weight: matrix(&(weight.load)()?)?,
                scales: matrix(&(scales.load)()?)?,
                biases: match biases {
                    Some(biases) => Some(matrix(&(biases.load)()?)?),
                    None => None,
                },
                layout,
            }),
        })
    }

    /// Ranges of rows that are worked on at once.
    fn chunks(&self) -> Vec<(i32, i32)> {
        let (rows, columns) = match self {
            Self::Dense(weight) => (dim(weight, 0), dim(weight, 1)),
            Self::Packed(weight) => {
                let groups = dim(&weight.scales, 1);
                (dim(&weight.scales, 0), groups * weight.layout.group_size)
            }
        };
        ranges(rows, columns)
    }

    /// Dense rows in `dtype`. Packed ones are computed in f32 and rounded once.
    fn rows(&self, start: i32, stop: i32, dtype: Dtype) -> Result<Array> {
        match self {
            Self::Dense(weight) => weight.slice_axis(0, start, stop)?.as_type(dtype),
            Self::Packed(weight) => {
                let part = |array: &Array| array.slice_axis(0, start, stop);
                let wide = |array: &Array| {
                    let part = part(array)?;
                    if part.dtype().is_float() {
                        part.as_type(Dtype::Float32)
                    } else {
                        Ok(part)
                    }
                };
                let rows = QuantizedWeight {
                    weight: part(&weight.weight)?,
                    scales: wide(&weight.scales)?,
                    biases: weight.biases.as_ref().map(wide).transpose()?,
                    layout: weight.layout,
                };
                rows.dequantize(Some(Dtype::Float32))?.as_type(dtype)
            }
        }
    }
}

/// Rows of an array `[.., K]` as a matrix.
fn matrix(array: &Array) -> Result<Array> {
    let columns = array.shape().last().copied().unwrap_or(1);
    let rows = array.size() / columns.max(1) as usize;
    array.reshape(&[i32::try_from(rows).unwrap_or(i32::MAX), columns])
}

/// A dimension of a matrix.
fn dim(matrix: &Array, axis: usize) -> i32 {
    matrix.shape().get(axis).copied().unwrap_or_default()
}

/// `0..rows` in ranges of about [`CHUNK`] elements.
fn ranges(rows: i32, columns: i32) -> Vec<(i32, i32)> {
    let step = (CHUNK / columns.max(1) as usize).max(1) as i32;
    (0..rows)
        .step_by(step as usize)
        .map(|start| (start, rows.min(start.saturating_add(step))))
        .collect()
}

/// Writes an array in another type where it is one of floats.
fn write_as(array: &Array, dtype: Dtype, sink: &mut dyn Write, tick: &mut Tick<'_>) -> Result<()> {
    if array.dtype() == dtype {
        return write(array, sink, tick);
    }
    let matrix = matrix(array)?;
    for (start, stop) in ranges(dim(&matrix, 0), dim(&matrix, 1)) {
        let part = matrix.slice_axis(0, start, stop)?.as_type(dtype)?;
        write(&part, sink, tick)?;
    }
    Ok(())
}

fn write(array: &Array, sink: &mut dyn Write, tick: &mut Tick<'_>) -> Result<()> {
    sink.write_all(array.contiguous()?.as_bytes()?)?;
    tick(array.nbytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_cover_all_rows() {
        assert_eq!(ranges(0, 64), []);
        assert_eq!(ranges(3, 64), [(0, 3)]);
        let step = (CHUNK / 1000) as i32;
        assert_eq!(
            ranges(2 * step + 1, 1000),
            [(0, step), (step, 2 * step), (2 * step, 2 * step + 1)]
        );
        // Rows larger than a chunk come one by one.
        assert_eq!(ranges(2, i32::MAX), [(0, 1), (1, 2)]);
        assert_eq!(ranges(1, 0), [(0, 1)]);
    }
}
