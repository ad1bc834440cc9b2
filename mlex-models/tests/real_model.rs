//! What loading and converting SmolLM2-135M-Instruct cost in memory. `MLEX_TEST_MODEL` is its GGUF file.
//!
//! The only test of this program, which runs itself again for each load: the peak is that of a
//! process that has done nothing else.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;

use mlex_models::generate::{LoadOptions, Session};
use mlex_models::{ConvertOptions, LayoutSettings, ModelFiles, Quantize, convert};

const MEGABYTE: f64 = 1e6;
/// Where a process of this program finds the model that it shall load.
const LOAD: &str = "MLEX_TEST_LOAD";
/// The same for one that it shall convert.
const CONVERT: &str = "MLEX_TEST_CONVERT";
/// What may be used besides the weights: the tokenizer, the program, one tensor on its way.
const ALLOWED: f64 = 100.0 * MEGABYTE;

#[test]
#[ignore = "needs MLEX_TEST_MODEL"]
fn loading_and_converting_take_little_memory() {
    if let Some(model) = std::env::var_os(CONVERT) {
        let dir = tempfile::tempdir().unwrap();
        let before = peak();
        let files = ModelFiles::open(model).unwrap();
        let quantize = Quantize::new(LayoutSettings::default(), None).unwrap();
        let options = ConvertOptions::default()
            .with_dequantize(true)
            .with_quantize(Some(quantize));
        let converted = convert(&files, &dir.path().join("out"), &options, |_| true).unwrap();
        println!("bytes {} {before} {}", converted.bytes, peak());
        return;
    }
    if let Some(model) = std::env::var_os(LOAD) {
        let before = peak();
        let session = Session::load(model, LoadOptions::default()).unwrap();
        println!("bytes {} {before} {}", session.info().file_bytes, peak());
        return;
    }
    let model = std::env::var_os("MLEX_TEST_MODEL").expect("MLEX_TEST_MODEL is set");
    let dir = tempfile::tempdir().unwrap();
    let converted = dir.path().join("converted");
    let files = ModelFiles::open(&model).unwrap();
    convert(&files, &converted, &ConvertOptions::default(), |_| true).unwrap();
    for (kind, path) in [("GGUF", Path::new(&model)), ("directory", &converted)] {
        let (weights, before, peak) = measure(LOAD, path);
        let [weights_mb, before, peak_mb] = [weights, before, peak].map(|bytes| bytes / MEGABYTE);
        println!(
            "{kind}: {weights_mb:.2} MB of weights, peak {peak_mb:.1} MB (before: {before:.1} MB)"
        );
        assert_eq!(weights, expected_weights());
        assert!(
            peak < weights + ALLOWED,
            "{kind}: {peak_mb:.1} MB for {weights_mb:.1} MB"
        );
    }
    // The embedding alone is 113 MB when it is dense, all weights 540 MB.
    let (_, before, peak) = measure(CONVERT, Path::new(&model));
    let [before, peak] = [before, peak].map(|bytes| bytes / MEGABYTE);
    println!("dequantized and quantized: peak {peak:.1} MB (before: {before:.1} MB)");
    assert!(peak < 200.0, "{peak:.1} MB");
}

/// The bytes of the arrays: an embedding of 8 bits, 7 matrices of 4 bits in each of 30 layers,
/// both with a scale and a bias in f32 to 32 weights, and 61 norms in f32.
fn expected_weights() -> f64 {
    let embedding = 49152.0 * 576.0 * (1.0 + 8.0 / 32.0);
    let layer = 2.0 * 576.0 * 576.0 + 2.0 * 192.0 * 576.0 + 3.0 * 1536.0 * 576.0;
    embedding + 30.0 * layer * (0.5 + 8.0 / 32.0) + 61.0 * 576.0 * 4.0
}

/// Weights, peak before the load and peak after it, in bytes, of a process that loads or
/// converts `model`.
fn measure(task: &str, model: &Path) -> (f64, f64, f64) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--include-ignored", "--nocapture"])
        .env(task, model)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.split("bytes ").nth(1).expect("a line of numbers");
    let numbers: Vec<f64> = line
        .split_whitespace()
        .take(3)
        .map(|number| number.parse().unwrap())
        .collect();
    (numbers[0], numbers[1], numbers[2])
}

/// The most memory that this process has had in use at once, in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .unwrap();
    let kilobytes: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
    kilobytes * 1024
}
