//! The tools of a request: their names, and the types that their parameters have.

use std::sync::Arc;

use serde_json::{Map, Number, Value};

use super::literal;

/// Tools as JSON schemas, `{"type": "function", "function": {"name": .., "parameters": ..}}`
/// or the inner object alone. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Tools(Arc<[Value]>);

impl Tools {
    pub(super) fn new(tools: &[Value]) -> Self {
        Self(tools.into())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn names(&self) -> Vec<String> {
        let names = self
            .0
            .iter()
            .filter_map(|tool| function(tool)["name"].as_str());
        names.map(str::to_owned).collect()
    }

    /// The schema of a parameter; none where it is not described.
    fn parameter(&self, name: &str, key: &str) -> Option<&Map<String, Value>> {
        let tool = self
            .0
            .iter()
            .map(function)
            .find(|tool| tool["name"] == name)?;
        tool["parameters"]["properties"][key].as_object()
    }

    /// The type of a parameter, where it is one.
    pub(super) fn kind(&self, name: &str, key: &str) -> Option<&str> {
        self.parameter(name, key)?.get("type")?.as_str()
    }

    /// The value that `text` is for a parameter: mlx-lm's rule for Qwen3-coder. None when its
    /// type is a number and the text is not.
    pub(super) fn convert(&self, name: &str, key: &str, text: &str) -> Option<Value> {
        const TEXT: [&str; 6] = ["string", "str", "text", "varchar", "char", "enum"];
        const BOOLEAN: [&str; 3] = ["boolean", "bool", "binary"];
        const NESTED: [&str; 5] = ["object", "array", "arr", "dict", "list"];
        const INTEGER: [&str; 5] = ["int", "uint", "long", "short", "unsigned"];
        if text.to_lowercase() == "null" {
            return Some(Value::Null);
        }
        let schema = self
            .parameter(name, key)
            .filter(|schema| !schema.is_empty());
        let Some(schema) = schema else {
            return Some(text.into());
        };
        let kind = match schema.get("type") {
            None => "string".to_owned(),
            Some(Value::String(kind)) => kind.trim().to_lowercase(),
            // Several types: by what the text is.
            Some(_) => String::new(),
        };
        let starts = |with: &[&str]| with.iter().any(|start| kind.starts_with(start));
        if TEXT.contains(&&*kind) {
            Some(text.into())
        } else if starts(&INTEGER) {
            number(text).filter(|number| number.is_i64() || number.is_u64())
        } else if starts(&["num", "float"]) {
            number(text)
        } else if BOOLEAN.contains(&&*kind) {
            Some((text.to_lowercase() == "true").into())
        } else {
            let nested = starts(&NESTED).then(|| lenient_json(text)).flatten();
            Some(
                nested
                    .or_else(|| literal::parse(text))
                    .unwrap_or_else(|| text.into()),
            )
        }
    }

    /// The value that `text` is for a parameter: text where its type says so, else JSON or a
    /// Python literal where it is one.
    pub(super) fn guess(&self, name: &str, key: &str, text: &str) -> Value {
        if self.kind(name, key) == Some("string") {
            return text.into();
        }
        serde_json::from_str(text)
            .ok()
            .or_else(|| literal::parse(text))
            .unwrap_or_else(|| text.into())
    }
}

fn function(tool: &Value) -> &Value {
    tool.get("function").unwrap_or(tool)
}

/// A number as Python's `float` reads it, an integer where it is one.
fn number(text: &str) -> Option<Value> {
    let text = text.trim();
    if let Ok(integer) = text.parse::<i64>() {
        return Some(integer.into());
    }
    let value: f64 = text.parse().ok()?;
    // As f64 the limit is 2^63; below it the cast is exact.
    if value.fract() == 0.0 && value.abs() < i64::MAX as f64 {
        return Some((value as i64).into());
    }
    Number::from_f64(value).map(Value::Number)
}

/// JSON whose strings may hold line breaks and other control characters, as Python's
/// `json.loads(strict=False)`.
fn lenient_json(text: &str) -> Option<Value> {
    if let Ok(value) = serde_json::from_str(text) {
        return Some(value);
    }
    let (mut fixed, mut string, mut escaped) = (String::with_capacity(text.len()), false, false);
    for character in text.chars() {
        if string && character < ' ' {
            fixed.push_str(&format!("\\u{:04x}", u32::from(character)));
        } else {
            fixed.push(character);
        }
        match character {
            _ if escaped => escaped = false,
            '\\' if string => escaped = true,
            '"' => string = !string,
            _ => {}
        }
    }
    serde_json::from_str(&fixed).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn numbers() {
        assert_eq!(number(" 3 "), Some(json!(3)));
        assert_eq!(number("3.0"), Some(json!(3)));
        assert_eq!(number("1e3"), Some(json!(1000)));
        assert_eq!(number("2.5"), Some(json!(2.5)));
        assert_eq!(number("1e300"), Some(json!(1e300)));
        for wrong in ["", "x", "nan", "inf", "1 2"] {
            assert_eq!(number(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn json_with_line_breaks() {
        assert_eq!(
            lenient_json("{\"a\": \"x\ny\\\"\n\"}"),
            Some(json!({"a": "x\ny\"\n"}))
        );
        assert_eq!(lenient_json("{\"a\": }"), None);
    }
}
