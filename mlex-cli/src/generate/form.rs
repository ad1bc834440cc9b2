//! The form that an answer must have.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use mlex_models::generate::Grammar;

use crate::failure;

/// The form of the answer.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Structured output")]
pub(crate) struct FormArgs {
    /// The answer is JSON that this schema allows: a file, or the schema itself
    #[arg(long, value_name = "FILE|JSON", group = "form")]
    json_schema: Option<String>,
    /// The answer is a JSON object
    #[arg(long, group = "form")]
    json_object: bool,
    /// The whole answer matches this regular expression
    #[arg(long, value_name = "REGEX", group = "form")]
    regex: Option<String>,
    /// The answer follows this grammar in Lark's notation: a file, or the grammar itself
    #[arg(long, value_name = "FILE|LARK", group = "form")]
    grammar: Option<String>,
}

impl FormArgs {
    /// The form; none where any answer will do.
    ///
    /// # Errors
    /// When a file cannot be read; a usage error when the form is wrong.
    pub(crate) fn read(&self) -> Result<Option<Grammar>> {
        let (flag, grammar) = if let Some(source) = &self.json_schema {
            let is_json =
                matches!(source.trim(), "true" | "false") || source.trim().starts_with('{');
            let text = text(source, is_json)?;
            let schema = serde_json::from_str(&text);
            let schema = schema.map_err(|error| {
                let place = if is_json {
                    String::new()
                } else {
                    format!("{source}: ")
                };
                let message = format!("--json-schema: {place}not valid JSON: {error}");
                failure::usage("generate", message)
            })?;
            ("--json-schema", Grammar::JsonSchema(schema))
        } else if self.json_object {
            ("--json-object", Grammar::JsonObject)
        } else if let Some(regex) = &self.regex {
            ("--regex", Grammar::Regex(regex.clone()))
        } else if let Some(source) = &self.grammar {
            let is_grammar = source.contains("start:") || source.contains("start :");
            ("--grammar", Grammar::Lark(text(source, is_grammar)?))
        } else {
            return Ok(None);
        };
        let wrong = |error| failure::usage("generate", format!("{flag}: {error}"));
        grammar.validate().map_err(wrong)?;
        Ok(Some(grammar))
    }
}

/// `source` itself, or what is in the file that it names.
fn text(source: &str, itself: bool) -> Result<String> {
    if itself {
        return Ok(source.to_owned());
    }
    let path = Path::new(source);
    fs::read_to_string(path).with_context(|| path.display().to_string())
}
