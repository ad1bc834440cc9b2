//! [`Session`] on a small checkpoint. Expected tokens and logits are mlx-lm's
//! (`tools/make_model_golden.py`); what they spell follows from the vocabulary made here.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::{Arc, Mutex};
use std::thread;

use common::{Copy, Expected, message};
use mlex_core::{Device, Dtype};
use mlex_models::generate::{
    Completion, Event, FinishReason, Generation, LoadOptions, PrefillProgress, Prompt, Request,
    SamplerConfig, Session,
};
use mlex_models::text::{Answer as Parsed, Part};
use mlex_models::{ErrorKind, Result};
use serde_json::json;

const VOCAB_SIZE: usize = 130;
const CHECKPOINT: &str = "llama-f32";
/// The text of `greedy` of the checkpoint's expected values: token 100 is the second byte of a
/// character without its first, token 0 is special.
const GREEDY_TEXT: &str = "|ae|;qeb|\u{fffd}fe:Ob|mz";
const TEMPLATE: &str = "{% for message in messages %}\
    {% if message.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}\
    {{ '<s>' + message.role[0] + message.content + '<|end|>' }}\
    {% endfor %}{% if add_generation_prompt %}{{ '<s>' }}{% endif %}";

fn model() -> Copy {
    let model = Copy::of(CHECKPOINT).with_tokenizer(VOCAB_SIZE);
    model.write("chat_template.jinja", TEMPLATE);
    model
}

fn load(model: &Copy) -> Session {
    let mut options = LoadOptions::default();
    options.device = Some(Device::Cpu);
    Session::load(model.path(), options).unwrap()
}

fn session() -> Session {
    load(&model())
}

fn expected() -> Expected {
    Expected::open("llama-f32/expected.safetensors")
}

/// The prompt of the expected values, whose continuation is known.
fn request() -> Request {
    Request::new(Prompt::Tokens(expected().tokens("tokens"))).with_max_tokens(16)
}

/// A prompt that never ends by itself.
fn endless() -> Request {
    let mut request = request().with_max_tokens(usize::MAX);
    request.ignore_eos = true;
    request
}

#[derive(Debug, Default, PartialEq)]
struct Answer {
    prompt: Vec<u32>,
    prefill: Vec<PrefillProgress>,
    ids: Vec<u32>,
    text: String,
    done: Option<Completion>,
}

impl Answer {
    fn reason(&self) -> FinishReason {
        self.done.as_ref().unwrap().finish_reason
    }
}

/// Reads a generation to its end and checks the order of its events.
fn read(generation: Generation) -> Result<Answer> {
    let mut answer = Answer::default();
    let mut stage = 0;
    for event in generation {
        let event = event?;
        let next = match &event {
            Event::Prompt(_) => 0,
            Event::Prefill(_) => 1,
            Event::Token { .. } => 2,
            Event::Rest(_) => 3,
            Event::Done(_) => 4,
            other => panic!("{other:?}"),
        };
        assert!(
            next >= stage && answer.done.is_none(),
            "{event:?} in stage {stage}"
        );
        stage = next;
        match event {
            Event::Prompt(ids) => {
                assert!(answer.prompt.is_empty(), "the prompt is told once");
                answer.prompt = ids;
            }
            Event::Prefill(progress) => answer.prefill.push(progress),
            Event::Token { id, parts, .. } => {
                answer.ids.push(id);
                answer.text.push_str(&text(&parts));
            }
            Event::Rest(parts) => {
                assert!(!parts.is_empty());
                answer.text.push_str(&text(&parts));
            }
            Event::Done(completion) => answer.done = Some(completion),
            other => panic!("{other:?}"),
        }
    }
    let done = answer.done.as_ref().expect("the last event is Done");
    assert_eq!(done.usage.completion_tokens, answer.ids.len());
    assert_eq!(done.usage.prompt_tokens, answer.prompt.len());
    Ok(answer)
}

/// The text of parts that are nothing else.
fn text(parts: &[Part]) -> String {
    let text = |part: &Part| match part {
        Part::Text(text) => text.clone(),
        other => panic!("{other:?}"),
    };
    parts.iter().map(text).collect()
}

fn answer(session: &Session, request: Request) -> Answer {
    read(session.generate(request)).unwrap()
}

