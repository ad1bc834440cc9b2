//! Experts without gates, chosen by groups, against plain arithmetic in f64; by the kernels and by
//! MLX's operations.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use mlex_core::{Array, Dtype, QuantizationMode, Quantized, QuantizedWeight, random};
use mlex_nn::{
    ExpertGroups, Experts, LazyTensor, MoeConfig, QuantizationConfig, Weights, dispatch,
};

const HIDDEN: usize = 32;
const INNER: usize = 64;
const EXPERTS: usize = 6;
const CONFIG: MoeConfig = MoeConfig {
    hidden_size: HIDDEN as i32,
    intermediate_size: INNER as i32,
    num_experts: EXPERTS as i32,
    experts_per_token: 2,
    normalize: true,
    shared_intermediate_size: None,
    gate: None,
};
const GROUPS: ExpertGroups = ExpertGroups {
    count: 3,
    active: 2,
    scale: 2.5,
};
const LAYOUT: Quantized = Quantized {
    bits: 4,
    group_size: 32,
    mode: QuantizationMode::Affine,
};

fn normal(seed: u64, shape: &[i32], scale: f32) -> Array {
    let key = random::key(seed).unwrap();
    random::normal(0.0, scale, shape, Dtype::Float32, &key).unwrap()
}

fn f64s(array: &Array) -> Vec<f64> {
    let values = array.as_type(Dtype::Float32).unwrap().to_vec::<f32>();
    values.unwrap().into_iter().map(f64::from).collect()
}

/// Where a checkpoint has the experts.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Stacked,
    Quantized,
    OneByOne,
    Fused,
}

/// A layer, and its up and down projections as f64.
fn layer(form: Form, correction: &Array) -> (Experts, Vec<Vec<f64>>) {
    let mut tensors = BTreeMap::new();
    let mut plain = Vec::new();
    for (index, (stacked, name, n, k)) in [
        ("fc1", "up_proj", INNER, HIDDEN),
        ("fc2", "down_proj", HIDDEN, INNER),
    ]
    .into_iter()
    .enumerate()
    {
        let shape = [EXPERTS as i32, n as i32, k as i32];
        let weight = normal(index as u64, &shape, (k as f32).powf(-0.5));
        let mut put = |path: String, array: Array| {
            tensors.insert(path, LazyTensor::ready(array));
        };
        let mut values = f64s(&weight);
        match form {
            Form::Stacked => put(format!("switch_mlp.{stacked}.weight"), weight),
            Form::Fused => put(format!("experts.{name}"), weight),
            Form::OneByOne => {
                for expert in 0..EXPERTS as i32 {
                    let one = weight.at(0, expert).unwrap();
                    put(format!("experts.{expert}.{name}.weight"), one);
                }
            }
            Form::Quantized => {
                let packed = QuantizedWeight::quantize(&weight, LAYOUT).unwrap();
                values = f64s(&packed.dequantize(None).unwrap());
                put(format!("switch_mlp.{stacked}.weight"), packed.weight);
                put(format!("switch_mlp.{stacked}.scales"), packed.scales);
                put(
                    format!("switch_mlp.{stacked}.biases"),
                    packed.biases.unwrap(),
                );
            }
        }
        plain.push(values);
    }
    let weights = Weights::new(tensors, QuantizationConfig::uniform(LAYOUT));
    let experts = Experts::load(&weights, "switch_mlp", &CONFIG).unwrap();
    weights.finish().unwrap();
    let experts = experts.with_groups(GROUPS, correction.clone()).unwrap();
    (experts, plain)
}

/// `[n, k]` of an expert times `x`.
fn product(weight: &[f64], expert: usize, n: usize, x: &[f64]) -> Vec<f64> {
    let k = x.len();
    let rows = weight[expert * n * k..(expert + 1) * n * k].chunks(k);
    rows.map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum())
        .collect()
}

/// The best two experts of the best two groups, with their weights.
fn route(logits: &[f64], correction: &[f64]) -> Vec<(usize, f64)> {
    let size = EXPERTS / GROUPS.count as usize;
    let scores: Vec<f64> = logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect();
    let mut ranked: Vec<f64> = scores.iter().zip(correction).map(|(a, b)| a + b).collect();
    // Groups of two: both count.
    let standing: Vec<f64> = ranked
        .chunks(size)
        .map(|group| group.iter().sum())
        .collect();
    let worst = (0..standing.len()).min_by(|&a, &b| standing[a].total_cmp(&standing[b]));
    ranked[worst.unwrap() * size..][..size].fill(0.0);
    let mut order: Vec<usize> = (0..EXPERTS).collect();
    order.sort_by(|&a, &b| ranked[b].total_cmp(&ranked[a]));
    order.truncate(2);
    let total: f64 = order.iter().map(|&expert| scores[expert]).sum();
    let weight = |expert: usize| 2.5 * scores[expert] / total;
    order
        .into_iter()
        .map(|expert| (expert, weight(expert)))
        .collect()
}

#[test]
fn every_form_of_the_experts() {
    // Some corrections are strong enough to change the choice.
    let correction = normal(9, &[EXPERTS as i32], 0.3);
    for form in [Form::Stacked, Form::Quantized, Form::OneByOne, Form::Fused] {
        let (experts, plain) = layer(form, &correction);
        // Few products, and so many that they are sorted.
        for tokens in [1usize, 5, 40] {
            let x = normal(3, &[1, tokens as i32, HIDDEN as i32], 1.0);
            let logits = normal(4, &[1, tokens as i32, EXPERTS as i32], 1.0);
            let (rows, scores) = (f64s(&x), f64s(&logits));
            let mut expected = Vec::new();
            for token in 0..tokens {
                let x = &rows[token * HIDDEN..][..HIDDEN];
                let mut sum = vec![0.0; HIDDEN];
                let logits = &scores[token * EXPERTS..][..EXPERTS];
                for (expert, weight) in route(logits, &f64s(&correction)) {
                    let up = product(&plain[0], expert, INNER, x);
                    let inner: Vec<f64> = up.iter().map(|x| x.max(0.0).powi(2)).collect();
                    let y = product(&plain[1], expert, HIDDEN, &inner);
                    sum.iter_mut()
                        .zip(y)
                        .for_each(|(sum, y)| *sum += weight * y);
                }
                expected.extend(sum);
            }
            for kernels in [true, false] {
                dispatch::set_kernels(kernels);
                let found = experts.forward(&x, &logits).unwrap();
                found.eval().unwrap();
                dispatch::set_kernels(true);
                assert_eq!(found.shape(), x.shape());
                for (found, expected) in f64s(&found).iter().zip(&expected) {
                    assert!(
                        (found - expected).abs() < 5e-5 * expected.abs().max(1.0),
                        "{form:?}, {tokens}, {kernels}: {found} for {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn groups_are_checked() {
    let correction = normal(9, &[EXPERTS as i32], 0.3);
    let refused = |count, active| {
        let weights = Weights::new(BTreeMap::new(), QuantizationConfig::default());
        let experts = Experts::load(&weights, "switch_mlp", &CONFIG).unwrap();
        let groups = ExpertGroups {
            count,
            active,
            scale: 1.0,
        };
        let error = experts.with_groups(groups, correction.clone());
        error.unwrap_err().to_string()
    };
    let divisor = "n_group: expected a divisor of the 6 experts, with two of them in a group";
    assert_eq!(refused(4, 1), format!("{divisor}, found 4"));
    assert_eq!(refused(6, 5), format!("{divisor}, found 6"));
    assert_eq!(
        refused(3, 4),
        "topk_group: expected a number from 1 to the 3 groups, found 4"
    );
}
