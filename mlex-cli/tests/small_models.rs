//! The commands on small checkpoints with random weights. Expected values are mlx-lm's
//! (`tools/make_model_golden.py`), or arithmetic where a test says so.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;
use std::time::Duration;

use common::{
    Expected, document, ends, ids, interrupt, mlex, small, small_with_tokenizer, stderr, stdout,
    succeeds,
};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(60);

#[test]
fn scores_are_the_references() {
    for (name, tolerance) in [
        ("llama-f32", 1e-4),
        ("qwen3-tied-4bit", 1e-4),
        ("qwen2-f32", 1e-4),
    ] {
        let expected = Expected::of(name);
        let mut command = mlex(["score", "--json", "--top", "3", "--model"]);
        command
            .arg(small(name))
            .args(["--tokens", &ids(&expected.tokens)]);
        let score = document(&mut command);
        assert_eq!(score["tokens"], json!(expected.tokens));
        assert_eq!(score["logprobs"][0], Value::Null);
        assert_eq!(score["top"][0], json!([]));
        let mut sum = 0.0;
        for position in 1..expected.tokens.len() {
            let logprobs = expected.logprobs(position - 1);
            let near = |found: &Value, id: usize| {
                let (found, wanted) = (found.as_f64().unwrap(), logprobs[id]);
                assert!(
                    (found - wanted).abs() < tolerance,
                    "{name}: {found}, not {wanted}"
                );
            };
            let id = expected.tokens[position] as usize;
            near(&score["logprobs"][position], id);
            sum += logprobs[id];
            let top = score["top"][position].as_array().unwrap();
            assert_eq!(top.len(), 3);
            for entry in top {
                near(&entry["logprob"], entry["id"].as_u64().unwrap() as usize);
            }
            let best = logprobs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            assert!((top[0]["logprob"].as_f64().unwrap() - best).abs() < tolerance);
        }
        let perplexity = (-sum / (expected.tokens.len() - 1) as f64).exp();
        let found = score["perplexity"].as_f64().unwrap();
        assert!(
            (found / perplexity - 1.0).abs() < 1e-3,
            "{name}: {found}, not {perplexity}"
        );
    }
}

#[test]
fn the_table_of_a_score() {
    let dir = small_with_tokenizer();
    let mut command = mlex(["score", "--top", "1", "--text", "t5 t7", "--model"]);
    let text = succeeds(command.arg(dir.path()));
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 5, "{text}");
    assert_eq!(
        lines[1].split_whitespace().collect::<Vec<_>>(),
        ["-", "5", "\"t5\""]
    );
    assert_eq!(
        lines[2].split_whitespace().skip(1).collect::<Vec<_>>(),
        ["7", "\"t7\""]
    );
    assert!(lines[4].starts_with("perplexity: "), "{text}");
    // The same from a file, from stdin and by ids.
    let file = dir.path().join("text");
    std::fs::write(&file, "t5 t7").unwrap();
    let with = |flag: &str, value: &str| {
        succeeds(mlex(["score", "--top", "1", flag, value, "--model"]).arg(dir.path()))
    };
    assert_eq!(with("--text-file", file.to_str().unwrap()), text);
    assert_eq!(with("--tokens", "5,7"), text);
}

