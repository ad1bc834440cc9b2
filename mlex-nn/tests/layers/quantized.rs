//! Layers over packed weights.

use mlex_core::{Array, Dtype, Quantized, QuantizedWeight};
use mlex_nn::{Embedding, Linear, QuantizationConfig, Result};

use crate::cases::Case;
use crate::{one, weights};

const NAMES: &[&str] = &["weight", "scales", "biases", "bias"];

pub(crate) fn run(case: &Case) -> Option<Result<Vec<Array>>> {
    let layout = || Quantized {
        bits: case.params.int("bits"),
        group_size: case.params.int("group_size"),
        mode: case.params.text("mode").parse().unwrap(),
    };
    match case.op.as_str() {
        "quantized_linear" => Some(linear(case, layout())),
        "quantized_embedding" => one(embedding(case, layout())),
        _ => None,
    }
}

/// y and the dequantized weight.
fn linear(case: &Case, layout: Quantized) -> Result<Vec<Array>> {
    let x = case.x();
    let (packed, scales) = (need(case, "weight"), need(case, "scales"));
    let rows = packed.dim(0)?;
    let weights = weights(case, NAMES, QuantizationConfig::uniform(layout));
    let linear = Linear::load(&weights, x.dim(-1)?, rows, case.named("bias").is_some())?;
    weights.finish()?;

    let y = linear.forward(x)?;
    // Many rows may be computed in another way than few: it must give the same.
    let many = linear.forward(&x.tile(&[4, 1])?)?;
    let close = many.all_close(&y.tile(&[4, 1])?, 1e-5, 1e-5)?;
    assert!(
        close || y.dtype() == Dtype::Bfloat16,
        "{}: four times x",
        case.name
    );

    let weight = QuantizedWeight {
        weight: packed.clone(),
        scales: scales.clone(),
        biases: case.named("biases").cloned(),
        layout,
    };
    // The row's y and weight are f32 for a bf16 layer too.
    let wide = |array: Array| array.as_type(Dtype::Float32);
    Ok(vec![wide(y)?, wide(weight.dequantize(None)?)?])
}

fn embedding(case: &Case, layout: Quantized) -> Result<Array> {
    let rows = need(case, "weight").dim(0)?;
    let columns = need(case, "scales").dim(1)? * layout.group_size;
    let weights = weights(case, NAMES, QuantizationConfig::uniform(layout));
    let embedding = Embedding::load(&weights, rows, columns)?;
    weights.finish()?;
    let vectors = embedding.forward(need(case, "ids"))?;
    Ok(vectors.as_type(Dtype::Float32)?)
}

fn need<'a>(case: &'a Case, name: &str) -> &'a Array {
    case.named(name).unwrap()
}
