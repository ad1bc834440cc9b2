//! [`OutputParser`]: what models write, taken apart.
//!
//! Expected calls: mlx-lm's tool parsers, or the calls that an answer was written from
//! (`tools/make_tool_call_golden.py`). Other expected values follow from the texts.
#![allow(clippy::unwrap_used)]

use std::sync::LazyLock;

use mlex_models::text::{
    Answer, ChatRequest, ChatTemplate, OutputFormat, OutputParser, Part, ToolCall, ToolFormat,
};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

const THINK: (&str, &str) = ("<think>", "</think>");
const ALL: [(&str, ToolFormat); 9] = [
    ("json", ToolFormat::Json),
    ("xml", ToolFormat::Xml),
    ("gemma4", ToolFormat::Gemma4),
    ("nemotron_h", ToolFormat::NemotronH),
    ("minicpm5", ToolFormat::MiniCpm5),
    ("mistral", ToolFormat::Mistral),
    ("llama3_json", ToolFormat::Llama3Json),
    ("pythonic", ToolFormat::Pythonic),
    ("llama3_pythonic", ToolFormat::Llama3Pythonic),
];

struct Golden {
    tools: Vec<Value>,
    rows: Vec<Value>,
}

fn golden() -> &'static Golden {
    static GOLDEN: LazyLock<Golden> = LazyLock::new(|| {
        let mut file: Value = serde_json::from_str(include_str!("data/tool-calls.json")).unwrap();
        Golden {
            tools: serde_json::from_value(file["tools"].take()).unwrap(),
            rows: serde_json::from_value(file["rows"].take()).unwrap(),
        }
    });
    &GOLDEN
}

fn format(tools: ToolFormat) -> OutputFormat {
    OutputFormat::new(Some(THINK), Some(tools))
}

fn named(name: &str) -> OutputFormat {
    format(ALL.iter().find(|(known, _)| *known == name).unwrap().1)
}

/// The parts of a text in pieces, joined, so that they do not tell where the pieces were.
fn parts<'a>(
    format: &OutputFormat,
    tools: &[Value],
    reasoning: bool,
    pieces: impl IntoIterator<Item = &'a str>,
) -> Vec<Part> {
    let mut parser = OutputParser::new(format.clone(), tools, reasoning);
    let mut all = Vec::new();
    for piece in pieces {
        for part in parser.push(piece) {
            Part::join(&mut all, part);
        }
    }
    for part in parser.finish() {
        Part::join(&mut all, part);
    }
    all
}

fn answer(format: &OutputFormat, tools: &[Value], text: &str) -> Answer {
    let mut answer = Answer::default();
    let mut grown: Vec<(String, String)> = Vec::new();
    for part in parts(format, tools, false, [text]) {
        match &part {
            Part::CallBegin { index, name } => {
                assert_eq!(*index, grown.len());
                grown.push((name.clone(), String::new()));
            }
            Part::CallArguments { index, json } => {
                assert_eq!(index + 1, grown.len());
                grown[*index].1.push_str(json);
            }
            // What has grown is the call.
            Part::CallEnd { index, call } => {
                let (name, arguments) = &grown[*index];
                assert_eq!(name, &call.name);
                let arguments: Map<String, Value> = serde_json::from_str(arguments).unwrap();
                assert_eq!(arguments, call.arguments);
            }
            _ => {}
        }
        answer.push(&part);
    }
    answer
}

/// The text of all parts, without markers.
fn everything(parts: &[Part]) -> String {
    parts
        .iter()
        .map(|part| match part {
            Part::Text(text) | Part::Reasoning(text) | Part::Malformed { text, .. } => {
                text.as_str()
            }
            _ => "",
        })
        .collect()
}

fn text(text: &str) -> Part {
    Part::Text(text.into())
}

fn thought(text: &str) -> Part {
    Part::Reasoning(text.into())
}

