//! Sounds and features against the Python feature extractors and against tones
//! (`tools/make_audio_golden.py` says what the files of `tests/data` hold).

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use mlex_audio::{Limits, MelConfig, MelExtractor, RawExtractor, Sound};
use safetensors::SafeTensors;
use serde_json::Value;

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

fn cases() -> Value {
    serde_json::from_slice(&std::fs::read(data().join("cases.json")).unwrap()).unwrap()
}

fn expected(name: &str) -> Vec<f32> {
    let bytes = std::fs::read(data().join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = tensors.tensor(name).unwrap();
    let values = tensor.data().chunks_exact(4);
    values
        .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
        .collect()
}

fn count(case: &Value, name: &str) -> usize {
    case[name].as_u64().unwrap() as usize
}

fn differences(ours: &[f32], expected: &[f32]) -> (f32, f32) {
    assert_eq!(ours.len(), expected.len());
    let differences = ours.iter().zip(expected).map(|(a, b)| (a - b).abs());
    let largest = differences.clone().fold(0.0, f32::max);
    (largest, differences.sum::<f32>() / ours.len() as f32)
}

#[test]
fn features_are_those_of_the_extractors() {
    for case in cases()["cases"].as_array().unwrap() {
        let (name, file) = (
            case["name"].as_str().unwrap(),
            case["file"].as_str().unwrap(),
        );
        let extractor =
            MelExtractor::new(MelConfig::from_json(&case["settings"]).unwrap()).unwrap();
        let original = Sound::open(data().join(file), &Limits::default()).unwrap();
        let rate = extractor.sampling_rate();
        let sound = original.clone().resampled(rate).unwrap();
        let samples = expected(&format!("{name}.samples"));
        let exact = case["exact"].as_bool().unwrap();
        if exact {
            assert_eq!(sound.samples(), samples, "{file}");
        } else if file.ends_with("wav") || file.ends_with("flac") {
            let (largest, _) = differences(sound.samples(), &samples);
            assert!(largest < 1e-3, "{file}: {largest}");
        } else {
            check_coded(file, &original, &samples);
            continue;
        }
        let features = extractor.features(&sound).unwrap();
        assert_eq!(
            (features.valid, features.tokens),
            (count(case, "valid"), count(case, "tokens")),
            "{name}"
        );
        let mel = expected(&format!("{name}.mel"));
        if exact {
            // The reference's transform is in float32, whose noise the logarithm shows where it
            // is quiet.
            let (largest, mean) = differences(&features.values, &mel);
            assert!(
                largest < 2e-3 && mean < 1e-4,
                "{name}: {largest}, mean {mean}"
            );
        } else {
            // The file's samples are rounded to 16 bits, which shows there too, the tones' are
            // not: compared without the logarithm.
            let linear = |values: &[f32]| values.iter().map(|x| x.exp()).collect::<Vec<_>>();
            let (ours, mel) = (linear(&features.values), linear(&mel));
            let loudest = mel.iter().copied().fold(0.0, f32::max);
            let (largest, _) = differences(&ours, &mel);
            assert!(largest < 1e-3 * loudest, "{name}: {largest} of {loudest}");
        }
    }
}

/// Compares a sound that loses something with one at 16 kHz. Codecs delay what they encode, and
/// not all files say by how much: by any number of samples, at the file's rate.
fn check_coded(file: &str, original: &Sound, expected: &[f32]) {
    let error = |delay: usize| {
        let samples = original.samples()[delay..].to_vec();
        let ours = Sound::new(original.rate(), samples).unwrap();
        let ours = ours.resampled(16_000).unwrap();
        let error = |skip: usize| {
            let pairs = ours.samples().iter().skip(skip).zip(expected);
            let sum: f32 = pairs.map(|(a, b)| (a - b) * (a - b)).sum();
            (sum / expected.len() as f32).sqrt()
        };
        (0..1200).map(error).fold(f32::MAX, f32::min)
    };
    // Three samples are about one at 16 kHz.
    let best = (0..3).map(error).fold(f32::MAX, f32::min);
    assert!(best < 0.02, "{file}: {best}");
    let seconds = original.samples().len() as f32 / original.rate() as f32;
    assert!((seconds - 0.4).abs() < 0.12, "{file}: {seconds} s");
}

#[test]
fn frames_and_tokens_are_those_of_the_extractors() {
    let extractor = MelExtractor::new(MelConfig::default()).unwrap();
    for case in cases()["lengths"].as_array().unwrap() {
        let sound = Sound::new(16_000, vec![0.0; count(case, "samples")]).unwrap();
        let features = extractor.features(&sound).unwrap();
        let frames = features.values.len() / features.bins;
        assert_eq!(frames, count(case, "frames"), "{case}");
        assert_eq!(features.valid, count(case, "valid"), "{case}");
        assert_eq!(features.tokens, count(case, "tokens"), "{case}");
    }
    let raw = RawExtractor::default();
    for case in cases()["raw"].as_array().unwrap() {
        let sound = Sound::new(16_000, vec![1.0; count(case, "samples")]).unwrap();
        let features = raw.features(&sound).unwrap();
        assert_eq!(features.tokens, count(case, "tokens"), "{case}");
        assert_eq!(features.values.len(), features.tokens * 640);
        assert_eq!(
            features.values.iter().sum::<f32>(),
            count(case, "samples") as f32
        );
    }
}

#[test]
fn resampling_keeps_tones() {
    for (from, to) in [
        (8000, 16_000),
        (11_025, 16_000),
        (48_000, 16_000),
        (44_101, 16_000),
    ] {
        let tone = |rate: u32| -> Vec<f32> {
            let at =
                |n: u32| (f64::from(n) * 440.0 * std::f64::consts::TAU / f64::from(rate)).sin();
            (0..rate).map(|n| at(n) as f32).collect()
        };
        let sound = Sound::new(from, tone(from)).unwrap().resampled(to).unwrap();
        let expected = tone(to);
        assert!(
            sound.samples().len().abs_diff(expected.len()) <= 1,
            "{from}"
        );
        let inner = 1000..15_000;
        let (largest, _) = differences(&sound.samples()[inner.clone()], &expected[inner]);
        assert!(largest < 1e-3, "{from} to {to}: {largest}");
    }
}
