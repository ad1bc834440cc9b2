//! The sampler on small distributions. Expected values are arithmetic on them: what each filter
//! keeps by its definition, and the probabilities of what is kept.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use mlex_core::{Array, Dtype};
use mlex_models::generate::{Dry, Sampler, SamplerConfig, Xtc};

/// Probabilities of six tokens, not in order: 3, 0, 4, 1, 5, 2 is the order of likelihood.
const PROBABILITIES: [f64; 6] = [0.25, 0.12, 0.03, 0.40, 0.15, 0.05];

fn config(set: impl FnOnce(&mut SamplerConfig)) -> SamplerConfig {
    let mut config = SamplerConfig::default();
    set(&mut config);
    config
}

/// A configuration that draws, repeatably.
fn drawing(set: impl FnOnce(&mut SamplerConfig)) -> SamplerConfig {
    config(|config| {
        config.temperature = 1.0;
        config.seed = Some(7);
        set(config);
    })
}

fn array(logits: &[f32]) -> Array {
    Array::from_slice(logits, &[1, logits.len() as i32]).unwrap()
}

/// Logits of [`PROBABILITIES`], away from their logarithms by a constant, as a model's are.
fn logits() -> Array {
    let logits: Vec<f32> = PROBABILITIES
        .iter()
        .map(|p| (p.ln() + 3.5) as f32)
        .collect();
    array(&logits)
}

fn draw(sampler: &mut Sampler, logits: &Array) -> u32 {
    let token = sampler.sample(logits).unwrap();
    assert_eq!(
        (token.shape(), token.dtype()),
        ([1].as_slice(), Dtype::Int32)
    );
    token.item::<i32>().unwrap() as u32
}

fn sequence(config: &SamplerConfig, logits: &Array, prompt: &[u32], count: usize) -> Vec<u32> {
    let vocab_size = logits.dim(1).unwrap();
    let mut sampler = Sampler::new(config.clone(), vocab_size, prompt).unwrap();
    let mut ids: Vec<u32> = Vec::new();
    while ids.len() < count {
        // Many at once: no step waits for the one before it.
        let steps = (count - ids.len()).min(100);
        let tokens: Vec<Array> = (0..steps)
            .map(|_| sampler.sample(logits).unwrap())
            .collect();
        let tokens = Array::concatenate(&tokens, 0).unwrap();
        ids.extend(tokens.to_vec::<i32>().unwrap().iter().map(|&id| id as u32));
    }
    ids
}

/// One greedy choice after `prompt`.
fn choice(config: &SamplerConfig, logits: &[f32], prompt: &[u32]) -> u32 {
    sequence(config, &array(logits), prompt, 1)[0]
}

/// Draws 2000 times and compares how often each token came with `weights`, which need not sum
/// to 1: within 4 standard deviations, and never where the weight is 0.
fn check_frequencies(config: &SamplerConfig, weights: [f64; 6]) {
    const COUNT: usize = 2000;
    let sum: f64 = weights.iter().sum();
    let drawn = sequence(config, &logits(), &[], COUNT);
    for (token, weight) in weights.iter().enumerate() {
        let p = weight / sum;
        let found = drawn.iter().filter(|&&id| id as usize == token).count() as f64;
        let expected = p * COUNT as f64;
        let deviation = (expected * (1.0 - p)).sqrt();
        assert!(
            (found - expected).abs() <= 4.0 * deviation,
            "{config:?}: token {token} came {found} times, expected {expected} +- {deviation}"
        );
    }
}

/// [`PROBABILITIES`] of `tokens`, the others 0, to the power of `1 / temperature`.
fn kept(tokens: &[usize], temperature: f64) -> [f64; 6] {
    let mut weights = [0.0; 6];
    for &token in tokens {
        weights[token] = PROBABILITIES[token].powf(1.0 / temperature);
    }
    weights
}

const ALL: [usize; 6] = [0, 1, 2, 3, 4, 5];

