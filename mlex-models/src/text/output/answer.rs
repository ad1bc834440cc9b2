//! Parts put together.

use serde_json::{Map, Value, json};

use super::{Part, ToolCall};

/// What a model has answered, put together from its parts.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Answer {
    /// The text; malformed calls are in it as the model wrote them.
    pub text: String,
    /// The reasoning; none where there was none.
    pub reasoning: Option<String>,
    /// The tool calls.
    pub tool_calls: Vec<ToolCall>,
    /// The malformed calls, which are in the text too.
    pub malformed: Vec<String>,
}

impl Answer {
    /// Adds the next part.
    pub fn push(&mut self, part: &Part) {
        match part {
            Part::Text(text) => self.text.push_str(text),
            Part::Reasoning(text) => self
                .reasoning
                .get_or_insert_with(String::new)
                .push_str(text),
            Part::CallBegin { .. } | Part::CallArguments { .. } => {}
            Part::CallEnd { call, .. } => self.tool_calls.push(call.clone()),
            Part::Malformed { text, .. } => {
                self.text.push_str(text);
                self.malformed.push(text.clone());
            }
        }
    }

    /// The answer as a message of a conversation, in the OpenAI shape. `id` makes an id for a
    /// call that has none.
    pub fn message(&self, mut id: impl FnMut(&ToolCall) -> String) -> Value {
        let mut message = Map::new();
        message.insert("role".into(), "assistant".into());
        message.insert("content".into(), self.text.clone().into());
        if let Some(reasoning) = &self.reasoning {
            message.insert("reasoning_content".into(), reasoning.clone().into());
        }
        if !self.tool_calls.is_empty() {
            let calls: Vec<Value> = self
                .tool_calls
                .iter()
                .map(|call| {
                    let arguments = Value::Object(call.arguments.clone()).to_string();
                    json!({
                        "id": call.id.clone().unwrap_or_else(|| id(call)),
                        "type": "function",
                        "function": {"name": call.name, "arguments": arguments},
                    })
                })
                .collect();
            message.insert("tool_calls".into(), calls.into());
        }
        Value::Object(message)
    }
}
