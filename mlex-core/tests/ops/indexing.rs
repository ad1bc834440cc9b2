//! Slices, gathers and scatters.

use mlex_core::{Array, Result};

use crate::cases::Case;
use crate::one;

pub(crate) fn run(case: &Case) -> Option<Result<Vec<Array>>> {
    let params = &case.params;
    let (x, rest) = case.inputs.split_first()?;
    let axis = || params.int("axis");
    one(match case.op.as_str() {
        "slice" => x.slice(
            &params.ints("start"),
            &params.ints("stop"),
            Some(&params.ints("strides")),
        ),
        "slice_update" => x.slice_update_strided(
            &rest[0],
            &params.ints("start"),
            &params.ints("stop"),
            Some(&params.ints("strides")),
        ),
        "take" if params.get("axis").is_none() => x.take_flat(&rest[0]),
        "take" => x.take(&rest[0], axis()),
        "take_along_axis" => x.take_along_axis(&rest[0], axis()),
        "put_along_axis" => x.put_along_axis(&rest[0], &rest[1], axis()),
        "scatter_add_axis" => x.scatter_add_axis(&rest[0], &rest[1], axis()),
        "gather" => x.gather(rest, &params.ints("axes"), &params.ints("slice_sizes")),
        "scatter" | "scatter_add" | "scatter_prod" | "scatter_max" | "scatter_min" => {
            let (updates, indices) = rest.split_last()?;
            let axes = params.ints("axes");
            match case.op.as_str() {
                "scatter" => x.scatter(indices, updates, &axes),
                "scatter_add" => x.scatter_add(indices, updates, &axes),
                "scatter_prod" => x.scatter_prod(indices, updates, &axes),
                "scatter_max" => x.scatter_max(indices, updates, &axes),
                _ => x.scatter_min(indices, updates, &axes),
            }
        }
        _ => return None,
    })
}
