//! Broken and hostile files: an error of one line that names the file, never a panic.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use mlex_vision::{
    ErrorKind, GemmaVision, Limits, Picture, ProcessorFiles, QwenVision, Video, VideoPrograms,
};
use proptest::prelude::*;
use serde_json::json;

const FILES: [&str; 8] = [
    "odd.png",
    "plain.jpg",
    "cmyk.jpg",
    "lossless.webp",
    "still.gif",
    "small.bmp",
    "moving.png",
    "deep.png",
];

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

fn bytes(name: &str) -> Vec<u8> {
    std::fs::read(data().join(name)).unwrap()
}

/// The message of opening a file with these bytes, without its folder.
fn message(name: &str, bytes: &[u8]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    let error = Picture::open(&path, &Limits::default())
        .unwrap_err()
        .to_string();
    assert!(!error.contains('\n'), "{error:?}");
    error.rsplit('/').next().unwrap().to_owned()
}

#[test]
fn files_that_are_cut_off_are_errors() {
    for file in FILES {
        let bytes = bytes(file);
        for length in [bytes.len() / 2, bytes.len() * 9 / 10] {
            let found = Picture::decode(&bytes[..length], &Limits::default());
            // The first frame of an animation can be whole.
            if file != "moving.png" {
                let error = found.expect_err(file).to_string();
                assert!(error.starts_with("broken "), "{file}: {error}");
            }
        }
    }
}

#[test]
fn a_wrong_extension_does_not_matter() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.jpg");
    std::fs::copy(data().join("odd.png"), &path).unwrap();
    let picture = Picture::open(&path, &Limits::default()).unwrap();
    assert_eq!((picture.width(), picture.height()), (61, 47));
}

#[test]
fn what_is_no_image_is_named() {
    let expected = "expected a JPEG, PNG, WebP, GIF or BMP image";
    assert_eq!(
        message("a.png", b""),
        format!("a.png: {expected}, found an empty file")
    );
    assert_eq!(
        message("a.png", b"RIFF"),
        format!("a.png: {expected}, found bytes 52 49 46 46")
    );
    let missing = Picture::open("/no/such.png", &Limits::default()).unwrap_err();
    assert!(missing.to_string().starts_with("/no/such.png: "));
}

/// A BMP header of a size, without pixels.
fn bmp(width: i32, height: i32) -> Vec<u8> {
    let mut bytes = b"BM".to_vec();
    bytes.extend([54_u32, 0, 54, 40].iter().flat_map(|n| n.to_le_bytes()));
    bytes.extend([width, height].iter().flat_map(|n| n.to_le_bytes()));
    bytes.extend([1_u16, 24].iter().flat_map(|n| n.to_le_bytes()));
    bytes.extend([0_u32; 6].iter().flat_map(|n| n.to_le_bytes()));
    bytes
}

#[test]
fn bombs_are_refused_by_their_headers() {
    assert_eq!(
        message("bomb.bmp", &bmp(60000, 60000)),
        "bomb.bmp: expected at most 134217728 pixels, found 60000x60000"
    );
    // Width and height of a PNG, with a checksum that is then wrong, and of a GIF.
    let mut gif = bytes("still.gif");
    gif[6..10].fill(0xff);
    assert_eq!(
        message("bomb.gif", &gif),
        "bomb.gif: expected at most 134217728 pixels, found 65535x65535"
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bomb.gif");
    std::fs::write(&path, gif).unwrap();
    let error = Video::open(&path, &Limits::default()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Pixels { .. }), "{error}");
}

#[test]
fn an_image_without_pixels_is_an_error() {
    for (width, height) in [(0, 5), (5, 0)] {
        assert!(Picture::decode(&bmp(width, height), &Limits::default()).is_err());
    }
    let mut gif = bytes("still.gif");
    gif[6..10].fill(0);
    assert!(Picture::decode(&gif, &Limits::default()).is_err());
}

#[test]
fn a_line_is_too_long_for_qwen_and_fits_gemma() {
    let line = Picture::new(1, 100_000, vec![7; 300_000]).unwrap();
    let qwen = QwenVision::new(&ProcessorFiles::default()).unwrap();
    assert_eq!(
        qwen.image(&line).unwrap_err().to_string(),
        "expected sides of a ratio of at most 200, found 1x100000"
    );
    let gemma = GemmaVision::new(&ProcessorFiles::default(), false).unwrap();
    assert_eq!(gemma.image(&line).unwrap().tokens, 280);
}

#[test]
fn fields_of_a_configuration_are_checked() {
    for (field, value, expected) in [
        ("patch_size", json!(0), "a whole number of 1 to 256"),
        ("merge_size", json!("2"), "a whole number of 1 to 16"),
        (
            "max_pixels",
            json!(1e18),
            "a whole number of 1 to 1073741824",
        ),
        ("image_std", json!([1, 0, 1]), "three numbers above 0"),
        ("image_mean", json!([1, 0]), "three numbers"),
        ("do_normalize", json!(1), "true or false"),
        ("rescale_factor", json!(-1), "a number above 0 and up to 1"),
    ] {
        let files = ProcessorFiles {
            preprocessor: Some(json!({ field: value })),
            ..Default::default()
        };
        let error = QwenVision::new(&files).unwrap_err().to_string();
        let start = format!("preprocessor_config.json: {field}: expected {expected}, found ");
        assert!(error.starts_with(&start), "{error}");
    }
    let files = ProcessorFiles {
        processor: Some(json!({"image_processor": {"max_soft_tokens": 100}})),
        ..Default::default()
    };
    assert_eq!(
        GemmaVision::new(&files, false).unwrap_err().to_string(),
        "max_soft_tokens: expected 70, 140, 280, 560 or 1120, found 100"
    );
}

#[test]
fn a_video_file_without_ffmpeg_says_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.mp4");
    std::fs::write(&path, b"\0\0\0\x18ftypmp42").unwrap();
    let programs = VideoPrograms {
        ffmpeg: folder.path().join("no-ffmpeg"),
        ffprobe: folder.path().join("no-ffprobe"),
    };
    let error = Video::open_with(&path, &Limits::default(), &programs).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::NoProgram { .. }),
        "{error}"
    );
    assert!(
        error
            .to_string()
            .contains("a.mp4: reading a video file needs the program")
    );
    let error = Video::open(folder.path(), &Limits::default()).unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("expected 1 to 4194304 frames, found 0"),
        "{error}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn changed_files_do_not_panic(
        file in 0..FILES.len(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = bytes(FILES[file]);
        for (index, value) in changes {
            let index = index.index(bytes.len());
            bytes[index] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let limits = { let mut limits = Limits::default(); limits.pixels = 1 << 20; limits };
        if let Err(error) = Picture::decode(&bytes, &limits) {
            prop_assert!(!error.to_string().contains('\n'));
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("moving");
        std::fs::write(&path, &bytes).unwrap();
        let _ = Video::open_with(&path, &limits, &VideoPrograms { ffmpeg: "no".into(), ffprobe: "no".into() });
    }
}
