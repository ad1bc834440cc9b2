//! How much sooner the second turn of a long conversation starts than a prompt from the start:
//! `cargo run --release -p mlex-models --example second_turn -- MODEL [TOKENS]`.
//!
//! MODEL has a chat template; the first turn has about TOKENS tokens (2000).
#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::time::{Duration, Instant};

use mlex_models::Result;
use mlex_models::generate::{Event, LoadOptions, Prompt, Request, Session};
use mlex_models::text::Answer;
use serde_json::{Value, json};

const RUNS: usize = 5;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let Some(model) = args.next() else {
        println!("usage: second_turn MODEL [TOKENS]");
        return Ok(());
    };
    let tokens = args.next().and_then(|count| count.parse().ok());
    let tokens: usize = tokens.unwrap_or(2000);
    let session = Session::load(&model, LoadOptions::default())?;

    let said = |text: &str| vec![json!({"role": "user", "content": text})];
    let mut text = "Here are notes of a walk.".to_owned();
    let mut step = 0;
    while session.prompt_tokens(&request(&said(&text)))?.len() < tokens {
        step += 1;
        let tree = step * 7 % 101;
        text.push_str(&format!(" After {step} steps I saw tree number {tree}."));
    }
    let messages = said(&text);
    let (mut cold, mut warm) = (Vec::new(), Vec::new());
    let mut sizes = [0; 2];
    for _ in 0..RUNS {
        session.clear_prompt_cache();
        let (first, answer) = answer(&session, &messages)?;
        cold.push(first.time);
        let mut second = messages.clone();
        second.push(answer);
        second.push(json!({"role": "user", "content": "Which tree came first?"}));
        // The second turn without and with what the first one has left.
        let mut from_start = request(&second);
        from_start.use_prompt_cache = false;
        cold.push(run(&session, from_start)?.0.time);
        let (turn, _) = run(&session, request(&second))?;
        warm.push(turn.time);
        sizes = [turn.prompt, turn.cached];
    }
    let (cold, warm) = (median(&mut cold), median(&mut warm));
    println!(
        "prompt of the second turn: {} tokens, {} of them known",
        sizes[0], sizes[1]
    );
    println!("first token from the start: {cold:.1?}");
    println!("first token of the second turn: {warm:.1?}");
    println!(
        "{:.1} times sooner",
        cold.as_secs_f64() / warm.as_secs_f64()
    );
    Ok(())
}

fn request(messages: &[Value]) -> Request {
    Request::new(Prompt::Messages(messages.to_vec())).with_max_tokens(32)
}

/// What a turn took.
#[derive(Default)]
struct Turn {
    /// To the first token.
    time: Duration,
    prompt: usize,
    cached: usize,
}

fn answer(session: &Session, messages: &[Value]) -> Result<(Turn, Value)> {
    let (turn, answer) = run(session, request(messages))?;
    Ok((turn, answer.message(|_| "call".to_owned())))
}

fn run(session: &Session, request: Request) -> Result<(Turn, Answer)> {
    let start = Instant::now();
    let (mut turn, mut answer) = (Turn::default(), Answer::default());
    for event in session.generate(request) {
        let event = event?;
        if matches!(event, Event::Token { .. }) && turn.time.is_zero() {
            turn.time = start.elapsed();
        }
        event.add_to(&mut answer);
        if let Event::Done(done) = event {
            turn.prompt = done.usage.prompt_tokens;
            turn.cached = done.usage.cached_tokens;
        }
    }
    Ok((turn, answer))
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}