#[test]
fn greedy_tokens_are_the_references() {
    let expected = Expected::of("llama-f32");
    let dir = small_with_tokenizer();
    let prompt: Vec<String> = expected.tokens.iter().map(|id| format!("t{id}")).collect();
    let mut command = mlex([
        "generate",
        "--json",
        "--raw",
        "--ignore-eos",
        "--max-tokens",
        "16",
    ]);
    command
        .arg("--model")
        .arg(dir.path())
        .args(["--prompt", &prompt.join(" ")]);
    let answer = document(&mut command);
    let fields: Vec<&String> = answer.as_object().unwrap().keys().collect();
    let wanted = [
        "text",
        "tokens",
        "prompt_tokens",
        "finish_reason",
        "reasoning",
        "tool_calls",
        "usage",
        "timings",
    ];
    assert_eq!(fields, wanted);
    assert_eq!(answer["prompt_tokens"], json!(expected.tokens));
    assert_eq!(answer["tokens"], json!(expected.greedy));
    let text: Vec<String> = expected.greedy.iter().map(|id| format!("t{id}")).collect();
    assert_eq!(answer["text"], json!(text.join(" ")));
    assert_eq!(answer["finish_reason"], "length");
    assert_eq!(answer["reasoning"], Value::Null);
    assert_eq!(answer["tool_calls"], json!([]));
    assert_eq!(
        answer["usage"],
        json!({"prompt_tokens": 24, "completion_tokens": 16})
    );
    for field in ["load_s", "prefill_tps", "decode_tps", "peak_memory_bytes"] {
        assert!(answer["timings"][field].as_f64().unwrap() > 0.0, "{field}");
    }

    // In smaller steps, and by ids, it is the same.
    let mut command = mlex(["generate", "--json", "--ignore-eos", "--max-tokens", "16"]);
    command
        .arg("--model")
        .arg(dir.path())
        .args(["--prefill-step", "5"]);
    let again = document(command.args(["--prompt-tokens", &ids(&expected.tokens)]));
    assert_eq!(again["tokens"], answer["tokens"]);

    // The text streams, with a line break at its end; statistics are on stderr.
    let mut command = mlex(["generate", "--raw", "--ignore-eos", "--max-tokens", "16"]);
    command
        .arg("--model")
        .arg(dir.path())
        .args(["--prompt", &prompt.join(" ")]);
    let output = command.output().unwrap();
    assert_eq!(stdout(&output), text.join(" ") + "\n");
    let statistics = stderr(&output);
    assert!(statistics.contains("24 tokens, "), "{statistics}");
    assert!(statistics.contains("16 tokens, "), "{statistics}");
    assert!(statistics.contains("(length)"), "{statistics}");
    assert!(statistics.contains("peak memory: "), "{statistics}");
}

#[test]
fn a_stop_text_and_a_bias_end_it() {
    let expected = Expected::of("llama-f32");
    let dir = small_with_tokenizer();
    let generate = |args: &[&str]| {
        let mut command = mlex(["generate", "--json", "--max-tokens", "16", "--model"]);
        command
            .arg(dir.path())
            .args(["--prompt-tokens", &ids(&expected.tokens)])
            .args(args);
        document(&mut command)
    };
    let third = format!("t{}", expected.greedy[2]);
    let answer = generate(&["--ignore-eos", "--stop", &third]);
    assert_eq!(answer["finish_reason"], "stop");
    assert!(!answer["text"].as_str().unwrap().contains(&third));
    // 2 is the config's end-of-text token.
    let answer = generate(&["--logit-bias", "2=1000"]);
    assert_eq!(answer["tokens"], json!([2]));
    assert_eq!(
        (&answer["text"], &answer["finish_reason"]),
        (&json!(""), &json!("stop"))
    );
    let forbidden = format!("{}=-inf", expected.greedy[0]);
    let answer = generate(&["--ignore-eos", "--logit-bias", &forbidden]);
    assert!(
        !answer["tokens"]
            .as_array()
            .unwrap()
            .contains(&json!(expected.greedy[0]))
    );
}

#[test]
fn a_seed_repeats_a_sample() {
    let dir = small_with_tokenizer();
    let tokens = |seed: &str| {
        let mut command = mlex([
            "generate",
            "--json",
            "--raw",
            "--prompt",
            "t5 t7",
            "--ignore-eos",
        ]);
        command.args([
            "--temp",
            "1",
            "--max-tokens",
            "24",
            "--seed",
            seed,
            "--model",
        ]);
        document(command.arg(dir.path()))["tokens"].clone()
    };
    assert_eq!(tokens("1"), tokens("1"));
    assert_ne!(tokens("1"), tokens("2"));
}

#[test]
fn a_model_without_a_template_takes_the_prompt_as_it_is() {
    let dir = small_with_tokenizer();
    let mut command = mlex(["generate", "--json", "--max-tokens", "1", "--model"]);
    command
        .arg(dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"t5 t7\n").unwrap();
    let output = child.wait_with_output().unwrap();
    let answer: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(answer["prompt_tokens"], json!([5, 7]));
    assert!(stderr(&output).contains("note: the model has no chat template"));

    let (error, _) = common::fails(
        mlex(["generate", "--prompt", "t5", "--system", "t6", "--model"]).arg(dir.path()),
    );
    assert_eq!(error, "the model has no chat template for a conversation");
}

