//! Flags, exit codes and errors.

mod common;

use common::{copy_of, fails, mlex, refuses, set_config, small, small_with_tokenizer, succeeds};
use serde_json::json;

#[test]
fn version_names_mlx_too() {
    let text = succeeds(&mut mlex(["--version"]));
    assert!(
        text.starts_with(concat!("mlex ", env!("CARGO_PKG_VERSION"), " (MLX 0.3")),
        "{text}"
    );
}

#[test]
fn help_names_the_commands() {
    let text = succeeds(&mut mlex(["--help"]));
    for command in ["generate", "score", "inspect", "convert", "bench"] {
        assert!(text.contains(command), "{text}");
        assert!(succeeds(&mut mlex([command, "--help"])).contains("--model"));
    }
    assert!(text.contains("pull"), "{text}");
}

#[test]
fn wrong_flags_are_usage_errors() {
    let model = small("llama-f32");
    let model = model.to_str().unwrap();
    let generate = ["generate", "--model", model, "--prompt", "t1"];
    let cases: &[(&[&str], &str)] = &[
        (&["generate", "--prompt", "t1"], "--model"),
        (&["nothing"], "nothing"),
        (&[], "Usage"),
        (&["score", "--model", model], "--text"),
        (
            &["score", "--model", model, "--text", "a", "--tokens", "1"],
            "--tokens",
        ),
        (&["score", "--model", model, "--tokens", "1 x"], "\"x\""),
        (
            &["inspect", "--model", model, "--context", "0"],
            "--context",
        ),
        (&["convert", "--model", model], "--out"),
        (
            &[
                "convert",
                "--model",
                model,
                "--out",
                "never-made",
                "--mode",
                "int4",
            ],
            "mxfp4",
        ),
        (
            &[
                "convert",
                "--model",
                model,
                "--out",
                "never-made",
                "--bits",
                "7",
            ],
            "bits: expected 2, 3, 4, 5, 6 or 8 for affine, found 7",
        ),
        (
            &[
                "convert",
                "--model",
                model,
                "--out",
                "never-made",
                "--mode",
                "nvfp4",
                "--recipe",
                "mixed_2_6",
            ],
            "mode: expected affine",
        ),
        (
            &["bench", "--model", model, "--gen-tokens", "0"],
            "--gen-tokens",
        ),
        (
            &["bench", "--model", model, "--prompt-tokens", "99999999999"],
            "--prompt-tokens",
        ),
        (&["bench", "--model", model, "--repeats", "0"], "--repeats"),
        (
            &["inspect", "--model", model, "--revision", "v1"],
            "--revision",
        ),
        (&["pull"], "<REPO>"),
        (&["pull", "name"], "organization/name"),
    ];
    for (args, what) in cases {
        let output = mlex(*args).output().unwrap();
        let text = common::stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {text}");
        assert!(text.contains(what), "{args:?}: {text}");
    }
    let cases: &[(&[&str], &str)] = &[
        (
            &["--top-p", "2"],
            "top_p: expected a number above 0 and up to 1, found 2",
        ),
        (
            &["--temp", "-1"],
            "temperature: expected a number of at least 0, found -1",
        ),
        (&["--temp", "x"], "--temp"),
        (&["--logit-bias", "x"], "expected ID=VALUE"),
        (&["--template-arg", "k=v"], "a text needs quotes"),
        (
            &["--dtype", "int8"],
            "expected float32, float16 or bfloat16",
        ),
        (&["--device", "tpu"], "expected cpu, gpu or gpu:N"),
        (&["--threads", "0"], "--threads"),
        (&["--prefill-step", "0"], "--prefill-step"),
        (&["--messages", "f"], "--messages"),
        (&["--raw", "--system", "s"], "--system"),
        (&["--stop", ""], "--stop"),
        (&["--no-such-flag"], "--no-such-flag"),
    ];
    for (args, what) in cases {
        let text = refuses(mlex(generate).args(*args));
        assert!(text.contains(what), "{args:?}: {text}");
    }
}

#[test]
fn a_prompt_is_needed() {
    let model = small("llama-f32");
    let text = refuses(mlex(["generate", "--model"]).arg(model));
    assert!(
        text.starts_with("error: no prompt: stdin is empty"),
        "{text}"
    );
}

