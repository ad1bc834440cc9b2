//! Answers of a given form, from a small model with random weights: whatever it prefers, what comes
//! out has the form. Forms are checked here by parsing, on the real model by Python's jsonschema
//! (`tools/check_schemas.py`).
#![allow(clippy::unwrap_used)]

mod common;

use common::Copy;
use mlex_core::Device;
use mlex_models::generate::{
    Completion, Event, FinishReason, Grammar, Guesses, LoadOptions, Prompt, Request, SamplerConfig,
    Session, Speculation,
};
use mlex_models::text::Answer;
use serde_json::{Map, Value, json};

const VOCAB_SIZE: usize = 130;
const TEMPLATE: &str = "{% for message in messages %}\
    {{ '<s>' + message.role[0] + message.content + '<|end|>' }}\
    {% endfor %}{% if add_generation_prompt %}{{ '<s>' }}{% endif %}\
    {% if enable_thinking == 'opened' %}{{ '<think>' }}{% endif %}";

/// With `<think>` and `</think>` in place of two other special tokens where `reasons`.
fn session(checkpoint: &str, reasons: bool) -> Session {
    let model = Copy::of(checkpoint).with_tokenizer(VOCAB_SIZE);
    model.write("chat_template.jinja", TEMPLATE);
    // The last token ends a text.
    model.write(
        "tokenizer_config.json",
        json!({"eos_token": "<|end|>"}).to_string(),
    );
    if reasons {
        let json = String::from_utf8(model.read("tokenizer.json")).unwrap();
        let json = json.replace("<pad>", "<think>").replace("</s>", "</think>");
        model.write("tokenizer.json", json);
        model.edit("config.json", |config| {
            config.insert("eos_token_id".into(), json!(129));
        });
    }
    load(&model)
}

/// A session whose model guesses for itself.
fn load(model: &Copy) -> Session {
    let mut options = LoadOptions::default();
    options.device = Some(Device::Cpu);
    options.draft_model = Some(model.path().to_owned());
    Session::load(model.path(), options).unwrap()
}

fn request(grammar: Grammar) -> Request {
    let mut request = Request::new(Prompt::Raw("abc abc".into())).with_max_tokens(400);
    request.grammar = Some(grammar);
    request
}

fn sampled(mut request: Request, seed: u64) -> Request {
    request.sampler = SamplerConfig {
        temperature: 1.0,
        seed: Some(seed),
        ..SamplerConfig::default()
    };
    request
}

struct Found {
    ids: Vec<u32>,
    answer: Answer,
    done: Completion,
}

fn run(session: &Session, request: Request) -> Result<Found, String> {
    let (mut ids, mut answer, mut end) = (Vec::new(), Answer::default(), None);
    for event in session.generate(request) {
        let event = event.map_err(|error| error.to_string())?;
        event.add_to(&mut answer);
        match event {
            Event::Token { id, .. } => ids.push(id),
            Event::Done(done) => end = Some(done),
            _ => {}
        }
    }
    let done = end.unwrap();
    Ok(Found { ids, answer, done })
}

fn text(session: &Session, request: Request) -> String {
    let found = run(session, request).unwrap();
    assert_eq!(
        found.done.finish_reason,
        FinishReason::Stop,
        "{}",
        found.answer.text
    );
    found.answer.text
}

fn schema() -> Grammar {
    Grammar::JsonSchema(json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "size": {"type": "integer", "minimum": -5, "maximum": 120},
            "kind": {"enum": ["cat", "café", null, 1.5]},
            "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["name", "size", "kind", "tags"],
        "additionalProperties": false,
    }))
}

fn check_schema(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap();
    let object = value.as_object().unwrap();
    assert_eq!(object.len(), 4, "{text}");
    assert!(object["name"].as_str().unwrap().chars().count() <= 6);
    let size = object["size"].as_f64().unwrap();
    assert!(
        size.fract() == 0.0 && (-5.0..=120.0).contains(&size),
        "{text}"
    );
    let kinds = [json!("cat"), json!("café"), Value::Null, json!(1.5)];
    assert!(kinds.contains(&object["kind"]), "{text}");
    let tags = object["tags"].as_array().unwrap();
    assert!(tags.len() <= 2 && tags.iter().all(Value::is_boolean));
}