#[test]
fn a_template_gets_messages_and_arguments() {
    let dir = small_with_tokenizer();
    let template = "{% for m in messages %}{{ 't1' if m.role == 'system' else 't2' }} \
                    {{ m.content }} {% endfor %}{{ 't3' if thinking else 't4' }}";
    std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    let prompt = |args: &[&str]| {
        let mut command = mlex(["generate", "--json", "--max-tokens", "1", "--model"]);
        document(command.arg(dir.path()).args(args))["prompt_tokens"].clone()
    };
    assert_eq!(prompt(&["--prompt", "t9"]), json!([2, 9, 4]));
    assert_eq!(
        prompt(&["--prompt", "t9", "--system", "t8"]),
        json!([1, 8, 2, 9, 4])
    );
    let thinking = ["--prompt", "t9", "--template-arg", "thinking=true"];
    assert_eq!(prompt(&thinking), json!([2, 9, 3]));
    assert_eq!(prompt(&["--prompt", "t9", "--raw"]), json!([9]));
    let file = dir.path().join("messages.json");
    let messages = json!({"messages": [{"role": "system", "content": "t7"},
                                       {"role": "user", "content": "t9"}]});
    std::fs::write(&file, messages.to_string()).unwrap();
    assert_eq!(
        prompt(&["--messages", file.to_str().unwrap()]),
        json!([1, 7, 2, 9, 4])
    );
}

#[test]
fn inspect_counts_parameters_and_memory() {
    // 130 x 64 embedding and head; in each of 2 layers q and o 64 x 64, k and v 32 x 64, three
    // of `inner` x 64, two norms of 64; a last norm.
    let parameters =
        |inner| 2 * 130 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * inner * 64 + 2 * 64) + 64;
    for (name, inner) in [
        ("llama-f32", 80),
        ("llama-4bit", 128),
        ("llama-mixed-bits", 128),
        ("llama-mxfp4", 128),
    ] {
        let model = document(mlex(["inspect", "--json", "--model"]).arg(small(name)));
        assert_eq!(model["model_type"], "llama", "{name}");
        assert_eq!(model["parameters"], parameters(inner), "{name}");
        assert_eq!(model["layers"], 2);
        assert_eq!(model["vocab_size"], 130);
        assert_eq!(model["max_context"], 512);
        assert_eq!(model["tokenizer"], Value::Null);
        assert_eq!(model["chat_template"], false);
        let file = std::fs::metadata(small(name).join("model.safetensors")).unwrap();
        assert_eq!(model["file_bytes"], file.len());
    }
    let model = document(mlex(["inspect", "--json", "--model"]).arg(small("llama-f32")));
    assert_eq!(model["weight_bytes"], 4 * parameters(80));
    assert_eq!(model["bits_per_weight"], 32.0);
    // Keys and values of 2 layers, 2 heads of 16, f32, 512 tokens.
    assert_eq!(model["memory"]["cache_bytes"], 2 * 2 * 2 * 16 * 4 * 512);
    let mut command = mlex(["inspect", "--json", "--context", "100", "--model"]);
    let model = document(command.arg(small("llama-bf16")));
    assert_eq!(model["memory"]["cache_bytes"], 2 * 2 * 2 * 16 * 2 * 100);
    assert_eq!(model["memory"]["cache_dtype"], "bfloat16");
}

#[test]
fn inspect_knows_states_of_fixed_size_and_windows() {
    let bytes = |name: &str| {
        let mut command = mlex(["inspect", "--json", "--context", "100", "--model"]);
        let report = document(command.arg(small(name)));
        report["memory"]["cache_bytes"].clone()
    };
    // One layer with keys and values of 2 heads of 16, and three with a state of 4 heads of
    // 16 x 16 and 3 positions of 2 * 2 * 16 + 4 * 16 channels; all in f32.
    let recurrent = 4 * 16 * 16 + 3 * (2 * 2 * 16 + 4 * 16);
    assert_eq!(bytes("qwen3_5-f32"), 4 * (100 * 2 * 2 * 16 + 3 * recurrent));
    // Two layers with a window of 8 and heads of 16, one without and a head of 32; the other
    // three use theirs.
    assert_eq!(bytes("gemma4-small"), 4 * (2 * 8 * 2 * 16 + 100 * 2 * 32));
}

