//! Keys and values that are packed or limited, against mlx-lm (`tools/make_kv_golden.py`).
#![allow(clippy::unwrap_used)]

mod common;

use common::{Copy, data};
use mlex_core::Device;
use mlex_models::generate::{Event, KvSettings, LoadOptions, Prompt, Request, Session};
use serde::Deserialize;

#[derive(Deserialize)]
struct Case {
    checkpoint: String,
    prompt: Vec<u32>,
    bits: Option<i32>,
    group_size: Option<i32>,
    start: Option<i32>,
    max_kv_size: Option<i32>,
    tokens: Vec<u32>,
    margins: Vec<f32>,
    /// After the prompt, the largest is 0.
    logprobs: Option<Vec<f32>>,
}

impl Case {
    fn settings(&self) -> KvSettings {
        let mut settings = KvSettings::new();
        settings.bits = self.bits;
        settings.group_size = self.group_size;
        settings.quantized_start = self.start.unwrap_or(0);
        settings.max_kv_size = self.max_kv_size;
        settings
    }

    fn request(&self) -> Request {
        let prompt = Prompt::Tokens(self.prompt.clone());
        let mut request = Request::new(prompt).with_max_tokens(self.tokens.len());
        request.ignore_eos = true;
        request.prefill_step = 2048.into();
        request.logprobs = Some(1000);
        request.kv = self.settings();
        request
    }
}

fn cases() -> Vec<Case> {
    serde_json::from_slice(&std::fs::read(data("kv.json")).unwrap()).unwrap()
}

/// A session, and its model's files.
fn load(checkpoint: &str) -> (Session, Copy) {
    let mut options = LoadOptions::default();
    options.device = Some(Device::Cpu);
    let model = Copy::of(checkpoint).with_tokenizer(130);
    (Session::load(model.path(), options).unwrap(), model)
}

/// The tokens, and the log-probabilities of all tokens at each.
fn run(session: &Session, request: Request) -> (Vec<u32>, Vec<Vec<(u32, f32)>>) {
    let mut answer = (Vec::new(), Vec::new());
    for event in session.generate(request) {
        if let Event::Token { id, logprobs, .. } = event.unwrap() {
            answer.0.push(id);
            let top = logprobs.unwrap().top;
            answer
                .1
                .push(top.iter().map(|top| (top.id, top.logprob)).collect());
        }
    }
    answer
}

fn all_are_mlx_lm_s() {
    for case in cases() {
        let what = format!(
            "{}, {} tokens, {:?}",
            case.checkpoint,
            case.prompt.len(),
            case.settings()
        );
        assert!(case.margins.iter().all(|&margin| margin > 0.01));
        let (tokens, logprobs) = run(&load(&case.checkpoint).0, case.request());
        if let Some(expected) = &case.logprobs {
            let best = logprobs[0][0].1;
            for &(id, found) in &logprobs[0] {
                let error = (found - best - expected[id as usize]).abs();
                assert!(error < 1e-3, "{what}: token {id} is off by {error}");
            }
            assert_eq!(logprobs[0].len(), expected.len());
        }
        assert_eq!(tokens, case.tokens, "{what}");
    }
}

#[test]
fn packed_and_limited_ones_give_mlx_lm_s_tokens() {
    all_are_mlx_lm_s();
}

#[test]
fn without_kernels_too() {
    // In a process of its own: the switch is the process's.
    if std::env::var_os("MLEX_TEST_NO_KERNELS").is_some() {
        mlex_models::compute::set_kernels(false);
        all_are_mlx_lm_s();
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
fn the_prompt_cache_tells_them_apart_and_goes_on() {
    for case in cases() {
        let (session, _files) = load(&case.checkpoint);
        let mut plain = case.request();
        plain.kv = KvSettings::new();
        run(&session, plain);
        // Nothing of the plain state is used; then the own one.
        let (tokens, _) = run(&session, case.request());
        assert_eq!(tokens, case.tokens);
        let mut longer = case.request();
        let prompt = [&case.prompt[..], &tokens].concat();
        longer.prompt = Prompt::Tokens(prompt.clone());
        let mut cached = 0;
        for event in session.generate(longer) {
            if let Event::Done(done) = event.unwrap() {
                cached = done.usage.cached_tokens;
            }
        }
        assert_eq!(cached, prompt.len() - 1);
        // To a file and back.
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("prompt.safetensors");
        let info = session.save_prompt(case.request(), &file).unwrap();
        assert_eq!(info.settings, case.settings());
        session.clear_prompt_cache();
        session.load_prompt(&file).unwrap();
        let (tokens, _) = run(&session, case.request());
        assert_eq!(tokens, case.tokens, "{:?}", case.settings());
    }
}

#[test]
fn wrong_settings_are_told() {
    let (session, _files) = load("llama-f32");
    let request = |set: fn(&mut KvSettings)| {
        let mut request = Request::new(Prompt::Tokens(vec![5, 6, 7])).with_max_tokens(2);
        set(&mut request.kv);
        let mut events = session.generate(request);
        events.find_map(Result::err).unwrap().to_string()
    };
    let message = request(|kv| kv.bits = Some(7));
    assert!(message.contains("bits"), "{message}");
    // A key has 16 numbers.
    let message = request(|kv| (kv.bits, kv.quantized_start) = (Some(8), 0));
    let expected = "kv_group_size: expected a divisor of the width 16 of keys and values, found 64";
    assert_eq!(message, expected);
    let message = request(|kv| kv.max_kv_size = Some(4));
    assert_eq!(message, "max_kv_size: expected more than 4, found 4");
    let message = request(|kv| (kv.bits, kv.max_kv_size) = (Some(8), Some(64)));
    assert!(message.starts_with("max_kv_size: "), "{message}");
}
