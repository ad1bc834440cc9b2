//! Messages in the OpenAI shape, made ready for chat templates.

use serde_json::{Map, Value, json};

use super::files::describe;
use crate::error::{Error, Result};
use crate::towers::MediaKind;

/// Messages as chat templates take them, from messages in the OpenAI shape:
///
/// * `content` in parts, `[{"type": "text", "text": ..}]`, becomes one text, and no content an
///   empty one; with an image, a video or a sound among them it stays in parts, of which those
///   are `{"type": "image"}`, `video` or `audio`;
/// * the arguments of `tool_calls`, JSON text, become the object that they stand for;
/// * everything else stays, such as `reasoning_content`, `name` and `tool_call_id`.
///
/// That is what mlx-lm's server does (`process_message_content`).
///
/// # Errors
/// When a message is not of that shape, or has a part of another type; the error names it.
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
        fields.insert("content".into(), content);
        if let Some(Value::Array(calls)) = fields.get_mut("tool_calls") {
            for (index, call) in calls.iter_mut().enumerate() {
                tool_call(&format!("{at}.tool_calls[{index}]"), call)?;
            }
        }
        Ok(Value::Object(fields))
    };
    messages.iter().enumerate().map(prepare).collect()
}

/// The content of a message as one text, or in parts where some are media.
fn content(at: &str, content: Option<&Value>) -> Result<Value> {
    let parts = match content {
        None | Some(Value::Null) => return Ok("".into()),
        Some(Value::String(text)) => return Ok(text.as_str().into()),
        Some(Value::Array(parts)) => parts,
        other => return Err(wrong(at, "content", "a text or a list of parts", other)),
    };
    let mut all = String::new();
    let mut prepared: Vec<Value> = Vec::with_capacity(parts.len());
    let mut has_media = false;
    for (index, part) in parts.iter().enumerate() {
        let at = format!("{at}.content[{index}]");
        if let Some(kind) = media_kind(part) {
            has_media = true;
            prepared.push(json!({ "type": kind.to_string() }));
            continue;
        }
        if part["type"] != "text" {
            let expected = "text, image, video or audio";
            return Err(wrong(&at, "type", expected, part.get("type")));
        }
        match part.get("text") {
            Some(Value::String(text)) => {
                all.push_str(text);
                prepared.push(json!({"type": "text", "text": text}));
            }
            other => return Err(wrong(&at, "text", "a text", other)),
        }
    }
    Ok(if has_media {
        prepared.into()
    } else {
        all.into()
    })
}

/// Of which kind a part of a message is; none for text and what is not known.
fn media_kind(part: &Value) -> Option<MediaKind> {
    match part.get("type")?.as_str()? {
        "image" | "image_url" | "input_image" => Some(MediaKind::Image),
        "video" | "video_url" | "input_video" => Some(MediaKind::Video),
        "audio" | "audio_url" | "input_audio" => Some(MediaKind::Audio),
        _ => None,
    }
}

/// The parts of messages that are media, with their kinds, in order.
pub fn media_parts(messages: &[Value]) -> impl Iterator<Item = (MediaKind, &Value)> {
    let parts = messages
        .iter()
        .filter_map(|message| message.get("content")?.as_array());
    parts
        .flatten()
        .filter_map(|part| Some((media_kind(part)?, part)))
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
            json!({"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": "data:"}}, {"type": "text", "text": "t"},
                {"type": "input_audio", "input_audio": {}}, {"type": "video"},
            ]}),
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
            json!({"role": "user", "content": [
                {"type": "image"}, {"type": "text", "text": "t"}, {"type": "audio"},
                {"type": "video"},
            ]}),
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
            error(json!({"role": "user", "content": [{"type": "file"}]})),
            "messages[0].content[0].type: expected text, image, video or audio, found \"file\""
        );
        assert_eq!(
            error(json!({"role": "assistant", "tool_calls": [{"function": {"arguments": "[1]"}}]})),
            "messages[0].tool_calls[0].function.arguments: expected JSON text of an object, found \"[1]\""
        );
    }
}
