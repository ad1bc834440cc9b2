//! Packed weights and the products with them.

use mlex_core::{Array, Quantized, QuantizedWeight, Result};

use crate::cases::Case;
use crate::one;

pub(crate) fn run(case: &Case) -> Option<Result<Vec<Array>>> {
    let (x, rest) = case.inputs.split_first()?;
    match case.op.as_str() {
        "quantize" => Some(QuantizedWeight::quantize(x, layout(case)).map(|packed| {
            let parts = [Some(packed.weight), Some(packed.scales), packed.biases];
            parts.into_iter().flatten().collect()
        })),
        "dequantize" => {
            let (weight, _) = packed(case, &case.inputs);
            one(weight.dequantize(Some(case.params.dtype("dtype"))))
        }
        "quantized_matmul" => {
            let (weight, _) = packed(case, rest);
            one(weight.matmul_oriented(x, case.params.bool("transpose")))
        }
        "gather_qmm" => {
            let (weight, indices) = packed(case, rest);
            let sorted = case.params.bool("sorted");
            one(weight.gather_matmul(x, indices.first(), indices.get(1), sorted))
        }
        _ => None,
    }
}

fn layout(case: &Case) -> Quantized {
    Quantized {
        bits: case.params.int("bits"),
        group_size: case.params.int("group_size"),
        mode: case.params.text("mode").parse().unwrap(),
    }
}

/// The weight that `arrays` begin with, and what follows it.
fn packed<'a>(case: &Case, arrays: &'a [Array]) -> (QuantizedWeight, &'a [Array]) {
    let layout = layout(case);
    let parts = if layout.mode.has_biases() { 3 } else { 2 };
    let (weight, rest) = arrays.split_at(parts);
    let weight = QuantizedWeight {
        weight: weight[0].clone(),
        scales: weight[1].clone(),
        biases: weight.get(2).cloned(),
        layout,
    };
    (weight, rest)
}
