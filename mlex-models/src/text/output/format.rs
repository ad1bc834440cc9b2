//! How a model marks its reasoning and its tool calls.

use super::body::Body;
use super::gemma::{self, GemmaBody};
use super::json::{JsonBody, Strict};
use super::minicpm::{self, MiniCpmBody};
use super::mistral::MistralBody;
use super::pythonic::PythonicBody;
use super::tools::Tools;
use super::xml::XmlBody;
use crate::text::{ChatTemplate, Tokenizer};

/// The syntax of a model's tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ToolFormat {
    /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`: Hermes, Qwen2.5, Qwen3.
    Json,
    /// `<tool_call><function=f><parameter=k>v</parameter></function></tool_call>`:
    /// Qwen3-coder, Qwen3.5, Nemotron 3.
    Xml,
    /// `<|tool_call>call:f{k:<|"|>v<|"|>}<tool_call|>`.
    Gemma4,
    /// `<TOOLCALL>[{"name": .., "arguments": {..}}]</TOOLCALL>`: Nemotron Nano 2.
    NemotronH,
    /// `<function name="f"><param name="k">v</param></function>`.
    MiniCpm5,
    /// `[TOOL_CALLS]f[ARGS]{..}`, or a list of JSON objects after the marker.
    Mistral,
    /// `{"name": .., "parameters": {..}}` as the whole answer, or after `<|python_tag|>`:
    /// Llama 3. Without a marker only tools that were offered are called.
    Llama3Json,
    /// `<|tool_call_start|>[f(k="v")]<|tool_call_end|>`: LFM2.
    Pythonic,
    /// `[f(k="v")]` as the whole answer: Llama 3.2 and 4. Only tools that were offered are
    /// called.
    Llama3Pythonic,
}

/// What stands before and after a span.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Markers {
    pub(super) start: String,
    pub(super) end: String,
}

/// How a model marks its reasoning and its tool calls. The default marks neither.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutputFormat {
    pub(super) reasoning: Option<Markers>,
    pub(super) tools: Option<ToolFormat>,
}

/// Markers of reasoning that are tokens of their own (mlx-lm `_infer_thinking`, and Mistral's).
const REASONING: [(&str, &str); 3] = [
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("[THINK]", "[/THINK]"),
];
/// Gemma 4's: a token, and the name of the channel.
const CHANNEL: (&str, &str) = ("<|channel>", "<channel|>");
const THOUGHT: &str = "thought";

impl OutputFormat {
    /// A format with these markers of reasoning and these tool calls.
    pub fn new(reasoning: Option<(&str, &str)>, tools: Option<ToolFormat>) -> Self {
        let markers = |(start, end): (&str, &str)| Markers {
            start: start.to_owned(),
            end: end.to_owned(),
        };
        Self {
            reasoning: reasoning
                .filter(|(start, end)| !start.is_empty() && !end.is_empty())
                .map(markers),
            tools,
        }
    }

    /// The format of a model: reasoning by the tokens that the tokenizer has, tool calls by
    /// what the chat template writes, as mlx-lm finds them (`tokenizer_utils.py`).
    pub fn of(tokenizer: &Tokenizer, template: Option<&ChatTemplate>) -> Self {
        let has = |token: &str| tokenizer.token_to_id(token).is_some();
        let both = |(start, end): (&str, &str)| has(start) && has(end);
        let channel = format!("{}{THOUGHT}", CHANNEL.0);
        let reasoning = REASONING
            .into_iter()
            .find(|&pair| both(pair))
            .or_else(|| both(CHANNEL).then_some((&*channel, CHANNEL.1)));
        let tools = template.and_then(|template| {
            let mut sources = template.sources();
            sources.find_map(|(_, source)| ToolFormat::of(source))
        });
        Self::new(reasoning, tools)
    }

    /// The markers before and after reasoning.
    pub fn reasoning(&self) -> Option<(&str, &str)> {
        self.reasoning
            .as_ref()
            .map(|markers| (&*markers.start, &*markers.end))
    }

    /// The syntax of tool calls.
    pub fn tools(&self) -> Option<ToolFormat> {
        self.tools
    }

    /// Whether a prompt ends with the marker that begins reasoning.
    pub fn opens_reasoning(&self, prompt: &str) -> bool {
        let prompt = prompt.trim_end();
        self.reasoning
            .as_ref()
            .is_some_and(|markers| prompt.ends_with(&markers.start))
    }

    /// Whether a token that is spelled `token` is a part of a marker, so that it must be seen
    /// although it is a special one.
    pub fn needs(&self, token: &str) -> bool {
        let reasoning = self.reasoning().map(|(start, end)| [start, end]);
        let tools = self.tools.map(ToolFormat::markers).unwrap_or_default();
        let mut markers = reasoning.iter().flatten().chain(tools);
        !token.is_empty() && markers.any(|marker| marker.contains(token))
    }
}

impl ToolFormat {
    /// The syntax that a chat template writes calls in: mlx-lm's `_infer_tool_parser`, and
    /// those that it does not know.
    pub fn of(template: &str) -> Option<Self> {
        let has = |text: &str| template.contains(text);
        if has("<|tool_call>") && has("<tool_call|>") {
            Some(Self::Gemma4)
        } else if has("<|tool_list_start|>") {
            Some(Self::Pythonic)
        } else if has("<tool_call>\\n<function=") || has("<tool_call>\n<function=") {
            Some(Self::Xml)
        } else if has("[TOOL_CALLS]") {
            Some(Self::Mistral)
        } else if has("<TOOLCALL>") {
            Some(Self::NemotronH)
        } else if has("<tool_call>") && has("tool_call.name") {
            Some(Self::Json)
        } else if has("<function name=") || has("<param name=") {
            Some(Self::MiniCpm5)
        } else if has("<|python_tag|>") || has("{\"name\": function name, \"parameters\":") {
            Some(Self::Llama3Json)
        } else if has("func_name1(params_name1=params_value1") {
            Some(Self::Llama3Pythonic)
        } else {
            None
        }
    }

    /// What stands before calls, and after them; nothing where there is no such marker.
    pub(super) fn span(self) -> (&'static str, &'static str) {
        match self {
            Self::Json | Self::Xml => ("<tool_call>", "</tool_call>"),
            Self::Gemma4 => ("<|tool_call>", "<tool_call|>"),
            Self::NemotronH => ("<TOOLCALL>", "</TOOLCALL>"),
            Self::MiniCpm5 => (minicpm::START, ""),
            Self::Mistral => ("[TOOL_CALLS]", ""),
            Self::Llama3Json => ("<|python_tag|>", ""),
            Self::Pythonic => ("<|tool_call_start|>", "<|tool_call_end|>"),
            Self::Llama3Pythonic => ("", ""),
        }
    }

    /// All strings whose tokens must be seen.
    fn markers(self) -> &'static [&'static str] {
        match self {
            Self::Json => &["<tool_call>", "</tool_call>"],
            Self::Xml => &[
                "<tool_call>",
                "</tool_call>",
                "<function=",
                "</function>",
                "<parameter=",
                "</parameter>",
            ],
            Self::Gemma4 => &["<|tool_call>", "<tool_call|>", gemma::QUOTE],
            Self::NemotronH => &["<TOOLCALL>", "</TOOLCALL>"],
            Self::MiniCpm5 => &[
                minicpm::START,
                "</function>",
                "<param name=",
                "</param>",
                "<![CDATA[",
                "]]>",
            ],
            Self::Mistral => &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
            Self::Llama3Json => &["<|python_tag|>"],
            Self::Pythonic => &["<|tool_call_start|>", "<|tool_call_end|>"],
            Self::Llama3Pythonic => &[],
        }
    }

    /// What reads the calls after a marker.
    pub(super) fn body(self, tools: &Tools) -> Box<dyn Body> {
        match self {
            Self::Json | Self::NemotronH => Box::new(JsonBody::closed()),
            Self::Xml => Box::new(XmlBody::new(tools.clone())),
            Self::Gemma4 => Box::new(GemmaBody::new()),
            Self::MiniCpm5 => Box::new(MiniCpmBody::new(tools.clone())),
            Self::Mistral => Box::new(MistralBody::new()),
            Self::Llama3Json => Box::new(JsonBody::open(None)),
            Self::Pythonic | Self::Llama3Pythonic => Box::new(PythonicBody::closed()),
        }
    }

    /// The character that an answer begins with when it is a call without a marker, and what
    /// reads it. None where calls have markers, or no tools were offered.
    pub(super) fn bare(self, tools: &Tools) -> Option<(char, Box<dyn Body>)> {
        if tools.is_empty() {
            return None;
        }
        let strict = Strict {
            names: tools.names(),
        };
        match self {
            Self::Llama3Json => Some(('{', Box::new(JsonBody::open(Some(strict))))),
            Self::Llama3Pythonic => Some(('[', Box::new(PythonicBody::open(strict)))),
            _ => None,
        }
    }
}
