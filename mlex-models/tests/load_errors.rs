//! Damaged model directories: each gives one line that names the file, the field or tensor, what
//! was expected and what was found.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::{Duration, Instant};

use common::{Copy, Header, message};
use mlex_models::generate::{LoadOptions, Session};
use mlex_models::{ErrorKind, ModelFiles, load};
use serde_json::{Map, Value, json};

/// The message with which loading `model` fails, soon.
fn fails(model: &Copy) -> String {
    let start = Instant::now();
    let result = ModelFiles::open(model.path()).and_then(|files| load(&files, None, |_| {}));
    let message = message(
        &result.expect_err("a broken model was loaded"),
        model.path(),
    );
    assert!(start.elapsed() < Duration::from_secs(5), "{message}");
    message
}

/// As [`fails`], for the tokenizer and the template, which a session needs too.
fn session_fails(model: &Copy) -> String {
    let result = Session::load(model.path(), LoadOptions::default());
    message(
        &result.expect_err("a broken model was loaded"),
        model.path(),
    )
}

/// The message for a config.json that was changed.
fn config(name: &str, change: impl FnOnce(&mut Map<String, Value>)) -> String {
    let model = Copy::of(name);
    model.edit("config.json", change);
    let message = fails(&model);
    let message = message.strip_prefix("M/config.json: ").expect(&message);
    message.to_owned()
}

/// The message for one field of llama-f32's config.json.
fn field(name: &str, value: Value) -> String {
    config("llama-f32", |config| {
        config.insert(name.to_owned(), value);
    })
}

#[test]
fn config_files_that_cannot_be_read() {
    let model = Copy::of("llama-f32");
    model.remove("config.json");
    assert_eq!(
        fails(&model),
        "M/config.json: No such file or directory (os error 2)"
    );
    for (text, expected) in [
        (
            "",
            "not valid JSON: EOF while parsing a value at line 1 column 0",
        ),
        (
            "{\"a\": ",
            "not valid JSON: EOF while parsing a value at line 1 column 6",
        ),
        ("hello", "not valid JSON: expected value at line 1 column 1"),
        ("[1]", "content: expected a JSON object, found a list of 1"),
        ("null", "content: expected a JSON object, found null"),
        ("{}", "missing field model_type"),
    ] {
        model.write("config.json", text);
        assert_eq!(fails(&model), format!("M/config.json: {expected}"));
    }
    // Nesting without end is refused, not followed.
    model.write("config.json", "[".repeat(1 << 20));
    assert!(fails(&model).starts_with("M/config.json: not valid JSON: recursion limit exceeded"));
    model.write("config.json", b"{\"model_type\": \"\xff\"}");
    assert!(fails(&model).starts_with("M/config.json: not valid JSON: invalid unicode"));

    let model = Copy::of("llama-f32");
    model.write("generation_config.json", "{");
    assert_eq!(
        fails(&model),
        "M/generation_config.json: not valid JSON: EOF while parsing an object at line 1 column 1"
    );
    let nowhere = ModelFiles::open(model.file("nowhere")).unwrap_err();
    assert_eq!(
        message(&nowhere, model.path()),
        "M/nowhere: No such file or directory (os error 2)"
    );
}

#[test]
fn architectures_that_are_not_known() {
    let known: Vec<_> = mlex_models::model_types().collect();
    assert!(known.len() > 6);
    let known = known.join(", ");
    assert_eq!(
        field("model_type", json!("gpt9")),
        format!("model_type: expected one of {known}, found \"gpt9\"")
    );
    assert_eq!(
        field("model_type", json!(3)),
        "model_type: expected a string, found 3"
    );
    assert_eq!(
        field("model_type", Value::Null),
        "model_type: expected a string, found null"
    );
}

