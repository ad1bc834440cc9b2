//! Images, grids, tokens and patches against the Python processors
//! (`tools/make_vision_golden.py` says what the files of `tests/data` hold).

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use mlex_vision::{
    Filter, FrameSampling, GemmaVision, Limits, Picture, ProcessorFiles, QwenVision, Video, resize,
};
use safetensors::SafeTensors;
use serde_json::{Value, json};

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

fn cases() -> Value {
    serde_json::from_slice(&std::fs::read(data().join("cases.json")).unwrap()).unwrap()
}

struct Expected(Vec<u8>);

impl Expected {
    fn read() -> Self {
        Self(std::fs::read(data().join("expected.safetensors")).unwrap())
    }

    fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.0).unwrap()
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        let tensors = self.tensors();
        let bytes = tensors.tensor(name).unwrap().data().to_vec();
        bytes
            .chunks_exact(4)
            .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
            .collect()
    }
}

fn open(name: &str) -> Picture {
    Picture::open(data().join(name), &Limits::default()).unwrap()
}

/// A list of whole numbers.
fn numbers(value: &Value) -> Vec<usize> {
    let items = value.as_array().unwrap().iter();
    items.map(|item| item.as_u64().unwrap() as usize).collect()
}

/// The settings as a checkpoint has them: flat for images, and the same for videos.
fn files(settings: &Value) -> ProcessorFiles {
    ProcessorFiles {
        preprocessor: Some(settings.clone()),
        processor: None,
        video_preprocessor: Some(settings.clone()),
    }
}

/// The sampled values of our output and of the processor's: the largest and the mean difference.
fn differences(name: &str, ours: &[f32], expected: &[f32], stride: usize) -> (f32, f32) {
    let ours: Vec<f32> = ours.iter().copied().step_by(stride).collect();
    assert_eq!(ours.len(), expected.len(), "{name}");
    let differences = ours.iter().zip(expected).map(|(a, b)| (a - b).abs());
    let largest = differences.clone().fold(0.0, f32::max);
    (largest, differences.sum::<f32>() / expected.len() as f32)
}

#[test]
fn patches_are_those_of_the_processors() {
    let (cases, expected) = (cases(), Expected::read());
    let stride = cases["stride"].as_u64().unwrap() as usize;
    for case in cases["cases"].as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let file = case["file"].as_str().unwrap();
        let (picture, files) = (open(file), files(&case["settings"]));
        let (width, height) = (picture.width(), picture.height());
        let (patches, grid, tokens, counted) = match case["family"].as_str().unwrap() {
            "qwen" => {
                let qwen = QwenVision::new(&files).unwrap();
                let input = qwen.image(&picture).unwrap();
                let counted = qwen.image_tokens(width, height).unwrap();
                (input.patches, input.grid.to_vec(), input.tokens, counted)
            }
            family => {
                let gemma = GemmaVision::new(&files, family == "gemma_unified").unwrap();
                let input = gemma.image(&picture).unwrap();
                let counted = gemma.image_tokens(width, height).unwrap();
                assert_eq!(input.positions().count(), input.grid[0] * input.grid[1]);
                (input.patches, input.grid.to_vec(), input.tokens, counted)
            }
        };
        assert_eq!(grid, numbers(&case["grid"]), "{name}");
        assert_eq!(tokens as u64, case["tokens"].as_u64().unwrap(), "{name}");
        assert_eq!(counted, tokens, "{name}");
        assert_eq!(
            patches.len() as u64,
            case["length"].as_u64().unwrap(),
            "{name}"
        );
        let values = expected.floats(name);
        let (largest, mean) = differences(name, &patches, &values, stride);
        if file.ends_with("jpg") {
            // JPEG decoders differ; the patches of Qwen reach from -1 to 1.
            assert!(mean < 1.0 / 255.0, "{name}: mean difference {mean}");
            assert!(largest < 12.0 / 255.0, "{name}: difference {largest}");
        } else {
            assert!(largest < 1e-6, "{name}: difference {largest}");
        }
    }
}

#[test]
fn resizing_gives_the_bytes_of_pillow() {
    let expected = Expected::read();
    let picture = open("resize.png");
    let mut count = 0;
    for (name, tensor) in expected.tensors().tensors() {
        let Some(rest) = name.strip_prefix("resize.") else {
            continue;
        };
        let filter = match rest.split_once('.').unwrap().0 {
            "bilinear" => Filter::Bilinear,
            _ => Filter::Bicubic,
        };
        let (height, width) = (tensor.shape()[0] as u32, tensor.shape()[1] as u32);
        let resized = resize(&picture, width, height, filter).unwrap();
        assert_eq!(resized.rgb(), tensor.data(), "{name}");
        count += 1;
    }
    assert_eq!(count, 22);
}