#[test]
fn greedy_takes_the_likeliest_whatever_the_filters() {
    let filtered = config(|c| (c.top_k, c.top_p, c.min_p) = (2, 0.3, 0.9));
    for config in [SamplerConfig::default(), filtered] {
        assert_eq!(sequence(&config, &logits(), &[], 3), [3, 3, 3]);
    }
    for dtype in [Dtype::Float16, Dtype::Bfloat16] {
        let half = logits().as_type(dtype).unwrap();
        assert_eq!(sequence(&SamplerConfig::default(), &half, &[], 1), [3]);
    }
}

#[test]
fn the_temperature_bends_the_distribution() {
    for temperature in [1.0, 0.5, 2.0] {
        let config = drawing(|c| c.temperature = temperature);
        check_frequencies(&config, kept(&ALL, f64::from(temperature)));
    }
    // Far above every logit nothing is left of them.
    check_frequencies(&drawing(|c| c.temperature = 1e30), [1.0; 6]);
}

#[test]
fn a_temperature_near_0_is_greedy() {
    for temperature in [1e-3, 1e-6, 1e-20, 1e-38, f32::from_bits(1)] {
        for top_k in [0, 2] {
            let config = drawing(|c| (c.temperature, c.top_k) = (temperature, top_k));
            assert_eq!(
                sequence(&config, &logits(), &[], 20),
                [3; 20],
                "{temperature}"
            );
        }
    }
}

#[test]
fn top_k_keeps_so_many() {
    for (top_k, tokens) in [
        (1, &[3][..]),
        (2, &[3, 0]),
        (3, &[3, 0, 4]),
        (6, &ALL),
        (7, &ALL),
        (0, &ALL),
        (u32::MAX, &ALL),
    ] {
        check_frequencies(&drawing(|c| c.top_k = top_k), kept(tokens, 1.0));
    }
}

#[test]
fn top_p_keeps_the_fewest_that_reach_the_sum() {
    // Sums in order: 0.40, 0.65, 0.80, 0.92, 0.97, 1.
    for (top_p, tokens) in [
        (1e-9, &[3][..]),
        (0.39, &[3]),
        (0.41, &[3, 0]),
        (0.64, &[3, 0]),
        (0.66, &[3, 0, 4]),
        (0.91, &[3, 0, 4, 1]),
        (0.93, &[3, 0, 4, 1, 5]),
        (0.98, &ALL),
        (1.0, &ALL),
    ] {
        check_frequencies(&drawing(|c| c.top_p = top_p), kept(tokens, 1.0));
    }
}

#[test]
fn min_p_keeps_a_share_of_the_likeliest() {
    // The shares: 1, 0.625, 0.375, 0.3, 0.125, 0.075.
    for (min_p, tokens) in [
        (1.0, &[3][..]),
        (0.63, &[3]),
        (0.62, &[3, 0]),
        (0.31, &[3, 0, 4]),
        (0.29, &[3, 0, 4, 1]),
        (0.07, &ALL),
        (0.0, &ALL),
    ] {
        check_frequencies(&drawing(|c| c.min_p = min_p), kept(tokens, 1.0));
    }
}

/// The tokens nearest to the expected surprise up to the sum `mass`, in plain arithmetic
/// (arXiv 2202.00666, equation 10).
fn typical(mass: f64) -> Vec<usize> {
    let entropy: f64 = PROBABILITIES.iter().map(|p| -p * p.ln()).sum();
    let distance = |&token: &usize| (-PROBABILITIES[token].ln() - entropy).abs();
    let mut order = ALL.to_vec();
    order.sort_by(|one, other| distance(one).total_cmp(&distance(other)));
    let mut sum = 0.0;
    order
        .into_iter()
        .take_while(|&token| {
            let more = sum < mass;
            sum += PROBABILITIES[token];
            more
        })
        .collect()
}