/// Checkpoints with keys and values, and with a window.
const CHECKPOINTS: [&str; 2] = ["llama-f32", "gemma4-small"];

#[test]
fn whatever_is_sampled_has_the_form() {
    for checkpoint in CHECKPOINTS {
        let session = session(checkpoint, false);
        check_schema(&text(&session, request(schema())));
        for seed in 0..6 {
            check_schema(&text(&session, sampled(request(schema()), seed)));
        }
    }
    let session = session("llama-f32", false);
    for seed in 0..10 {
        let regex = Grammar::Regex("(ab|c){2,4}-[0-9]{3}é?".into());
        let found = text(&session, sampled(request(regex), seed));
        let (letters, digits) = found.split_once('-').unwrap();
        assert!(
            letters.replace("ab", "c").chars().all(|c| c == 'c'),
            "{found}"
        );
        assert!(
            (2..=4).contains(&letters.replace("ab", "c").len()),
            "{found}"
        );
        let digits = digits.trim_end_matches('é');
        assert!(
            digits.len() == 3 && digits.parse::<u32>().is_ok(),
            "{found}"
        );
        let lark =
            Grammar::Lark("start: pair (\",\" pair){1,3}\npair: /[a-c]/ \"=\" /[0-9]/".into());
        let found = text(&session, sampled(request(lark), seed));
        let pairs: Vec<&str> = found.split(',').collect();
        assert!((2..=4).contains(&pairs.len()), "{found}");
        for pair in pairs {
            let bytes = pair.as_bytes();
            assert!(matches!(bytes, [b'a'..=b'c', b'=', b'0'..=b'9']), "{found}");
        }
    }
}

#[test]
fn guesses_change_nothing() {
    let mut right = 0;
    // The last one has recurrent states, and tokens up to the capital letters.
    for checkpoint in [CHECKPOINTS[0], CHECKPOINTS[1], "qwen3_5-f32"] {
        let is_small = checkpoint == "qwen3_5-f32";
        let session = if is_small {
            let model = Copy::of(checkpoint).with_tokenizer(64);
            load(&model)
        } else {
            session(checkpoint, false)
        };
        for seed in 0..2 {
            let mut plain = sampled(request(schema()), seed);
            if is_small {
                plain.prompt = Prompt::Tokens(vec![20, 21, 40, 41, 20, 21]);
                plain.grammar = Some(Grammar::Regex("([AB]{3}[0-9]{2}-){6,9}!".into()));
            }
            let expected = run(&session, plain.clone()).unwrap();
            assert_eq!(expected.done.finish_reason, FinishReason::Stop);
            if is_small {
                assert!(expected.answer.text.ends_with("-!"));
            } else {
                check_schema(&expected.answer.text);
            }
            for guesses in [Guesses::Ngram, Guesses::Draft] {
                for (adapt, logprobs) in [(false, None), (false, Some(3)), (true, None)] {
                    let mut guessing = plain.clone();
                    guessing.speculation = Speculation::new(guesses);
                    guessing.speculation.adapt = adapt;
                    guessing.logprobs = logprobs;
                    let found = run(&session, guessing).unwrap();
                    assert_eq!(found.ids, expected.ids, "{checkpoint}: {guesses:?}");
                    assert_eq!(found.answer.text, expected.answer.text);
                    right += found.done.drafts.accepted;
                }
            }
        }
    }
    assert!(right > 50, "{right}");
}

