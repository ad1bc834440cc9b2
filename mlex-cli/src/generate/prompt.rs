//! What a generation continues: a text, a conversation or tokens.

use std::fs;
use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use mlex_models::generate::{Prompt, Request};
use serde_json::{Value, json};

use crate::args::{TokenIds, key_json};
use crate::failure::{self, Hinted};
use crate::media::{MediaArgs, content, named_in};
use crate::output::note;

const STDIN: &str = "-";

/// The prompt and what goes with it.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Prompt")]
pub(crate) struct PromptArgs {
    /// The prompt; `-`, or none with stdin not a terminal, reads it from stdin
    #[arg(long, short, value_name = "TEXT", conflicts_with_all = ["messages", "prompt_tokens"])]
    prompt: Option<String>,
    /// A file with the prompt
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "messages", "prompt_tokens"])]
    prompt_file: Option<PathBuf>,
    /// A JSON file with a conversation, a list of messages or {"messages": [..], "tools": [..]};
    /// `-` is stdin
    #[arg(long, value_name = "FILE", conflicts_with_all = ["raw", "prompt_tokens"])]
    messages: Option<PathBuf>,
    /// The prompt as token ids
    #[arg(long, value_name = "IDS", hide = true)]
    prompt_tokens: Option<TokenIds>,
    /// A system message before the prompt
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["raw", "prompt_tokens"])]
    system: Option<String>,
    /// Feed the prompt as it is, without the chat template
    #[arg(long)]
    raw: bool,
    /// Set a variable of the chat template, such as enable_thinking=false (repeatable)
    #[arg(long, value_name = "KEY=JSON", value_parser = key_json)]
    template_arg: Vec<(String, Value)>,
    #[command(flatten)]
    media: MediaArgs,
}

/// A prompt that has been read.
#[derive(Debug)]
pub(crate) struct Input {
    kind: Kind,
    system: Option<String>,
    variables: Vec<(String, Value)>,
    media: MediaArgs,
}

#[derive(Debug)]
enum Kind {
    /// Fed as it is.
    Raw(String),
    /// What a user says, or fed as it is to a model without a chat template.
    Text(String),
    Conversation(Conversation),
    Tokens(Vec<u32>),
}

impl PromptArgs {
    /// Reads the prompt from where it is.
    ///
    /// # Errors
    /// A usage error when there is none; what is wrong with a file.
    pub(crate) fn read(&self) -> Result<Input> {
        let kind = if let Some(ids) = &self.prompt_tokens {
            Kind::Tokens(ids.0.clone())
        } else if let Some(path) = &self.messages {
            Kind::Conversation(Conversation::read(path)?)
        } else if self.raw {
            Kind::Raw(self.text()?)
        } else {
            Kind::Text(self.text()?)
        };
        let (system, variables) = (self.system.clone(), self.template_arg.clone());
        Ok(Input {
            kind,
            system,
            variables,
            media: self.media.clone(),
        })
    }

    fn text(&self) -> Result<String> {
        if let Some(path) = &self.prompt_file {
            let name = path.display().to_string();
            return fs::read_to_string(path).context(name);
        }
        match self.prompt.as_deref() {
            Some(text) if text != STDIN => return Ok(text.to_owned()),
            None if io::stdin().is_terminal() => {
                return Err(failure::usage(
                    "generate",
                    "no prompt: give --prompt TEXT or --messages FILE, or pipe a text in",
                ));
            }
            _ => {}
        }
        let text = read_stdin()?;
        if text.is_empty() {
            let message = "no prompt: stdin is empty; give --prompt TEXT or --messages FILE";
            return Err(failure::usage("generate", message));
        }
        // The line break is the shell's, not part of what the user says.
        let line = text
            .strip_suffix('\n')
            .map(|line| line.strip_suffix('\r').unwrap_or(line));
        Ok(if self.raw {
            text
        } else {
            line.unwrap_or(&text).to_owned()
        })
    }
}

impl Input {
    /// The request for a model with or without a chat template.
    ///
    /// # Errors
    /// When the model has none and needs one.
    pub(crate) fn request(self, has_template: bool) -> Result<Request> {
        let Self {
            kind,
            system,
            variables,
            media,
        } = self;
        let has_system = system.is_some();
        let mut request = match kind {
            Kind::Raw(text) => Request::new(Prompt::Raw(text)),
            Kind::Tokens(ids) => Request::new(Prompt::Tokens(ids)),
            Kind::Text(text) if !has_template && !has_system => {
                note("note: the model has no chat template; the prompt is fed as it is");
                Request::new(Prompt::Raw(text))
            }
            Kind::Text(_) | Kind::Conversation(_) if !has_template => {
                let error = anyhow::anyhow!("the model has no chat template for a conversation");
                return Err(Hinted::new(error, "give the whole prompt with --raw --prompt").into());
            }
            Kind::Text(text) => {
                let content = content(&media.media, &text);
                let user = json!({"role": "user", "content": content});
                Request::new(Prompt::Messages(with_system(system, vec![user])?))
            }
            Kind::Conversation(Conversation { messages, tools }) => {
                let mut request = Request::new(Prompt::Messages(with_system(system, messages)?));
                request.tools = tools;
                request
            }
        };
        request.template_variables = variables.into_iter().collect();
        media.set_options(&mut request);
        request.media = match &request.prompt {
            Prompt::Messages(messages) if media.media.is_empty() => named_in(messages),
            _ => media.media,
        };
        Ok(request)
    }
}