#[test]
fn calls_are_those_of_the_reference() {
    let Golden { tools, rows } = golden();
    for row in rows {
        let (format, text) = (
            named(row["format"].as_str().unwrap()),
            row["text"].as_str().unwrap(),
        );
        let answer = answer(&format, tools, text);
        match row["calls"].as_array() {
            None => {
                assert_eq!(answer.tool_calls, [], "{row}");
                assert_eq!(answer.malformed.concat(), text, "{row}");
                assert_eq!(answer.text, text, "{row}");
            }
            Some(calls) => {
                let found: Vec<Value> = answer
                    .tool_calls
                    .iter()
                    .map(|call| json!({"name": call.name, "arguments": call.arguments}))
                    .collect();
                assert_eq!(&found, calls, "{row}");
                assert_eq!(answer.text.trim(), "", "{row}");
            }
        }
    }
}

#[test]
fn reasoning_is_apart_and_whitespace_stays() {
    let format = format(ToolFormat::Json);
    let read = |reasoning, text| parts(&format, &[], reasoning, [text]);
    assert_eq!(
        read(false, "<think>\na\n</think>\n\nb \n"),
        [thought("\na\n"), text("\n\nb \n")]
    );
    assert_eq!(read(true, "a</think>b"), [thought("a"), text("b")]);
    assert_eq!(read(true, "no end"), [thought("no end")]);
    assert_eq!(read(false, "a</think>b"), [text("a</think>b")]);
    // Half a marker, and the half again before a whole one.
    assert_eq!(
        read(true, "</thi</thin</think></th"),
        [thought("</thi</thin"), text("</th")]
    );
    assert_eq!(
        read(false, "<think><think>a</think>b<think>c"),
        [thought("<think>a"), text("b"), thought("c")]
    );
    let plain = OutputFormat::default();
    assert_eq!(
        parts(&plain, &[], true, ["<think>a</think>"]),
        [text("<think>a</think>")]
    );
}

#[test]
fn gemma_reasons_in_a_channel() {
    let format = OutputFormat::new(
        Some(("<|channel>thought", "<channel|>")),
        Some(ToolFormat::Gemma4),
    );
    let written = "<|channel>thought\nhm<channel|>Yes.<|tool_call>call:now{}<tool_call|>";
    let found = parts(&format, &[], false, [written]);
    assert_eq!(found[..2], [thought("\nhm"), text("Yes.")]);
    assert!(
        matches!(&found[4], Part::CallEnd { index: 0, call } if call.name == "now"),
        "{found:?}"
    );
    assert_eq!(found.len(), 5);
}

#[test]
fn calls_stand_between_text_and_end_reasoning() {
    let format = format(ToolFormat::Json);
    let call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    let written = format!("a{call}\n{call} b<think>c{call}d");
    let answer = answer(&format, &[], &written);
    assert_eq!(answer.tool_calls.len(), 3);
    assert_eq!(
        (&*answer.text, answer.reasoning.as_deref()),
        ("a\n bd", Some("c"))
    );
}

#[test]
fn a_second_list_of_arguments_fails_at_the_same_place_in_any_split() {
    // Found by `any_split_gives_the_same`.
    let written = "{\"name\": \"now\", \"arguments\": {\"a\": 1}, \"parameters\": {}";
    let format = format(ToolFormat::Llama3Json);
    let tools = &golden().tools;
    let whole = parts(&format, tools, false, [written]);
    let single = written.split_inclusive(|_: char| true);
    assert_eq!(parts(&format, tools, false, single), whole);
    assert!(whole.contains(&Part::CallArguments {
        index: 0,
        json: "{\"a\": 1}".into()
    }));
}