#[test]
fn fields_that_are_missing() {
    for name in [
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
        "num_attention_heads",
        "rms_norm_eps",
        "vocab_size",
    ] {
        let expected = format!("missing field {name}");
        let removed = config("llama-f32", |config| {
            config.remove(name);
        });
        assert_eq!(removed, expected);
        assert_eq!(field(name, Value::Null), expected);
    }
    for (model, name) in [
        ("qwen2-f32", "num_key_value_heads"),
        ("qwen3-f32", "head_dim"),
        ("minicpm", "scale_emb"),
        ("smollm3", "vocab_size"),
    ] {
        let removed = config(model, |config| {
            config.remove(name);
        });
        assert_eq!(removed, format!("missing field {name}"));
    }
}

#[test]
fn fields_of_another_type() {
    for model in ["llama-f32", "qwen2-f32", "qwen3-f32", "minicpm", "smollm3"] {
        let with = |name: &str, value: Value| {
            config(model, |config| {
                config.insert(name.to_owned(), value);
            })
        };
        let number = "expected a whole number";
        assert_eq!(
            with("hidden_size", json!("x")),
            format!("hidden_size: {number}, found \"x\""),
            "{model}"
        );
        assert_eq!(
            with("vocab_size", json!([1])),
            format!("vocab_size: {number}, found a list of 1"),
            "{model}"
        );
        assert_eq!(
            with("rms_norm_eps", json!("small")),
            "rms_norm_eps: expected a number, found \"small\"",
            "{model}"
        );
        assert_eq!(
            with("tie_word_embeddings", json!("no")),
            "tie_word_embeddings: expected true or false, found \"no\"",
            "{model}"
        );
        assert_eq!(
            with("rope_theta", json!("high")),
            "rope_theta: expected a number, found \"high\"",
            "{model}"
        );
    }
}

#[test]
fn numbers_that_no_model_has() {
    let size = "expected a number from 1 to 16777216";
    for (name, value, expected) in [
        (
            "num_hidden_layers",
            json!(1_000_000_000),
            "expected a number from 1 to 1024",
        ),
        (
            "num_hidden_layers",
            json!(0),
            "expected a number from 1 to 1024",
        ),
        ("hidden_size", json!(0), size),
        ("hidden_size", json!(-64), size),
        ("hidden_size", json!(1 << 30), size),
        ("hidden_size", json!(1_u64 << 40), "expected a whole number"),
        ("hidden_size", json!(64.5), "expected a whole number"),
        ("hidden_size", json!(1e300), "expected a whole number"),
        ("vocab_size", json!(0), size),
        ("intermediate_size", json!(-1), size),
        ("num_attention_heads", json!(0), size),
        ("num_attention_heads", json!(-4), size),
        ("head_dim", json!(-16), size),
        (
            "num_key_value_heads",
            json!(0),
            "expected a number from 1 to 4",
        ),
        (
            "num_key_value_heads",
            json!(8),
            "expected a number from 1 to 4",
        ),
        (
            "num_key_value_heads",
            json!(3),
            "expected a divisor of the 4 query heads",
        ),
        ("head_dim", json!(15), "expected a positive even number"),
        ("rms_norm_eps", json!(0), "expected a positive number"),
        ("rms_norm_eps", json!(-1e-5), "expected a positive number"),
        ("rope_theta", json!(0), "expected a positive number"),
        ("rope_theta", json!(-1e4), "expected a positive number"),
        (
            "max_position_embeddings",
            json!(1_u64 << 40),
            "expected a whole number",
        ),
    ] {
        let found = field(name, value.clone());
        let shown = match (name, value.as_f64()) {
            ("rms_norm_eps" | "rope_theta", Some(number)) => (number as f32).to_string(),
            _ => value.to_string(),
        };
        assert_eq!(
            found,
            format!("{name}: {expected}, found {shown}"),
            "{value}"
        );
    }
    // 64 / 128 heads leave no width for one.
    assert_eq!(
        config("llama-f32", |config| {
            config.insert("num_attention_heads".into(), json!(128));
        }),
        "num_attention_heads: expected a divisor of the hidden_size 64, found 128"
    );
    assert_eq!(
        field("num_attention_heads", json!(5)),
        "num_attention_heads: expected a divisor of the hidden_size 64, found 5"
    );
}

