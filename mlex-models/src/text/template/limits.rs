//! What a template may cost. Templates come with models from anywhere, so none may hang, take the
//! memory or overflow the stack.
//!
//! The template language counts steps and the data they make as fuel. It does not count the
//! depth of expressions and of values, which parsing, printing and dropping follow by
//! recursion: hence a bound on the size of a tag, a large stack, and a bound on what is printed.
//!
//! Two gaps of minijinja 3.1 remain: a list that is added to itself 33 times is built without
//! being counted, and a namespace that contains itself overflows the stack where `~` prints it.

use std::thread;

use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, Output, State, Value as Jinja};
use serde_json::{Map, Value};

use super::{generation, json};

/// Steps that every rendering may take; each may also make 64 bytes of data.
const FUEL: u64 = 2_000_000;
/// How deep macros may call each other.
const MAX_RECURSION: usize = 100;
/// How deep a printed value may be nested.
const MAX_DEPTH: usize = 128;
/// Ten times the longest templates in use.
const MAX_SOURCE: usize = 1 << 20;
const MAX_TAG: usize = 1 << 15;
/// Enough for the deepest value that the fuel lets a template make (a few hundred bytes a
/// level). Only the part that is used takes memory.
const STACK: usize = 128 << 20;

/// Sets the limits that do not depend on the input.
pub(super) fn set(environment: &mut Environment<'_>) {
    environment.set_recursion_limit(MAX_RECURSION);
    environment.set_formatter(print);
}

/// The source as the template language takes it. Fails where it is too large, with what to say
/// after the template's name.
pub(super) fn checked(source: &str) -> Result<String, String> {
    if source.len() > MAX_SOURCE {
        return Err(format!(": {} bytes are too long", source.len()));
    }
    // Jinja reads every kind of line break as one.
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    generation::pass_through(&source, MAX_TAG)
        .map_err(|line| format!(", line {line}: the tag is too long"))
}

/// The fuel for a rendering of these variables: more for longer chats.
pub(super) fn fuel(variables: &Map<String, Value>) -> u64 {
    fn weight(value: &Value) -> u64 {
        match value {
            Value::String(text) => 64 + text.len() as u64,
            Value::Array(items) => 64 + items.iter().map(weight).sum::<u64>(),
            Value::Object(fields) => 64 + fields.values().map(weight).sum::<u64>(),
            _ => 64,
        }
    }
    FUEL + variables.values().map(weight).sum::<u64>()
}

/// Runs `work` where recursion has room. Fails with what to say after the template's name.
pub(super) fn on_large_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, String> {
    thread::scope(|scope| {
        let builder = thread::Builder::new()
            .name("chat template".into())
            .stack_size(STACK);
        let running = builder
            .spawn_scoped(scope, work)
            .map_err(|error| format!(": {error}"))?;
        running
            .join()
            .map_err(|_| ": the template engine gave up".to_owned())
    })
}

/// Prints a value, unless it is nested too deep; a namespace can even contain itself. Numbers are
/// written as Python does.
fn print(out: &mut Output, state: &mut State, value: &Jinja) -> Result<(), Error> {
    if value.kind() == ValueKind::Number {
        return Ok(out.write_str(&json::number(value))?);
    }
    check_depth(state, value, MAX_DEPTH)?;
    minijinja::escape_formatter(out, state, value)
}

fn check_depth(state: &State, value: &Jinja, left: usize) -> Result<(), Error> {
    let kind = value.kind();
    if !matches!(kind, ValueKind::Seq | ValueKind::Map) {
        return Ok(());
    }
    let Some(left) = left.checked_sub(1) else {
        let message = "a printed value is nested too deep";
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    };
    for item in value.try_iter()? {
        state.consume_fuel(1)?;
        match kind {
            ValueKind::Map => check_depth(state, &value.get_item(&item)?, left)?,
            _ => check_depth(state, &item, left)?,
        }
    }
    Ok(())
}