/// The error of a request, after which the generation has ended.
fn fails(session: &Session, request: Request) -> String {
    let mut generation = session.generate(request);
    let error = loop {
        match generation.next().expect("an error before the end") {
            Ok(Event::Prompt(_)) => {}
            Ok(other) => panic!("{other:?} instead of an error"),
            Err(error) => break error,
        }
    };
    assert!(generation.next().is_none());
    assert_eq!(answer(session, request_after_error()).ids.len(), 2);
    message(&error, std::path::Path::new("nowhere"))
}

fn request_after_error() -> Request {
    request().with_max_tokens(2)
}

#[test]
fn types_may_cross_threads_as_documented() {
    fn send_and_sync<T: Send + Sync>() {}
    fn send<T: Send>() {}
    send_and_sync::<Session>();
    send_and_sync::<Request>();
    send_and_sync::<Event>();
    send_and_sync::<mlex_models::Error>();
    send_and_sync::<mlex_models::generate::CancelHandle>();
    send::<Generation>();
    send::<LoadOptions>();
}

#[test]
fn a_generation_tells_prompt_prefill_tokens_and_end() {
    let session = session();
    let mut request = request();
    request.prefill_step = 10.into();
    let answer = answer(&session, request);
    let expected = expected();
    assert_eq!(answer.prompt, expected.tokens("tokens"));
    let steps: Vec<_> = answer
        .prefill
        .iter()
        .map(|step| (step.processed, step.total))
        .collect();
    assert_eq!(steps, [(10, 24), (20, 24), (24, 24)]);
    assert_eq!(answer.ids, expected.tokens("greedy"));
    assert_eq!(answer.text, GREEDY_TEXT);
    assert_eq!(answer.reason(), FinishReason::Length);
    let done = answer.done.unwrap();
    assert!(done.timings.peak_memory_bytes > 0);
    assert!(done.prefill_tps() > 0.0 && done.decode_tps() > 0.0);
}

#[test]
fn the_session_says_what_it_is() {
    let model = model();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let mut options = LoadOptions::default();
    options.device = Some(Device::Cpu);
    options.on_progress = Some(Box::new({
        let seen = Arc::clone(&seen);
        move |progress| seen.lock().unwrap().push(progress)
    }));
    let session = Session::load(model.path(), options).unwrap();
    let info = session.info();
    assert_eq!(info.model.model_type, "llama");
    assert_eq!(info.model.vocab_size, 130);
    assert_eq!(info.model.num_layers, 2);
    assert_eq!(info.model.max_context, Some(512));
    // Keys and values of 2 layers with 2 heads of 16 entries.
    assert_eq!(info.model.cache_per_token, 2 * 2 * 2 * 16);
    assert_eq!(info.device, Device::Cpu);
    // 130 x 64 at each end, 64 in the last norm, and in each
    // of 2 layers 64 x 64 and 64 x 32 twice, 64 x 80 three times, and two norms of 64.
    let weights = 2 * 130 * 64 + 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 80 + 2 * 64);
    assert_eq!(info.file_bytes, 4 * weights);
    let seen = seen.lock().unwrap();
    assert!(seen.is_sorted_by_key(|progress| progress.loaded));
    let last = seen.last().unwrap();
    assert_eq!(
        (last.loaded, last.total),
        (info.file_bytes, info.file_bytes)
    );
    assert_eq!(session.tokenizer().vocab_size(), 130);
    assert!(session.has_chat_template());
}

#[test]
fn messages_go_through_the_template_and_text_through_the_tokenizer() {
    let session = session();
    let ids = |tokens: &[&str]| -> Vec<u32> {
        let id = |token: &&str| session.tokenizer().token_to_id(token).unwrap();
        tokens.iter().map(id).collect()
    };
    // "here": no space before it, `he` and `re` are tokens.
    let chat = Request::chat("here").with_max_tokens(1);
    let prompt = ids(&["<s>", "u", "he", "re", "<|end|>", "<s>"]);
    assert_eq!(session.prompt_tokens(&chat).unwrap(), prompt);
    assert_eq!(answer(&session, chat).prompt, prompt);
    let raw = Request::new(Prompt::Raw("re a\n".into())).with_max_tokens(1);
    assert_eq!(answer(&session, raw).prompt, ids(&["re", "Ġa", "Ċ"]));
}