#[test]
fn typical_p_keeps_the_tokens_of_expected_surprise() {
    for mass in [0.01, 0.2, 0.35, 0.6, 0.9, 0.99] {
        let config = drawing(|c| c.typical_p = mass);
        check_frequencies(&config, kept(&typical(f64::from(mass)), 1.0));
    }
    // The likeliest token is not the most typical one.
    assert!(!typical(0.2).contains(&3));
    check_frequencies(&drawing(|c| c.typical_p = 1.0), kept(&ALL, 1.0));
    // The others look at what it leaves.
    let most = typical(0.35);
    let likeliest = *most
        .iter()
        .max_by(|one, other| PROBABILITIES[**one].total_cmp(&PROBABILITIES[**other]))
        .unwrap();
    let config = drawing(|c| (c.typical_p, c.top_k) = (0.35, 1));
    check_frequencies(&config, kept(&[likeliest], 1.0));
    // Forbidden tokens count nothing.
    let config = drawing(|c| {
        c.typical_p = 0.99;
        c.logit_bias = BTreeMap::from([(3, f32::NEG_INFINITY)]);
    });
    check_frequencies(&config, kept(&[0, 1, 2, 4, 5], 1.0));
}

#[test]
fn xtc_leaves_out_all_top_choices_but_the_least_likely() {
    let set = |probability, threshold| drawing(|c| c.xtc = Some(Xtc::new(probability, threshold)));
    // Above 0.1 are 3, 0, 4 and 1.
    check_frequencies(&set(1.0, 0.1), kept(&[1, 5, 2], 1.0));
    check_frequencies(&set(1.0, 0.2), kept(&[0, 4, 1, 5, 2], 1.0));
    // One token above the threshold stays, and none.
    check_frequencies(&set(1.0, 0.3), kept(&ALL, 1.0));
    check_frequencies(&set(1.0, 0.5), kept(&ALL, 1.0));
    check_frequencies(&set(1.0, 0.0), kept(&[2], 1.0));
    check_frequencies(&set(0.0, 0.1), kept(&ALL, 1.0));
    // Half of the time: the mean of both distributions.
    let (all, left) = (kept(&ALL, 1.0), kept(&[1, 5, 2], 1.0));
    let sum: f64 = left.iter().sum();
    let mean = std::array::from_fn(|token| (all[token] + left[token] / sum) / 2.0);
    check_frequencies(&set(0.5, 0.1), mean);
    // Tokens that are kept, as mlx-lm's special ones.
    let mut config = set(1.0, 0.1);
    config.xtc.as_mut().unwrap().keep.extend([3, 1000]);
    check_frequencies(&config, kept(&[3, 1, 5, 2], 1.0));
}

#[test]
fn xtc_stands_between_the_sum_and_the_number_of_tokens() {
    // mlx-lm's order: of 0.40, 0.25 and 0.15, as 0.5, 0.31 and 0.19, the first is left out.
    let set = |top_p, top_k| {
        drawing(|c| {
            (c.top_p, c.top_k) = (top_p, top_k);
            c.xtc = Some(Xtc::new(1.0, 0.2));
        })
    };
    check_frequencies(&set(0.66, 0), kept(&[0, 4], 1.0));
    check_frequencies(&set(0.66, 1), kept(&[0], 1.0));
    check_frequencies(&set(1.0, 2), kept(&[0, 4], 1.0));
    check_frequencies(&set(1.0, 6), kept(&[0, 4, 1, 5, 2], 1.0));
}

