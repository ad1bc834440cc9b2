//! The prompt cache: whatever it holds, a prompt gives the tokens of a run without it. So the
//! expected values are those of our own run from the start, which `goldens.rs` compares with
//! mlx-lm.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::thread;

use common::{Copy, Expected, data};
use mlex_core::Device;
use mlex_core::io::{SafetensorsFile, StoredDtype, TensorSpec, write_safetensors};
use mlex_models::generate::{
    Event, FinishReason, LoadOptions, Prompt, PromptFileInfo, Request, Session, TokenLogprob,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::Value;

/// How much likelier a token must be than the next one for two runs to agree on it, in
/// log-probability: chunks of other lengths round otherwise.
const MARGIN: f32 = 1e-3;

fn load_with(model: &Copy, set: impl FnOnce(&mut LoadOptions)) -> Session {
    let mut options = LoadOptions::default();
    options.device = Some(Device::Cpu);
    set(&mut options);
    Session::load(model.path(), options).unwrap()
}

fn load(model: &Copy) -> Session {
    load_with(model, |_| {})
}

fn vocab_size(name: &str) -> usize {
    let config = std::fs::read(data(name).join("config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    let text = config.get("text_config").unwrap_or(&config);
    text["vocab_size"].as_u64().unwrap() as usize
}

fn checkpoint(name: &str) -> Copy {
    Copy::of(name).with_tokenizer(vocab_size(name))
}

/// The checkpoints that compute in f32: rounding in other types decides more often.
fn names() -> Vec<String> {
    let entries = std::fs::read_dir(data("")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let wide = |name: &String| {
        let path = data(name).join("expected.safetensors");
        let exact = |file: mlex_core::io::SafetensorsFile| file.info("logits_f32").is_none();
        path.exists()
            && exact(mlex_core::io::SafetensorsFile::open(path).unwrap())
            && !["bit", "fp", "quant"]
                .iter()
                .any(|part| name.contains(part))
    };
    let mut names: Vec<String> = names.filter(wide).collect();
    names.sort();
    assert!(names.len() >= 20, "{names:?}");
    names
}

fn request(prompt: &[u32], step: usize) -> Request {
    let mut request = Request::new(Prompt::Tokens(prompt.to_vec())).with_max_tokens(6);
    request.ignore_eos = true;
    request.prefill_step = step.into();
    request.logprobs = Some(2);
    request
}

#[derive(Debug, Default)]
struct Answer {
    ids: Vec<u32>,
    /// How much likelier each was than the next one.
    margins: Vec<f32>,
    cached: usize,
    reason: Option<FinishReason>,
}

fn run(session: &Session, request: Request) -> Answer {
    let mut answer = Answer::default();
    for event in session.generate(request) {
        match event.unwrap() {
            Event::Token { id, logprobs, .. } => {
                answer.ids.push(id);
                let top = logprobs.map_or(Vec::new(), |logprobs| logprobs.top);
                let margin = |top: &[TokenLogprob]| match top {
                    [first, second, ..] => first.logprob - second.logprob,
                    _ => 0.0,
                };
                answer.margins.push(margin(&top));
            }
            Event::Done(done) => {
                answer.cached = done.usage.cached_tokens;
                answer.reason = Some(done.finish_reason);
            }
            _ => {}
        }
    }
    answer
}

fn cold(session: &Session, mut request: Request) -> Answer {
    request.use_prompt_cache = false;
    let answer = run(session, request);
    assert_eq!(answer.cached, 0);
    answer
}

/// Whether both runs chose the same tokens, as far as that was no toss-up.
fn agree(warm: &Answer, cold: &Answer) -> bool {
    let pairs = warm.ids.iter().zip(&cold.ids).zip(&cold.margins);
    for ((warm, cold), margin) in pairs {
        if warm != cold {
            return *margin < MARGIN;
        }
    }
    warm.ids.len() == cold.ids.len()
}

/// What a conversation does next.
#[derive(Clone, Debug)]
enum Turn {
    /// Goes on after its last answer.
    Extend(Vec<u32>),
    /// Asks the same again.
    Again,
    /// Asks the beginning of it.
    Shorter(f64),
    /// Goes another way from somewhere.
    Diverge(f64, Vec<u32>),
    Fresh(Vec<u32>),
}

#[derive(Clone, Debug)]
struct Step {
    conversation: usize,
    turn: Turn,
    prefill_step: usize,
    /// Cancelled after so many events.
    cancelled: Option<usize>,
}

fn tokens(vocab_size: u32, count: std::ops::Range<usize>) -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(3..vocab_size, count)
}

fn steps(vocab_size: u32) -> impl Strategy<Value = Vec<Step>> {
    let turn = prop_oneof![
        3 => tokens(vocab_size, 1..9).prop_map(Turn::Extend),
        1 => Just(Turn::Again),
        1 => (0.0..1.0).prop_map(Turn::Shorter),
        2 => ((0.0..1.0), tokens(vocab_size, 1..6)).prop_map(|(at, new)| Turn::Diverge(at, new)),
        1 => tokens(vocab_size, 1..40).prop_map(Turn::Fresh),
    ];
    let prefill_step = prop_oneof![Just(3usize), Just(8), Just(512)];
    let cancelled = prop::option::weighted(0.25, 1usize..10);
    let step = (0usize..3, turn, prefill_step, cancelled);
    let step = step.prop_map(|(conversation, turn, prefill_step, cancelled)| Step {
        conversation,
        turn,
        prefill_step,
        cancelled,
    });
    prop::collection::vec(step, 4..14)
}

fn next_prompt(transcript: &[u32], turn: &Turn) -> Vec<u32> {
    let at = |part: f64| {
        ((transcript.len() as f64 * part) as usize)
            .max(1)
            .min(transcript.len())
    };
    let mut prompt = match turn {
        Turn::Extend(_) | Turn::Again => transcript.to_vec(),
        Turn::Shorter(part) | Turn::Diverge(part, _) => transcript[..at(*part)].to_vec(),
        Turn::Fresh(_) => Vec::new(),
    };
    if let Turn::Extend(new) | Turn::Diverge(_, new) | Turn::Fresh(new) = turn {
        prompt.extend(new);
    }
    prompt
}

/// Conversations that take turns give what each gives from the start, and the pool keeps to its
/// bounds.
fn interleaved(name: &str, cases: u32) {
    let model = checkpoint(name);
    let limits = |options: &mut LoadOptions| {
        options.prompt_cache.snapshot_every = 5;
        options.prompt_cache.max_entries = 6;
    };
    let session = load_with(&model, limits);
    let mut runner = TestRunner::new_with_rng(
        Config {
            cases,
            failure_persistence: None,
            ..Config::default()
        },
        proptest::test_runner::TestRng::deterministic_rng(
            proptest::test_runner::RngAlgorithm::ChaCha,
        ),
    );
    let vocab_size = vocab_size(name) as u32;
    let result = runner.run(&steps(vocab_size), |steps| {
        session.clear_prompt_cache();
        let mut transcripts = [vec![1u32], vec![1, 5], vec![4]];
        for step in &steps {
            let transcript = &mut transcripts[step.conversation];
            let prompt = next_prompt(transcript, &step.turn);
            let request = request(&prompt, step.prefill_step);
            if let Some(events) = step.cancelled {
                session.generate(request).take(events).for_each(drop);
                *transcript = prompt;
                continue;
            }
            let cold = cold(&session, request.clone());
            let warm = run(&session, request);
            prop_assert!(
                agree(&warm, &cold),
                "{name}: {step:?} after {} of {} tokens: {warm:?}, from the start {cold:?}",
                warm.cached,
                prompt.len()
            );
            prop_assert!(session.prompt_cache().unwrap().entries <= 6);
            *transcript = prompt;
            transcript.extend(&cold.ids);
        }
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{name}: {error}"));
}

#[test]
fn every_architecture_gives_the_tokens_of_a_run_from_the_start() {
    for name in names() {
        interleaved(&name, 6);
    }
}

#[test]
fn without_kernels_too() {
    // In a process of its own: the switch is the process's.
    if std::env::var_os("MLEX_TEST_NO_KERNELS").is_some() {
        mlex_models::compute::set_kernels(false);
        for name in ["llama-f32", "llama-sliding", "qwen3_5-f32", "gemma4-small"] {
            interleaved(name, 4);
        }
        return;
    }
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["without_kernels_too", "--exact", "--nocapture"])
        .env("MLEX_TEST_NO_KERNELS", "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}");
}

#[test]
fn conversations_of_several_threads_do_not_disturb_each_other() {
    for name in ["llama-f32", "llama-sliding", "qwen3_5-f32"] {
        let model = checkpoint(name);
        let session = load(&model);
        thread::scope(|scope| {
            for number in 0..4u32 {
                let session = session.clone();
                scope.spawn(move || {
                    let mut transcript = vec![1, 7 + number % 2];
                    for turn in 0..5 {
                        transcript.extend([10 + number, 20 + turn]);
                        let request = request(&transcript, 512);
                        if (number + turn) % 3 == 0 {
                            let few = session.generate(request.clone()).take(3);
                            few.for_each(drop);
                        }
                        let warm = run(&session, request.clone());
                        let cold = cold(&session, request);
                        assert!(agree(&warm, &cold), "{name}: {warm:?}, {cold:?}");
                        transcript.extend(cold.ids);
                    }
                });
            }
        });
    }
}

/// A prompt of 24 tokens for a checkpoint.
fn prompt(name: &str) -> Vec<u32> {
    let tokens = Expected::open(&format!("{name}/expected.safetensors")).tokens("tokens");
    assert_eq!(tokens.len(), 24);
    tokens
}

#[test]
fn what_is_known_is_not_computed_again() {
    let session = load(&checkpoint("llama-f32"));
    let prompt = prompt("llama-f32");
    let first = run(&session, request(&prompt, 512));
    assert_eq!(first.cached, 0);
    // The last answer's last token was not given to the model.
    let mut longer: Vec<u32> = [&prompt[..], &first.ids, &[9, 8]].concat();
    assert_eq!(run(&session, request(&longer, 512)).cached, 24 + 5);
    assert_eq!(run(&session, request(&prompt, 512)).cached, 23);
    assert_eq!(run(&session, request(&prompt[..10], 512)).cached, 9);
    longer.truncate(20);
    longer.push(3);
    let diverging = run(&session, request(&longer, 512));
    assert_eq!(diverging.cached, 20 + usize::from(prompt[20] == 3));
    session.clear_prompt_cache();
    assert_eq!(session.prompt_cache().unwrap().entries, 0);
    assert_eq!(run(&session, request(&prompt, 512)).cached, 0);
}

#[test]
fn states_that_cannot_go_back_are_kept_at_places() {
    let set = |options: &mut LoadOptions| options.prompt_cache.snapshot_every = 10;
    let session = load_with(&checkpoint("qwen3_5-f32"), set);
    let prompt = prompt("qwen3_5-f32");
    let first = run(&session, request(&prompt, 512));
    // After the prompt and the answer, and after 10 and 20 tokens.
    assert_eq!(session.prompt_cache().unwrap().entries, 4);
    assert_eq!(
        run(&session, request(&prompt, 512)).cached,
        24,
        "as a whole"
    );
    assert_eq!(run(&session, request(&prompt[..23], 512)).cached, 20);
    assert_eq!(run(&session, request(&prompt[..15], 512)).cached, 10);
    let longer: Vec<u32> = [&prompt[..], &first.ids, &[9, 8]].concat();
    assert_eq!(run(&session, request(&longer, 512)).cached, 29);
}

#[test]
fn the_end_of_a_turn_is_kept_where_the_answer_is_announced_otherwise() {
    // What opens the reasoning in a prompt is not in the history of the next one.
    const TEMPLATE: &str = "{% for message in messages %}\
        {{ '<s>' + message.role[0] + message.content + '<|end|>' }}\
        {% endfor %}{% if add_generation_prompt %}{{ '<s>ax:' }}{% endif %}";
    let model = checkpoint("qwen3_5-f32");
    model.write("chat_template.jinja", TEMPLATE);
    let session = load(&model);
    let chat = |messages: &[(&str, &str)]| {
        let message =
            |(role, content): &(&str, &str)| serde_json::json!({"role": role, "content": content});
        let messages = messages.iter().map(message).collect();
        Request::new(Prompt::Messages(messages)).with_max_tokens(4)
    };
    let first = chat(&[("user", "hello")]);
    let announced = session.prompt_tokens(&first).unwrap().len();
    run(&session, first);
    let second = chat(&[("user", "hello"), ("assistant", "b"), ("user", "c")]);
    let answer = run(&session, second.clone());
    // `<s>`, `a`, `x`, `:` and perhaps a pair of them in one token: the next prompt has `<s>ab`.
    assert!(
        (announced - 4..announced).contains(&answer.cached),
        "{answer:?}"
    );
    assert!(agree(&answer, &cold(&session, second)));
}

#[test]
fn states_go_to_files_and_back() {
    for name in [
        "llama-f32",
        "llama-bf16",
        "llama-sliding",
        "qwen3_5-f32",
        "gemma4-small",
        "dhara_ar-abcd",
        "dhara_ar-cd",
        "nemotron_h-experts",
    ] {
        let model = checkpoint(name);
        let prompt = prompt(name);
        let file = model.file("prompt.state");
        let saved = load(&model)
            .save_prompt(request(&prompt, 512), &file)
            .unwrap();
        assert_eq!(saved.tokens, 24);
        assert_eq!(PromptFileInfo::open(&file).unwrap(), saved);
        let session = load(&model);
        assert_eq!(session.load_prompt(&file).unwrap(), saved);
        let longer: Vec<u32> = prompt.iter().copied().chain([5, 6, 7]).collect();
        let cold = cold(&session, request(&longer, 512));
        let warm = run(&session, request(&longer, 512));
        assert_eq!(warm.cached, 24, "{name}");
        assert!(
            agree(&warm, &cold) || name.ends_with("16"),
            "{name}: {warm:?} {cold:?}"
        );
    }
}

#[test]
fn files_of_other_models_are_refused() {
    let (model, other) = (checkpoint("llama-f32"), checkpoint("llama-tied"));
    let file = model.file("prompt.state");
    let tokens: Vec<u32> = (3..9).collect();
    load(&model)
        .save_prompt(request(&tokens, 512), &file)
        .unwrap();
    let error = load(&other).load_prompt(&file).unwrap_err();
    let message = common::message(&error, model.path());
    assert!(
        message.starts_with("M/prompt.state: model: expected "),
        "{message}"
    );
    // The same architecture with one weight changed, and another type.
    let changed = Copy::of("llama-f32").with_tokenizer(130);
    let mut bytes = changed.read("model.safetensors");
    *bytes.last_mut().unwrap() ^= 1;
    changed.write("model.safetensors", bytes);
    assert!(load(&changed).load_prompt(&file).is_err());
    let half = load_with(&model, |options| {
        options.dtype = Some(mlex_core::Dtype::Bfloat16)
    });
    assert!(half.load_prompt(&file).is_err());
    // Not such a file at all.
    let weights = model.file("model.safetensors");
    let error = load(&model).load_prompt(&weights).unwrap_err();
    let message = common::message(&error, model.path());
    assert!(
        message.starts_with("M/model.safetensors: missing "),
        "{message}"
    );
}

#[test]
fn damaged_files_are_refused() {
    damaged("qwen3_5-f32");
    damaged("dhara_ar-abcd");
}

fn damaged(name: &str) {
    let model = checkpoint(name);
    let file = model.file("prompt.state");
    let session = load(&model);
    let tokens: Vec<u32> = (3..20).collect();
    session.save_prompt(request(&tokens, 512), &file).unwrap();
    let whole = std::fs::read(&file).unwrap();
    let length = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let header = String::from_utf8(whole[8..8 + length].to_vec()).unwrap();
    let replaced = |from: &str, to: &str| {
        assert!(header.contains(from), "{from} in {header}");
        let header = header.replacen(from, to, 1);
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(&whole[8 + length..]);
        bytes
    };
    let changes = [
        // Numbers of tokens, names and shapes that do not fit.
        (r#"\"seen\":17"#, r#"\"seen\":16"#),
        (r#"\"seen\":17"#, r#"\"seen\":-1"#),
        (r#"\"seen\":17"#, r#"\"seen\":99999999999"#),
        (r#"\"version\":1"#, r#"\"version\":2"#),
        (r#"\"kind\":\"recurrent\""#, r#"\"kind\":\"attention\""#),
        (r#"\"kind\":\"conv\""#, r#"\"kind\":\"recurrent\""#),
        (r#"\"kind\":\"conv\""#, r#"\"kind\":\"convolution\""#),
        (
            r#"\"kind\":\"conv\",\"seen\":17"#,
            r#"\"kind\":\"conv\",\"seen\":16"#,
        ),
        (
            r#"\"kind\":\"conv\",\"seen\":17"#,
            r#"\"kind\":\"conv\",\"seen\":0"#,
        ),
        (
            r#"\"media\":[]"#,
            r#"\"media\":[{\"start\":3,\"end\":99,\"digest\":\"00\"}]"#,
        ),
        ("layers.0.conv", "layers.0.conw"),
        ("layers.1.rows", "layers.1.rowz"),
        ("[1,17,", "[17,1,"),
    ];
    for (from, to) in changes {
        if !header.contains(from) {
            continue;
        }
        std::fs::write(&file, replaced(from, to)).unwrap();
        let error = session.load_prompt(&file).unwrap_err();
        common::message(&error, model.path());
    }
    for end in [0, 7, 8, length, whole.len() - 1] {
        std::fs::write(&file, &whole[..end]).unwrap();
        assert!(session.load_prompt(&file).is_err());
    }
    std::fs::write(&file, &whole).unwrap();
    session.load_prompt(&file).unwrap();
}

/// The file with each tensor as `change` makes it of its name, type, shape and bytes.
fn rewrite(file: &Path, change: impl Fn(&mut TensorSpec, &mut Vec<u8>)) {
    let whole = SafetensorsFile::open(file).unwrap();
    let names: Vec<String> = whole.names().map(str::to_owned).collect();
    let mut tensors = BTreeMap::new();
    for name in names {
        let info = whole.info(&name).unwrap();
        let mut spec = TensorSpec {
            name: name.clone(),
            dtype: info.dtype,
            shape: info.shape.clone(),
        };
        let mut bytes = whole.bytes(&name).unwrap().to_vec();
        change(&mut spec, &mut bytes);
        tensors.insert(name, (spec, bytes));
    }
    let specs: Vec<TensorSpec> = tensors.values().map(|(spec, _)| spec.clone()).collect();
    write_safetensors(file, specs, whole.metadata(), |spec, sink| {
        Ok(sink.write_all(&tensors[&spec.name].1)?)
    })
    .unwrap();
}

#[test]
fn inputs_of_convolutions_that_are_not_the_models_are_refused() {
    let model = checkpoint("dhara_ar-abcd");
    let file = model.file("prompt.state");
    let tokens: Vec<u32> = (3..20).collect();
    let refused = |change: &dyn Fn(&mut TensorSpec, &mut Vec<u8>)| {
        let session = load(&model);
        session.save_prompt(request(&tokens, 512), &file).unwrap();
        rewrite(&file, |spec, bytes| {
            if spec.name == "layers.1.rows" {
                assert_eq!(spec.shape, [1, 3, 64]);
                change(spec, bytes);
            }
        });
        common::message(&session.load_prompt(&file).unwrap_err(), model.path())
    };
    let row = 64 * 4;
    let shape = "M/prompt.state: cache of a convolution: expected shape [1, 3, 64] or more rows";
    let fewer = refused(&|spec, bytes| {
        spec.shape[1] = 2;
        bytes.truncate(2 * row);
    });
    assert_eq!(fewer, format!("{shape}, found [1, 2, 64]"));
    let narrower = refused(&|spec, _| spec.shape = vec![1, 6, 32]);
    assert_eq!(narrower, format!("{shape}, found [1, 6, 32]"));
    let more = refused(&|spec, bytes| {
        spec.shape[1] = 5;
        bytes.extend(vec![0; 2 * row]);
    });
    let expected =
        "M/prompt.state: layers.1: expected float32 [1, 3, 64], found float32 [1, 5, 64]";
    assert_eq!(more, expected);
    let half = |spec: &mut TensorSpec, bytes: &mut Vec<u8>| {
        spec.dtype = StoredDtype::F16;
        bytes.truncate(3 * row / 2);
    };
    let expected =
        "M/prompt.state: layers.1: expected float32 [1, 3, 64], found float16 [1, 3, 64]";
    assert_eq!(refused(&half), expected);
    let kind = "M/prompt.state: inputs of a convolution: expected floats [1, rows, channels]";
    let integers = refused(&|spec, _| spec.dtype = StoredDtype::I32);
    assert_eq!(integers, format!("{kind}, found int32 [1, 3, 64]"));
    let batch = refused(&|spec, _| spec.shape = vec![3, 1, 64]);
    assert_eq!(batch, format!("{kind}, found float32 [3, 1, 64]"));
    let none = refused(&|spec, bytes| {
        spec.shape = vec![1, 0, 64];
        bytes.clear();
    });
    assert_eq!(none, format!("{kind}, found float32 [1, 0, 64]"));
}
