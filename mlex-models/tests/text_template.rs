//! Chat templates against renderings by transformers (tests/data/templates.json,
//! qwen3-template.json and gemma4-templates.json, made by tools/).
#![allow(clippy::unwrap_used)]

use mlex_models::text::{ChatRequest, ChatTemplate, LocalTime};
use serde_json::{Map, Value, json};

fn data(name: &str) -> Value {
    let path = format!("{}/tests/data/{name}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// `2024-07-05T09:08:07`.
fn time(text: &str) -> LocalTime {
    let mut parts = text
        .split(['-', 'T', ':'])
        .map(|part| part.parse::<i16>().unwrap());
    let mut next = || parts.next().unwrap();
    let year = next();
    let mut next = || i8::try_from(next()).unwrap();
    LocalTime::new(year, next(), next(), next(), next(), next()).unwrap()
}

fn list(value: &Value) -> Option<&[Value]> {
    value.as_array().map(Vec::as_slice)
}

fn render(source: &str, case: &Value) -> Result<String, String> {
    let mut tokens = Map::new();
    for name in ["bos_token", "eos_token"] {
        if let Some(token) = case[name].as_str() {
            tokens.insert(name.to_owned(), token.into());
        }
    }
    let mut template = ChatTemplate::new(source).map_err(|error| error.to_string())?;
    template = template.with_variables(tokens);
    if let Some(now) = case["now"].as_str() {
        let now = time(now);
        template = template.with_clock(move || now);
    }
    let mut variables = case["kwargs"].as_object().cloned().unwrap_or_default();
    let documents = variables.remove("documents");
    let request = ChatRequest {
        messages: list(&case["messages"]).unwrap_or_default(),
        tools: list(&case["tools"]),
        documents: documents.as_ref().and_then(list),
        add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap_or(false),
        variables,
        ..ChatRequest::default()
    };
    template.render(&request).map_err(|error| error.to_string())
}

fn check(source: &str, case: &Value) -> Result<(), String> {
    let found = render(source, case);
    match (case["expected"].as_str(), found) {
        (Some(expected), Ok(found)) if expected == found => Ok(()),
        (Some(expected), found) => Err(format!("expected {expected:?}\n   found {found:?}")),
        (None, Err(message)) => {
            // What a template raises is told in its own words.
            let raised = case["error"]
                .as_str()
                .filter(|_| case["error_kind"] == "TemplateError");
            match raised {
                _ if message.contains('\n') => Err(format!("more than a line: {message:?}")),
                Some(raised) if !message.contains(raised) => {
                    Err(format!("expected {raised:?}\n   found {message:?}"))
                }
                _ => Ok(()),
            }
        }
        (None, Ok(found)) => Err(format!("expected {}\n   found {found:?}", case["error"])),
    }
}

fn check_all(cases: &[(&str, &Value)]) {
    let failures: Vec<String> = cases
        .iter()
        .filter_map(|(source, case)| {
            let failure = check(source, case).err()?;
            Some(format!("{}: {failure}", case["name"]))
        })
        .collect();
    assert!(
        failures.is_empty(),
        "{} failed\n{}",
        failures.len(),
        failures.join("\n")
    );
}

#[test]
fn templates_render_as_transformers_renders_them() {
    let rows = data("templates.json");
    let rows = rows.as_array().unwrap();
    assert!(rows.len() > 70);
    let cases: Vec<_> = rows
        .iter()
        .map(|row| (row["template"].as_str().unwrap(), row))
        .collect();
    check_all(&cases);
}

#[test]
fn the_qwen3_template_renders_as_transformers_renders_it() {
    let file = data("qwen3-template.json");
    let source = file["template"].as_str().unwrap();
    let rows = file["cases"].as_array().unwrap();
    let cases: Vec<_> = rows.iter().map(|row| (source, row)).collect();
    check_all(&cases);
}

#[test]
fn the_gemma4_templates_render_as_transformers_renders_them() {
    let file = data("gemma4-templates.json");
    for name in ["released", "latest"] {
        let source = file[name]["template"].as_str().unwrap();
        let rows = file[name]["cases"].as_array().unwrap();
        let cases: Vec<_> = rows.iter().map(|row| (source, row)).collect();
        check_all(&cases);
    }
}

fn user(text: &str) -> Vec<Value> {
    vec![json!({"role": "user", "content": text})]
}

fn plain(source: &str) -> Result<String, String> {
    let template = ChatTemplate::new(source).map_err(|error| error.to_string())?;
    let messages = user("Hi");
    let request = ChatRequest {
        messages: &messages,
        ..ChatRequest::default()
    };
    template.render(&request).map_err(|error| error.to_string())
}

#[test]
fn a_broken_template_names_itself_and_its_line() {
    let cases = [
        (
            "a\n{% if %}",
            "chat template: default, line 2: syntax error: ",
        ),
        ("{{ x", "chat template: default, line 1: syntax error: "),
        ("a\n\n{{ x.y }}", "chat template: default, line 3: "),
        (
            "\n{{ raise_exception('No\nsuch role') }}",
            "chat template: default, line 2: No such role",
        ),
        (
            "{{ messages | nofilter }}",
            "chat template: default, line 1: unknown filter: ",
        ),
        (
            "{{ missing | tojson }}",
            "chat template: default, line 1: tojson: undefined is not JSON",
        ),
        (
            "{{ 1 | tojson(indnt=2) }}",
            "chat template: default, line 1: ",
        ),
        ("{% include 'other' %}", "chat template: default, line 1: "),
    ];
    for (source, expected) in cases {
        let error = plain(source).unwrap_err();
        assert!(error.starts_with(expected), "{source}: {error}");
        assert!(!error.contains('\n'), "{error:?}");
    }
}

/// None of these may hang, take the memory or overflow the stack.
#[test]
fn hostile_templates_end_with_an_error() {
    let nested = "[".repeat(100_000);
    let sources = [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}".to_owned(),
        "{% set ns = namespace(s='x') %}{% for i in range(200) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}".to_owned(),
        "{% set ns = namespace(s='x') %}{% for i in range(200) %}{% set ns.s = ns.s + ns.s %}{% endfor %}".to_owned(),
        "{{ 'x' * 10000000000 }}".to_owned(),
        "{{ range(10000000000) | list }}".to_owned(),
        "{{ 'a' | indent(10000000000) }}".to_owned(),
        "{{ [1] | tojson(indent=10000000000) }}".to_owned(),
        "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}".to_owned(),
        "{{ '{:>999999999999}'.format('a') }}".to_owned(),
        "{{ '%999999999999s' | format('a') }}".to_owned(),
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}".to_owned(),
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".to_owned(),
        "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('x') }}".to_owned(),
        format!("{{{{ {nested} }}}}"),
        format!("{{{{ {} }}}}", "(".repeat(100_000)),
        format!("{{{{ {}1 }}}}", "not ".repeat(100_000)),
        format!("{{{{ {}1 }}}}", "-".repeat(100_000)),
        "{% if 1 %}".repeat(100_000),
    ];
    for source in sources {
        let start = std::time::Instant::now();
        let error = plain(&source).unwrap_err();
        let shown: String = source.chars().take(80).collect();
        assert!(
            start.elapsed().as_secs() < 20,
            "{shown}: {:?}",
            start.elapsed()
        );
        assert!(
            !error.contains('\n') && error.len() < 1000,
            "{shown}: {error}"
        );
    }
    // Long chains of values and operators: an error or a result, but no overflow.
    let chains = [
        "{% set ns = namespace(x=[]) %}{% for i in range(50000) %}{% set ns.x = [ns.x] %}{% endfor %}",
        "{% set ns = namespace(x=[]) %}{% for i in range(50000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x={}) %}{% for i in range(50000) %}{% set ns.x = {'a': ns.x} %}{% endfor %}{{ ns.x | tojson }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(50000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x == [ns.x] }}",
    ];
    for source in chains {
        let _ = plain(source);
    }
    let _ = plain(&format!("{{{{ 1{} }}}}", " + 1".repeat(50_000)));
    let _ = plain(&format!("{{{{ messages{} }}}}", "[0]".repeat(50_000)));
    let _ = plain(&format!("{{{{ 1{} }}}}", " | string".repeat(50_000)));
}