#[test]
fn several_threads_and_clones_share_a_model() {
    let session = session();
    let greedy = expected().tokens("greedy");
    let sampled = |seed| {
        request().with_sampler(SamplerConfig {
            temperature: 1.0,
            seed: Some(seed),
            ..SamplerConfig::default()
        })
    };
    let alone: Vec<_> = (0..4)
        .map(|seed| answer(&session, sampled(seed)).ids)
        .collect();
    assert_ne!(alone[0], alone[1]);
    thread::scope(|scope| {
        for (seed, alone) in (0..).zip(&alone) {
            let (clone, session, greedy) = (session.clone(), &session, &greedy);
            scope.spawn(move || {
                for _ in 0..3 {
                    assert_eq!(&answer(&clone, sampled(seed)).ids, alone);
                    assert_eq!(&answer(session, request()).ids, greedy);
                    assert!(session.score(greedy, 0).unwrap().perplexity().unwrap() > 1.0);
                }
            });
        }
    });
}

#[test]
fn a_generation_can_be_read_on_another_thread() {
    let session = session();
    let generation = session.generate(request());
    let answer = thread::spawn(move || read(generation).unwrap())
        .join()
        .unwrap();
    assert_eq!(answer.text, GREEDY_TEXT);
}

#[test]
fn a_stop_text_across_tokens_ends_the_text_before_it() {
    let session = session();
    // Token 2 to 5 spell `ae`, `|`, `;`, `qe`; the stop text begins and ends inside of tokens.
    let stopped = answer(&session, request().with_stop(["e|;q"]));
    assert_eq!(stopped.text, "|a");
    assert_eq!(stopped.ids, expected().tokens("greedy")[..5]);
    assert_eq!(stopped.reason(), FinishReason::Stop);
    // The one that comes first in the text counts, not the first of the list.
    let stopped = answer(&session, request().with_stop(["Ob", "qe", "zz"]));
    assert_eq!(stopped.text, "|ae|;");
    // What might have become a stop text is given out at the end.
    let whole = answer(&session, request().with_stop(["mz!"]));
    assert_eq!(whole.text, GREEDY_TEXT);
    assert_eq!(whole.reason(), FinishReason::Length);
    let empty = answer(&session, request().with_stop([""]));
    assert_eq!(empty.text, GREEDY_TEXT);
}

#[test]
fn an_end_token_ends_the_text_unless_it_is_ignored() {
    let greedy = expected().tokens("greedy");
    for ids in [json!(29), json!([7, 29])] {
        let model = model();
        // Of generation_config.json, which wins over the config's own.
        model.write(
            "generation_config.json",
            json!({"eos_token_id": ids}).to_string(),
        );
        let session = load(&model);
        let ended = answer(&session, request());
        assert_eq!(ended.ids, greedy[..4]);
        assert_eq!(
            (ended.text.as_str(), ended.reason()),
            ("|ae|", FinishReason::Stop)
        );
        let mut ignoring = request();
        ignoring.ignore_eos = true;
        assert_eq!(answer(&session, ignoring).text, GREEDY_TEXT);
    }
    // The tokenizer's own end token counts too.
    let model = model();
    model.write(
        "tokenizer_config.json",
        json!({"eos_token": ";"}).to_string(),
    );
    assert_eq!(answer(&load(&model), request()).ids, greedy[..4]);
}

#[test]
fn max_tokens_may_be_none_or_one() {
    let session = session();
    let none = answer(&session, request().with_max_tokens(0));
    assert_eq!((none.ids.len(), none.text.as_str()), (0, ""));
    assert_eq!(none.reason(), FinishReason::Length);
    assert_eq!(none.prefill.len(), 1);
    let one = answer(&session, request().with_max_tokens(1));
    assert_eq!(one.ids, expected().tokens("greedy")[..1]);
    assert_eq!(one.done.unwrap().decode_tps(), 0.0);
}

#[test]
fn a_handle_cancels_from_another_thread() {
    let session = session();
    let mut generation = session.generate(endless());
    let handle = generation.cancel_handle();
    let mut count = 0;
    let done = loop {
        match generation.next().unwrap().unwrap() {
            Event::Token { .. } => {
                count += 1;
                if count == 3 {
                    let handle = handle.clone();
                    thread::spawn(move || handle.cancel()).join().unwrap();
                }
            }
            Event::Done(done) => break done,
            _ => {}
        }
    };
    assert_eq!(done.finish_reason, FinishReason::Cancelled);
    assert_eq!(done.usage.completion_tokens, count);
    assert!(generation.next().is_none());
    assert_eq!(answer(&session, request()).text, GREEDY_TEXT);
}

#[test]
fn cancelled_before_it_starts_it_generates_nothing() {
    let session = session();
    let busy = session.generate(endless());
    let waiting = session.generate(endless());
    waiting.cancel_handle().cancel();
    drop(busy);
    let cancelled = read(waiting).unwrap();
    assert_eq!((cancelled.ids.len(), cancelled.prefill.len()), (0, 0));
    assert_eq!(cancelled.reason(), FinishReason::Cancelled);
}

