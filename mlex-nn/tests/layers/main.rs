//! Every layer against golden cases: values from numpy in f64, from mlx-lm for the rotary
//! scalings, from MLX for packed weights. See tools/make_nn_golden.py.
#![allow(clippy::unwrap_used, reason = "a helper fails as its test would")]

#[path = "../../../mlex-core/tests/ops/cases.rs"]
mod cases;

mod dense;
mod mixing;
mod positions;
mod quantized;

use std::collections::BTreeMap;
use std::path::Path;

use cases::{Case, Tolerance, difference, load};
use mlex_core::Array;
use mlex_nn::{LazyTensor, QuantizationConfig, Result, Weights};

/// Runs a case, or gives `None` when its layer is another module's.
type Handler = fn(&Case) -> Option<Result<Vec<Array>>>;

const HANDLERS: &[Handler] = &[dense::run, mixing::run, positions::run, quantized::run];

/// Cases of layers that do not exist yet, with the issue that will need them.
const LATER: &[(&str, &str)] = &[(
    "layer_norm_plain",
    "issue 8 (towers): a norm without a weight",
)];

/// One output, as a handler gives it.
fn one(output: Result<Array>) -> Option<Result<Vec<Array>>> {
    Some(output.map(|output| vec![output]))
}

/// The inputs that the row calls so, as a checkpoint's tensors of that name.
fn weights(case: &Case, names: &[&str], quantization: QuantizationConfig) -> Weights {
    let tensor = |&name: &&str| {
        let array = case.named(name)?.clone();
        Some((name.to_owned(), LazyTensor::ready(array)))
    };
    let tensors: BTreeMap<String, LazyTensor> = names.iter().filter_map(tensor).collect();
    Weights::new(tensors, quantization)
}

fn tolerance(case: &Case) -> Tolerance {
    if case.name == "quantized_linear_bf16" {
        // MLX's CPU kernel adds the 128 products of a row up in bf16.
        return Tolerance::new(1.0 / 128.0, 0.06);
    }
    if case.name.contains("bf16") {
        // A unit of bf16's last place.
        return Tolerance::new(1.0 / 128.0, 1.0 / 128.0);
    }
    match case.op.as_str() {
        "embedding" | "quantized_embedding" => Tolerance::EXACT,
        "rope" => {
            // An angle is a position times a frequency in f32, whose last place grows with it.
            let offset = case.params.get("offset").and_then(|offset| offset.as_f64());
            Tolerance::new(1e-5, 1e-5 + 2e-7 * offset.unwrap_or(16.0))
        }
        _ => Tolerance::new(1e-5, 1e-5),
    }
}

#[test]
fn golden_cases() {
    let stem = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/nn");
    let cases = load(&stem);
    assert!(cases.len() >= 183, "only {} cases", cases.len());
    let mut failures = Vec::new();
    for case in &cases {
        if LATER.iter().any(|(name, _)| *name == case.name) {
            continue;
        }
        let Some(outputs) = HANDLERS.iter().find_map(|handler| handler(case)) else {
            failures.push(format!("{}: no handler for {}", case.name, case.op));
            continue;
        };
        let outputs = match outputs {
            Ok(outputs) => outputs,
            Err(error) => {
                failures.push(format!("{}: {error}", case.name));
                continue;
            }
        };
        if outputs.len() != case.outputs.len() {
            let (found, expected) = (outputs.len(), case.outputs.len());
            failures.push(format!("{}: {found} outputs, not {expected}", case.name));
        }
        for (index, (found, expected)) in outputs.iter().zip(&case.outputs).enumerate() {
            if let Some(text) = difference(found, expected, tolerance(case)) {
                failures.push(format!("{} output {index}: {text}", case.name));
            }
        }
    }
    assert!(
        failures.is_empty(),
        "{} of {} cases:\n{}",
        failures.len(),
        cases.len(),
        failures.join("\n")
    );
}

#[test]
fn later_cases_are_still_there() {
    let stem = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/nn");
    let cases = load(&stem);
    for (name, reason) in LATER {
        let found = cases.iter().any(|case| case.name == *name);
        assert!(found, "{name} ({reason}) is no case any more");
    }
}