#[test]
fn a_long_chat_is_within_the_limits() {
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}";
    let messages: Vec<Value> = (0..2000)
        .map(|_| json!({"role": "user", "content": "x".repeat(5000)}))
        .collect();
    let template = ChatTemplate::new(source).unwrap();
    let request = ChatRequest {
        messages: &messages,
        ..ChatRequest::default()
    };
    assert_eq!(template.render(&request).unwrap().len(), 2000 * 5007);
}

#[test]
fn the_named_template_is_chosen_as_transformers_chooses_it() {
    let named = |names: &[&str]| {
        let templates = names
            .iter()
            .map(|name| ((*name).to_owned(), format!("<{name}>")));
        ChatTemplate::named(templates.collect()).unwrap()
    };
    let tools = [json!({"name": "f"})];
    let with = |template: &ChatTemplate, tools, name| {
        let request = ChatRequest {
            tools,
            template: name,
            ..ChatRequest::default()
        };
        template.render(&request).map_err(|error| error.to_string())
    };
    let both = named(&["tool_use", "default", "rag"]);
    assert_eq!(with(&both, None, None).unwrap(), "<default>");
    assert_eq!(with(&both, Some(&tools[..]), None).unwrap(), "<tool_use>");
    assert_eq!(with(&both, Some(&tools[..]), Some("rag")).unwrap(), "<rag>");
    assert_eq!(
        with(&named(&["default"]), Some(&tools[..]), None).unwrap(),
        "<default>"
    );
    assert_eq!(
        with(&both, None, Some("x")).unwrap_err(),
        "chat template: no template \"x\"; there are default, tool_use, rag"
    );
    assert_eq!(
        with(&named(&["rag"]), None, None).unwrap_err(),
        "chat template: no template \"default\"; there are rag"
    );
}