#[test]
fn a_dropped_generation_frees_the_session() {
    let session = session();
    for read in [0, 1, 5] {
        let mut generation = session.generate(endless());
        for _ in 0..read {
            generation.next().unwrap().unwrap();
        }
        drop(generation);
        assert_eq!(answer(&session, request()).ids, expected().tokens("greedy"));
    }
}

#[test]
fn a_generation_outlives_its_session() {
    let session = session();
    let generation = session.generate(request());
    drop(session);
    assert_eq!(read(generation).unwrap().text, GREEDY_TEXT);
    // And an endless one ends with its last owner, whichever it is.
    let session = self::session();
    let generation = session.generate(endless());
    drop(session.clone());
    drop(generation);
    drop(session);
}

#[test]
fn requests_that_cannot_be_done_say_why_and_leave_the_session_usable() {
    let session = session();
    let tokens = |ids: &[u32]| Request::new(Prompt::Tokens(ids.to_vec()));
    let none = "prompt: expected at least one token, found none";
    assert_eq!(fails(&session, tokens(&[])), none);
    assert_eq!(
        fails(&session, Request::new(Prompt::Raw(String::new()))),
        none
    );
    for id in [130, u32::MAX] {
        let expected = format!("token: expected an id below 130, found {id}");
        assert_eq!(fails(&session, tokens(&[3, id, 4])), expected);
        assert_eq!(
            session.score(&[3, id], 1).unwrap_err().to_string(),
            expected
        );
        assert_eq!(
            session.score(&[id, 3], 1).unwrap_err().to_string(),
            expected
        );
    }
    let cold = SamplerConfig {
        temperature: -1.0,
        ..SamplerConfig::default()
    };
    assert_eq!(
        fails(&session, request().with_sampler(cold)),
        "temperature: expected a number of at least 0, found -1"
    );
    let system = vec![json!({"role": "system", "content": "x"})];
    assert_eq!(
        fails(&session, Request::new(Prompt::Messages(system))),
        "chat template: default, line 1: no system role"
    );
    let broken = vec![json!("hello")];
    assert_eq!(
        fails(&session, Request::new(Prompt::Messages(broken))),
        "messages[0]: expected an object, found \"hello\""
    );
    assert_eq!(
        session.score(&[], 1).unwrap_err().to_string(),
        "tokens: expected at least one, found none"
    );
}

#[test]
fn without_a_template_messages_are_refused_and_text_is_not() {
    let model = model();
    model.remove("chat_template.jinja");
    let session = load(&model);
    assert!(!session.has_chat_template());
    assert_eq!(
        fails(&session, Request::chat("a")),
        "missing a chat template; use a raw prompt"
    );
    let raw = Request::new(Prompt::Raw("a".into())).with_max_tokens(3);
    assert_eq!(answer(&session, raw).ids.len(), 3);
}

#[test]
fn a_panic_while_loading_is_an_error() {
    let model = model();
    let mut options = LoadOptions::default();
    options.on_progress = Some(Box::new(|_| panic!("of the test")));
    let error = Session::load(model.path(), options).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::EngineGone), "{error}");
}

#[test]
fn half_precision_is_asked_for_by_dtype() {
    let model = model();
    let mut options = LoadOptions::default();
    options.dtype = Some(Dtype::Bfloat16);
    let session = Session::load(model.path(), options).unwrap();
    assert_eq!(answer(&session, request().with_max_tokens(4)).ids.len(), 4);
    let mut options = LoadOptions::default();
    options.dtype = Some(Dtype::Int32);
    assert_eq!(
        Session::load(model.path(), options)
            .unwrap_err()
            .to_string(),
        "dtype: expected a floating-point type, found int32"
    );
}

#[test]
fn tokens_come_with_their_log_probabilities() {
    let session = session();
    let mut asked = request();
    asked.logprobs = Some(3);
    let prompt = expected().tokens("tokens");
    let mut ids = prompt.clone();
    let mut found = Vec::new();
    for event in session.generate(asked) {
        if let Event::Token { id, logprobs, .. } = event.unwrap() {
            ids.push(id);
            found.push(logprobs.unwrap());
        }
    }
    assert_eq!(ids[prompt.len()..], expected().tokens("greedy"));
    // The scores, which are compared with the reference, are those of the same positions.
    let score = session.score(&ids, 3).unwrap();
    for (at, found) in found.iter().enumerate() {
        let at = prompt.len() + at;
        assert!((found.logprob - score.logprobs[at].unwrap()).abs() < 1e-4);
        assert_eq!(found.top[0].id, ids[at]);
        assert_eq!(found.top[0].logprob, found.logprob);
        let top = |top: &[mlex_models::generate::TokenLogprob]| -> Vec<u32> {
            top.iter().map(|token| token.id).collect()
        };
        assert_eq!(top(&found.top), top(&score.top[at]));
    }
    assert_eq!(found.len(), 16);
}