#[test]
fn inspect_groups_layers_by_their_layout() {
    let model = document(mlex(["inspect", "--json", "--model"]).arg(small("llama-mixed-bits")));
    let row = |path: &str| {
        let rows = model["quantization"].as_array().unwrap().iter();
        let rows = rows.filter(|row| row["path"] == path);
        rows.map(|row| json!([row["bits"], row["dtype"], row["count"]]))
            .collect::<Vec<_>>()
    };
    // As its config.json says.
    assert_eq!(row("model.embed_tokens"), [json!([8, null, 1])]);
    assert_eq!(row("lm_head"), [json!([null, "float32", 1])]);
    assert_eq!(row("model.layers.*.mlp.up_proj"), [json!([4, null, 2])]);
    let down = row("model.layers.*.mlp.down_proj");
    assert_eq!(down.len(), 2);
    assert!(down.contains(&json!([4, null, 1])) && down.contains(&json!([null, "float32", 1])));
    let text = succeeds(mlex(["inspect", "--model"]).arg(small("llama-mixed-bits")));
    assert!(text.contains("architecture     llama\n"), "{text}");
    assert!(text.contains("8-bit affine, group 32\n"), "{text}");
}

#[test]
fn bench_measures() {
    // It has no tokenizer, and needs none.
    let args = ["--prompt-tokens", "20", "--gen-tokens", "4", "--model"];
    let bench = |more: &[&str]| {
        let mut command = mlex(["bench", "--json"]);
        command.args(more).args(args);
        document(command.arg(small("qwen3-tied-4bit")))
    };
    let fields = [
        "prefill_tps",
        "decode_tps",
        "load_s",
        "peak_memory_bytes",
        "model_bytes",
    ];
    for more in [
        &["--repeats", "2", "--threads", "1", "--dtype", "float32"][..],
        &["--no-kernels"],
    ] {
        let report = bench(more);
        for field in fields {
            assert!(report[field].as_f64().unwrap() > 0.0, "{field}: {report}");
        }
        assert_eq!(
            [&report["prompt_tokens"], &report["gen_tokens"]],
            [&json!(20), &json!(4)]
        );
        assert_eq!(report["context"], 24);
    }
    let report = bench(&["--repeats", "2", "--threads", "1", "--device", "cpu"]);
    assert_eq!(report["threads"], 1);
    assert_eq!(report["kernels"], true);
    assert_eq!(report["device"], "cpu");
    assert_eq!(report["dtype"], Value::Null);
    // The medians are those of the runs: of two, the mean.
    let runs = report["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 2);
    for field in ["prefill_tps", "decode_tps"] {
        let [a, b] = [0, 1].map(|run| runs[run][field].as_f64().unwrap());
        let median = report[field].as_f64().unwrap();
        assert!((median / ((a + b) / 2.0) - 1.0).abs() < 1e-9, "{report}");
    }
    let off = bench(&["--no-kernels", "--dtype", "bfloat16", "--repeats", "1"]);
    assert_eq!(off["kernels"], false);
    assert_eq!(off["dtype"], "bfloat16");

    let mut command = mlex(["bench", "--repeats", "1"]);
    let text = succeeds(command.args(args).arg(small("llama-f32")));
    assert!(text.starts_with("prefill "), "{text}");
    assert!(text.contains("tokens/s (20 tokens)\n"), "{text}");
    assert!(text.contains("\npeak memory  "), "{text}");
}

#[test]
fn threads_and_kernels_change_no_token() {
    let expected = Expected::of("qwen3-tied-4bit");
    for more in [
        &["--threads", "1"][..],
        &["--threads", "3"],
        &["--no-kernels"],
    ] {
        let mut command = mlex(["score", "--json", "--top", "1", "--model"]);
        command
            .arg(small("qwen3-tied-4bit"))
            .args(["--tokens", &ids(&expected.tokens)])
            .args(more);
        let score = document(&mut command);
        for position in 1..expected.tokens.len() {
            let wanted = expected.logprobs(position - 1)[expected.tokens[position] as usize];
            let found = score["logprobs"][position].as_f64().unwrap();
            assert!(
                (found - wanted).abs() < 1e-4,
                "{more:?}: {found}, not {wanted}"
            );
        }
    }
}

#[test]
fn ctrl_c_keeps_the_text_so_far() {
    let dir = small_with_tokenizer();
    let mut command = mlex([
        "generate",
        "--raw",
        "--prompt",
        "t5",
        "--ignore-eos",
        "--model",
    ]);
    command.arg(dir.path()).args(["--max-tokens", "100000000"]);
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut reader = BufReader::new(child.stdout.take().unwrap());
    let mut text = vec![0; 16];
    reader.read_exact(&mut text).unwrap();
    interrupt(&child);
    reader.read_to_end(&mut text).unwrap();
    assert_eq!(ends(&mut child, SOON), Some(130));
    let text = String::from_utf8(text).unwrap();
    assert!(text.starts_with('t') && text.ends_with('\n'), "{text}");
    let mut statistics = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut statistics)
        .unwrap();
    assert!(statistics.contains("(cancelled)"), "{statistics}");
}

