//! What a model's chat template can be asked for.

use mlex_models::text::{ChatRequest, ChatTemplate};
use serde_json::{Map, Value, json};

/// What can be done with a model beside continuing a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Abilities {
    /// Conversations: there is a chat template.
    pub(super) chat: bool,
    /// The template puts tools into the prompt.
    pub(super) tools: bool,
    /// The template heeds `enable_thinking`.
    pub(super) thinking: bool,
}

impl Abilities {
    /// Tries the template out: what changes its prompt is understood.
    pub(super) fn of(template: Option<&ChatTemplate>) -> Self {
        let Some(template) = template else {
            return Self::default();
        };
        let messages = [json!({"role": "user", "content": "Hi"})];
        let tool = json!({"type": "function", "function": {
            "name": "look_up",
            "description": "Looks a word up",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        }});
        let tools = [tool];
        let prompt = |tools: Option<&[Value]>, thinking: Option<bool>| {
            let thinking = thinking.map(|on| ("enable_thinking".to_owned(), json!(on)));
            let request = ChatRequest {
                messages: &messages,
                tools,
                add_generation_prompt: true,
                variables: Map::from_iter(thinking),
                ..ChatRequest::default()
            };
            // A template that refuses a request does not understand it.
            template.render(&request).ok()
        };
        let differs = |one: Option<String>, other: Option<String>| {
            one.zip(other).is_some_and(|(one, other)| one != other)
        };
        Self {
            chat: true,
            tools: differs(prompt(Some(&tools), None), prompt(None, None)),
            thinking: differs(prompt(None, Some(true)), prompt(None, Some(false))),
        }
    }

    /// Their names.
    pub(super) fn names(self) -> Vec<&'static str> {
        [
            ("chat", self.chat),
            ("tools", self.tools),
            ("thinking", self.thinking),
        ]
        .into_iter()
        .filter_map(|(name, can)| can.then_some(name))
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_tell_what_they_understand() {
        let names = |source: &str| {
            let template = ChatTemplate::new(source).unwrap();
            Abilities::of(Some(&template)).names()
        };
        assert_eq!(Abilities::of(None).names(), [""; 0]);
        assert_eq!(names("{{ messages[0].content }}"), ["chat"]);
        assert_eq!(names("{{ tools }}"), ["chat", "tools"]);
        let think = "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}";
        assert_eq!(names(think), ["chat", "thinking"]);
        let refuses = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}";
        assert_eq!(names(refuses), ["chat"]);
    }
}