#[test]
fn several_answers_are_those_of_seeds_in_a_row() {
    let session = session();
    let sampled = |seed| {
        request().with_max_tokens(8).with_sampler(SamplerConfig {
            temperature: 1.0,
            seed: Some(seed),
            ..SamplerConfig::default()
        })
    };
    let mut several = sampled(u64::MAX);
    several.choices = 3;
    let mut answers: Vec<Vec<u32>> = Vec::new();
    let mut done = 0;
    for event in session.generate(several) {
        match event.unwrap() {
            Event::Choice(index) => {
                assert_eq!((index, done), (answers.len(), index));
                answers.push(Vec::new());
            }
            Event::Token { id, .. } => answers.last_mut().unwrap().push(id),
            Event::Done(completion) => {
                assert_eq!(completion.usage.prompt_tokens, 24);
                assert_eq!(completion.usage.completion_tokens, 8);
                done += 1;
            }
            _ => {}
        }
    }
    assert_eq!(done, 3);
    for (answer, seed) in answers.iter().zip([u64::MAX, 0, 1]) {
        assert_eq!(answer, &self::answer(&session, sampled(seed)).ids);
    }
}

/// A model whose tokens 0 and 2 are markers of reasoning, which its template opens.
fn reasoning_model() -> Copy {
    let model = model();
    model.write("chat_template.jinja", format!("{TEMPLATE}<think>"));
    let json = String::from_utf8(model.read("tokenizer.json")).unwrap();
    let json = json.replace("<pad>", "<think>").replace("</s>", "</think>");
    model.write("tokenizer.json", json);
    model
}

#[test]
fn a_reasoning_budget_ends_the_reasoning_and_the_answer_goes_on() {
    let session = load(&reasoning_model());
    assert_eq!(
        session.output_format().reasoning(),
        Some(("<think>", "</think>"))
    );
    // Never an end of its own.
    let mut sampler = SamplerConfig::default();
    sampler
        .logit_bias
        .extend([(0, f32::NEG_INFINITY), (2, f32::NEG_INFINITY)]);
    let run = |budget| {
        let mut request = Request::chat("here")
            .with_max_tokens(8)
            .with_sampler(sampler.clone());
        // Token 2 ends a text, as the config has it.
        request.ignore_eos = true;
        request.reasoning_budget = budget;
        request.logprobs = Some(0);
        let (mut ids, mut parsed, mut put_in) = (Vec::new(), Parsed::default(), Vec::new());
        for event in session.generate(request) {
            let event = event.unwrap();
            event.add_to(&mut parsed);
            if let Event::Token { id, logprobs, .. } = event {
                put_in.extend(logprobs.is_none().then_some(ids.len()));
                ids.push(id);
            }
        }
        assert_eq!(ids.len(), 8);
        (ids, parsed, put_in)
    };
    let (free, parsed, put_in) = run(None);
    assert!(!free.contains(&2) && put_in.is_empty());
    assert_eq!(parsed.text, "");
    let reasoning = parsed.reasoning.unwrap();
    for budget in [0, 1, 3] {
        let (ids, parsed, put_in) = run(Some(budget));
        assert_eq!((ids[budget], &*put_in), (2, &[budget][..]));
        assert_eq!(ids[..budget], free[..budget]);
        let thought = parsed.reasoning.unwrap_or_default();
        assert!(reasoning.starts_with(&thought), "{thought}");
        assert_eq!(thought.is_empty(), budget == 0);
        assert!(!parsed.text.is_empty());
    }
    // A budget that is not spent changes nothing.
    assert_eq!(run(Some(100)).0, free);
}

#[test]
fn a_prompt_that_is_no_conversation_is_not_parsed() {
    let session = load(&reasoning_model());
    let raw = Request::new(Prompt::Raw("a<think>".into())).with_max_tokens(3);
    let answer = answer(&session, raw);
    assert_eq!(answer.ids.len(), 3);
}
