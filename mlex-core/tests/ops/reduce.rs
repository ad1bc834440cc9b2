//! Reductions, scans, sorting.

use mlex_core::{Array, Result};

use crate::cases::Case;
use crate::one;

pub(crate) fn run(case: &Case) -> Option<Result<Vec<Array>>> {
    let x = case.inputs.first()?;
    if let Some(output) = reduction(case, x) {
        return one(output);
    }
    if let Some(output) = scan(case, x) {
        return one(output);
    }
    let axis = || case.params.int("axis");
    one(match case.op.as_str() {
        "sort" => x.sort(axis()),
        "argsort" => x.argsort(axis()),
        // In no certain order: sorted here as in the expected values.
        "topk" => x
            .topk(case.params.int("k"), axis())
            .and_then(|top| top.sort(axis())),
        "partition" => {
            let kth = case.params.int("kth");
            x.partition(kth, axis())
                .and_then(|output| output.slice_axis(axis(), kth, kth + 1))
        }
        "argpartition" => {
            let kth = case.params.int("kth");
            x.argpartition(kth, axis())
                .and_then(|output| output.slice_axis(axis(), kth, kth + 1))
        }
        _ => return None,
    })
}

fn reduction(case: &Case, x: &Array) -> Option<Result<Array>> {
    let params = &case.params;
    let axes = || params.ints("axes");
    let keep = || params.bool("keepdims");
    Some(match case.op.as_str() {
        "softmax" => x.softmax(&axes(), params.bool("precise")),
        "logsumexp" => x.logsumexp(&axes(), keep()),
        "mean" => x.mean(&axes(), keep()),
        "sum" => x.sum(&axes(), keep()),
        "prod" => x.prod(&axes(), keep()),
        "max" => x.max(&axes(), keep()),
        "min" => x.min(&axes(), keep()),
        "var" => x.var(&axes(), keep(), params.int("ddof")),
        "std" => x.std(&axes(), keep(), params.int("ddof")),
        "all" => x.all(&axes(), keep()),
        "any" => x.any(&axes(), keep()),
        "argmax" => x.argmax(params.int("axis"), keep()),
        "argmin" => x.argmin(params.int("axis"), keep()),
        _ => return None,
    })
}

fn scan(case: &Case, x: &Array) -> Option<Result<Array>> {
    let scan = match case.op.as_str() {
        "cumsum" => Array::cumsum,
        "cumprod" => Array::cumprod,
        "cummax" => Array::cummax,
        "cummin" => Array::cummin,
        "logcumsumexp" => Array::logcumsumexp,
        _ => return None,
    };
    let params = &case.params;
    Some(scan(
        x,
        params.int("axis"),
        params.bool("reverse"),
        params.bool("inclusive"),
    ))
}