#[test]
fn ctrl_c_ends_a_document_too() {
    let dir = small_with_tokenizer();
    let mut command = mlex([
        "generate",
        "--raw",
        "--prompt",
        "t5",
        "--ignore-eos",
        "--json",
    ]);
    command
        .arg("--model")
        .arg(dir.path())
        .args(["--max-tokens", "100000000"]);
    command
        .env("RUST_LOG", "debug")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // Nothing is printed while it generates; it begins right after the load is logged.
    let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(log.any(|line| line.unwrap().contains("loaded a model")));
    std::thread::sleep(Duration::from_secs(2));
    interrupt(&child);
    let mut text = String::new();
    child
        .stdout
        .take()
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    assert_eq!(ends(&mut child, SOON), Some(130));
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["finish_reason"], "cancelled");
    let tokens = answer["tokens"].as_array().unwrap().len();
    assert!(tokens > 0);
    assert_eq!(answer["usage"]["completion_tokens"], tokens);
}

#[test]
fn a_second_ctrl_c_ends_the_program_within_a_prompt() {
    let dir = small_with_tokenizer();
    let mut command = mlex(["generate", "--raw", "--ignore-eos", "--model"]);
    command
        .arg(dir.path())
        .args(["--max-tokens", "1", "--prefill-step", "1000000"]);
    command
        .env("RUST_LOG", "debug")
        .stdin(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let prompt = "t5 ".repeat(10_000);
    child
        .stdin
        .take()
        .unwrap()
        .write_all(prompt.as_bytes())
        .unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(log.any(|line| line.unwrap().contains("loaded a model")));
    // So many tokens in one step take seconds; the first Ctrl-C waits for them.
    std::thread::sleep(Duration::from_millis(500));
    interrupt(&child);
    std::thread::sleep(Duration::from_millis(200));
    interrupt(&child);
    assert_eq!(ends(&mut child, Duration::from_secs(2)), Some(130));
}

#[test]
fn a_closed_pipe_ends_it_quietly() {
    let dir = small_with_tokenizer();
    let mut command = mlex([
        "generate",
        "--raw",
        "--prompt",
        "t5",
        "--ignore-eos",
        "--model",
    ]);
    command.arg(dir.path()).args(["--max-tokens", "100000000"]);
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut reader = child.stdout.take().unwrap();
    reader.read_exact(&mut [0; 16]).unwrap();
    drop(reader);
    assert_eq!(ends(&mut child, SOON), Some(0));
    let mut text = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    assert_eq!(text, "");
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error() {
    let full = std::fs::File::options()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let mut command = mlex(["inspect", "--model"]);
    let output = command
        .arg(small("llama-f32"))
        .stdout(full)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).starts_with("error: stdout: No space left"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_wrong_token_is_an_error() {
    let (error, _) =
        common::fails(mlex(["score", "--tokens", "1 130", "--model"]).arg(small("llama-f32")));
    assert_eq!(error, "token: expected an id below 130, found 130");
    let (error, _) =
        common::fails(mlex(["score", "--tokens", "", "--model"]).arg(small("llama-f32")));
    assert_eq!(error, "tokens: expected at least one, found none");
}
