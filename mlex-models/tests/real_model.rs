//! What loading SmolLM2-135M-Instruct costs in memory. `MLEX_TEST_MODEL` is its GGUF file.
//!
//! The only test of this program, which runs itself again for each load: the peak is that of a
//! process that has done nothing else.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;

use mlex_models::generate::{LoadOptions, Session};
use mlex_models::{ConvertOptions, ModelFiles, convert};

const MEGABYTE: f64 = 1e6;
/// Where a process of this program finds the model that it shall load.
const LOAD: &str = "MLEX_TEST_LOAD";
/// What may be used besides the weights: the tokenizer, the program, one tensor on its way.
const ALLOWED: f64 = 100.0 * MEGABYTE;

#[test]
#[ignore = "needs MLEX_TEST_MODEL"]
fn loading_peaks_below_the_weights_and_100_megabytes() {
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
    convert(&files, &converted, ConvertOptions::default(), |_| true).unwrap();
    for (kind, path) in [("GGUF", Path::new(&model)), ("directory", &converted)] {
        let (weights, before, peak) = measure(path);
        let [weights_mb, before, peak_mb] = [weights, before, peak].map(|bytes| bytes / MEGABYTE);
        println!(
            "{kind}: {weights_mb:.2} MB of weights, peak {peak_mb:.1} MB (before: {before:.1} MB)"
        );
        // 134,515,008 weights: the embedding in 8 bits, the matrices in 4 bits with a scale and
        // a bias in f32 to 32 of them, the norms in f32.
        assert!((weights_mb - 115.16).abs() < 60.0, "{weights_mb}");
        assert!(
            peak < weights + ALLOWED,
            "{kind}: {peak_mb:.1} MB for {weights_mb:.1} MB"
        );
    }
}

/// Weights, peak before the load and peak after it, in bytes, of a process that loads `model`.
fn measure(model: &Path) -> (f64, f64, f64) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--include-ignored", "--nocapture"])
        .env(LOAD, model)
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
