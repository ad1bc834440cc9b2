//! Python literals, as `ast.literal_eval` reads them, to JSON values.

use std::iter::Peekable;
use std::str::Chars;

use serde_json::{Map, Number, Value};

/// Deeper nesting is no literal that a model means.
const MAX_DEPTH: usize = 64;

/// The value of a literal: a number, a text, `True`, `False`, `None`, a list, a tuple (a list
/// too) or a dictionary, whose keys become texts as `json.dumps` makes them. None for anything
/// else.
pub(super) fn parse(text: &str) -> Option<Value> {
    let mut reader = Reader {
        rest: text.trim().chars().peekable(),
        depth: 0,
    };
    let value = reader.value()?;
    reader.space();
    reader.rest.next().is_none().then_some(value)
}

struct Reader<'a> {
    rest: Peekable<Chars<'a>>,
    depth: usize,
}

impl Reader<'_> {
    fn space(&mut self) {
        while self.rest.next_if(|c| c.is_ascii_whitespace()).is_some() {}
    }

    fn take(&mut self, wanted: char) -> bool {
        self.rest.next_if_eq(&wanted).is_some()
    }

    fn value(&mut self) -> Option<Value> {
        self.space();
        match *self.rest.peek()? {
            '[' => self.list(']'),
            '(' => self.list(')'),
            '{' => self.dictionary(),
            '"' | '\'' => self.texts().map(Value::String),
            '-' | '+' | '.' | '0'..='9' => self.number(),
            _ => match &*self.word() {
                "True" => Some(true.into()),
                "False" => Some(false.into()),
                "None" => Some(Value::Null),
                _ => None,
            },
        }
    }

    fn word(&mut self) -> String {
        let mut word = String::new();
        while let Some(c) = self.rest.next_if(|c| c.is_alphanumeric() || *c == '_') {
            word.push(c);
        }
        word
    }

    fn deeper<T>(&mut self, inner: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        if self.depth == MAX_DEPTH {
            return None;
        }
        self.depth += 1;
        let value = inner(self);
        self.depth -= 1;
        value
    }

    fn list(&mut self, end: char) -> Option<Value> {
        self.rest.next();
        self.deeper(|reader| {
            let mut items = Vec::new();
            let mut comma = false;
            loop {
                reader.space();
                if reader.take(end) {
                    break;
                }
                if !items.is_empty() && !comma {
                    return None;
                }
                items.push(reader.value()?);
                reader.space();
                comma = reader.take(',');
            }
            // `(1)` is a number in parentheses.
            if end == ')' && items.len() == 1 && !comma {
                return items.pop();
            }
            Some(Value::Array(items))
        })
    }

    fn dictionary(&mut self) -> Option<Value> {
        self.rest.next();
        self.deeper(|reader| {
            let mut fields = Map::new();
            let mut comma = true;
            loop {
                reader.space();
                if reader.take('}') {
                    return Some(Value::Object(fields));
                }
                if !comma {
                    return None;
                }
                let key = match reader.value()? {
                    Value::String(key) => key,
                    Value::Array(_) | Value::Object(_) => return None,
                    // `json.dumps` writes these as JSON does.
                    other => other.to_string(),
                };
                reader.space();
                if !reader.take(':') {
                    return None;
                }
                let value = reader.value()?;
                fields.insert(key, value);
                reader.space();
                comma = reader.take(',');
            }
        })
    }

    /// Texts beside each other are one.
    fn texts(&mut self) -> Option<String> {
        let mut all = String::new();
        while let Some(quote) = self.rest.next_if(|c| matches!(c, '"' | '\'')) {
            self.text(quote, &mut all)?;
            self.space();
        }
        Some(all)
    }

    fn text(&mut self, quote: char, all: &mut String) -> Option<()> {
        loop {
            match self.rest.next()? {
                '\\' => self.escape(all)?,
                '\n' => return None,
                c if c == quote => return Some(()),
                c => all.push(c),
            }
        }
    }

    fn escape(&mut self, all: &mut String) -> Option<()> {
        let c = match self.rest.next()? {
            '\n' => return Some(()),
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            'a' => '\x07',
            'b' => '\x08',
            'f' => '\x0c',
            'v' => '\x0b',
            c @ ('\\' | '\'' | '"') => c,
            'x' => self.code(2)?,
            'u' => self.code(4)?,
            'U' => self.code(8)?,
            c @ '0'..='7' => {
                let mut code = c.to_digit(8)?;
                for _ in 0..2 {
                    let Some(digit) = self.rest.next_if(|c| c.is_digit(8)) else {
                        break;
                    };
                    code = code * 8 + digit.to_digit(8)?;
                }
                char::from_u32(code)?
            }
            // Python keeps the backslash of an escape that it does not know.
            c => {
                all.push('\\');
                c
            }
        };
        all.push(c);
        Some(())
    }

    fn code(&mut self, digits: usize) -> Option<char> {
        let mut code = 0;
        for _ in 0..digits {
            code = code * 16 + self.rest.next()?.to_digit(16)?;
        }
        char::from_u32(code)
    }

    fn number(&mut self) -> Option<Value> {
        let mut digits = String::new();
        while let Some(sign) = self.rest.next_if(|c| matches!(c, '-' | '+')) {
            // `--1` is allowed in Python, and no model means it.
            if !digits.is_empty() {
                return None;
            }
            digits.push(sign);
        }
        let start = digits.len();
        loop {
            let after_exponent = digits[start..].ends_with(['e', 'E']);
            let next = self.rest.next_if(|c| {
                c.is_ascii_digit()
                    || matches!(c, '.' | 'e' | 'E' | '_')
                    || after_exponent && matches!(c, '-' | '+')
            });
            match next {
                Some('_') if digits[start..].ends_with(|c: char| c.is_ascii_digit()) => {
                    self.rest.peek().filter(|c| c.is_ascii_digit())?;
                }
                Some('_') => return None,
                Some(c) => digits.push(c),
                None => break,
            }
        }
        let plain = &digits[start..];
        // Python has no number with a zero in front.
        let is_integer = plain.bytes().all(|c| c.is_ascii_digit());
        if plain.is_empty() || is_integer && plain.len() > 1 && plain.starts_with('0') {
            return None;
        }
        let digits = digits.strip_prefix('+').unwrap_or(&digits);
        if is_integer {
            if let Ok(integer) = digits.parse::<i64>() {
                return Some(integer.into());
            }
            if let Ok(integer) = digits.parse::<u64>() {
                return Some(integer.into());
            }
        }
        Number::from_f64(digits.parse().ok()?).map(Value::Number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    // Expected values: Python 3.11's `json.dumps(ast.literal_eval(text))`.
    #[test]
    fn literals() {
        for (text, expected) in [
            ("12", json!(12)),
            (" -1_000 ", json!(-1000)),
            ("+.5", json!(0.5)),
            ("1e-3", json!(0.001)),
            ("2.", json!(2.0)),
            ("True", json!(true)),
            ("None", json!(null)),
            ("'a\\'b\\n\\x41\\u00e9\\q'", json!("a'b\nAé\\q")),
            ("\"x\" 'y'", json!("xy")),
            ("[1, 'a', [ ], (2,), (3), ]", json!([1, "a", [], [2], 3])),
            (
                "{'a': {1: None, True: 2.5}, }",
                json!({"a": {"1": null, "true": 2.5}}),
            ),
            ("()", json!([])),
        ] {
            assert_eq!(parse(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_literal() {
        for text in [
            "",
            "x",
            "true",
            "1 2",
            "[1 2]",
            "[,]",
            "{'a'}",
            "'a",
            "'a\nb'",
            "{[1]: 2}",
            "f(1)",
            "1__0",
            "1_",
            "010",
            "1e",
            "-",
            "'\\ud800'",
            "[1",
            "2025-06-15",
        ] {
            assert_eq!(parse(text), None, "{text:?}");
        }
        assert_eq!(parse(&"[".repeat(100_000)), None);
    }
}