#[test]
fn the_end_of_the_form_is_the_end_of_the_answer() {
    let session = session("llama-f32", false);
    // Nothing can follow: no end-of-text token is waited for.
    let fixed = Grammar::Regex("abc".into());
    for ignore_eos in [false, true] {
        let mut request = request(fixed.clone());
        request.ignore_eos = ignore_eos;
        let found = run(&session, request).unwrap();
        assert_eq!(found.answer.text, "abc");
        assert_eq!(found.done.finish_reason, FinishReason::Stop);
        assert!(!found.ids.contains(&129));
    }
    // Something could: the model ends it.
    let open = Grammar::Regex("[ab]{1,200}".into());
    let mut request = request(open);
    request.sampler.logit_bias.insert(129, 100.0);
    let found = run(&session, request).unwrap();
    assert_eq!((found.ids.len(), found.ids[1]), (2, 129));
    assert_eq!(found.done.finish_reason, FinishReason::Stop);
}

#[test]
fn an_answer_can_be_cut_off() {
    let session = session("llama-f32", false);
    let found = run(&session, request(schema()).with_max_tokens(5)).unwrap();
    assert_eq!(found.ids.len(), 5);
    assert_eq!(found.done.finish_reason, FinishReason::Length);
    let none = run(&session, request(schema()).with_max_tokens(0)).unwrap();
    assert_eq!(none.done.finish_reason, FinishReason::Length);
}

#[test]
fn json_is_a_json_object() {
    let session = session("llama-f32", false);
    let mut closed = 0;
    for seed in 0..10 {
        // A model of random weights is not made to end: it likes to.
        let mut request = sampled(request(Grammar::JsonObject), seed);
        let end = session.tokenizer().token_to_id("}").unwrap();
        request.sampler.logit_bias.insert(end, 4.0);
        let found = run(&session, request).unwrap();
        assert!(found.answer.text.trim_start().starts_with('{'));
        if found.done.finish_reason == FinishReason::Stop {
            let value: Value = serde_json::from_str(&found.answer.text).unwrap();
            assert!(value.is_object());
            closed += 1;
        }
    }
    assert!(closed > 2, "{closed}");
}

#[test]
fn reasoning_is_free_until_the_answer_starts() {
    let session = session("llama-f32", true);
    assert_eq!(
        session.output_format().reasoning(),
        Some(("<think>", "</think>"))
    );
    let chat = |opened: &str, seed| {
        let mut request = sampled(Request::chat("here").with_max_tokens(300), seed);
        request
            .template_variables
            .insert("enable_thinking".into(), json!(opened));
        request.grammar = Some(schema());
        request.reasoning_budget = Some(20);
        request
    };
    let (mut reasoned, mut straight) = (0, 0);
    for seed in 0..12 {
        // The prompt opens the reasoning; its budget, or the model, ends it.
        let found = run(&session, chat("opened", seed)).unwrap();
        let reasoning = found.answer.reasoning.clone().unwrap_or_default();
        check_schema(&found.answer.text);
        let end = found.ids.iter().position(|&id| id == 2).unwrap();
        assert!(end <= 20, "{end}");
        assert!(reasoning.is_empty() || serde_json::from_str::<Value>(&reasoning).is_err());
        for guesses in [Guesses::Ngram, Guesses::Draft] {
            let mut guessing = chat("opened", seed);
            guessing.speculation = Speculation::new(guesses);
            guessing.speculation.adapt = false;
            let guessed = run(&session, guessing).unwrap();
            check_schema(&guessed.answer.text);
            assert_eq!(guessed.ids[..end], found.ids[..end]);
        }
        // The model may open it, or answer at once.
        let mut request = chat("no", seed);
        let brace = session.tokenizer().token_to_id("{").unwrap();
        let liked = if seed % 2 == 0 { 0 } else { brace };
        request.sampler.logit_bias.insert(liked, 10.0);
        let found = run(&session, request).unwrap();
        check_schema(&found.answer.text);
        if found.ids[0] == 0 {
            reasoned += 1;
            assert!(found.ids.contains(&2));
        } else {
            straight += 1;
            assert!(!found.ids.contains(&0) && found.answer.reasoning.is_none());
        }
        // Unless it is told not to.
        let mut request = chat("no", seed);
        request
            .template_variables
            .insert("enable_thinking".into(), json!(false));
        request.sampler.logit_bias.insert(0, 10.0);
        let found = run(&session, request).unwrap();
        assert!(!found.ids.contains(&0));
        check_schema(&found.answer.text);
    }
    assert!(reasoned > 3 && straight > 3, "{reasoned} {straight}");
}

