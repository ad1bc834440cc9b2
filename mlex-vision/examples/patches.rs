//! Shows what becomes of images and videos:
//! `cargo run -p mlex-vision --example patches [FILE]..`.
//!
//! Without files a small picture is drawn.
#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use mlex_vision::{
    GemmaVision, Limits, Picture, ProcessorFiles, QwenVision, Result, Video, VideoInfo,
};

fn main() -> Result<()> {
    // A checkpoint's own settings: `ProcessorFiles::read(directory)`.
    let settings = ProcessorFiles::default();
    let qwen = QwenVision::new(&settings)?;
    // Fewer tokens per image than by default, as the family allows.
    let gemma = GemmaVision::new(&settings, false)?.with_max_image_tokens(140)?;

    let files: Vec<String> = std::env::args().skip(1).collect();
    let limits = Limits::default();
    for file in &files {
        match Picture::open(file, &limits) {
            Ok(picture) => show(file, &picture, &qwen, &gemma)?,
            // Whatever is no still image.
            Err(_) => show_video(file, &qwen, &gemma)?,
        }
    }
    if files.is_empty() {
        show("a gradient", &gradient(300, 200)?, &qwen, &gemma)?;
        let frames = (1..=8)
            .map(|n| gradient(60 + n, 60 + n))
            .map(|frame| mlex_vision::resize(&frame?, 96, 64, mlex_vision::Filter::Bilinear));
        let video = Video::from_pictures(frames.collect::<Result<_>>()?, 4.0)?;
        show_frames("eight frames", &video, &qwen, &gemma)?;
    }
    Ok(())
}

fn show(name: &str, picture: &Picture, qwen: &QwenVision, gemma: &GemmaVision) -> Result<()> {
    println!("{name}: {}x{}", picture.width(), picture.height());
    let input = qwen.image(picture)?;
    println!(
        "  Qwen3.5: grid {:?}, {} values per patch, {} tokens",
        input.grid, input.patch_len, input.tokens
    );
    let input = gemma.image(picture)?;
    println!(
        "  Gemma 4: grid {:?}, {} values per patch, {} tokens",
        input.grid, input.patch_len, input.tokens
    );
    Ok(())
}

fn show_video(file: &str, qwen: &QwenVision, gemma: &GemmaVision) -> Result<()> {
    let video = Video::open(file, &Limits::default())?;
    show_frames(file, &video, qwen, gemma)
}

fn show_frames(name: &str, video: &Video, qwen: &QwenVision, gemma: &GemmaVision) -> Result<()> {
    let VideoInfo {
        frames,
        fps,
        width,
        height,
        ..
    } = video.info();
    println!("{name}: {frames} frames of {width}x{height}, {fps} per second");
    let taken = qwen.video(video)?;
    println!(
        "  Qwen3.5: grid {:?}, {} tokens, at {:?} seconds",
        taken.input.grid, taken.input.tokens, taken.timestamps
    );
    let taken = gemma.video(video)?;
    let tokens: usize = taken.frames.iter().map(|frame| frame.tokens).sum();
    println!("  Gemma 4: {} frames, {tokens} tokens", taken.frames.len());
    Ok(())
}

/// Red from left to right, green from top to bottom.
fn gradient(width: u32, height: u32) -> Result<Picture> {
    let level = |position: u32, side: u32| (255 * position / side) as u8;
    let pixels = (0..height).flat_map(|y| (0..width).map(move |x| (x, y)));
    let rgb = pixels.flat_map(|(x, y)| [level(x, width), level(y, height), 64]);
    Picture::new(width, height, rgb.collect())
}