#[test]
fn malformed_calls_come_back_as_written() {
    let json = format(ToolFormat::Json);
    for (written, expected) in [
        // No end, and not whole.
        (
            "a<tool_call>{\"name\": \"f\", ",
            vec!["<tool_call>{\"name\": \"f\", "],
        ),
        ("<tool_call></tool_call>b", vec!["<tool_call></tool_call>"]),
        (
            "<tool_call>[1]</tool_call>",
            vec!["<tool_call>[1]</tool_call>"],
        ),
        (
            "<tool_call>{}</tool_call>",
            vec!["<tool_call>{}</tool_call>"],
        ),
        (
            "<tool_call>{\"name\": 1, \"arguments\": {}}</tool_call>",
            vec!["<tool_call>{\"name\": 1, \"arguments\": {}}</tool_call>"],
        ),
        (
            "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>",
            vec!["<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>"],
        ),
        // What comes after a call within the markers is none.
        (
            "<tool_call>{\"name\": \"f\", \"arguments\": {}} x</tool_call>",
            vec![" x</tool_call>"],
        ),
        ("a <tool_ca", vec![]),
    ] {
        let answer = answer(&json, &[], written);
        assert_eq!(answer.malformed, expected, "{written}");
        if answer.tool_calls.is_empty() {
            assert_eq!(answer.text, written);
        }
    }
    // An announced call is taken back by its index, and the next one has another.
    let mistral = format(ToolFormat::Mistral);
    let found = parts(
        &mistral,
        &[],
        false,
        ["[TOOL_CALLS]f[ARGS]{\"a\": [TOOL_CALLS]g[ARGS]{}"],
    );
    assert!(found.contains(&Part::Malformed {
        index: Some(0),
        text: "[TOOL_CALLS]f[ARGS]{\"a\": ".into()
    }));
    assert!(
        matches!(found.last(), Some(Part::CallEnd { index: 1, call }) if call.name == "g"),
        "{found:?}"
    );
}

#[test]
fn a_call_may_lack_its_end_marker() {
    // The server of mlx-lm reads what is there when a text ends within a call.
    let answer = answer(
        &format(ToolFormat::Json),
        &[],
        "<tool_call>{\"name\": \"f\", \"arguments\": {}}\n",
    );
    assert_eq!(answer.tool_calls.len(), 1);
    assert_eq!(answer.text, "");
}

#[test]
fn arguments_may_come_before_the_name_and_other_fields_between() {
    let written = "<tool_call>{\"arguments\": {\"a\": {\"b\": \"}\"}}, \"id\": {}, \"x\": [{}, \":\"], \
                   \"name\": \"f\"}</tool_call>";
    let answer = answer(&format(ToolFormat::Json), &[], written);
    assert_eq!(
        json!(answer.tool_calls[0].arguments),
        json!({"a": {"b": "}"}})
    );
    // Twice is not clear.
    for twice in ["\"name\": \"f\"", "\"arguments\": {}"] {
        let written = std::format!(
            "<tool_call>{{\"name\": \"f\", \"arguments\": {{}}, {twice}}}</tool_call>"
        );
        assert_eq!(
            self::answer(&format(ToolFormat::Json), &[], &written).malformed,
            [written]
        );
    }
}

#[test]
fn arguments_may_be_text_that_holds_json() {
    let written = "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>";
    let answer = answer(&format(ToolFormat::Json), &[], written);
    assert_eq!(json!(answer.tool_calls[0].arguments), json!({"a": 1}));
}

#[test]
fn answers_without_markers_are_calls_of_known_tools_only() {
    let Golden { tools, .. } = golden();
    let json = format(ToolFormat::Llama3Json);
    let pythonic = format(ToolFormat::Llama3Pythonic);
    for (format, written) in [
        (&json, "{\"name\": \"Bob\", \"age\": 3}"),
        (&json, " \n{\"multiply\": 1}"),
        (&json, "{\"name\": \"multiply\""),
        (&json, "x {\"name\": \"multiply\", \"parameters\": {}}"),
        (&pythonic, "[1, 2]"),
        (&pythonic, "[Bob(a=1)]"),
        (&pythonic, "[link](multiply)"),
        (&pythonic, "a [multiply(a=1)]"),
        (&pythonic, " ["),
    ] {
        let answer = answer(format, tools, written);
        assert_eq!(
            (answer.text.as_str(), answer.tool_calls.len()),
            (written, 0)
        );
        assert_eq!(
            answer.malformed.is_empty(),
            written != "{\"name\": \"multiply\"",
            "{written}"
        );
    }
    // No tools were offered.
    for (format, written) in [
        (&json, "{\"name\": \"now\", \"parameters\": {}}"),
        (&pythonic, "[now()]"),
    ] {
        assert_eq!(answer(format, &[], written).text, written);
        assert_eq!(answer(format, tools, written).tool_calls.len(), 1);
    }
    // What comes after calls is text, and reasoning may stand before.
    let written = "<think>a</think>\n{\"name\": \"now\", \"parameters\": {}} done";
    let found = answer(&json, tools, written);
    assert_eq!((&*found.text, found.tool_calls.len()), (" done", 1));
}

