//! Chat templates: messages to the prompt that the model was trained on.
//!
//! Templates are Jinja as transformers runs it. They come with the model, so they are run with
//! a limit on work, memory and depth, and see nothing but their inputs and the time.

mod generation;
mod json;
mod limits;
mod methods;
mod source;
mod time;

use std::path::Path;
use std::sync::Arc;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest};
use minijinja::{AutoEscape, Environment, UndefinedBehavior, Value as Jinja};
use mlex_core::io::GgufMetadata;
use serde_json::{Map, Value};

pub use time::LocalTime;

use crate::error::{Error, Result, ResultExt};

/// The template for chats without a name of their own, and the one for chats with tools.
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

/// The chat template of a model, or the several named ones that some models have.
#[derive(Clone)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Name and source, the default one first where there is one.
    sources: Vec<(String, String)>,
    variables: Map<String, Value>,
}

/// What a template is rendered for.
#[derive(Debug, Clone, Default)]
pub struct ChatRequest<'a> {
    /// The messages: objects with a `role`, and `content`, `tool_calls` and so on.
    pub messages: &'a [Value],
    /// The tools that the model may call, as JSON schemas.
    pub tools: Option<&'a [Value]>,
    /// Documents to answer from, for the few templates that take them.
    pub documents: Option<&'a [Value]>,
    /// Whether the prompt ends with the beginning of an answer.
    pub add_generation_prompt: bool,
    /// The template by its name, if the model has several. Otherwise it is `tool_use` if
    /// there are tools and such a template, and else the default one.
    pub template: Option<&'a str>,
    /// Further variables that the template may ask for, such as `enable_thinking`.
    pub variables: Map<String, Value>,
}

impl ChatTemplate {
    /// Reads the template of a model directory; `None` if it has none.
    ///
    /// As in transformers, `chat_template.jinja` and `additional_chat_templates/*.jinja` win
    /// over the `chat_template` of `tokenizer_config.json`; `chat_template.json` comes last.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Option<Self>> {
        match source::from_dir(dir.as_ref())? {
            Some(found) => Self::named(found.templates).with_path(found.path).map(Some),
            None => Ok(None),
        }
    }

    /// Reads the template in a GGUF file's metadata; `None` if it has none.
    pub fn from_gguf_metadata(metadata: &GgufMetadata) -> Result<Option<Self>> {
        let templates = source::from_gguf(metadata)?;
        if templates.is_empty() {
            Ok(None)
        } else {
            Self::named(templates).map(Some)
        }
    }

    /// The template with that source. Fails with name and line if it does not parse.
    pub fn new(source: impl Into<String>) -> Result<Self> {
        Self::named(vec![(DEFAULT.to_owned(), source.into())])
    }

    /// Several templates, as name and source. Fails with name and line if one does not parse.
    pub fn named(templates: Vec<(String, String)>) -> Result<Self> {
        let mut environment = environment()?;
        for (name, source) in &templates {
            let added = limits::checked(source).and_then(|source| {
                // Parsed by recursion, as deep as the longest tag is.
                limits::on_large_stack(|| environment.add_template_owned(name.clone(), source))
            });
            added
                .map_err(|problem| Error::template(format!("{name}{problem}")))?
                .map_err(|error| template_error(name, &error))?;
        }
        let mut sources = templates;
        sources.sort_by_key(|(name, _)| name != DEFAULT);
        let template = Self {
            environment,
            sources,
            variables: Map::new(),
        };
        Ok(template.with_clock(LocalTime::now))
    }

    /// Sets variables that every rendering sees, such as the special tokens that
    /// [`Tokenizer::special_tokens`](super::Tokenizer::special_tokens) names.
    #[must_use]
    pub fn with_variables(mut self, variables: Map<String, Value>) -> Self {
        self.variables.extend(variables);
        self
    }

    /// Sets the clock that `strftime_now` reads; it is the system's in its time zone if not set.
    #[must_use]
    pub fn with_clock(mut self, clock: impl Fn() -> LocalTime + Send + Sync + 'static) -> Self {
        let clock = Arc::new(clock);
        self.environment
            .add_function("strftime_now", move |format: &str| -> String {
                clock().format(format)
            });
        self
    }

    /// The names and sources of the templates, the default one first.
    pub fn sources(&self) -> impl Iterator<Item = (&str, &str)> {
        self.sources
            .iter()
            .map(|(name, source)| (name.as_str(), source.as_str()))
    }

    /// The prompt for a chat.
    ///
    /// Fails with the template's name and line if the template raises an exception (a role
    /// that it does not know, say), uses what is not there, or exceeds its limits.
    pub fn render(&self, request: &ChatRequest<'_>) -> Result<String> {
        let name = self.select(request)?;
        let mut variables = self.variables.clone();
        variables.extend(request.variables.clone());
        variables.insert("messages".into(), messages(request.messages)?.into());
        variables.insert("tools".into(), list_or_null(request.tools));
        variables.insert("documents".into(), list_or_null(request.documents));
        variables.insert(
            "add_generation_prompt".into(),
            request.add_generation_prompt.into(),
        );
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(limits::fuel(&variables)));
        let render = || environment.get_template(name)?.render(object(&variables));
        limits::on_large_stack(render)
            .map_err(|problem| Error::template(format!("{name}{problem}")))?
            .map_err(|error| template_error(name, &error))
    }

    fn select<'a>(&'a self, request: &ChatRequest<'a>) -> Result<&'a str> {
        let has = |name: &str| self.sources.iter().any(|(known, _)| known == name);
        let wanted = match request.template {
            Some(name) => name,
            None if request.tools.is_some() && has(TOOL_USE) => TOOL_USE,
            None => DEFAULT,
        };
        if has(wanted) {
            return Ok(wanted);
        }
        let names: Vec<&str> = self.sources.iter().map(|(name, _)| name.as_str()).collect();
        Err(Error::template(format!(
            "no template {wanted:?}; there are {}",
            names.join(", ")
        )))
    }

    /// Writes `chat_template.jinja`, and `additional_chat_templates/NAME.jinja` for templates
    /// with other names than the default one, into a directory.
    pub fn save(&self, dir: impl AsRef<Path>) -> Result<()> {
        source::save(dir.as_ref(), &self.sources)
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("sources", &self.sources)
            .finish_non_exhaustive()
    }
}

