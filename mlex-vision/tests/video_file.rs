//! Video files: with programs that play `ffmpeg` and `ffprobe`, and with the real ones.

#![allow(clippy::unwrap_used)]
#![cfg(unix)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use mlex_vision::{ErrorKind, Limits, Picture, ProcessorFiles, QwenVision, Video, VideoPrograms};

fn script(folder: &Path, name: &str, body: &str) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

const PROBE: &str = r#"echo '{"streams":[{"nb_read_packets":"10","avg_frame_rate":"5/1"}]}'"#;

/// A frame for each that is selected.
const DECODE: &str =
    r#"for n in $(echo "$*" | grep -o 'eq(n'); do printf 'P6\n2 1\n255\nabcdef'; done"#;

/// Opens a video file with these programs.
fn open(folder: &Path, probe: &str, decode: &str) -> mlex_vision::Result<Video> {
    let programs = VideoPrograms {
        ffmpeg: script(folder, "ffmpeg", decode),
        ffprobe: script(folder, "ffprobe", probe),
    };
    let path = folder.join("a.mp4");
    fs::write(&path, b"\0\0\0\x18ftypmp42").unwrap();
    Video::open_with(&path, &Limits::default(), &programs)
}

fn frames(video: &Video, indices: &[usize]) -> mlex_vision::Result<Vec<Picture>> {
    let mut frames = Vec::new();
    let count = video.frames(indices, &mut |frame| {
        frames.push(frame);
        Ok(())
    })?;
    assert_eq!(count, frames.len());
    Ok(frames)
}

#[test]
fn frames_come_out_of_the_program() {
    let folder = tempfile::tempdir().unwrap();
    let video = open(folder.path(), PROBE, DECODE).unwrap();
    let info = video.info();
    assert_eq!(
        (info.frames, info.fps, info.width, info.height),
        (10, 5.0, 2, 1)
    );
    let found = frames(&video, &[0, 4, 9]).unwrap();
    assert_eq!(found.len(), 3);
    assert!(found.iter().all(|frame| frame.rgb() == b"abcdef"));
}

#[test]
fn frames_that_are_missing_at_the_end_are_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let video = open(folder.path(), PROBE, r"printf 'P6\n2 1\n255\nabcdef'").unwrap();
    let qwen = QwenVision::new(&ProcessorFiles::default()).unwrap();
    let video = qwen.video(&video).unwrap();
    assert_eq!((video.input.grid[0], video.timestamps), (1, vec![0.0]));
    let height_and_width = video.input.grid[1] * video.input.grid[2];
    assert_eq!(
        video.input.patches.len(),
        height_and_width * video.input.patch_len
    );
}

#[test]
fn what_programs_say_is_in_the_error() {
    let folder = tempfile::tempdir().unwrap();
    let message = |probe: &str, decode: &str| {
        let error = open(folder.path(), probe, decode).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Program { .. }), "{error}");
        let text = error.to_string();
        assert!(!text.contains('\n'));
        text.rsplit("/ff").next().unwrap().to_owned()
    };
    let fail = "echo first >&2; echo 'moov atom not found' >&2; exit 1";
    assert_eq!(message(fail, DECODE), "probe: moov atom not found");
    assert_eq!(message(PROBE, fail), "mpeg: moov atom not found");
    assert_eq!(message("echo '{}'", DECODE), "probe: the file has no video");
    assert_eq!(message(PROBE, "echo hello"), "mpeg: expected PPM images");
    assert_eq!(
        message(PROBE, r"printf 'P6\n2 1\n255\nab'"),
        "mpeg: a frame is cut off"
    );
}

#[test]
#[ignore = "needs ffmpeg and ffprobe"]
fn a_real_video_file_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("it's 100% [a];b,c.mkv");
    // Frame N has the colour (2N, N, 0).
    let source = "nullsrc=s=8x6:r=25:d=4,format=gbrp,geq=r='2*N':g='N':b=0";
    let status = Command::new("ffmpeg")
        .args(["-v", "error", "-f", "lavfi", "-i", source, "-c:v", "ffv1"])
        .arg(&path)
        .status();
    assert!(status.unwrap().success());
    let video = Video::open(&path, &Limits::default()).unwrap();
    let info = video.info();
    assert_eq!(
        (info.frames, info.fps, info.width, info.height),
        (100, 25.0, 8, 6)
    );
    let all: Vec<usize> = (0..100).collect();
    for indices in [&[0, 1, 50, 99][..], &all] {
        let found = frames(&video, indices).unwrap();
        assert_eq!(found.len(), indices.len());
        for (frame, &n) in found.iter().zip(indices) {
            assert_eq!(frame.rgb()[..3], [2 * n as u8, n as u8, 0]);
        }
    }
    let broken = folder.path().join("broken.mp4");
    fs::write(&broken, b"\0\0\0\x18ftypmp42 and no more").unwrap();
    let error = Video::open(&broken, &Limits::default()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Program { .. }), "{error}");
}
