//! The same linear layer dense and packed in several layouts: how far the results are apart,
//! and what the weights take. `cargo run -p mlex-nn --example quantized_linear`.
#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::collections::BTreeMap;

use mlex_core::{Array, Dtype, QuantizationMode, Quantized, QuantizedWeight, random};
use mlex_nn::{LazyTensor, Linear, QuantizationConfig, Result, Weights};

const INPUT: i32 = 512;
const OUTPUT: i32 = 256;

/// The layer `proj` of a checkpoint with these tensors.
fn layer(tensors: Vec<(&str, Array)>, quantization: QuantizationConfig) -> Result<Linear> {
    let tensors: BTreeMap<String, LazyTensor> = tensors
        .into_iter()
        .map(|(name, array)| (format!("proj.{name}"), LazyTensor::ready(array)))
        .collect();
    let weights = Weights::new(tensors, quantization);
    let layer = Linear::load(&weights.pp("proj"), INPUT, OUTPUT, false)?;
    // Nothing may be missing or left over.
    weights.finish()?;
    Ok(layer)
}

fn main() -> Result<()> {
    let keys = random::split(&random::key(0)?, 2)?;
    let normal = |index, shape: &[i32]| {
        let std = (INPUT as f32).powf(-0.5);
        random::normal(0.0, std, shape, Dtype::Float32, &keys.at(0, index)?)
    };
    let weight = normal(0, &[OUTPUT, INPUT])?;
    let x = normal(1, &[3, INPUT])?;

    let dense = layer(
        vec![("weight", weight.clone())],
        QuantizationConfig::default(),
    )?;
    let expected = dense.forward(&x)?;
    let norm = |array: &Array| -> Result<f32> { Ok(array.square()?.sum_all()?.sqrt()?.item()?) };
    println!("layout            bytes  relative error");
    println!("dense f32      {:>8}", weight.nbytes());

    let affine = |bits| (QuantizationMode::Affine, bits, 64);
    for (mode, bits, group_size) in [
        affine(8),
        affine(6),
        affine(4),
        affine(3),
        affine(2),
        (QuantizationMode::Mxfp8, 8, 32),
        (QuantizationMode::Mxfp4, 4, 32),
        (QuantizationMode::Nvfp4, 4, 16),
    ] {
        let layout = Quantized {
            bits,
            group_size,
            mode,
        };
        let packed = QuantizedWeight::quantize(&weight, layout)?;
        let mut tensors = vec![("weight", packed.weight), ("scales", packed.scales)];
        tensors.extend(packed.biases.map(|biases| ("biases", biases)));
        let bytes: usize = tensors.iter().map(|(_, array)| array.nbytes()).sum();

        let quantized = layer(tensors, QuantizationConfig::uniform(layout))?;
        let difference = quantized.forward(&x)?.subtract(&expected)?;
        println!(
            "{:<8} {bits} bits {bytes:>7}  {:.4}",
            mode.name(),
            norm(&difference)? / norm(&expected)?
        );
    }
    Ok(())
}
