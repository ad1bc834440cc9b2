//! Routing to experts against sorting in f64, and the products' way there and back.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Random, Values};
use mlex_kernels::{ExpertGroups, KernelError, Routes, relu2};
use proptest::prelude::*;

proptest! {
    #[test]
    fn routes_are_the_most_probable_experts(
        tokens in 0usize..20,
        experts in 1usize..40,
        choices in 1usize..9,
        normalize: bool,
        kind in 0usize..3,
        seed: u64,
    ) {
        let per_token = choices.min(experts);
        let mut random = Random::new(seed);
        let values: Vec<f32> = (0..tokens * experts).map(|_| 8.0 * random.float()).collect();
        let logits = Values::new(kind, &values);
        let mut routes = Routes::top(logits.view(), experts, per_token, normalize).unwrap();
        prop_assert!(routes.experts().is_sorted());
        for token in 0..tokens {
            let row: Vec<f64> = (0..experts)
                .map(|expert| f64::from(logits.view().get(token * experts + expert)))
                .collect();
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
            let best = &order[..per_token];
            let exp: Vec<f64> = row.iter().map(|logit| (logit - row[best[0]]).exp()).collect();
            let total: f64 = if normalize {
                best.iter().map(|&expert| exp[expert]).sum()
            } else {
                exp.iter().sum()
            };
            for (choice, &expert) in best.iter().enumerate() {
                let at = token * per_token + choice;
                let line = routes.rows()[at] as usize;
                prop_assert_eq!(routes.experts()[line] as usize, expert);
                prop_assert_eq!(routes.tokens()[line] as usize, token);
                prop_assert!((f64::from(routes.weights()[at]) - exp[expert] / total).abs() < 1e-6);
            }
        }
        let (before, factors) = (routes.weights().to_vec(), random.floats::<f32>(experts));
        routes.scale(factors[..].into()).unwrap();
        for ((found, before), &row) in routes.weights().iter().zip(before).zip(routes.rows()) {
            let expert = routes.experts()[row as usize] as usize;
            prop_assert_eq!(*found, before * factors[expert]);
        }
        // What each expert gives back: its row times its number, so that rows are told apart.
        let size = 5;
        let x: Vec<f32> = random.floats(tokens * size);
        let mut gathered = vec![f32::NAN; tokens * per_token * size];
        routes.gather(&mut gathered, &x, size).unwrap();
        for (line, &expert) in gathered.chunks_exact_mut(size).zip(routes.experts()) {
            line.iter_mut().for_each(|value| *value *= expert as f32);
        }
        let mut out = vec![f32::NAN; tokens * size];
        routes.combine(&mut out, &gathered, size).unwrap();
        for token in 0..tokens {
            let factor: f64 = (0..per_token)
                .map(|choice| {
                    let at = token * per_token + choice;
                    let expert = routes.experts()[routes.rows()[at] as usize];
                    f64::from(routes.weights()[at]) * f64::from(expert)
                })
                .sum();
            for i in 0..size {
                let expected = factor * f64::from(x[token * size + i]);
                prop_assert!((f64::from(out[token * size + i]) - expected).abs() < 1e-4);
            }
        }
    }
}