#[test]
fn wrong_and_hostile_forms_are_refused_in_one_line() {
    let long = "a".repeat(2 << 20);
    let deep = |open: &str, count: usize| open.repeat(count);
    let mut nested = json!(true);
    for _ in 0..500 {
        nested = Value::Object([("items".to_owned(), nested)].into_iter().collect());
    }
    let chain: String = (0..20_000).map(|n| format!("r{n}: r{}\n", n + 1)).collect();
    // Each definition refers to the next: what is short and takes llguidance long.
    let reference = |n| json!({"$ref": format!("#/$defs/d{n}")});
    let object = |n| json!({"type": "object", "properties": {"a": reference(n)}});
    let defs: Map<String, Value> = (0..3000)
        .map(|n| (format!("d{n}"), object(n + 1)))
        .collect();
    let cases = [
        Grammar::JsonSchema(json!([1])),
        Grammar::JsonSchema(json!({"type": "nothing"})),
        Grammar::JsonSchema(json!({"type": 5})),
        Grammar::JsonSchema(json!({"$ref": "#/$defs/none"})),
        Grammar::JsonSchema(json!({"$ref": "http://127.0.0.1/x"})),
        Grammar::JsonSchema(json!({"type": "string", "pattern": "("})),
        Grammar::JsonSchema(json!({"type": "string", "minLength": 5, "maxLength": 2})),
        Grammar::JsonSchema(json!({"not": {}})),
        Grammar::JsonSchema(json!({"x-guidance": {"nothing": 1}})),
        Grammar::JsonSchema(json!({"multipleOf": 1_000_000_007, "type": "integer"})),
        Grammar::JsonSchema(nested),
        Grammar::JsonSchema(json!({"$defs": defs, "$ref": "#/$defs/d0"})),
        Grammar::JsonSchema(json!(false)),
        Grammar::Regex("(".into()),
        Grammar::Regex("(?=a)b".into()),
        Grammar::Regex(deep("(", 100_000)),
        Grammar::Regex(long.clone()),
        Grammar::Lark(String::new()),
        Grammar::Lark("start: nothing".into()),
        Grammar::Lark("start: \"a".into()),
        Grammar::Lark("start: %json {\"type\": 3}".into()),
        Grammar::Lark("%import /etc/passwd\nstart: \"a\"".into()),
        Grammar::Lark(format!("start: {}", deep("(", 100_000))),
        Grammar::Lark(format!("start: r0\n{chain}")),
        Grammar::Lark(format!("start: \"{long}\"")),
    ];
    let mut accepted = Vec::new();
    for (at, grammar) in cases.iter().enumerate() {
        let begun = std::time::Instant::now();
        let result = grammar.validate();
        let time = begun.elapsed().as_secs_f64();
        assert!(time < 20.0, "case {at}: {time} s");
        let Err(error) = result else {
            accepted.push(at);
            continue;
        };
        let error = error.to_string();
        assert!(
            !error.contains(['\n', '\r']) && error.chars().count() < 350,
            "{at}: {error}"
        );
        println!("{at}: {error} ({time:.2} s)");
    }
    assert!(accepted.is_empty(), "not refused: {accepted:?}");
    // A session says the same, and goes on.
    let session = session("llama-f32", false);
    let error = run(&session, request(Grammar::Regex("(".into())))
        .err()
        .unwrap();
    assert!(error.starts_with("regular expression: "), "{error}");
    assert_eq!(text(&session, request(Grammar::Regex("ab".into()))), "ab");
    // Where a bias forbids all that the form allows, it says so.
    let mut request = request(Grammar::Regex("a".into()));
    let id = session.tokenizer().token_to_id("a").unwrap();
    request.sampler.logit_bias.insert(id, f32::NEG_INFINITY);
    let error = run(&session, request).err().unwrap();
    assert_eq!(
        error,
        "regular expression: no token that it allows can be chosen"
    );
}