#[test]
fn images_are_decoded_as_pillow_decodes_them() {
    let expected = Expected::read();
    let mut count = 0;
    for (name, tensor) in expected.tensors().tensors() {
        let Some(file) = name.strip_prefix("decode.") else {
            continue;
        };
        let picture = open(file);
        let size = [picture.height() as usize, picture.width() as usize, 3];
        assert_eq!(size, tensor.shape(), "{file}");
        let pairs = picture.rgb().iter().zip(tensor.data());
        let differences = pairs.map(|(&a, &b)| u64::from(a.abs_diff(b)));
        let mean = differences.sum::<u64>() as f64 / picture.rgb().len() as f64;
        let tolerance = if file.ends_with("jpg") { 1.0 } else { 0.0 };
        assert!(mean <= tolerance, "{file}: mean difference {mean}");
        count += 1;
    }
    assert!(count > 20, "{count}");
}

#[test]
fn videos_are_those_of_the_processors() {
    let (cases, expected) = (cases(), Expected::read());
    let stride = cases["stride"].as_u64().unwrap() as usize;
    // All five frames are taken, and the number of frames is even only where it may be.
    let pictures = || {
        let video = Video::open(data().join("moving.png"), &Limits::default()).unwrap();
        let mut pictures = Vec::new();
        let take = &mut |picture| {
            pictures.push(picture);
            Ok(())
        };
        assert_eq!(video.frames(&[0, 1, 2, 3, 4], take).unwrap(), 5);
        pictures
    };
    for case in cases["videos"].as_array().unwrap() {
        let files = files(&case["settings"]);
        let family = case["family"].as_str().unwrap();
        let mut timestamps: Vec<f64> = Vec::new();
        let times = case["timestamps"].as_array().unwrap();
        timestamps.extend(times.iter().map(|time| time.as_f64().unwrap()));
        let video = Video::from_pictures(pictures(), 10.0).unwrap();
        let tokens = case["tokens"].as_u64().unwrap() as usize;
        let (patches, grid, found, times) = if family == "qwen" {
            let qwen = QwenVision::new(&files).unwrap();
            let video = qwen.video_of(&video, &[0, 1, 2, 3, 4]).unwrap();
            let input = video.input;
            (
                input.patches,
                input.grid.to_vec(),
                input.tokens,
                video.timestamps,
            )
        } else {
            let gemma = GemmaVision::new(&files, false).unwrap();
            let video = gemma.video_of(&video, &[0, 1, 2, 3, 4]).unwrap();
            let (grid, found) = (video.frames[0].grid.to_vec(), video.frames[0].tokens);
            let frames = video.frames.into_iter();
            let patches = frames.flat_map(|frame| frame.patches).collect();
            (patches, grid, found, video.timestamps)
        };
        assert_eq!(grid, numbers(&case["grid"]), "{family}");
        assert_eq!(found, tokens, "{family}");
        assert_eq!(times.len(), timestamps.len(), "{family}");
        for (a, b) in times.iter().zip(&timestamps) {
            assert!((a - b).abs() < 1e-9, "{family}: {a} {b}");
        }
        let values = expected.floats(&format!("video.{family}"));
        let (largest, _) = differences(family, &patches, &values, stride);
        assert!(largest < 1e-6, "{family}: difference {largest}");
    }
}

#[test]
fn the_frames_that_are_taken_are_those_of_the_reference() {
    for case in cases()["sampling"].as_array().unwrap() {
        let number = |name: &str| case[name].as_f64().unwrap();
        let sampling = FrameSampling {
            fps: number("fps"),
            min_frames: number("min_frames") as usize,
            max_frames: number("max_frames") as usize,
        };
        let indices = sampling.indices(number("total") as usize, number("source_fps"));
        assert_eq!(indices, numbers(&case["indices"]), "{case}");
    }
}

#[test]
fn sides_are_those_of_the_processors() {
    let qwen = QwenVision::new(&ProcessorFiles::default()).unwrap();
    for case in cases()["sizes"].as_array().unwrap() {
        let size = numbers(&case["size"]);
        let (width, height) = (size[0] as u32, size[1] as u32);
        let tokens = |sides: &Value, side: usize| {
            let sides = numbers(sides);
            sides[0] / side * (sides[1] / side)
        };
        match (&case["qwen"], qwen.image_tokens(width, height)) {
            (Value::Null, found) => {
                let error = found.unwrap_err().to_string();
                assert!(error.contains("ratio of at most 200"), "{error}");
            }
            (sides, found) => assert_eq!(found.unwrap(), tokens(sides, 32), "{case}"),
        }
        for (budget, sides) in [70, 280, 1120]
            .iter()
            .zip(case["gemma"].as_array().unwrap())
        {
            let files = files(&json!({ "max_soft_tokens": budget }));
            let gemma = GemmaVision::new(&files, false).unwrap();
            let found = gemma.image_tokens(width, height).unwrap();
            assert_eq!(found, tokens(sides, 48), "{case}");
            assert!(found <= *budget);
        }
        if let sides @ Value::Array(_) = &case["qwen_video_7"] {
            let found = qwen.video_frame_size(7, width, height).unwrap();
            assert_eq!(
                [found.0 as usize, found.1 as usize],
                numbers(sides)[..],
                "{case}"
            );
        }
    }
}