#[test]
fn files_are_found_in_the_order_of_transformers() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    let sources = || {
        let template = ChatTemplate::from_dir(dir.path()).unwrap()?;
        let pairs = template
            .sources()
            .map(|(name, source)| format!("{name}={source}"));
        Some(pairs.collect::<Vec<_>>().join(" "))
    };
    assert_eq!(sources(), None);
    write("chat_template.json", r#"{"chat_template": "json"}"#);
    assert_eq!(sources().unwrap(), "default=json");
    write("tokenizer_config.json", r#"{"chat_template": null}"#);
    assert_eq!(sources().unwrap(), "default=json");
    write("tokenizer_config.json", r#"{"chat_template": "config"}"#);
    assert_eq!(sources().unwrap(), "default=config");
    write(
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}"#,
    );
    assert_eq!(sources().unwrap(), "default=d rag=r");
    write("chat_template.jinja", "jinja");
    assert_eq!(sources().unwrap(), "default=jinja");
    std::fs::create_dir(dir.path().join("additional_chat_templates")).unwrap();
    write("additional_chat_templates/tool_use.jinja", "tools");
    write("additional_chat_templates/note.txt", "not a template");
    assert_eq!(sources().unwrap(), "default=jinja tool_use=tools");

    let saved = tempfile::tempdir().unwrap();
    let template = ChatTemplate::from_dir(dir.path()).unwrap().unwrap();
    template.save(saved.path()).unwrap();
    let again = ChatTemplate::from_dir(saved.path()).unwrap().unwrap();
    assert!(template.sources().eq(again.sources()));
    let outside = ChatTemplate::named(vec![("../x".into(), "x".into())]).unwrap();
    assert!(
        outside
            .save(saved.path())
            .unwrap_err()
            .to_string()
            .starts_with("chat_template name")
    );
}

#[test]
fn broken_template_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = |name: &str, bytes: &[u8]| {
        std::fs::write(dir.path().join(name), bytes).unwrap();
        let error = ChatTemplate::from_dir(dir.path()).unwrap_err();
        std::fs::remove_file(dir.path().join(name)).unwrap();
        assert_eq!(error.path(), Some(dir.path().join(name).as_path()));
        let message = error.to_string();
        assert!(!message.contains('\n'), "{message:?}");
        message
    };
    assert!(error("chat_template.jinja", b"\xFF").contains("UTF-8"));
    assert!(error("chat_template.jinja", b"{% for").contains("default, line 1"));
    assert!(error("tokenizer_config.json", b"{\"chat_template\": ").contains("not valid JSON"));
    assert!(error("tokenizer_config.json", b"{\"chat_template\": 3}").contains("found 3"));
    assert!(
        error(
            "chat_template.json",
            b"{\"chat_template\": [{\"name\": 1}]}"
        )
        .contains("found an object")
    );
    assert!(error("chat_template.json", b"[]").contains("expected an object, found a list"));
}

