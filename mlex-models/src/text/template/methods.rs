//! Methods of Python's types that templates call.

use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

/// Calls a method that the template language does not have itself.
pub(super) fn call(
    state: &mut State,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    if let Some(text) = value.as_str()
        && let Some(result) = string_method(text, method, arguments)
    {
        return result;
    }
    if method == "format" && value.as_str().is_some_and(has_huge_width) {
        return Err(wrong(method));
    }
    pycompat::unknown_method_callback(state, value, method, arguments)
}

/// More than any column of a real template is wide.
const MAX_WIDTH: usize = 4;

/// Whether a format asks for a width or precision of more digits than [`MAX_WIDTH`], or takes
/// it from an argument. The text would be made before its size is counted.
fn has_huge_width(format: &str) -> bool {
    let specs = format
        .split('{')
        .skip(1)
        .map(|rest| rest.split('}').next().unwrap_or(rest));
    let digits = |spec: &str| {
        spec.split(|c: char| !c.is_ascii_digit())
            .map(str::len)
            .max()
    };
    format.contains(":{")
        || format.contains(".{")
        || specs.into_iter().any(|spec| digits(spec) > Some(MAX_WIDTH))
}

/// The string methods that pycompat lacks.
fn string_method(text: &str, method: &str, arguments: &[Value]) -> Option<Result<Value, Error>> {
    let argument = || match arguments {
        [value] => value.as_str().ok_or_else(|| wrong(method)),
        _ => Err(wrong(method)),
    };
    let found = match method {
        "removeprefix" => argument().map(|end| text.strip_prefix(end).unwrap_or(text).into()),
        "removesuffix" => argument().map(|end| text.strip_suffix(end).unwrap_or(text).into()),
        "partition" => argument().map(|at| {
            let (before, after) = text.split_once(at).unwrap_or((text, ""));
            parts([before, if text.contains(at) { at } else { "" }, after])
        }),
        "rpartition" => argument().map(|at| {
            let (before, after) = text.rsplit_once(at).unwrap_or(("", text));
            parts([before, if text.contains(at) { at } else { "" }, after])
        }),
        "rsplit" => rsplit(text, arguments),
        _ => return None,
    };
    Some(found)
}

fn rsplit(text: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (at, limit) = match arguments {
        [at] => (at, -1),
        [at, limit] => (at, i64::try_from(limit.clone())?),
        _ => return Err(wrong("rsplit")),
    };
    let at = at
        .as_str()
        .filter(|at| !at.is_empty())
        .ok_or_else(|| wrong("rsplit"))?;
    let mut parts: Vec<&str> = match usize::try_from(limit) {
        Ok(limit) => text.rsplitn(limit.saturating_add(1), at).collect(),
        Err(_) => text.rsplit(at).collect(),
    };
    parts.reverse();
    Ok(parts.into_iter().map(Value::from).collect())
}

fn parts(parts: [&str; 3]) -> Value {
    parts.into_iter().map(Value::from).collect()
}

fn wrong(method: &str) -> Error {
    Error::new(
        ErrorKind::InvalidOperation,
        format!("{method}: wrong arguments"),
    )
}