#[test]
fn dry_makes_repetitions_less_likely() {
    let config = |multiplier| config(|c| c.dry = Some(Dry::new(multiplier)));
    // 0 1 2 0 1: 2 came next, 2 tokens are the same, the penalty is the multiplier.
    let prompt = [0, 1, 2, 0, 1];
    assert_eq!(choice(&config(1.0), &[0.0, 0.0, 3.0, 1.99], &prompt), 2);
    assert_eq!(choice(&config(1.0), &[0.0, 0.0, 3.0, 2.01], &prompt), 3);
    // 3 are the same: 1.75 times as much.
    let prompt = [3, 0, 1, 2, 3, 0, 1];
    assert_eq!(choice(&config(1.0), &[0.0, 0.0, 3.0, 1.24], &prompt), 2);
    assert_eq!(choice(&config(1.0), &[0.0, 0.0, 3.0, 1.26], &prompt), 3);
    // Tokens that were chosen count too: after 2 2 2 another 2 is penalized by 1.
    let logits = array(&[0.0, 0.0, 3.0, 2.5]);
    let chosen = sequence(&config(1.0), &logits, &[], 3);
    assert_eq!(chosen, [2, 2, 2]);
    assert_eq!(sequence(&config(1.0), &logits, &[], 4), [2, 2, 2, 3]);
    // A penalty without end forbids.
    let strong = config(f32::MAX);
    assert_eq!(choice(&strong, &[0.0, 0.0, 3.0, -9.0], &[0, 1, 2, 0, 1]), 0);
}

#[test]
fn scores_are_those_before_temperature_and_filters() {
    let mut sampler =
        Sampler::new(drawing(|c| (c.top_k, c.temperature) = (1, 0.3)), 6, &[]).unwrap();
    let (token, logprobs) = sampler.sample_scored(&logits()).unwrap();
    assert_eq!(token.item::<i32>().unwrap(), 3);
    for (found, expected) in logprobs.to_vec::<f32>().unwrap().iter().zip(PROBABILITIES) {
        assert!((f64::from(*found) - expected.ln()).abs() < 1e-5);
    }
}

#[test]
fn a_token_may_be_put_in_place_of_the_last() {
    let config = config(|c| (c.presence_penalty, c.penalty_context) = (1.0, 1));
    let mut sampler = Sampler::new(config, 3, &[]).unwrap();
    let logits = array(&[2.0, 1.9, 1.8]);
    assert_eq!(draw(&mut sampler, &logits), 0);
    let other = Array::from_slice(&[1], &[1]).unwrap();
    sampler.replace_last(&other).unwrap();
    // 1 is penalized, and 0 is not.
    assert_eq!(draw(&mut sampler, &logits), 0);
}

#[test]
fn filters_together_keep_what_each_of_them_keeps() {
    let set = |temperature, top_k, top_p, min_p| {
        drawing(|c| (c.temperature, c.top_k, c.top_p, c.min_p) = (temperature, top_k, top_p, min_p))
    };
    check_frequencies(&set(1.0, 3, 0.91, 0.0), kept(&[3, 0, 4], 1.0));
    check_frequencies(&set(1.0, 5, 0.66, 0.0), kept(&[3, 0, 4], 1.0));
    check_frequencies(&set(1.0, 5, 0.98, 0.62), kept(&[3, 0], 1.0));
    check_frequencies(&set(1.0, 0, 0.66, 0.29), kept(&[3, 0, 4], 1.0));
    check_frequencies(&set(1.0, 4, 1.0, 0.07), kept(&[3, 0, 4, 1], 1.0));
    // The filters look at the probabilities at temperature 1 (mlx-lm, `make_sampler`): at this
    // temperature 0.64 would be reached by token 3 alone, at the other one by five tokens.
    check_frequencies(&set(0.5, 0, 0.64, 0.0), kept(&[3, 0], 0.5));
    check_frequencies(&set(3.0, 0, 0.64, 0.29), kept(&[3, 0], 3.0));
}

#[test]
fn seeds_repeat() {
    let with = |seed| config(|c| (c.temperature, c.seed) = (1.0, seed));
    let sampled = |seed| sequence(&with(seed), &logits(), &[], 64);
    for seed in [0, 1, u64::MAX] {
        assert_eq!(sampled(Some(seed)), sampled(Some(seed)));
    }
    assert_ne!(sampled(Some(0)), sampled(Some(1)));
    // All 64 bits of it count.
    assert_ne!(sampled(Some(1)), sampled(Some(1 + (1 << 32))));
    assert_ne!(sampled(None), sampled(None));
    // A clone goes on as its original does.
    let mut one = Sampler::new(with(Some(5)), 6, &[]).unwrap();
    draw(&mut one, &logits());
    let mut two = one.clone();
    for _ in 0..32 {
        assert_eq!(draw(&mut one, &logits()), draw(&mut two, &logits()));
    }
}

