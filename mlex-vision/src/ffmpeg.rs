//! Video files, which the programs `ffmpeg` and `ffprobe` read.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};

use serde_json::Value;

use crate::error::{Error, ErrorKind, Result};
use crate::limits::Limits;
use crate::picture::Picture;
use crate::video::VideoInfo;

/// The programs that read video files. A name without a folder is looked for in `PATH`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VideoPrograms {
    /// Decodes frames.
    pub ffmpeg: PathBuf,
    /// Says what is in a file.
    pub ffprobe: PathBuf,
}

impl Default for VideoPrograms {
    fn default() -> Self {
        Self {
            ffmpeg: "ffmpeg".into(),
            ffprobe: "ffprobe".into(),
        }
    }
}

/// The most that is read of what a program says.
const MESSAGES: u64 = 1 << 16;

/// A running program. It is stopped when it is no longer wanted.
struct Running {
    name: String,
    child: Child,
    messages: Option<JoinHandle<String>>,
}

impl Running {
    fn start(program: &Path, arguments: impl IntoIterator<Item = OsString>) -> Result<Self> {
        let name = program.display().to_string();
        let child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = match child {
            Ok(child) => child,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(ErrorKind::NoProgram { program: name }.into());
            }
            Err(error) => return Err(failed(name, error.to_string())),
        };
        // Read beside the frames: a program whose messages nobody reads stands still.
        let messages = child.stderr.take().map(|mut messages| {
            thread::spawn(move || {
                let mut start = Vec::new();
                let _ = messages.by_ref().take(MESSAGES).read_to_end(&mut start);
                let _ = io::copy(&mut messages, &mut io::sink());
                String::from_utf8_lossy(&start).into_owned()
            })
        });
        Ok(Self {
            name,
            child,
            messages,
        })
    }

    /// What it writes.
    fn output(&mut self) -> Result<impl Read + use<>> {
        let output = self.child.stdout.take();
        output.ok_or_else(|| failed(self.name.clone(), "no output".to_owned()))
    }

    /// Waits for its end; an error if it failed.
    fn finish(mut self) -> Result<()> {
        let status = self.child.wait()?;
        let messages = self.messages.take().and_then(|thread| thread.join().ok());
        if status.success() {
            return Ok(());
        }
        let messages = messages.unwrap_or_default();
        let last = messages.lines().rfind(|line| !line.trim().is_empty());
        let cause = last.map_or_else(|| status.to_string(), |line| line.trim().to_owned());
        Err(failed(self.name.clone(), cause))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn failed(program: String, cause: String) -> Error {
    ErrorKind::Program { program, cause }.into()
}

/// The file as an input. Only files are read: a playlist must not open connections.
fn input(path: &Path) -> [OsString; 4] {
    let mut url = OsString::from("file:");
    url.push(path);
    let [whitelist, protocols, input] = ["-protocol_whitelist", "file", "-i"];
    [whitelist.into(), protocols.into(), input.into(), url]
}

/// What is in a video file. Its packets are counted, as few headers say how many there are.
pub(crate) fn probe(path: &Path, programs: &VideoPrograms, limits: &Limits) -> Result<VideoInfo> {
    let options = [
        "-v",
        "error",
        "-select_streams",
        "v:0",
        "-count_packets",
        "-show_entries",
        "stream=nb_read_packets,avg_frame_rate,r_frame_rate",
        "-of",
        "json",
    ];
    let arguments = options.map(OsString::from).into_iter().chain(input(path));
    let mut program = Running::start(&programs.ffprobe, arguments)?;
    let mut text = String::new();
    program.output()?.take(MESSAGES).read_to_string(&mut text)?;
    let name = program.name.clone();
    program.finish()?;
    let found: Value = serde_json::from_str(&text).unwrap_or_default();
    let stream = &found["streams"][0];
    let packets = stream["nb_read_packets"].as_str();
    let Some(count) = packets.and_then(|count| count.parse::<u64>().ok()) else {
        return Err(failed(name, "the file has no video".to_owned()));
    };
    limits.check_frames(count)?;
    let rate = |field: &str| stream[field].as_str().and_then(ratio);
    let fps = rate("avg_frame_rate").or_else(|| rate("r_frame_rate"));
    // The size is that of a decoded frame, which is turned as the file says.
    let mut first = None;
    frames(path, &[0], programs, limits, &mut |frame| {
        first = Some((frame.width(), frame.height()));
        Ok(())
    })?;
    let Some((width, height)) = first else {
        return Err(failed(name, "the file has no frame".to_owned()));
    };
    Ok(VideoInfo {
        frames: count as usize,
        fps: fps.unwrap_or(1.0),
        width,
        height,
    })
}

/// A ratio like 30000/1001, if it is a positive number.
fn ratio(text: &str) -> Option<f64> {
    let (numerator, denominator) = text.split_once('/')?;
    let ratio = numerator.parse::<f64>().ok()? / denominator.parse::<f64>().ok()?;
    (ratio > 0.0 && ratio.is_finite()).then_some(ratio)
}

/// Calls `take` with the frames of these indices.
pub(crate) fn frames(
    path: &Path,
    indices: &[usize],
    programs: &VideoPrograms,
    limits: &Limits,
    take: &mut dyn FnMut(Picture) -> Result<()>,
) -> Result<()> {
    // With times of their own, and not those of the video, no version repeats or drops frames.
    let filter = format!("select='{}',setpts=N/(25*TB)", is_one_of(indices));
    let count = indices.len().to_string();
    let options = ["-nostdin", "-v", "error"].map(OsString::from);
    let output = [
        "-map",
        "0:v:0",
        "-vf",
        &filter,
        "-r",
        "25",
        "-frames:v",
        &count,
        "-c:v",
        "ppm",
        "-pix_fmt",
        "rgb24",
        "-f",
        "image2pipe",
        "pipe:1",
    ]
    .map(OsString::from);
    let arguments = options.into_iter().chain(input(path)).chain(output);
    let mut program = Running::start(&programs.ffmpeg, arguments)?;
    let mut reader = BufReader::new(program.output()?);
    while let Some(picture) = read_ppm(&mut reader, limits, &program.name)? {
        take(picture)?;
    }
    program.finish()
}

/// The expression that is true for the frames of these indices, as a tree of sums: long sums are
/// refused as too deep.
fn is_one_of(indices: &[usize]) -> String {
    match indices {
        [] => "0".to_owned(),
        [index] => format!("eq(n,{index})"),
        _ => {
            let (left, right) = indices.split_at(indices.len() / 2);
            format!("({}+{})", is_one_of(left), is_one_of(right))
        }
    }
}

/// The next image of a stream of PPM images of 8 bits; none at its end.
fn read_ppm(reader: &mut impl BufRead, limits: &Limits, program: &str) -> Result<Option<Picture>> {
    if reader.fill_buf()?.is_empty() {
        return Ok(None);
    }
    let broken = || failed(program.to_owned(), "expected PPM images".to_owned());
    let mut header = [0_u32; 3];
    if word(reader)? != b"P6" {
        return Err(broken());
    }
    for number in &mut header {
        let text = String::from_utf8(word(reader)?).map_err(|_| broken())?;
        *number = text.parse().map_err(|_| broken())?;
    }
    let [width, height, most] = header;
    if most != 255 {
        return Err(broken());
    }
    limits.check_pixels(width, height)?;
    let length = u64::from(width) * u64::from(height) * 3;
    let mut rgb = Vec::new();
    reader.take(length).read_to_end(&mut rgb)?;
    if rgb.len() as u64 != length {
        return Err(failed(program.to_owned(), "a frame is cut off".to_owned()));
    }
    Picture::new(width, height, rgb).map(Some)
}

/// The bytes up to the next white space, which is taken too; at most 16.
fn word(reader: &mut impl BufRead) -> Result<Vec<u8>> {
    let mut word = Vec::new();
    for byte in reader.take(16).bytes() {
        match byte? {
            byte if byte.is_ascii_whitespace() => break,
            byte => word.push(byte),
        }
    }
    Ok(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_follow_each_other() {
        let stream = b"P6\n2 1\n255\nabcdefP6 1 1 255 xyzP6 1 1 255 x";
        let mut reader = &stream[..];
        let mut next = || read_ppm(&mut reader, &Limits::default(), "ffmpeg");
        let first = next().unwrap().unwrap();
        assert_eq!((first.width(), first.height()), (2, 1));
        assert_eq!(first.rgb(), b"abcdef");
        assert_eq!(next().unwrap().unwrap().rgb(), b"xyz");
        assert_eq!(
            next().unwrap_err().to_string(),
            "ffmpeg: a frame is cut off"
        );
        assert!(next().unwrap().is_none());
    }

    #[test]
    fn frames_are_selected_by_a_tree() {
        assert_eq!(is_one_of(&[3, 5, 8]), "(eq(n,3)+(eq(n,5)+eq(n,8)))");
    }

    #[test]
    fn a_bomb_is_refused_by_its_header() {
        let mut reader = &b"P6\n100000 100000\n255\n"[..];
        let error = read_ppm(&mut reader, &Limits::default(), "ffmpeg").unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Pixels { .. }));
    }

    #[test]
    fn rates_are_ratios() {
        assert_eq!(ratio("30000/1001"), Some(30000.0 / 1001.0));
        for text in ["0/0", "1/0", "-1/2", "25", "x/y", ""] {
            assert_eq!(ratio(text), None, "{text}");
        }
    }
}
