//! Products of matrices, and convolutions.

use mlex_core::{Array, Result};

use crate::cases::Case;
use crate::one;

pub(crate) fn run(case: &Case) -> Option<Result<Vec<Array>>> {
    let params = &case.params;
    let [x, other, rest @ ..] = &case.inputs[..] else {
        return None;
    };
    let pair = |key| {
        let list = params.ints(key);
        (list[0], list[1])
    };
    let triple = |key| {
        let list = params.ints(key);
        (list[0], list[1], list[2])
    };
    one(match case.op.as_str() {
        "matmul" => x.matmul(other),
        "addmm" => x.addmm(other, &rest[0], params.float("alpha"), params.float("beta")),
        "outer" => x.outer(other),
        "inner" => x.inner(other),
        "tensordot" => x.tensordot(other, &params.ints("axes_a"), &params.ints("axes_b")),
        "gather_mm" => x.gather_mm(other, rest.first(), rest.get(1), false),
        "conv1d" => x.conv1d(
            other,
            params.int("stride"),
            params.int("padding"),
            params.int("dilation"),
            params.int("groups"),
        ),
        "conv2d" => x.conv2d(
            other,
            pair("stride"),
            pair("padding"),
            pair("dilation"),
            params.int("groups"),
        ),
        "conv3d" => x.conv3d(
            other,
            triple("stride"),
            triple("padding"),
            triple("dilation"),
            params.int("groups"),
        ),
        "conv_transpose1d" => x.conv_transpose1d(
            other,
            params.int("stride"),
            params.int("padding"),
            params.int("dilation"),
            0,
            params.int("groups"),
        ),
        _ => return None,
    })
}