#[test]
fn mistral_names_ids() {
    let found = answer(
        &format(ToolFormat::Mistral),
        &[],
        "[TOOL_CALLS]f[CALL_ID]ab12[ARGS]{} text",
    );
    let call: &ToolCall = &found.tool_calls[0];
    assert_eq!((&*call.name, call.id.as_deref()), ("f", Some("ab12")));
    assert_eq!(found.text, " text");
}

#[test]
fn formats_are_found_in_templates() {
    // The strings by which mlx-lm's `_infer_tool_parser` tells formats apart, and those of the
    // templates of the models that it does not know.
    for (template, expected) in [
        ("<|tool_call>call:x<tool_call|>", Some(ToolFormat::Gemma4)),
        ("<|tool_list_start|>", Some(ToolFormat::Pythonic)),
        ("{{ '<tool_call>\\n<function=' }}", Some(ToolFormat::Xml)),
        ("<tool_call>\n<function=", Some(ToolFormat::Xml)),
        ("[TOOL_CALLS]", Some(ToolFormat::Mistral)),
        ("<tool_call> tool_call.name", Some(ToolFormat::Json)),
        ("<TOOLCALL>[", Some(ToolFormat::NemotronH)),
        ("<function name=\"", Some(ToolFormat::MiniCpm5)),
        ("<|python_tag|>", Some(ToolFormat::Llama3Json)),
        ("<tool_call>", None),
        ("", None),
    ] {
        assert_eq!(ToolFormat::of(template), expected, "{template}");
    }
}