#[test]
fn large_numbers_cost_nothing() {
    // All are within the limits; the tensors do not fit, and nothing of that size is made.
    let message = config_weights("llama-f32", |config| {
        for name in ["hidden_size", "intermediate_size", "vocab_size"] {
            config.insert(name.into(), json!(1 << 24));
        }
        config.insert("num_hidden_layers".into(), json!(1024));
    });
    assert!(message.contains("9198 missing ("), "{message}");
    assert!(
        message.contains("expected shape [16777216, 16777216], found [130, 64]"),
        "{message}"
    );
}

/// The message for a config.json that fits the limits but not the tensors.
fn config_weights(name: &str, change: impl FnOnce(&mut Map<String, Value>)) -> String {
    let model = Copy::of(name);
    model.edit("config.json", change);
    let message = fails(&model);
    let rest = message
        .strip_prefix("M: the tensors do not fit the model: ")
        .expect(&message);
    rest.to_owned()
}

#[test]
fn rope_scalings_that_are_not_understood() {
    let scaling = |value: Value| field("rope_scaling", value);
    assert_eq!(
        scaling(json!({"type": "cubic", "factor": 2.0})),
        "rope_scaling.type: \"cubic\" is not supported"
    );
    for kind in ["linear", "llama3", "yarn"] {
        assert_eq!(
            scaling(json!({"rope_type": kind})),
            "missing field rope_scaling.factor"
        );
        assert_eq!(
            scaling(json!({"rope_type": kind, "factor": -1.0})),
            "factor: expected a positive number, found -1"
        );
        assert_eq!(
            scaling(json!({"rope_type": kind, "factor": "2"})),
            "rope_scaling.factor: expected a number, found \"2\""
        );
    }
    assert_eq!(
        scaling(json!({"type": "longrope", "original_max_position_embeddings": 16})),
        "missing field rope_scaling.long_factor"
    );
    assert_eq!(
        scaling(
            json!({"type": "longrope", "original_max_position_embeddings": 16,
                       "long_factor": [1.0, 2.0]})
        ),
        "long_factor: expected 8 numbers, found 2"
    );
    assert_eq!(
        scaling(json!({"type": "longrope", "long_factor": vec![1.0; 8]})),
        "missing field rope_scaling.original_max_position_embeddings"
    );
    assert_eq!(
        scaling(json!("linear")),
        "rope_scaling: expected an object, found \"linear\""
    );
    assert_eq!(
        scaling(json!({"type": 7})),
        "rope_scaling.type: expected a string, found 7"
    );
}

#[test]
fn layers_that_are_not_described() {
    let types = |types: Value| {
        config("llama-sliding", |config| {
            config.insert("layer_types".into(), types);
        })
    };
    assert_eq!(
        types(json!(["full_attention"])),
        "layer_types: expected 3 entries, found 1"
    );
    assert_eq!(
        types(json!([
            "full_attention",
            "full_attention",
            "ring_attention"
        ])),
        "layer_types: \"ring_attention\" is not supported"
    );
    let window = |window: Value| {
        config("llama-sliding", |config| {
            config.insert("sliding_window".into(), window);
        })
    };
    assert_eq!(window(Value::Null), "missing field sliding_window");
    for size in [0, -8] {
        assert_eq!(
            window(json!(size)),
            format!("sliding_window: expected a positive number, found {size}")
        );
    }
    let smollm3 = |name: &str, value: Value| {
        config("smollm3", |config| {
            config.insert(name.into(), value);
        })
    };
    assert_eq!(
        smollm3("no_rope_layers", json!([1, 0])),
        "no_rope_layers: expected 4 entries, found 2"
    );
    assert_eq!(
        config("smollm3", |config| {
            config.remove("no_rope_layers");
            config.insert("no_rope_layer_interval".into(), json!(0));
        }),
        "no_rope_layer_interval: expected a number from 1 to 2147483647, found 0"
    );
}

