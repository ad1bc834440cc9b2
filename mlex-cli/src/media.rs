//! Images, videos and sounds on the command line and in conversations.

use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use mlex_models::generate::Request;
use mlex_models::media::Media;
use mlex_models::text::media_parts;
use mlex_models::towers::MediaKind;
use serde_json::{Value, json};

const HEADING: &str = "Media";
const KINDS: [(&str, MediaKind, &str); 3] = [
    (
        "image",
        MediaKind::Image,
        "Show the model an image (repeatable; media keep their order)",
    ),
    (
        "video",
        MediaKind::Video,
        "Show the model a video, a moving image or a folder of frames (repeatable)",
    ),
    (
        "audio",
        MediaKind::Audio,
        "Let the model hear a sound (repeatable)",
    ),
];
const IMAGE_TOKENS: &str = "image-tokens";
const VIDEO_FPS: &str = "video-fps";
const VIDEO_FRAMES: &str = "video-frames";

/// The media of a prompt, in the order of the command line, and how they are looked at.
#[derive(Clone, Debug, Default)]
pub(crate) struct MediaArgs {
    pub(crate) media: Vec<Media>,
    image_tokens: Option<usize>,
    video_fps: Option<f64>,
    video_frames: Option<usize>,
}

impl MediaArgs {
    /// Sets how media are looked at.
    pub(crate) fn set_options(&self, request: &mut Request) {
        let options = &mut request.media_options;
        options.image_tokens = self.image_tokens;
        options.video_fps = self.video_fps;
        options.video_frames = self.video_frames;
    }
}

// Not derived: only the matches know the order of different flags.
impl clap::Args for MediaArgs {
    fn augment_args(command: Command) -> Command {
        let flags = KINDS.map(|(name, _, help)| {
            Arg::new(name)
                .long(name)
                .value_name("FILE")
                .action(ArgAction::Append)
                .value_parser(value_parser!(PathBuf))
                .help_heading(HEADING)
                .help(help)
        });
        let number = |name: &'static str, value: &'static str, help: &'static str| {
            let arg = Arg::new(name).long(name).value_name(value);
            arg.help_heading(HEADING).help(help).hide_short_help(true)
        };
        command
            .args(flags)
            .arg(
                number(
                    IMAGE_TOKENS,
                    "N",
                    "The most tokens of an image; Gemma 4 knows 70, 140, 280, 560 and 1120",
                )
                .value_parser(value_parser!(usize)),
            )
            .arg(
                number(VIDEO_FPS, "FPS", "How many frames of a second are taken")
                    .value_parser(value_parser!(f64)),
            )
            .arg(
                number(
                    VIDEO_FRAMES,
                    "N",
                    "The most frames of a video that are taken",
                )
                .value_parser(value_parser!(usize)),
            )
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl clap::FromArgMatches for MediaArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut found = Vec::new();
        for (name, kind, _) in KINDS {
            let paths = matches.get_many::<PathBuf>(name).into_iter().flatten();
            let places = matches.indices_of(name).into_iter().flatten();
            found.extend(places.zip(paths).map(|(place, path)| (place, kind, path)));
        }
        found.sort_by_key(|(place, ..)| *place);
        let media = found.into_iter();
        Ok(Self {
            media: media
                .map(|(_, kind, path)| Media::open(kind, path))
                .collect(),
            image_tokens: matches.get_one(IMAGE_TOKENS).copied(),
            video_fps: matches.get_one(VIDEO_FPS).copied(),
            video_frames: matches.get_one(VIDEO_FRAMES).copied(),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// The content of a message: media, then text. Without media it is the text.
pub(crate) fn content(media: &[Media], text: &str) -> Value {
    if media.is_empty() {
        return text.into();
    }
    let parts = media.iter().map(|media| {
        let kind = media.kind.to_string();
        let mut part = json!({ "type": kind });
        if let Some(path) = media.path() {
            part[kind] = path.to_string_lossy().into();
        }
        part
    });
    let text = json!({"type": "text", "text": text});
    parts.chain([text]).collect()
}

/// The media that messages name by a file, as [`content`] does; none where a part names none.
pub(crate) fn named_in(messages: &[Value]) -> Vec<Media> {
    let named = media_parts(messages).map(|(kind, part)| {
        let path = part.get(kind.to_string())?.as_str()?;
        // What it holds is read from the message.
        let is_path = !path.starts_with("data:");
        is_path.then(|| Media::open(kind, path))
    });
    named.collect::<Option<Vec<_>>>().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Args as _, FromArgMatches as _};

    fn parse(args: &[&str]) -> MediaArgs {
        let command = MediaArgs::augment_args(Command::new("x"));
        let matches = command.try_get_matches_from(args).unwrap();
        MediaArgs::from_arg_matches(&matches).unwrap()
    }

    #[test]
    fn media_keep_the_order_of_the_command_line() {
        let args = parse(&[
            "x",
            "--image",
            "a.png",
            "--audio",
            "b.wav",
            "--image",
            "c.png",
            "--image-tokens",
            "70",
        ]);
        let expected = [
            Media::open(MediaKind::Image, "a.png"),
            Media::open(MediaKind::Audio, "b.wav"),
            Media::open(MediaKind::Image, "c.png"),
        ];
        assert_eq!(args.media, expected);
        assert_eq!(args.image_tokens, Some(70));
    }

    #[test]
    fn a_message_names_its_media() {
        let media = [
            Media::open(MediaKind::Image, "a.png"),
            Media::open(MediaKind::Video, "v"),
        ];
        let content = content(&media, "t");
        assert_eq!(
            content,
            json!([
                {"type": "image", "image": "a.png"}, {"type": "video", "video": "v"},
                {"type": "text", "text": "t"},
            ])
        );
        let messages = [json!({"role": "user", "content": content})];
        assert_eq!(named_in(&messages), media);
        // One without a file.
        let messages = [json!({"role": "user", "content": [{"type": "image"}]})];
        assert_eq!(named_in(&messages), []);
        assert_eq!(super::content(&[], "t"), json!("t"));
    }
}