#[test]
fn a_message_that_is_no_object_is_named() {
    let template = ChatTemplate::new("x").unwrap();
    let messages = [json!({"role": "user"}), json!("Hi")];
    let request = ChatRequest {
        messages: &messages,
        ..ChatRequest::default()
    };
    assert_eq!(
        template.render(&request).unwrap_err().to_string(),
        "messages[1]: expected an object, found \"Hi\""
    );
}

#[test]
fn variables_of_the_request_win_over_those_of_the_template() {
    let tokens = json!({"bos_token": "<s>", "a": 1})
        .as_object()
        .cloned()
        .unwrap();
    let template = ChatTemplate::new("{{ bos_token }}{{ a }}{{ tools }}")
        .unwrap()
        .with_variables(tokens);
    let variables = json!({"a": 2, "tools": "no"}).as_object().cloned().unwrap();
    let request = ChatRequest {
        variables,
        ..ChatRequest::default()
    };
    assert_eq!(template.render(&request).unwrap(), "<s>2None");
}

/// Expected values: CPython 3.11 on Linux, `datetime(2024, 7, 5, 9, 8, 7).strftime(format)`.
#[test]
fn the_time_is_formatted_as_python_formats_it() {
    let template = ChatTemplate::new("{{ strftime_now(f) }}").unwrap();
    let template = template.with_clock(|| time("2024-07-05T09:08:07"));
    let cases = [
        ("%Y-%m-%d %H:%M:%S", "2024-07-05 09:08:07"),
        ("%d %B %Y", "05 July 2024"),
        ("%-d %b %y, %A %a", "5 Jul 24, Friday Fri"),
        ("%I:%M %p|%-I|%e|%j|%u|%w", "09:08 AM|9| 5|187|5|5"),
        ("%U %W %V %G", "26 27 27 2024"),
        ("%D %F %T %R", "07/05/24 2024-07-05 09:08:07 09:08"),
        ("[%Z][%z] 100%% %f", "[][] 100% 000000"),
        ("%%Z %%f", "%Z %f"),
        ("", ""),
        ("é 你", "é 你"),
    ];
    for (format, expected) in cases {
        let variables = json!({"f": format}).as_object().cloned().unwrap();
        let request = ChatRequest {
            variables,
            ..ChatRequest::default()
        };
        assert_eq!(template.render(&request).unwrap(), expected, "{format}");
    }
    assert!(LocalTime::new(2024, 2, 30, 0, 0, 0).is_none());
    let now = ChatTemplate::new("{{ strftime_now('%Y') | int > 2024 }}").unwrap();
    assert_eq!(now.render(&ChatRequest::default()).unwrap(), "True");
}
