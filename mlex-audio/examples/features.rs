//! Shows what becomes of sounds:
//! `cargo run -p mlex-audio --example features [FILE]..`.
//!
//! Without files a tone is made.
#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::f32::consts::TAU;

use mlex_audio::{Limits, MelConfig, MelExtractor, RawExtractor, Result, Sound};

fn main() -> Result<()> {
    // A checkpoint's own settings: `MelConfig::from_json` of its `feature_extractor`.
    let mel = MelExtractor::new(MelConfig::default())?;
    let raw = RawExtractor::default();

    let files: Vec<String> = std::env::args().skip(1).collect();
    for file in &files {
        show(file, &Sound::open(file, &Limits::default())?, &mel, &raw)?;
    }
    if files.is_empty() {
        let rate = 44_100;
        let tone = (0..rate).map(|n| 0.5 * (TAU * 440.0 * n as f32 / rate as f32).sin());
        let sound = Sound::new(rate, tone.collect())?;
        show("440 Hz for a second", &sound, &mel, &raw)?;
    }
    Ok(())
}

fn show(name: &str, sound: &Sound, mel: &MelExtractor, raw: &RawExtractor) -> Result<()> {
    println!(
        "{name}: {} samples at {} Hz",
        sound.samples().len(),
        sound.rate()
    );
    let sound = sound.clone().resampled(mel.sampling_rate())?;
    let features = mel.features(&sound)?;
    println!(
        "  mel: {} frames of {} bins, {} tokens",
        features.valid, features.bins, features.tokens
    );
    let loudest = features
        .values
        .chunks_exact(features.bins)
        .take(features.valid)
        .filter_map(|frame| (0..features.bins).max_by(|&a, &b| frame[a].total_cmp(&frame[b])));
    println!(
        "  loudest bins: {:?}",
        loudest.step_by(25).collect::<Vec<_>>()
    );
    let features = raw.features(&sound)?;
    println!(
        "  raw: {} tokens of {} samples",
        features.tokens, features.samples_per_token
    );
    Ok(())
}
