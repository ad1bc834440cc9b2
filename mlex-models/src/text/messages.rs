//! Messages in the OpenAI shape, made ready for chat templates.

use serde_json::{Map, Value};

use super::files::describe;
use crate::error::{Error, Result};

/// Messages as chat templates take them, from messages in the OpenAI shape:
///
/// * `content` in parts, `[{"type": "text", "text": ..}]`, becomes one text, and no content an
///   empty one;
/// * the arguments of `tool_calls`, JSON text, become the object that they stand for;
/// * everything else stays, such as `reasoning_content`, `name` and `tool_call_id`.
///
/// That is what mlx-lm's server does (`process_message_content`).
///
/// # Errors
/// When a message is not of that shape, or has a part that is no text; the error names it.
pub fn chat_messages(messages: &[Value]) -> Result<Vec<Value>> {
    let prepare = |(index, message): (usize, &Value)| {
        let at = format!("messages[{index}]");
        let Value::Object(fields) = message else {
            return Err(Error::field(at, "an object", describe(message)));
        };
        let mut fields = fields.clone();
        if !fields.get("role").is_some_and(Value::is_string) {
            return Err(wrong(&at, "role", "a text", fields.get("role")));
        }
        let content = content(&at, fields.get("content"))?;
        fields.insert("content".into(), content.into());
        if let Some(Value::Array(calls)) = fields.get_mut("tool_calls") {
            for (index, call) in calls.iter_mut().enumerate() {
                tool_call(&format!("{at}.tool_calls[{index}]"), call)?;
            }
        }
        Ok(Value::Object(fields))
    };
    messages.iter().enumerate().map(prepare).collect()
}

/// The content of a message as one text.
fn content(at: &str, content: Option<&Value>) -> Result<String> {
    match content {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let mut all = String::new();
            for (index, part) in parts.iter().enumerate() {
                let at = format!("{at}.content[{index}]");
                if part["type"] != "text" {
                    return Err(wrong(&at, "type", "\"text\"", part.get("type")));
                }
                match part.get("text") {
                    Some(Value::String(text)) => all.push_str(text),
                    other => return Err(wrong(&at, "text", "a text", other)),
                }
            }
            Ok(all)
        }
        other => Err(wrong(at, "content", "a text or a list of parts", other)),
    }
}

fn tool_call(at: &str, call: &mut Value) -> Result<()> {
    let Some(function) = call.get_mut("function") else {
        return Ok(());
    };
    let arguments = function.get_mut("arguments");
    let Some(Value::String(text)) = arguments.as_deref() else {
        return Ok(());
    };
    let parsed = if text.is_empty() {
        Map::new()
    } else {
        serde_json::from_str(text).map_err(|_| {
            let expected = "JSON text of an object";
            wrong(
                at,
                "function.arguments",
                expected,
                Some(&text.as_str().into()),
            )
        })?
    };
    if let Some(arguments) = arguments {
        *arguments = Value::Object(parsed);
    }
    Ok(())
}

fn wrong(at: &str, field: &str, expected: &str, found: Option<&Value>) -> Error {
    let found = found.map_or_else(|| "nothing".to_owned(), describe);
    Error::field(format!("{at}.{field}"), expected, found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_openai_shape_becomes_that_of_templates() {
        let messages = [
            json!({"role": "system", "content": "s"}),
            json!({"role": "user", "content": [
                {"type": "text", "text": "a"}, {"type": "text", "text": "b"},
            ]}),
            json!({"role": "assistant", "content": null, "reasoning_content": "r", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": [1]}"}},
                {"id": "2", "type": "function", "function": {"name": "g", "arguments": {"y": 2}}},
                {"id": "3", "type": "function", "function": {"name": "h", "arguments": ""}},
            ]}),
            json!({"role": "tool", "tool_call_id": "1", "content": "3"}),
        ];
        let expected = [
            json!({"role": "system", "content": "s"}),
            json!({"role": "user", "content": "ab"}),
            json!({"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": [1]}}},
                {"id": "2", "type": "function", "function": {"name": "g", "arguments": {"y": 2}}},
                {"id": "3", "type": "function", "function": {"name": "h", "arguments": {}}},
            ]}),
            json!({"role": "tool", "tool_call_id": "1", "content": "3"}),
        ];
        assert_eq!(chat_messages(&messages).unwrap(), expected);
    }

    #[test]
    fn other_shapes_are_named() {
        let error = |message: Value| chat_messages(&[message]).unwrap_err().to_string();
        assert_eq!(error(json!(1)), "messages[0]: expected an object, found 1");
        assert_eq!(
            error(json!({"content": "x"})),
            "messages[0].role: expected a text, found nothing"
        );
        assert_eq!(
            error(json!({"role": "user", "content": 1})),
            "messages[0].content: expected a text or a list of parts, found 1"
        );
        assert_eq!(
            error(json!({"role": "user", "content": [{"type": "image_url"}]})),
            "messages[0].content[0].type: expected \"text\", found \"image_url\""
        );
        assert_eq!(
            error(json!({"role": "assistant", "tool_calls": [{"function": {"arguments": "[1]"}}]})),
            "messages[0].tool_calls[0].function.arguments: expected JSON text of an object, found \"[1]\""
        );
    }
}