#[test]
fn all_tensors_that_do_not_fit_are_in_one_error() {
    let model = Copy::of("llama-f32");
    let mut header = Header::read(&model, FILE);
    header.rename("lm_head.weight", "lm_tail.weight");
    header.rename(
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.mlp.sideways_proj.weight",
    );
    header.entry("model.norm.weight")["shape"] = json!([8, 8]);
    header.write(&model, FILE);
    assert_eq!(
        fails(&model),
        "M: the tensors do not fit the model: \
         2 missing (model.layers.1.mlp.up_proj.weight, lm_head.weight); \
         2 unexpected (lm_tail.weight, model.layers.1.mlp.sideways_proj.weight); \
         1 of another shape (model.norm.weight: expected shape [64], found [8, 8])"
    );
    // Biases that the config does not announce are not left out in silence.
    let message = config_weights("llama-attn-bias", |config| {
        config.insert("attention_bias".into(), json!(false));
    });
    assert!(
        message.starts_with("8 unexpected (model.layers.0.self_attn.k_proj.bias"),
        "{message}"
    );
}

#[test]
fn layers_that_are_only_half_there() {
    // The scales without the biases that an affine layout has.
    let model = Copy::of("llama-4bit");
    let mut header = Header::read(&model, FILE);
    header.rename("lm_head.biases", "lm_head.bases");
    header.write(&model, FILE);
    assert_eq!(
        fails(&model),
        "M: the tensors do not fit the model: 1 missing (lm_head.biases); \
         1 unexpected (lm_head.bases)"
    );
}

const FILE: &str = "model.safetensors";

#[test]
fn weights_that_are_missing_or_cut() {
    let model = Copy::of("llama-f32");
    model.remove(FILE);
    assert_eq!(
        fails(&model),
        "M: folder: expected model.safetensors.index.json, model.safetensors or \
         model*.safetensors, found none of them"
    );
    let model = Copy::of("llama-f32");
    let whole = model.read(FILE);
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for length in [
        0,
        7,
        8,
        100,
        header - 1,
        header,
        header + 1,
        whole.len() - 1,
    ] {
        model.write(FILE, &whole[..length]);
        let message = fails(&model);
        let expected = match length {
            0 | 7 => format!("file: expected at least 8 bytes, found {length} bytes"),
            8 | 100 => format!(
                "header length: expected at most the {} bytes that follow, found {}",
                length - 8,
                header - 8
            ),
            _ if length < header => format!(
                "header length: expected at most the {} bytes that follow, found {}",
                length - 8,
                header - 8
            ),
            // Which tensor is the first that does not lie within the data is of no account.
            _ => format!(
                "data_offsets: expected a range within the {} bytes of data",
                length - header
            ),
        };
        assert!(message.starts_with("M/model.safetensors: "), "{message}");
        assert!(message.contains(&expected), "{length}: {message}");
    }
    let mut long = whole.clone();
    long.push(0);
    model.write(FILE, long);
    let data = whole.len() - header;
    assert_eq!(
        fails(&model),
        format!(
            "M/model.safetensors: data: expected {data} bytes, found {} bytes",
            data + 1
        )
    );
}

#[test]
fn headers_that_lie() {
    let name = "model.norm.weight";
    let change = |change: &dyn Fn(&mut Value)| {
        let model = Copy::of("llama-f32");
        let mut header = Header::read(&model, FILE);
        change(header.entry(name));
        header.write(&model, FILE);
        let message = fails(&model);
        let start = format!("M/model.safetensors: tensor \"{name}\": ");
        message.strip_prefix(&start).expect(&message).to_owned()
    };
    assert_eq!(
        change(&|entry| entry["shape"] = json!([65])),
        "data_offsets: expected 260 bytes for F32 [65], found 256 bytes"
    );
    assert_eq!(
        change(&|entry| entry["shape"] = json!([u64::MAX, u64::MAX])),
        format!(
            "data_offsets: expected more than 2^64 bytes for F32 [{0}, {0}], found 256 bytes",
            u64::MAX
        )
    );
    assert!(
        change(&|entry| entry["dtype"] = json!("F31")).starts_with("dtype: expected one of BOOL,")
    );
    let far = 1_u64 << 50;
    let found = change(&|entry| entry["data_offsets"] = json!([far, far + 256]));
    assert!(
        found.ends_with(&format!("found [{far}, {}]", far + 256)),
        "{found}"
    );
    let back = change(&|entry| entry["data_offsets"] = json!([512, 256]));
    assert!(back.ends_with("found [512, 256]"), "{back}");

    let model = Copy::of("llama-f32");
    for (length, expected) in [
        (u64::MAX, "header length: expected at most 100000000 bytes"),
        (99_999_999, "header length: expected at most the "),
    ] {
        let mut bytes = model.read(FILE);
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        model.write(FILE, bytes);
        let message = fails(&model);
        let expected = format!("M/model.safetensors: {expected}");
        assert!(message.starts_with(&expected), "{message}");
    }
    // A dtype that can be read, but is no weight.
    let model = Copy::of("llama-f32");
    let mut header = Header::read(&model, FILE);
    header.entry(name)["dtype"] = json!("I32");
    header.write(&model, FILE);
    assert_eq!(
        fails(&model),
        format!(
            "M: the tensors do not fit the model: 1 of another dtype \
             ({name}: expected a floating-point type, found int32)"
        )
    );
}