#[test]
fn moving_images_are_videos() {
    let frames: Vec<Picture> = {
        let video = Video::open(data().join("moving.png"), &Limits::default()).unwrap();
        let mut frames = Vec::new();
        video
            .frames(&[0, 1, 2, 3, 4], &mut |frame| {
                frames.push(frame);
                Ok(())
            })
            .unwrap();
        frames
    };
    for file in ["moving.webp", "moving.png", "moving.gif"] {
        let video = Video::open(data().join(file), &Limits::default()).unwrap();
        let info = video.info();
        assert_eq!(
            (info.frames, info.width, info.height),
            (5, 64, 48),
            "{file}"
        );
        assert!((info.fps - 10.0).abs() < 1e-9, "{file}");
        let mut found = Vec::new();
        let count = video.frames(&[1, 4], &mut |frame| {
            found.push(frame);
            Ok(())
        });
        assert_eq!(count.unwrap(), 2, "{file}");
        for (found, expected) in found.iter().zip([&frames[1], &frames[4]]) {
            let pairs = found.rgb().iter().zip(expected.rgb());
            let sum: u64 = pairs.map(|(&a, &b)| u64::from(a.abs_diff(b))).sum();
            // The decoder of moving WebP images blends what is opaque too, and is off by one step
            // in places; the GIF has 64 colours.
            let tolerance = match file {
                "moving.png" => 0.0,
                "moving.webp" => 1.0,
                _ => 12.0,
            };
            let mean = sum as f64 / found.rgb().len() as f64;
            assert!(mean <= tolerance, "{file}: mean difference {mean}");
        }
    }
}

#[test]
fn a_folder_is_a_video() {
    let folder = tempfile::tempdir().unwrap();
    for (n, file) in [
        (2, "turned-2.jpg"),
        (10, "turned-3.jpg"),
        (1, "turned-4.jpg"),
    ] {
        std::fs::copy(data().join(file), folder.path().join(format!("f{n}.jpg"))).unwrap();
    }
    std::fs::write(folder.path().join("notes.txt"), "x").unwrap();
    let video = Video::open(folder.path(), &Limits::default()).unwrap();
    assert_eq!((video.info().frames, video.info().fps), (3, 2.0));
    let mut frames = Vec::new();
    let take = &mut |frame| {
        frames.push(frame);
        Ok(())
    };
    video.frames(&[0, 1, 2], take).unwrap();
    for (frame, file) in frames
        .iter()
        .zip(["turned-4.jpg", "turned-2.jpg", "turned-3.jpg"])
    {
        assert_eq!(frame, &open(file));
    }
    // A frame of another size is named.
    std::fs::copy(data().join("odd.png"), folder.path().join("f3.png")).unwrap();
    let video = Video::open(folder.path(), &Limits::default()).unwrap();
    let error = video
        .frames(&[0, 2], &mut |_| Ok(()))
        .unwrap_err()
        .to_string();
    assert!(
        error.ends_with("f3.png: frame 2: expected 48x32, found 61x47"),
        "{error}"
    );
}

/// Qwen2.5-VL without files, by arithmetic: patches of 14, CLIP's mean and deviation as
/// transformers has them, and the time between the pairs of frames that were taken.
#[test]
fn qwen2_5_has_defaults_of_its_own() {
    let qwen = QwenVision::qwen2_5(&ProcessorFiles::default()).unwrap();
    assert_eq!(qwen.image_tokens(28 * 4, 28 * 3).unwrap(), 12);
    let (width, height) = (28 * 4, 28 * 3);
    let pixels = [255, 0, 128].repeat((width * height) as usize);
    let picture = Picture::new(width, height, pixels).unwrap();
    let input = qwen.image(&picture).unwrap();
    assert_eq!((input.grid, input.patch_len), ([1, 6, 8], 3 * 2 * 14 * 14));
    let expected = [
        (1.0 - 0.48145466) / 0.26862954,
        (0.0 - 0.4578275) / 0.26130258,
        (128.0 / 255.0 - 0.40821073) / 0.27577711,
    ];
    for (channel, expected) in expected.iter().enumerate() {
        let found = f64::from(input.patches[channel * 2 * 14 * 14]);
        assert!((found - expected).abs() < 1e-5, "{found} {expected}");
    }
    // Four of five frames at ten per second are eight per second, and two of them a quarter.
    let video = Video::open(data().join("moving.png"), &Limits::default()).unwrap();
    let taken = qwen.video_of(&video, &[0, 1, 3, 4]).unwrap();
    assert!((taken.seconds_per_patch - 0.25).abs() < 1e-9);
}