#[test]
fn the_repetition_penalty_divides_or_multiplies_once() {
    let config = config(|c| c.repetition_penalty = 2.0);
    assert_eq!(choice(&config, &[3.0, 1.51, -9.0], &[0]), 1);
    assert_eq!(choice(&config, &[3.0, 1.49, -9.0], &[0]), 0);
    assert_eq!(choice(&config, &[3.0, 1.49, -9.0], &[0, 0, 0]), 0);
    assert_eq!(choice(&config, &[3.0, 2.0, -9.0], &[0, 1]), 0);
    assert_eq!(choice(&config, &[-1.0, -1.99, -9.0], &[0]), 1);
    assert_eq!(choice(&config, &[-1.0, -2.01, -9.0], &[0]), 0);
    let below = self::config(|c| c.repetition_penalty = 0.5);
    assert_eq!(choice(&below, &[3.0, 1.51, -9.0], &[1]), 1);
}

#[test]
fn the_presence_penalty_counts_once_and_the_frequency_penalty_each_time() {
    let presence = config(|c| c.presence_penalty = 1.0);
    assert_eq!(choice(&presence, &[3.0, 2.01, -9.0], &[0, 0]), 1);
    assert_eq!(choice(&presence, &[3.0, 1.99, -9.0], &[0, 0]), 0);
    let frequency = config(|c| c.frequency_penalty = 0.5);
    assert_eq!(choice(&frequency, &[3.0, 1.51, -9.0], &[0, 2, 0, 0]), 1);
    assert_eq!(choice(&frequency, &[3.0, 1.49, -9.0], &[0, 2, 0, 0]), 0);
    // A negative one asks for repetition.
    let more = config(|c| c.frequency_penalty = -1.0);
    assert_eq!(choice(&more, &[3.0, 1.01, -9.0], &[1, 1]), 1);
    assert_eq!(choice(&more, &[3.0, 0.99, -9.0], &[1, 1]), 0);
}

#[test]
fn bias_and_penalties_act_one_after_the_other() {
    // (2 + 2) / 2 - 0.5 - 2 * 0.25 = 1, in the order of mlx-lm's `make_logits_processors`.
    let config = config(|c| {
        c.logit_bias = BTreeMap::from([(0, 2.0)]);
        c.repetition_penalty = 2.0;
        c.presence_penalty = 0.5;
        c.frequency_penalty = 0.25;
    });
    assert_eq!(choice(&config, &[2.0, 1.01, -9.0], &[0, 0]), 1);
    assert_eq!(choice(&config, &[2.0, 0.99, -9.0], &[0, 0]), 0);
}

#[test]
fn penalties_count_prompt_and_answer_within_their_context() {
    let with = |context| config(|c| (c.presence_penalty, c.penalty_context) = (1.0, context));
    let logits = array(&[2.0, 1.9, 1.8, -9.0]);
    let chosen = |context, prompt: &[u32]| sequence(&with(context), &logits, prompt, 6);
    assert_eq!(chosen(1, &[]), [0, 1, 0, 1, 0, 1]);
    assert_eq!(chosen(2, &[]), [0, 1, 2, 0, 1, 2]);
    // Once all have come, all are as much less likely.
    assert_eq!(chosen(8, &[]), [0, 1, 2, 0, 0, 0]);
    assert_eq!(chosen(u32::MAX, &[]), [0, 1, 2, 0, 0, 0]);
    assert_eq!(chosen(2, &[0, 3, 3]), [0, 1, 2, 0, 1, 2]);
    assert_eq!(chosen(3, &[0, 3, 3]), [1, 0, 2, 0, 1, 0]);
    assert_eq!(chosen(0, &[0]), [0; 6]);
}

