//! Routing to experts against sorting in f64, and the products' way there and back.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Random, Values};
use mlex_kernels::{KernelError, Routes};
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
