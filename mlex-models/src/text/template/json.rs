//! `tojson` as transformers defines it: Python's `json.dumps` without escaping HTML.

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

/// Deeper than any tool schema, and shallow enough for the stack.
const MAX_DEPTH: usize = 128;

/// The options of `json.dumps` that templates can set.
struct Format {
    ensure_ascii: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

/// `value | tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(
    state: &mut State,
    value: &Value,
    arguments: Rest<Value>,
    named: Kwargs,
) -> Result<Value, Error> {
    let format = Format::new(&arguments, &named)?;
    named.assert_all_used()?;
    let mut out = String::new();
    format.write(&mut out, value, 0)?;
    let _ = state;
    Ok(Value::from(out))
}

impl Format {
    fn new(arguments: &[Value], named: &Kwargs) -> Result<Self, Error> {
        let argument = |position: usize, name: &str| -> Result<Option<Value>, Error> {
            let value = match arguments.get(position) {
                Some(value) => Some(value.clone()),
                None => named.get::<Option<Value>>(name)?,
            };
            Ok(value.filter(|value| !value.is_none() && !value.is_undefined()))
        };
        let ensure_ascii = argument(0, "ensure_ascii")?.is_some_and(|value| value.is_true());
        let indent = match argument(1, "indent")? {
            Some(indent) => Some(match indent.as_str() {
                Some(text) => text.to_owned(),
                None => {
                    let width = i64::try_from(indent).map_err(|_| invalid("tojson: indent"))?;
                    if width > 64 {
                        return Err(invalid("tojson: indent is above 64"));
                    }
                    " ".repeat(usize::try_from(width).unwrap_or(0))
                }
            }),
            None => None,
        };
        let (item_separator, key_separator) = match argument(2, "separators")? {
            Some(pair) => {
                let part = |index: usize| {
                    let part = pair.get_item_by_index(index).ok();
                    let part = part.and_then(|part| part.as_str().map(str::to_owned));
                    part.ok_or_else(|| invalid("tojson: separators are not two strings"))
                };
                (part(0)?, part(1)?)
            }
            None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
            None => (", ".to_owned(), ": ".to_owned()),
        };
        let sort_keys = argument(3, "sort_keys")?.is_some_and(|value| value.is_true());
        Ok(Self {
            ensure_ascii,
            indent,
            item_separator,
            key_separator,
            sort_keys,
        })
    }

    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid("tojson: the value is nested too deep"));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)),
            ValueKind::String => self.write_string(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.map(|item| (None, item));
                self.write_items(out, ['[', ']'], items, depth)?;
            }
            ValueKind::Map => {
                let mut items = Vec::new();
                for key in value.try_iter()? {
                    let item = value.get_item(&key)?;
                    items.push((Some(key_text(&key)?), item));
                }
                if self.sort_keys {
                    items.sort_by(|(a, _), (b, _)| a.cmp(b));
                }
                self.write_items(out, ['{', '}'], items.into_iter(), depth)?;
            }
            kind => return Err(invalid(format!("tojson: {kind} is not JSON"))),
        }
        Ok(())
    }

    fn write_items(
        &self,
        out: &mut String,
        brackets: [char; 2],
        items: impl Iterator<Item = (Option<String>, Value)>,
        depth: usize,
    ) -> Result<(), Error> {
        out.push(brackets[0]);
        let mut empty = true;
        for (key, item) in items {
            if !std::mem::take(&mut empty) {
                out.push_str(&self.item_separator);
            }
            self.break_line(out, depth + 1);
            if let Some(key) = key {
                self.write_string(out, &key);
                out.push_str(&self.key_separator);
            }
            self.write(out, &item, depth + 1)?;
        }
        if !empty {
            self.break_line(out, depth);
        }
        out.push(brackets[1]);
        Ok(())
    }

    fn break_line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    }

    fn write_string(&self, out: &mut String, text: &str) {
        out.push('"');
        for character in text.chars() {
            match character {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{C}' => out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::Number => Ok(number(key)),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::None => Ok("null".to_owned()),
        kind => Err(invalid(format!("tojson: a key cannot be a {kind}"))),
    }
}

/// A number as Python writes it.
pub(super) fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => python_float(float),
        _ => value.to_string(),
    }
}

/// A float as Python's `repr` and `json.dumps` write it: the shortest digits that give the
/// same number, with an exponent below 1e-4 and from 1e16 on.
fn python_float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if value != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = value.to_string();
    if plain.contains('.') {
        plain
    } else {
        plain + ".0"
    }
}

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

#[cfg(test)]
mod tests {
    use super::python_float;

    /// Expected values: `repr` of CPython 3.11.
    #[test]
    fn floats_are_written_as_python_does() {
        let cases = [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e-4, "0.0001"),
            (1.5e-5, "1.5e-05"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.25e100, "1.25e+100"),
            (123456.789, "123456.789"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-Infinity"),
        ];
        for (value, expected) in cases {
            assert_eq!(python_float(value), expected);
        }
    }
}
