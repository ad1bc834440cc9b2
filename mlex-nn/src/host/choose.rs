//! Rows of an embedding, and the likeliest token.

use mlex_core::{Array, Dtype, HostView, HostViewMut};

use super::sequence::{Sequence, Shape, Step, Value};
use super::weight::{Part, Weight};
use super::{by_dtype, kernel_error, size};
use crate::Result;
use crate::linear::{Matrix, Stored};

/// The rows of `matrix` `[N, K]` that `ids` name: `[*ids.shape, K]`.
pub(crate) fn record_rows(
    sequence: &mut Sequence,
    ids: Value,
    matrix: &Matrix,
) -> Result<Option<Value>> {
    // As `Matrix::rows` unpacks it.
    let dtype = match &matrix.stored {
        Stored::Dense { weight, .. } => weight.dtype(),
        Stored::Quantized { dtype, .. } => dtype.unwrap_or(Dtype::Bfloat16),
    };
    let known = matches!(sequence.dtype(ids), Dtype::Int32 | Dtype::Uint32);
    let weight = Weight { matrix, bias: None };
    let Some(table) = Part::new(Dtype::Float32, weight)?.filter(|_| known) else {
        return Ok(None);
    };
    let columns = matrix.rows_and_columns()?.1;
    let mut shape = Shape::from_slice(sequence.shape(ids));
    shape.push(columns);
    let y = sequence.output(&shape, dtype);
    let columns = size(columns);
    sequence.step(RowsStep { table, columns }, &[ids], &[y]);
    Ok(Some(y))
}

struct RowsStep {
    table: Part,
    columns: usize,
}

impl Step for RowsStep {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let table = self.table.projection(self.columns)?;
        // As MLX: negative numbers count from the end.
        let row = |id: i64| {
            let id = if id < 0 { id + table.n() as i64 } else { id };
            usize::try_from(id).unwrap_or(usize::MAX)
        };
        let ids: Vec<usize> = match inputs[0].dtype() {
            Dtype::Uint32 => inputs[0]
                .as_slice::<u32>()?
                .iter()
                .map(|&id| row(id.into()))
                .collect(),
            _ => inputs[0]
                .as_slice::<i32>()?
                .iter()
                .map(|&id| row(id.into()))
                .collect(),
        };
        let output = &mut outputs[0];
        by_dtype!(output.dtype(), T => {
            mlex_kernels::take_rows(output.as_mut_slice::<T>()?, &ids, &table)
        })
        .map_err(kernel_error(self.name()))
    }
}

/// The place of the largest element of each row of `x` `[.., N]`: int32 `[..]`.
pub(crate) fn argmax(x: &Array) -> Result<Option<Array>> {
    let Some((mut sequence, value)) = Sequence::start(x)? else {
        return Ok(None);
    };
    let (Some((&last, rows)), true) = (x.shape().split_last(), x.size() > 0) else {
        return Ok(None);
    };
    let y = sequence.output(rows, Dtype::Int32);
    sequence.step(
        ArgmaxStep {
            columns: size(last),
        },
        &[value],
        &[y],
    );
    Ok(sequence.finish(&[y])?.pop())
}

struct ArgmaxStep {
    columns: usize,
}

impl Step for ArgmaxStep {
    fn name(&self) -> &'static str {
        "argmax"
    }

    fn run(
        &self,
        inputs: &[HostView<'_>],
        outputs: &mut [HostViewMut<'_>],
    ) -> mlex_core::Result<()> {
        let places = outputs[0].as_mut_slice::<i32>()?;
        by_dtype!(inputs[0].dtype(), T => {
            let rows = inputs[0].as_slice::<T>()?.chunks_exact(self.columns);
            for (place, row) in places.iter_mut().zip(rows) {
                // A dimension of an array fits an i32.
                *place = mlex_kernels::argmax(row) as i32;
            }
        });
        Ok(())
    }
}
