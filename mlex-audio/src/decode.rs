//! From a sound file to a [`Sound`].

use std::fs::File;
use std::io::Cursor;
use std::path::Path;

use symphonia::core::codecs::audio::{AudioDecoder, AudioDecoderOptions};
use symphonia::core::errors::Error as Broken;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::well_known::{FORMAT_ID_FLAC, FORMAT_ID_WAVE};
use symphonia::core::formats::{FormatOptions, FormatReader, TrackType};
use symphonia::core::io::{MediaSource, MediaSourceStream};
use symphonia::core::meta::MetadataOptions;

use crate::error::{Error, ErrorKind, Result};
use crate::limits::Limits;
use crate::sound::{Sound, check_rate};

/// How many samples may be missing at the end: encoders round up to whole packets.
const SLACK: u64 = 4608;

impl Sound {
    /// Reads a sound file: WAV, MP3, FLAC, Ogg Vorbis, AAC or M4A, by its content and not by its
    /// name. Its channels are averaged.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is no such sound, is broken or cut off, or exceeds `limits`.
    pub fn open(path: impl AsRef<Path>, limits: &Limits) -> Result<Self> {
        let path = path.as_ref();
        let open = || {
            if path.is_dir() {
                return Err(Error::from(std::io::Error::from(
                    std::io::ErrorKind::IsADirectory,
                )));
            }
            decode(Box::new(File::open(path)?), limits)
        };
        open().map_err(|error| error.with_path(path))
    }

    /// As [`Sound::open`], from the bytes of a file.
    ///
    /// # Errors
    ///
    /// As for [`Sound::open`].
    pub fn decode(bytes: Vec<u8>, limits: &Limits) -> Result<Self> {
        decode(Box::new(Cursor::new(bytes)), limits)
    }
}

fn decode(source: Box<dyn MediaSource>, limits: &Limits) -> Result<Sound> {
    let stream = MediaSourceStream::new(source, Default::default());
    let mut format = symphonia::default::get_probe()
        .probe(
            &Hint::new(),
            stream,
            FormatOptions::default(),
            MetadataOptions::default(),
        )
        .map_err(unknown)?;
    let no_track = || ErrorKind::Format {
        cause: "the file has no sound track".to_owned(),
    };
    let track = format
        .default_track(TrackType::Audio)
        .ok_or_else(no_track)?;
    let id = track.id;
    // Of other formats the number is estimated, or counts in other samples.
    let counted = [FORMAT_ID_WAVE, FORMAT_ID_FLAC].contains(&format.format_info().format);
    let expected = track.num_frames.filter(|_| counted);
    let parameters = track.codec_params.as_ref().and_then(|codec| codec.audio());
    let mut decoder = symphonia::default::get_codecs()
        .make_audio_decoder(
            parameters.ok_or_else(no_track)?,
            &AudioDecoderOptions::default(),
        )
        .map_err(unknown)?;
    let sound = mix(&mut *format, &mut *decoder, id, limits)?;
    // A program that writes into a pipe announces as much as the header can hold.
    let found = sound.samples().len() as u64;
    match expected {
        Some(expected) if expected <= limits.samples && found.saturating_add(SLACK) < expected => {
            Err(ErrorKind::CutOff { expected, found }.into())
        }
        _ if found == 0 => Err(ErrorKind::TooShort { least: 1, found: 0 }.into()),
        _ => Ok(sound),
    }
}

/// The mean of the channels of all packets of a track.
fn mix(
    format: &mut dyn FormatReader,
    decoder: &mut dyn AudioDecoder,
    track: u32,
    limits: &Limits,
) -> Result<Sound> {
    let limit = limits.samples;
    let mut mono: Vec<f32> = Vec::new();
    let mut rate = None;
    let mut samples: Vec<f32> = Vec::new();
    loop {
        let packet = match format.next_packet() {
            Ok(Some(packet)) => packet,
            // What follows the last whole packet of a file that is cut off.
            Ok(None) => break,
            Err(Broken::IoError(error)) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                break;
            }
            Err(error) => return Err(broken(&error)),
        };
        if packet.track_id != track {
            continue;
        }
        let decoded = decoder.decode(&packet).map_err(|error| broken(&error))?;
        let found = decoded.spec().rate();
        check_rate(found)?;
        let first = *rate.get_or_insert(found);
        if first != found {
            let expected = first.to_string();
            return Err(ErrorKind::Rate { expected, found }.into());
        }
        let channels = decoded.spec().channels().count();
        if (mono.len() + decoded.frames()) as u64 > limit {
            return Err(ErrorKind::TooLong { limit }.into());
        }
        decoded.copy_to_vec_interleaved(&mut samples);
        let mean = |frame: &[f32]| frame.iter().sum::<f32>() / channels as f32;
        mono.extend(samples.chunks_exact(channels.max(1)).map(mean));
    }
    match rate {
        Some(rate) => Sound::new(rate, mono),
        None => Err(ErrorKind::TooShort { least: 1, found: 0 }.into()),
    }
}

fn unknown(error: Broken) -> Error {
    ErrorKind::Format {
        cause: error.to_string(),
    }
    .into()
}

fn broken(error: &Broken) -> Error {
    ErrorKind::Decode {
        cause: error.to_string(),
    }
    .into()
}