#[test]
fn prompts_open_the_reasoning() {
    let format = format(ToolFormat::Json);
    assert!(format.opens_reasoning("<|im_start|>assistant\n<think>\n"));
    assert!(!format.opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n"));
    assert!(!format.opens_reasoning("what is <think>?<|im_end|>\n<|im_start|>assistant\n"));
    assert!(!OutputFormat::default().opens_reasoning("<think>"));
    assert!(format.needs("<think>") && format.needs("</tool_call>") && !format.needs("<|im_end|>"));
}

#[test]
fn answers_become_messages() {
    let mut answer = Answer::default();
    for part in parts(
        &format(ToolFormat::Json),
        &[],
        true,
        ["r</think>t<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>"],
    ) {
        answer.push(&part);
    }
    assert_eq!(
        answer.message(|call| format!("id-{}", call.name)),
        json!({
            "role": "assistant", "content": "t", "reasoning_content": "r",
            "tool_calls": [{
                "id": "id-f", "type": "function",
                "function": {"name": "f", "arguments": "{\"a\":1}"},
            }],
        })
    );
}

/// Texts that have much of what a format looks for.
fn written() -> impl Strategy<Value = (usize, String, bool)> {
    let golden = golden();
    let texts: Vec<String> = golden
        .rows
        .iter()
        .map(|row| row["text"].as_str().unwrap().to_owned())
        .collect();
    let words: Vec<&'static str> = vec![
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "<parameter=a>",
        "</parameter>",
        "</function>",
        "<|tool_call>",
        "<tool_call|>",
        "call:f{",
        "<|\"|>",
        "}",
        "{\"name\": \"now\", \"arguments\": {",
        "}}",
        "[TOOL_CALLS]",
        "[ARGS]",
        "{",
        "[",
        "]",
        ",",
        ";",
        "now(",
        "a=1",
        ")",
        "<TOOLCALL>",
        "</TOOLCALL>",
        "<function name=\"now\">",
        "<param name=\"a\">",
        "</param>",
        "<![CDATA[",
        "]]>",
        "<|python_tag|>",
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        " ",
        "\n",
        "é",
        "\"",
        "\\",
        "x",
        "\"arguments\":",
        "\"name\":",
        "null",
        "1",
    ];
    let piece = prop_oneof![
        3 => prop::sample::select(texts),
        8 => prop::sample::select(words).prop_map(str::to_owned),
        1 => "\\PC{0,3}",
    ];
    (
        0..ALL.len(),
        prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat()),
        any::<bool>(),
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn any_split_gives_the_same((format_index, text, reasoning) in written(), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20)) {
        let Golden { tools, .. } = golden();
        let format = format(ALL[format_index].1);
        let whole = parts(&format, tools, reasoning, [text.as_str()]);
        let single = text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()]);
        prop_assert_eq!(&parts(&format, tools, reasoning, single), &whole);
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| text.floor_char_boundary(cut.index(text.len() + 1))).collect();
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        let pieces = cuts.windows(2).map(|cut| &text[cut[0]..cut[1]]);
        prop_assert_eq!(&parts(&format, tools, reasoning, pieces), &whole);
    }

    #[test]
    fn text_without_markers_is_not_touched(text in "[^<\\[{]{0,60}", format_index in 0..ALL.len()) {
        let Golden { tools, .. } = golden();
        let found = parts(&format(ALL[format_index].1), tools, false, [text.as_str()]);
        prop_assert_eq!(everything(&found), text);
    }

    #[test]
    fn what_no_call_takes_is_not_lost((format_index, text, reasoning) in written()) {
        let Golden { tools, .. } = golden();
        let found = parts(&format(ALL[format_index].1), tools, reasoning, [text.as_str()]);
        if !found.iter().any(|part| matches!(part, Part::CallEnd { .. })) {
            let without = |text: &str| text.replace(THINK.0, "").replace(THINK.1, "");
            prop_assert_eq!(without(&everything(&found)), without(&text));
        }
    }
}

#[test]
fn what_qwen3s_template_writes_is_read_back() {
    let file: Value = serde_json::from_str(include_str!("data/qwen3-template.json")).unwrap();
    let source = file["template"].as_str().unwrap();
    let template = ChatTemplate::new(source).unwrap();
    assert_eq!(ToolFormat::of(source), Some(ToolFormat::Json));
    for row in golden().rows.iter().filter(|row| row["calls"].is_array()) {
        let calls = row["calls"].as_array().unwrap();
        let written: Vec<Value> = calls
            .iter()
            .map(|call| json!({"type": "function", "function": call}))
            .collect();
        let user = json!({"role": "user", "content": "a"});
        let assistant = json!({
            "role": "assistant", "content": "b", "reasoning_content": "c", "tool_calls": written,
        });
        let rendered = template
            .render(&ChatRequest {
                messages: &[user, assistant],
                ..ChatRequest::default()
            })
            .unwrap();
        let (_, rendered) = rendered.split_once("<|im_start|>assistant\n").unwrap();
        let rendered = rendered.strip_suffix("<|im_end|>\n").unwrap();
        let answer = answer(&format(ToolFormat::Json), &golden().tools, rendered);
        let found: Vec<Value> = answer
            .tool_calls
            .iter()
            .map(|call| json!({"name": call.name, "arguments": call.arguments}))
            .collect();
        assert_eq!(&found, calls, "{rendered}");
        assert_eq!(answer.reasoning.as_deref(), Some("\nc\n"));
        assert_eq!(answer.text.trim(), "b");
    }
}
