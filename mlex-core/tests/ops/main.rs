//! Every operation against golden cases: values from numpy in f64, from MLX's Python package
//! where MLX alone defines them (packed layouts, random bits), by the version that is linked. See
//! tools/make_op_golden.py.
#![allow(clippy::unwrap_used, reason = "a helper fails as its test would")]

mod cases;
mod elementwise;
mod fast;
mod indexing;
mod products;
mod quantized;
mod random;
mod reduce;
mod shape;
mod versions;

use std::path::Path;

use cases::{Case, Tolerance, difference, load};
use mlex_core::{Array, Result};

/// Runs a case, or gives `None` when its operation is another module's.
type Handler = fn(&Case) -> Option<Result<Vec<Array>>>;

const HANDLERS: &[Handler] = &[
    elementwise::run,
    fast::run,
    indexing::run,
    products::run,
    quantized::run,
    random::run,
    reduce::run,
    shape::run,
];

/// One output, as a handler gives it.
fn one(output: Result<Array>) -> Option<Result<Vec<Array>>> {
    Some(output.map(|output| vec![output]))
}

fn tolerance(case: &Case) -> Tolerance {
    match case.op.as_str() {
        // Conversions, packing and random bits are defined to the last bit.
        "astype" | "quantize" | "round" | "floor" | "ceil" => Tolerance::EXACT,
        op if op.starts_with("random_") => Tolerance::new(1e-6, 1e-6),
        // The result is rounded to bf16: half a unit of its last place.
        "softmax" if case.name.contains("bf16") => Tolerance::new(1.0 / 256.0, 0.0),
        _ => Tolerance::new(1e-5, 1e-5),
    }
}

#[test]
fn golden_cases() {
    let stem = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/ops/ops");
    let mut cases = load(&stem);
    versions::replace_changed(&mut cases, &stem.with_file_name("ops-later"));
    assert!(cases.len() >= 290, "only {} cases", cases.len());
    let mut failures = Vec::new();
    for case in &cases {
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
fn wrong_outputs_are_noticed() {
    let array = |values: &[f32]| Array::from_slice(values, &[values.len() as i32]).unwrap();
    let expected = array(&[1.0, f32::NAN, f32::INFINITY, -0.5]);
    let tolerance = Tolerance::new(1e-5, 0.0);
    assert_eq!(difference(&expected, &expected, tolerance), None);
    for wrong in [
        &[1.1, f32::NAN, f32::INFINITY, -0.5][..],
        &[1.0, 0.0, f32::INFINITY, -0.5],
        &[1.0, f32::NAN, f32::NEG_INFINITY, -0.5],
        &[1.0, f32::NAN, f32::INFINITY, f32::NAN],
        &[1.0, f32::NAN, f32::INFINITY],
    ] {
        let text = difference(&array(wrong), &expected, tolerance);
        assert!(text.is_some(), "{wrong:?}");
    }
    let other = expected.as_type(mlex_core::Dtype::Float16).unwrap();
    assert!(difference(&other, &expected, tolerance).is_some());
}