#[test]
fn a_logit_bias_is_added() {
    let with = |bias: &[(u32, f32)]| config(|c| c.logit_bias = bias.iter().copied().collect());
    assert_eq!(choice(&with(&[(1, 1.0)]), &[3.0, 2.01, -9.0], &[]), 1);
    assert_eq!(choice(&with(&[(1, 1.0)]), &[3.0, 1.99, -9.0], &[]), 0);
    assert_eq!(
        choice(&with(&[(0, -100.0), (2, 100.0)]), &[3.0, 1.0, -9.0], &[]),
        2
    );
    // Banned.
    let mut banned = drawing(|c| c.logit_bias = BTreeMap::from([(3, f32::NEG_INFINITY)]));
    check_frequencies(&banned, kept(&[0, 1, 2, 4, 5], 1.0));
    banned.top_k = 2;
    check_frequencies(&banned, kept(&[0, 4], 1.0));
}

#[test]
fn numbers_out_of_range_are_named() {
    let nan = f32::NAN;
    type Set = fn(&mut SamplerConfig, f32);
    let cases: [(&str, Set, &[f32], &str); 12] = [
        (
            "temperature",
            |c, x| c.temperature = x,
            &[-0.1, f32::INFINITY, nan],
            "a number of at least 0",
        ),
        (
            "top_p",
            |c, x| c.top_p = x,
            &[0.0, -1.0, 1.1, nan],
            "a number above 0 and up to 1",
        ),
        (
            "min_p",
            |c, x| c.min_p = x,
            &[-0.1, 1.1, nan],
            "a number from 0 to 1",
        ),
        (
            "typical_p",
            |c, x| c.typical_p = x,
            &[0.0, 1.1, nan],
            "a number above 0 and up to 1",
        ),
        (
            "xtc.probability",
            |c, x| c.xtc = Some(Xtc::new(x, 0.1)),
            &[-0.1, 1.1, nan],
            "a number from 0 to 1",
        ),
        (
            "xtc.threshold",
            |c, x| c.xtc = Some(Xtc::new(0.5, x)),
            &[-0.1, 0.6, nan],
            "a number from 0 to 0.5",
        ),
        (
            "dry.multiplier",
            |c, x| c.dry = Some(Dry::new(x)),
            &[-0.1, f32::INFINITY, nan],
            "a number of at least 0",
        ),
        (
            "dry.base",
            |c, x| {
                c.dry = Some(Dry {
                    base: x,
                    ..Dry::new(1.0)
                })
            },
            &[0.9, f32::INFINITY, nan],
            "a number of at least 1",
        ),
        (
            "repetition_penalty",
            |c, x| c.repetition_penalty = x,
            &[0.0, -1.0, f32::INFINITY, nan],
            "a positive number",
        ),
        (
            "presence_penalty",
            |c, x| c.presence_penalty = x,
            &[f32::INFINITY, nan],
            "a number",
        ),
        (
            "frequency_penalty",
            |c, x| c.frequency_penalty = x,
            &[f32::NEG_INFINITY, nan],
            "a number",
        ),
        (
            "logit_bias",
            |c, x| c.logit_bias = BTreeMap::from([(2, x)]),
            &[f32::INFINITY, nan],
            "a number or -inf",
        ),
    ];
    for (field, set, values, expected) in cases {
        for &value in values {
            let error = Sampler::new(config(|c| set(c, value)), 6, &[]).unwrap_err();
            let expected = format!("{field}: expected {expected}, found {value}");
            assert_eq!(error.to_string(), expected);
        }
    }
    for id in [6, u32::MAX] {
        let config = config(|c| c.logit_bias = BTreeMap::from([(id, 1.0)]));
        assert_eq!(
            Sampler::new(config, 6, &[]).unwrap_err().to_string(),
            format!("logit_bias: expected token ids below 6, found {id}")
        );
    }
}
