//! Commands of the chat: lines that begin with a slash.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use mlex_models::media::Media;
use mlex_models::towers::MediaKind;
use serde_json::json;

use super::Chat;
use crate::generate::Conversation;
use crate::output::note;

const HELP: &str = "\
/system [TEXT]        show or set the system message; `/system -` takes it away
/image FILE           show an image with what you say next; /video and /audio likewise
/reset                forget the conversation
/save FILE            write the conversation as JSON
/load FILE            go on with a conversation from a file
/think on|off         let the model reason, or not, where its template knows the difference
/think show|hide      show the reasoning, or not
/think N|free         end the reasoning after N tokens, or never
/params [NAME=VALUE]  show or set how answers are generated
/exit                 leave, as Ctrl-D
A line that ends with a backslash goes on in the next one; lines between \"\"\" are one text.
Ctrl-C ends an answer and keeps what there is.";

/// A command.
#[derive(Debug, PartialEq)]
pub(super) enum Command {
    Help,
    System(Option<String>),
    Reset,
    Media(MediaKind, PathBuf),
    Save(PathBuf),
    Load(PathBuf),
    Think(Think),
    Params(Vec<(String, String)>),
    Exit,
}

/// What `/think` sets.
#[derive(Debug, PartialEq)]
pub(super) enum Think {
    Enabled(bool),
    Shown(bool),
    Budget(Option<usize>),
}

impl Command {
    /// The command that a line is; none for what is said to the model.
    pub(super) fn parse(line: &str) -> Option<Result<Self>> {
        let line = line.trim();
        let name = line.strip_prefix('/')?;
        let (name, rest) = match name.split_once(char::is_whitespace) {
            Some((name, rest)) => (name, rest.trim()),
            None => (name, ""),
        };
        Some(Self::named(name, rest))
    }

    fn named(name: &str, rest: &str) -> Result<Self> {
        let file = || {
            if rest.is_empty() {
                bail!("/{name}: expected a file");
            }
            Ok(PathBuf::from(rest))
        };
        let command = match name {
            "help" | "?" => Self::Help,
            "system" => Self::System((!rest.is_empty()).then(|| rest.to_owned())),
            "reset" => Self::Reset,
            "image" => Self::Media(MediaKind::Image, file()?),
            "video" => Self::Media(MediaKind::Video, file()?),
            "audio" => Self::Media(MediaKind::Audio, file()?),
            "save" => Self::Save(file()?),
            "load" => Self::Load(file()?),
            "think" => Self::Think(Think::parse(rest)?),
            "params" => Self::Params(
                rest.split_whitespace()
                    .map(|word| match word.split_once('=') {
                        Some((name, value)) => Ok((name.to_owned(), value.to_owned())),
                        None => bail!("/params: expected NAME=VALUE, found {word:?}"),
                    })
                    .collect::<Result<_>>()?,
            ),
            "exit" | "quit" => Self::Exit,
            _ => bail!("/{name}: no such command; /help lists them"),
        };
        Ok(command)
    }
}

impl Think {
    fn parse(word: &str) -> Result<Self> {
        Ok(match word {
            "on" => Self::Enabled(true),
            "off" => Self::Enabled(false),
            "show" => Self::Shown(true),
            "hide" => Self::Shown(false),
            "free" => Self::Budget(None),
            _ => match word.parse() {
                Ok(tokens) => Self::Budget(Some(tokens)),
                Err(_) => {
                    bail!("/think: expected on, off, show, hide, free or a number, found {word:?}")
                }
            },
        })
    }
}

impl Chat<'_> {
    /// Does what a command says.
    pub(super) fn obey(&mut self, command: Command) -> Result<()> {
        match command {
            Command::Help => note(HELP),
            Command::System(None) => note(self.system.as_deref().unwrap_or("no system message")),
            Command::System(Some(text)) => self.system = Some(text).filter(|text| text != "-"),
            Command::Reset => {
                self.messages.clear();
                self.shown.clear();
                self.calls = 0;
            }
            Command::Media(kind, path) => self.show(kind, path)?,
            Command::Save(path) => {
                let tools = &self.settings.request.tools;
                let chat = json!({"messages": self.transcript(), "tools": tools});
                let text = format!("{}\n", serde_json::to_string_pretty(&chat)?);
                fs::write(&path, text).context(path.display().to_string())?;
            }
            Command::Load(path) => self.load(&path)?,
            Command::Think(think) => self.settings.think(&think),
            Command::Params(changes) if changes.is_empty() => note(&self.settings.to_string()),
            Command::Params(changes) => {
                let vocab_size = self.session.info().model.vocab_size;
                self.settings.change(&changes, vocab_size)?;
            }
            Command::Exit => {}
        }
        Ok(())
    }

    /// Keeps a file for what is said next.
    fn show(&mut self, kind: MediaKind, path: PathBuf) -> Result<()> {
        let info = self.session.info();
        if !info.media.contains(&kind) {
            bail!("{}: input: {kind} is not supported", info.model.model_type);
        }
        fs::metadata(&path).context(path.display().to_string())?;
        self.shown.push(Media::open(kind, path));
        Ok(())
    }

    fn load(&mut self, path: &std::path::Path) -> Result<()> {
        let Conversation {
            mut messages,
            tools,
        } = Conversation::read(path)?;
        self.system = None;
        if messages
            .first()
            .is_some_and(|first| first["role"] == "system")
        {
            let first = messages.remove(0);
            self.system = first["content"].as_str().map(str::to_owned);
        }
        note(&format!("{} messages", messages.len()));
        self.messages = messages;
        self.shown.clear();
        self.settings.request.tools = tools;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands() {
        let parse = |line| Command::parse(line).unwrap();
        assert!(Command::parse("hello /help").is_none());
        assert_eq!(parse(" /reset ").unwrap(), Command::Reset);
        assert_eq!(parse("/system").unwrap(), Command::System(None));
        assert_eq!(
            parse("/system be\nbrief").unwrap(),
            Command::System(Some("be\nbrief".into()))
        );
        assert_eq!(
            parse("/save a b.json").unwrap(),
            Command::Save("a b.json".into())
        );
        assert_eq!(
            parse("/image a b.png").unwrap(),
            Command::Media(MediaKind::Image, "a b.png".into())
        );
        assert_eq!(
            parse("/think 12").unwrap(),
            Command::Think(Think::Budget(Some(12)))
        );
        assert_eq!(
            parse("/params temp=1  seed=2").unwrap(),
            Command::Params(vec![
                ("temp".into(), "1".into()),
                ("seed".into(), "2".into())
            ])
        );
        for (line, expected) in [
            ("/load", "/load: expected a file"),
            ("/audio", "/audio: expected a file"),
            ("/x", "/x: no such command; /help lists them"),
            (
                "/params temp",
                "/params: expected NAME=VALUE, found \"temp\"",
            ),
            (
                "/think maybe",
                "/think: expected on, off, show, hide, free or a number, found \"maybe\"",
            ),
        ] {
            assert_eq!(parse(line).unwrap_err().to_string(), expected);
        }
    }
}
