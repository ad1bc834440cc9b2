//! Broken and hostile files: an error of one line that names the file, never a panic.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use mlex_audio::{ErrorKind, Limits, MelConfig, MelExtractor, RawExtractor, Sound};
use serde_json::json;

const FILES: [&str; 7] = [
    "plain.wav",
    "odd.wav",
    "coded.flac",
    "coded.mp3",
    "coded.ogg",
    "coded.m4a",
    "coded.aac",
];

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

fn bytes(name: &str) -> Vec<u8> {
    std::fs::read(data().join(name)).unwrap()
}

#[test]
fn what_is_no_sound_is_an_error_with_the_file() {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in [
        ("empty.wav", &b""[..]),
        ("text.mp3", b"this is no sound"),
        ("image.wav", b"\x89PNG\r\n\x1a\n"),
    ] {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let error = Sound::open(&path, &Limits::default())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(&format!("{name}: expected a WAV, MP3,")),
            "{error}"
        );
        assert!(!error.contains('\n'));
    }
    assert!(Sound::open(folder.path(), &Limits::default()).is_err());
    assert!(Sound::open("/no/such.wav", &Limits::default()).is_err());
}

#[test]
fn files_that_are_cut_off_are_errors() {
    // Before the header's end, a file is of no format.
    for (file, tenths) in [("plain.wav", 2), ("coded.flac", 2), ("coded.flac", 6)] {
        let bytes = bytes(file);
        let error = Sound::decode(
            bytes[..bytes.len() * tenths / 10].to_vec(),
            &Limits::default(),
        );
        let error = error.expect_err(file).to_string();
        assert!(
            ["cut off", "broken", "end of file"]
                .iter()
                .any(|text| error.contains(text)),
            "{file}: {error}"
        );
    }
}

#[test]
fn a_file_without_samples_is_an_error() {
    let mut bytes = bytes("plain.wav");
    bytes.truncate(44);
    bytes[40..44].fill(0);
    assert!(Sound::decode(bytes, &Limits::default()).is_err());
}

#[test]
fn a_sound_that_is_too_long_is_refused() {
    let mut limits = Limits::default();
    limits.samples = 1000;
    let error = Sound::decode(bytes("plain.wav"), &limits).unwrap_err();
    assert_eq!(
        error.to_string(),
        "expected at most 1000 samples, found more"
    );
}

#[test]
fn a_wav_header_with_a_strange_rate_is_refused() {
    for rate in [0_u32, 1, 999, 4_000_000_000] {
        let mut bytes = bytes("plain.wav");
        bytes[24..28].copy_from_slice(&rate.to_le_bytes());
        assert!(Sound::decode(bytes, &Limits::default()).is_err(), "{rate}");
    }
}

#[test]
fn changed_files_do_not_panic() {
    // Bytes of a small generator: the same each time.
    let mut state = 7_u64;
    let mut next = move |below: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let mut limits = Limits::default();
    limits.samples = 1 << 20;
    for file in FILES {
        let whole = bytes(file);
        for _ in 0..40 {
            let mut bytes = whole.clone();
            for _ in 0..1 + next(4) {
                let most = if next(2) == 0 {
                    bytes.len()
                } else {
                    bytes.len().min(200)
                };
                bytes[next(most)] = next(256) as u8;
            }
            if next(3) == 0 {
                bytes.truncate(next(whole.len()));
            }
            if let Err(error) = Sound::decode(bytes, &limits) {
                assert!(!error.to_string().contains('\n'));
            }
        }
    }
}

#[test]
fn features_need_the_right_rate_and_enough_samples() {
    let extractor = MelExtractor::new(MelConfig::default()).unwrap();
    let sound = Sound::new(8000, vec![0.0; 8000]).unwrap();
    assert_eq!(
        extractor.features(&sound).unwrap_err().to_string(),
        "sampling rate: expected 16000 Hz, found 8000"
    );
    let sound = Sound::new(16_000, vec![0.0; 160]).unwrap();
    assert_eq!(
        extractor.features(&sound).unwrap_err().to_string(),
        "expected at least 161 samples, found 160"
    );
    let error = RawExtractor::default().features(&Sound::new(16_000, Vec::new()).unwrap());
    assert!(matches!(
        error.unwrap_err().kind(),
        ErrorKind::TooShort { .. }
    ));
    let error = Sound::new(16_000, vec![0.0, f32::NAN]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "sample 1: expected a finite number, found NaN"
    );
}

#[test]
fn fields_of_a_configuration_are_checked() {
    for (settings, expected) in [
        (
            json!({"feature_size": 0}),
            "feature_extractor: feature_size: expected 1 to 4096, found 0",
        ),
        (
            json!({"dither": 0.1}),
            "feature_extractor: dither: expected 0, found 0.1",
        ),
        (
            json!({"per_bin_mean": [1.0]}),
            "feature_extractor: per_bin_mean: expected 128 numbers, found 1",
        ),
        (
            json!({"hop_length_ms": 0}),
            "feature_extractor: hop_length_ms: expected a number above 0 and up to 1000, found 0",
        ),
        (
            json!({"mel_floor": -1}),
            "feature_extractor: mel_floor: expected a number above 0, found -1",
        ),
    ] {
        let error = MelExtractor::new(MelConfig::from_json(&settings).unwrap()).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
    let error = MelConfig::from_json(&json!({"feature_size": "x"}))
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("feature_extractor: feature_size: "),
        "{error}"
    );
}