fn with_system(system: Option<String>, mut messages: Vec<Value>) -> Result<Vec<Value>> {
    if let Some(system) = system {
        if messages
            .first()
            .is_some_and(|message| message["role"] == "system")
        {
            bail!("the conversation has a system message already, besides --system");
        }
        messages.insert(0, json!({"role": "system", "content": system}));
    }
    Ok(messages)
}

/// The messages of a file, and tools where it has some.
#[derive(Debug, PartialEq)]
pub(crate) struct Conversation {
    pub(crate) messages: Vec<Value>,
    pub(crate) tools: Vec<Value>,
}

impl Conversation {
    /// Reads a file.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let (name, text) = if path == Path::new(STDIN) {
            ("stdin".to_owned(), read_stdin()?)
        } else {
            let name = path.display().to_string();
            (name.clone(), fs::read_to_string(path).context(name)?)
        };
        Self::parse(&text).context(name)
    }

    fn parse(text: &str) -> Result<Self> {
        let (messages, tools) = match serde_json::from_str(text).context("not valid JSON")? {
            Value::Array(messages) => (messages, Vec::new()),
            Value::Object(mut object) => {
                let mut list = |key: &str| match object.remove(key) {
                    Some(Value::Array(list)) => Ok(Some(list)),
                    None | Some(Value::Null) => Ok(None),
                    Some(other) => bail!("{key}: expected a list, found {}", kind(&other)),
                };
                let messages = list("messages")?.context("missing field messages")?;
                (messages, list("tools")?.unwrap_or_default())
            }
            other => bail!(
                "expected a list of messages, or an object with one, found {}",
                kind(&other)
            ),
        };
        if messages.is_empty() {
            bail!("messages: expected at least one, found none");
        }
        for (index, message) in messages.iter().enumerate() {
            if !message.is_object() {
                bail!(
                    "messages[{index}]: expected an object, found {}",
                    kind(message)
                );
            }
            if !message["role"].is_string() {
                bail!(
                    "messages[{index}].role: expected a text, found {}",
                    kind(&message["role"])
                );
            }
        }
        Ok(Self { messages, tools })
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn read_stdin() -> Result<String> {
    let mut text = String::new();
    io::stdin()
        .lock()
        .read_to_string(&mut text)
        .context("stdin")?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversations() {
        let message = json!({"role": "user", "content": "hi"});
        let conversation = Conversation {
            messages: vec![message.clone()],
            tools: vec![json!({"type": "x"})],
        };
        let text = json!({"messages": [message], "tools": [{"type": "x"}]}).to_string();
        assert_eq!(Conversation::parse(&text).unwrap(), conversation);
        let text = json!([message]).to_string();
        let conversation = Conversation {
            tools: vec![],
            ..conversation
        };
        assert_eq!(Conversation::parse(&text).unwrap(), conversation);
    }

    #[test]
    fn wrong_conversations_are_named() {
        let error = |text: &str| format!("{:#}", Conversation::parse(text).unwrap_err());
        assert!(error("[").starts_with("not valid JSON: "));
        assert_eq!(error("{}"), "missing field messages");
        assert_eq!(error("[]"), "messages: expected at least one, found none");
        assert_eq!(
            error("{\"messages\": 1}"),
            "messages: expected a list, found a number"
        );
        assert_eq!(
            error("3"),
            "expected a list of messages, or an object with one, found a number"
        );
        assert_eq!(
            error("[{\"role\": \"user\"}, \"hi\"]"),
            "messages[1]: expected an object, found a text"
        );
        assert_eq!(
            error("[{}]"),
            "messages[0].role: expected a text, found nothing"
        );
    }

    #[test]
    fn a_second_system_message_is_refused() {
        let system = json!({"role": "system", "content": "a"});
        let user = json!({"role": "user", "content": "b"});
        let with = with_system(Some("a".to_owned()), vec![user.clone()]).unwrap();
        assert_eq!(with, [system.clone(), user]);
        assert!(with_system(Some("c".to_owned()), vec![system]).is_err());
    }
}
