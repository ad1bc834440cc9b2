//! From a grammar to llguidance's matcher, within limits.
//!
//! llguidance bounds most of its own work (regex fuel, Earley items, lexer states, grammar size),
//! and catches its panics while it matches. What it does not bound are the depth of its recursions
//! and the time of some compiles, such as of long chains of references. So sources are bounded in
//! length and nesting, and a compile has a thread with a large stack of its own, which is left
//! alone when it has taken too long.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use super::Grammar;
use crate::{Error, Result};

/// The longest source of a grammar, in bytes.
const MAX_BYTES: usize = 256 << 10;
/// How deeply brackets may be nested.
const MAX_DEPTH: usize = 128;
/// Whitespace between the parts of JSON where the schema does not say: none, a space, or a line
/// break and up to 32 spaces. Without a bound a model may write nothing else for ever.
const WHITESPACE: &str = " |\n {0,32}";
/// The stack of the thread that compiles. Pages that are not touched take no memory.
const STACK_BYTES: usize = 256 << 20;
/// How long a compile may take; usual ones take milliseconds.
const DEADLINE: Duration = Duration::from_secs(10);

/// llguidance's limits: what a mask or a grammar may cost. The default ones are made for servers;
/// errors shall not have the state of the parser in them.
pub(super) fn limits() -> ParserLimits {
    ParserLimits {
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// Checks `grammar` by compiling it for a vocabulary of single bytes.
pub(super) fn validate(grammar: &Grammar) -> Result<()> {
    let env = ApproximateTokEnv::single_byte_env();
    let factory = ParserFactory::new(&env, InferenceCapabilities::default(), &[]);
    let mut factory = factory.map_err(|error| grammar.error(error))?;
    *factory.limits_mut() = limits();
    factory.quiet();
    matcher(grammar, &Arc::new(factory)).map(drop)
}

/// The matcher of `grammar` at its beginning.
pub(super) fn matcher(grammar: &Grammar, factory: &Arc<ParserFactory>) -> Result<Matcher> {
    let source = source(grammar)?;
    let factory = Arc::clone(factory);
    let (done, result) = channel();
    let compile = move || {
        let build = AssertUnwindSafe(|| Matcher::new(factory.create_parser(source)));
        // Nobody waits any more where this fails.
        let _ = done.send(catch_unwind(build));
    };
    let thread = thread::Builder::new().stack_size(STACK_BYTES);
    thread.name("mlex-grammar".to_owned()).spawn(compile)?;
    let matcher = match result.recv_timeout(DEADLINE) {
        Ok(Ok(matcher)) => matcher,
        Err(RecvTimeoutError::Timeout) => {
            let seconds = DEADLINE.as_secs();
            return Err(grammar.error(format!("takes more than {seconds} s to compile")));
        }
        Ok(Err(_)) | Err(RecvTimeoutError::Disconnected) => {
            return Err(grammar.error("llguidance gave up on it"));
        }
    };
    match matcher.get_error() {
        Some(error) => Err(grammar.error(error)),
        None => Ok(matcher),
    }
}

/// What llguidance is given.
fn source(grammar: &Grammar) -> Result<TopLevelGrammar> {
    let check = |text: &str| {
        if text.len() > MAX_BYTES {
            let found = format!("{} bytes, more than {MAX_BYTES}", text.len());
            return Err(grammar.error(found));
        }
        if depth(text) > MAX_DEPTH {
            return Err(too_deep(grammar));
        }
        Ok(())
    };
    Ok(match grammar {
        Grammar::JsonObject => schema(json!({"type": "object"})),
        Grammar::JsonSchema(value) => {
            if !value.is_object() && !value.is_boolean() {
                return Err(grammar.error("expected an object or a boolean"));
            }
            // Printing it recurses, too.
            if value_depth(value) > MAX_DEPTH {
                return Err(too_deep(grammar));
            }
            check(&value.to_string())?;
            schema(value.clone())
        }
        Grammar::Regex(regex) => {
            check(regex)?;
            TopLevelGrammar::from_regex(regex)
        }
        Grammar::Lark(lark) => {
            check(lark)?;
            TopLevelGrammar::from_lark(lark.clone())
        }
    })
}

fn too_deep(grammar: &Grammar) -> Error {
    grammar.error(format!("nested more than {MAX_DEPTH} deep"))
}

/// How deeply `value` is nested, as far as one level beyond the limit.
fn value_depth(value: &Value) -> usize {
    let mut left = vec![(value, 0)];
    let mut deepest = 0;
    while let Some((value, depth)) = left.pop() {
        deepest = deepest.max(depth);
        if deepest > MAX_DEPTH {
            break;
        }
        match value {
            Value::Array(items) => left.extend(items.iter().map(|item| (item, depth + 1))),
            Value::Object(fields) => left.extend(fields.values().map(|item| (item, depth + 1))),
            _ => {}
        }
    }
    deepest
}

/// A schema that says how its JSON is written.
fn schema(mut schema: Value) -> TopLevelGrammar {
    if schema == Value::Bool(true) {
        schema = json!({});
    }
    if let Some(fields) = schema.as_object_mut() {
        fields
            .entry("x-guidance")
            .or_insert_with(|| json!({"whitespace_pattern": WHITESPACE}));
    }
    TopLevelGrammar::from_json_schema(schema)
}

/// How deeply brackets are nested in `text` at most, those in its literals included.
fn depth(text: &str) -> usize {
    let (mut depth, mut deepest) = (0usize, 0);
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    deepest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn brackets_are_counted() {
        assert_eq!(depth(""), 0);
        assert_eq!(depth("a(b[c]{d})(e)"), 2);
        assert_eq!(depth(")))(("), 2);
    }
}