proptest! {
    #[test]
    fn groups_choose_by_their_two_best_experts(
        tokens in 1usize..10,
        groups in 1usize..5,
        size in 2usize..6,
        left_out in 0usize..4,
        choices in 1usize..9,
        normalize: bool,
        kind in 0usize..3,
        seed: u64,
    ) {
        let (experts, active) = (groups * size, groups - left_out.min(groups - 1));
        let per_token = choices.min(active * size);
        let mut random = Random::new(seed);
        let values: Vec<f32> = (0..tokens * experts).map(|_| 3.0 * random.float()).collect();
        let logits = Values::new(kind, &values);
        let correction: Vec<f32> = random.floats(experts);
        let grouping = ExpertGroups {
            count: groups,
            active,
            scale: 2.5,
            correction: correction[..].into(),
        };
        let routes =
            Routes::grouped(logits.view(), experts, per_token, normalize, &grouping).unwrap();
        prop_assert!(routes.experts().is_sorted());
        for token in 0..tokens {
            let at = |expert: usize| f64::from(logits.view().get(token * experts + expert));
            let scores: Vec<f64> = (0..experts).map(|e| 1.0 / (1.0 + (-at(e)).exp())).collect();
            let mut ranked: Vec<f64> = (0..experts)
                .map(|expert| scores[expert] + f64::from(correction[expert]))
                .collect();
            let standing = |group: &usize| {
                let mut of_group = ranked[group * size..][..size].to_vec();
                of_group.sort_by(|a, b| b.total_cmp(a));
                of_group[0] + of_group[1]
            };
            let mut order: Vec<usize> = (0..groups).collect();
            order.sort_by(|a, b| standing(b).total_cmp(&standing(a)));
            let dropped = order.split_off(active);
            for group in dropped {
                ranked[group * size..][..size].fill(0.0);
            }
            let row = |choice: usize| routes.rows()[token * per_token + choice] as usize;
            let chosen: Vec<usize> = (0..per_token)
                .map(|choice| routes.experts()[row(choice)] as usize)
                .collect();
            // Whatever was not chosen is not better, but for rounding.
            let worst = chosen.iter().map(|&e| ranked[e]).fold(f64::INFINITY, f64::min);
            for expert in (0..experts).filter(|expert| !chosen.contains(expert)) {
                prop_assert!(ranked[expert] <= worst + 1e-6);
            }
            let total: f64 = if normalize && per_token > 1 {
                chosen.iter().map(|&expert| scores[expert]).sum()
            } else {
                1.0
            };
            for (choice, &expert) in chosen.iter().enumerate() {
                let found = f64::from(routes.weights()[token * per_token + choice]);
                prop_assert!((found - 2.5 * scores[expert] / total).abs() < 1e-5);
                prop_assert_eq!(routes.tokens()[row(choice)] as usize, token);
            }
        }
    }
}

#[test]
fn the_positive_part_is_squared() {
    let mut out = [f32::NAN; 4];
    relu2(&mut out, &[-2.0, 0.0, 0.5, 3.0]).unwrap();
    assert_eq!(out, [0.0, 0.0, 0.25, 9.0]);
    assert!(relu2(&mut out, &[1.0f32]).is_err());
}

#[test]
fn groups_that_do_not_fit_are_refused() {
    let (logits, correction) = ([0.0f32; 8], [0.0f32; 8]);
    let refused = |count, active, correction: &[f32]| {
        let grouping = ExpertGroups {
            count,
            active,
            scale: 1.0,
            correction: correction.into(),
        };
        let routes = Routes::grouped(logits[..].into(), 8, 2, true, &grouping);
        routes.unwrap_err().to_string()
    };
    assert_eq!(
        refused(3, 1, &correction),
        "routes: groups: expected a divisor of the experts, with two of them in a group, found 3"
    );
    assert_eq!(
        refused(8, 4, &correction),
        "routes: groups: expected a divisor of the experts, with two of them in a group, found 8"
    );
    assert_eq!(
        refused(2, 3, &correction),
        "routes: active groups: expected at least one group and no more than there are, found 3"
    );
    assert_eq!(
        refused(2, 1, &correction[..7]),
        "routes: correction: expected 8 elements, found 7"
    );
}

#[test]
fn wrong_arguments_are_refused() {
    let logits = [0.0f32; 6];
    let found = |experts, per_token| Routes::top(logits[..].into(), experts, per_token, true);
    assert!(matches!(found(3, 0), Err(KernelError::Argument { .. })));
    assert!(matches!(found(3, 4), Err(KernelError::Argument { .. })));
    assert!(matches!(found(4, 1), Err(KernelError::Argument { .. })));
    let mut routes = found(3, 2).unwrap();
    assert!(routes.scale([1.0f32][..].into()).is_err());
    assert_eq!(
        routes
            .gather(&mut [0.0; 4], &[0.0f32; 3], 1)
            .unwrap_err()
            .to_string(),
        "routes: rows to gather: expected 2 elements, found 3"
    );
    assert_eq!(
        routes
            .combine(&mut [0.0f32; 2], &[0.0; 3], 1)
            .unwrap_err()
            .to_string(),
        "routes: rows to combine: expected 4 elements, found 3"
    );
}
