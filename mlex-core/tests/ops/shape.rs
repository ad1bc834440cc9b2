//! Arrays from nothing, and other shapes of the same elements.

use mlex_core::{Array, Dtype, Result};

use crate::cases::Case;
use crate::one;

pub(crate) fn run(case: &Case) -> Option<Result<Vec<Array>>> {
    if let Some(output) = create(case) {
        return one(output);
    }
    let params = &case.params;
    let x = case.inputs.first()?;
    one(match case.op.as_str() {
        "tril" => x.tril(params.int("k")),
        "triu" => x.triu(params.int("k")),
        "diagonal" => x.diagonal(
            params.int("offset"),
            params.int("axis1"),
            params.int("axis2"),
        ),
        "diag" => x.diag(params.int("k")),
        "pad" => {
            let sizes: Vec<(i32, i32)> = params
                .ints("low")
                .into_iter()
                .zip(params.ints("high"))
                .collect();
            match params.text("mode") {
                "edge" => x.pad_edge(&params.ints("axes"), &sizes),
                _ => x.pad(&params.ints("axes"), &sizes, params.float("value")),
            }
        }
        "repeat" => x.repeat(params.int("repeats"), params.int("axis")),
        "tile" => x.tile(&params.ints("reps")),
        "roll" => x.roll(params.int("shift"), params.int("axis")),
        "transpose" => x.transpose(&params.ints("axes")),
        "moveaxis" => x.move_axis(params.int("source"), params.int("destination")),
        "swapaxes" => x.swap_axes(params.int("axis1"), params.int("axis2")),
        "flatten" => x.flatten(params.int("start_axis"), params.int("end_axis")),
        "as_strided" => {
            let strides: Vec<i64> = params.ints("strides").into_iter().map(i64::from).collect();
            let offset = params.int("offset") as usize;
            x.as_strided(&params.ints("shape"), &strides, offset)
        }
        "concatenate" => Array::concatenate(&case.inputs, params.int("axis")),
        "stack" => Array::stack(&case.inputs, params.int("axis")),
        "split" if params.get("parts").is_some() => {
            return Some(x.split(params.int("parts"), params.int("axis")));
        }
        "split" => return Some(x.split_at(&params.ints("indices"), params.int("axis"))),
        _ => return None,
    })
}

fn create(case: &Case) -> Option<Result<Array>> {
    let params = &case.params;
    let double = |key| f64::from(params.float(key));
    let size = || (params.int("n"), params.int("m"), params.int("k"));
    Some(match case.op.as_str() {
        "tri" => {
            let (rows, columns, k) = size();
            Array::tri(rows, columns, k, Dtype::Float32)
        }
        "eye" => {
            let (rows, columns, k) = size();
            Array::eye(rows, columns, k, Dtype::Float32)
        }
        "arange" => Array::arange(
            double("start"),
            double("stop"),
            double("step"),
            Dtype::Float32,
        ),
        "linspace" => Array::linspace(
            double("start"),
            double("stop"),
            params.int("num"),
            Dtype::Float32,
        ),
        _ => return None,
    })
}