#[test]
fn indexes_that_lie() {
    const INDEX: &str = "model.safetensors.index.json";
    const FIRST: &str = "model-00001-of-00002.safetensors";
    const SECOND: &str = "model-00002-of-00002.safetensors";
    let index = |change: &dyn Fn(&mut Map<String, Value>)| {
        let model = Copy::of("llama-sharded");
        model.edit(INDEX, |index| {
            change(index["weight_map"].as_object_mut().unwrap());
        });
        fails(&model)
    };
    let model = Copy::of("llama-sharded");
    model.remove(SECOND);
    assert_eq!(
        fails(&model),
        format!(
            "M/{INDEX}: weight_map[\"model.embed_tokens.weight\"]: expected a file of the same \
             folder, found \"{SECOND}\", which is not there"
        )
    );
    let model = Copy::of("llama-sharded");
    let half = model.read(SECOND);
    model.write(SECOND, &half[..half.len() / 2]);
    let message = fails(&model);
    assert!(
        message.starts_with(&format!("M/{SECOND}: tensor \"")),
        "{message}"
    );
    assert!(
        message.contains("data_offsets: expected a range within the "),
        "{message}"
    );

    assert_eq!(
        index(&|map| {
            map.insert("ghost.weight".into(), json!(FIRST));
        }),
        format!("M/{FIRST}: tensor \"ghost.weight\": no such tensor")
    );
    assert_eq!(
        index(&|map| {
            map.insert("lm_head.weight".into(), json!(SECOND));
        }),
        format!("M/{SECOND}: tensor \"lm_head.weight\": no such tensor")
    );
    for outside in ["../model.safetensors", "/etc/passwd", "a/../../b", ""] {
        let message = index(&|map| {
            map.insert("lm_head.weight".into(), json!(outside));
        });
        let start = format!("M/{INDEX}: weight_map[\"lm_head.weight\"]: ");
        assert!(message.starts_with(&start), "{message}");
        assert!(
            message.ends_with(&format!("found {outside:?}")),
            "{message}"
        );
    }
    let model = Copy::of("llama-sharded");
    for (text, expected) in [
        ("{", "EOF while parsing an object at line 1 column 1"),
        ("{}", "missing field `weight_map`"),
        ("{\"weight_map\": 3}", "invalid type: integer `3`"),
    ] {
        model.write(INDEX, text);
        let message = fails(&model);
        assert!(message.starts_with(&format!("M/{INDEX}: ")), "{message}");
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn tokenizers_that_are_missing_or_broken() {
    let model = Copy::of("llama-f32");
    assert_eq!(session_fails(&model), "M: missing tokenizer.json");
    let model = model.with_tokenizer(130);
    let whole = model.read("tokenizer.json");
    for (text, expected) in [
        (
            &whole[..whole.len() / 2],
            "M/tokenizer.json: not valid JSON: EOF while parsing",
        ),
        (
            b"hello",
            "M/tokenizer.json: not valid JSON: expected value at line 1 column 1",
        ),
        (b"{}", "M/tokenizer.json: missing field model"),
        (
            b"{\"model\": {\"type\": \"BPE\"}}",
            "M/tokenizer.json: missing field model.vocab",
        ),
        (b"\xff", "M/tokenizer.json: "),
    ] {
        model.write("tokenizer.json", text);
        let message = session_fails(&model);
        assert!(message.starts_with(expected), "{message}");
    }
    model.write("tokenizer.json", &whole);
    model.write("tokenizer_config.json", "{\"add_bos_token\": 3}");
    let message = session_fails(&model);
    assert!(
        message.starts_with("M/tokenizer_config.json: add_bos_token: expected "),
        "{message}"
    );
}

#[test]
fn templates_that_are_broken() {
    let model = Copy::of("llama-f32").with_tokenizer(130);
    model.write("chat_template.jinja", "one\n{% if x %}");
    let message = session_fails(&model);
    let start = "M/chat_template.jinja: chat template: default, line 2: syntax error";
    assert!(message.starts_with(start), "{message}");
    model.remove("chat_template.jinja");
    model.write(
        "tokenizer_config.json",
        json!({"chat_template": 3}).to_string(),
    );
    assert_eq!(
        session_fails(&model),
        "M/tokenizer_config.json: chat_template: expected a string or a list of objects with \
         name and template, found 3"
    );
}

#[test]
fn end_tokens_that_are_none() {
    for value in [json!("two"), json!([1, -2]), json!(1_u64 << 40), json!({})] {
        let model = Copy::of("llama-f32").with_tokenizer(130);
        model.edit("config.json", |config| {
            config.insert("eos_token_id".into(), value.clone());
        });
        let message = session_fails(&model);
        let expected = "eos_token_id: expected a token id or a list of them, found ";
        let start = format!("M/config.json: {expected}");
        assert!(message.starts_with(&start), "{message}");
        // The other file, which wins.
        model.write(
            "generation_config.json",
            json!({"eos_token_id": value}).to_string(),
        );
        let message = session_fails(&model);
        let start = format!("M/generation_config.json: {expected}");
        assert!(message.starts_with(&start), "{message}");
    }
}

#[test]
fn kinds_of_errors_can_be_told_apart() {
    let kind_of = |change: &dyn Fn(&Copy)| {
        let model = Copy::of("llama-f32");
        change(&model);
        let files = ModelFiles::open(model.path()).unwrap();
        let error = load(&files, None, |_| {}).unwrap_err();
        assert!(error.path().is_some(), "{error}");
        format!("{:?}", error.kind())
            .split([' ', '('])
            .next()
            .unwrap()
            .to_owned()
    };
    assert_eq!(
        kind_of(&|m| {
            m.remove("config.json");
        }),
        "Io"
    );
    assert_eq!(
        kind_of(&|m| {
            m.write("config.json", "{");
        }),
        "Json"
    );
    assert_eq!(
        kind_of(&|m| {
            m.write("config.json", "{}");
        }),
        "Missing"
    );
    assert_eq!(
        kind_of(&|m| {
            m.write("config.json", "{\"model_type\": \"x\"}");
        }),
        "UnknownModelType"
    );
    assert_eq!(
        kind_of(&|m| {
            m.write(FILE, "");
        }),
        "Core"
    );
    let model = Copy::of("llama-f32");
    model.edit("config.json", |config| {
        config.insert("vocab_size".into(), json!(131));
    });
    let files = ModelFiles::open(model.path()).unwrap();
    let error = load(&files, None, |_| {}).unwrap_err();
    let ErrorKind::Nn(nn) = error.kind() else {
        panic!("{error:?}")
    };
    let mlex_nn::ErrorKind::Weights(weights) = nn.kind() else {
        panic!("{error:?}")
    };
    let names: Vec<_> = weights
        .misshapen
        .iter()
        .map(|tensor| tensor.name.as_str())
        .collect();
    assert_eq!(names, ["model.embed_tokens.weight", "lm_head.weight"]);
}