#[test]
fn a_missing_model_says_how_to_get_one() {
    for command in [
        &["generate", "--prompt", "hi"][..],
        &["score", "--tokens", "1"],
        &["inspect"],
        &["convert", "--out", "never-made"],
    ] {
        let (error, hint) = fails(mlex(command).args(["--model", "no/such/model.gguf"]));
        assert!(
            error.starts_with("no/such/model.gguf: No such file"),
            "{error}"
        );
        assert!(
            hint.starts_with("a model is a directory with config.json"),
            "{hint}"
        );
        let (error, hint) = fails(mlex(command).args(["--model", "org/Some-Model-4bit"]));
        assert_eq!(
            error,
            "org/Some-Model-4bit: revision \"main\" is not in the cache /no/cache"
        );
        assert!(hint.contains("mlex pull org/Some-Model-4bit"), "{hint}");
    }
}

#[test]
fn a_broken_gguf_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let whole = std::fs::read(small("").join("../../../mlex-core/tests/data/gguf/all_types.gguf"));
    let whole = whole.unwrap();
    for content in [
        &whole[..whole.len() / 2],
        &whole[..20],
        b"",
        b"GGUF",
        b"not a model",
    ] {
        std::fs::write(&path, content).unwrap();
        for command in [
            &["generate", "--prompt", "hi"][..],
            &["score", "--tokens", "1"],
            &["inspect"],
            &["convert", "--out", "never-made"],
        ] {
            let (error, _) = fails(mlex(command).arg("--model").arg(&path));
            assert!(error.starts_with(path.to_str().unwrap()), "{error}");
        }
    }
}

#[test]
fn an_unknown_architecture_is_named() {
    let dir = small_with_tokenizer();
    set_config(dir.path(), "model_type", json!("mystery"));
    for command in [
        &["generate", "--prompt", "t1"][..],
        &["score", "--tokens", "1"],
        &["inspect"],
    ] {
        // The note about the missing chat template would come first.
        let raw = if command[0] == "generate" {
            &["--raw"][..]
        } else {
            &[]
        };
        let (error, _) = fails(mlex(command).args(raw).arg("--model").arg(dir.path()));
        let config = dir.path().join("config.json");
        let start = format!("{}: model_type: expected one of ", config.display());
        assert!(error.starts_with(&start), "{error}");
        assert!(error.contains(" llama, "), "{error}");
        assert!(error.ends_with("found \"mystery\""), "{error}");
    }
}

#[test]
fn weights_that_do_not_fit_are_named_with_a_hint() {
    let dir = copy_of("llama-f32");
    set_config(dir.path(), "num_hidden_layers", json!(3));
    for command in [&["score", "--tokens", "1"][..], &["inspect"]] {
        let (error, hint) = fails(mlex(command).arg("--model").arg(dir.path()));
        assert!(error.contains("model.layers.2."), "{error}");
        assert!(hint.contains("incomplete download"), "{hint}");
    }
}

#[test]
fn a_missing_tokenizer_is_named() {
    let dir = copy_of("llama-f32");
    let (error, hint) = fails(mlex(["score", "--text", "hi", "--model"]).arg(dir.path()));
    assert!(error.ends_with("missing tokenizer.json"), "{error}");
    assert!(hint.contains("copy tokenizer.json"), "{hint}");
}

#[test]
fn messages_that_are_none_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("messages.json");
    let model = small_with_tokenizer();
    let error_of = |content: &str| {
        std::fs::write(&path, content).unwrap();
        let mut command = mlex(["generate", "--model"]);
        let (error, hint) = fails(command.arg(model.path()).arg("--messages").arg(&path));
        let error = error
            .strip_prefix(&format!("{}: ", path.display()))
            .unwrap_or(&error);
        (error.to_owned(), hint)
    };
    assert_eq!(
        error_of("[]").0,
        "messages: expected at least one, found none"
    );
    assert!(error_of("[{]").0.starts_with("not valid JSON: "));
    assert!(
        error_of("{\"tools\": []}")
            .0
            .starts_with("missing field messages")
    );
    let (error, hint) = error_of("[{\"role\": \"user\", \"content\": \"t1\"}]");
    assert_eq!(error, "the model has no chat template for a conversation");
    assert!(hint.contains("--raw"), "{hint}");
}