/// Jinja as transformers sets it up.
fn environment() -> Result<Environment<'static>> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    environment.set_syntax(syntax.map_err(|error| template_error("syntax", &error))?);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    limits::set(&mut environment);
    environment.set_unknown_method_callback(methods::call);
    environment.add_filter("tojson", json::tojson);
    environment.add_function("raise_exception", raise_exception);
    Ok(environment)
}

fn raise_exception(message: Jinja, _: Rest<Jinja>, _: Kwargs) -> Result<Jinja, minijinja::Error> {
    Err(minijinja::Error::new(
        minijinja::ErrorKind::InvalidOperation,
        message.to_string(),
    ))
}

/// The error on one line: template, line, what happened.
fn template_error(name: &str, error: &minijinja::Error) -> Error {
    let line = error
        .line()
        .map(|line| format!(", line {line}"))
        .unwrap_or_default();
    let what = match (error.kind(), error.detail()) {
        (minijinja::ErrorKind::InvalidOperation, Some(detail)) => detail.to_owned(),
        (kind, Some(detail)) => format!("{kind}: {detail}"),
        (kind, None) => kind.to_string(),
    };
    Error::template(format!("{name}{line}: {what}"))
}

/// A JSON value as a value of the template language.
fn jinja(value: &Value) -> Jinja {
    match value {
        Value::Null => Jinja::from(()),
        Value::Bool(flag) => Jinja::from(*flag),
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(integer), _) => Jinja::from(integer),
            (None, Some(integer)) => Jinja::from(integer),
            (None, None) => Jinja::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Value::String(text) => Jinja::from(text.as_str()),
        Value::Array(items) => items.iter().map(jinja).collect(),
        Value::Object(fields) => object(fields),
    }
}

fn object(fields: &Map<String, Value>) -> Jinja {
    Jinja::from_pairs(
        fields
            .iter()
            .map(|(key, value)| (key.as_str(), jinja(value))),
    )
}

fn list_or_null(values: Option<&[Value]>) -> Value {
    values.map_or(Value::Null, |values| values.to_vec().into())
}

/// The names that a message's reasoning goes by; templates read the first, and some the second.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// The messages as templates expect them, as transformers prepares them: without the keys that
/// are null, and with the reasoning under the names that templates read.
fn messages(messages: &[Value]) -> Result<Vec<Value>> {
    let prepare = |(index, message): (usize, &Value)| {
        let Value::Object(fields) = message else {
            let found = super::files::describe(message);
            return Err(Error::field(
                format!("messages[{index}]"),
                "an object",
                found,
            ));
        };
        let mut fields = fields.clone();
        fields.retain(|_, value| !value.is_null());
        let reasoning = REASONING.iter().find_map(|&name| fields.get(name)).cloned();
        if let Some(reasoning) = reasoning {
            if !fields.contains_key("thinking") {
                fields.shift_insert(0, "thinking".into(), reasoning.clone());
            }
            fields.insert("reasoning_content".into(), reasoning);
        }
        Ok(Value::Object(fields))
    };
    messages.iter().enumerate().map(prepare).collect()
}
