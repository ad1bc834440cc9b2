//! Mixtures of experts against plain arithmetic in f64, by the kernels and by MLX's operations,
//! from each form that checkpoints have.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use mlex_core::{Array, Dtype, QuantizationMode, Quantized, QuantizedWeight};
use mlex_nn::{Activation, LazyTensor, MoeConfig, MoeMlp, QuantizationConfig, Weights, dispatch};

const HIDDEN: usize = 32;
const INNER: usize = 64;
const EXPERTS: usize = 5;
const SHARED: usize = 32;
const LAYOUT: Quantized = Quantized {
    bits: 4,
    group_size: 32,
    mode: QuantizationMode::Affine,
};

/// A repeatable source of numbers from -1 to 1 (Knuth's MMIX constants).
fn random(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    (0..count)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
        })
        .collect()
}

/// How a checkpoint has the experts.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Stacked,
    OneByOne,
    Fused,
    Quantized,
    QuantizedOneByOne,
}

/// A layer and its weights in f64, as the layer has them.
struct Layer {
    layer: MoeMlp,
    config: MoeConfig,
    router: Vec<f64>,
    /// Gate, up and down projection of all experts.
    experts: [Vec<f64>; 3],
    shared: [Vec<f64>; 4],
}

fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

impl Layer {
    fn new(form: Form, config: MoeConfig) -> Self {
        let mut tensors = BTreeMap::new();
        let mut put = |name: &str, array: Array| {
            tensors.insert(name.to_owned(), LazyTensor::ready(array));
        };
        let array = |values: &[f32], shape: &[usize]| {
            let shape: Vec<i32> = shape.iter().map(|&dim| dim as i32).collect();
            Array::from_slice(values, &shape).unwrap()
        };
        let router = random(1, EXPERTS * HIDDEN);
        put("gate.weight", array(&router, &[EXPERTS, HIDDEN]));
        let mut shared = [const { Vec::new() }; 4];
        if config.shared_intermediate_size.is_some() {
            let shapes = [
                [SHARED, HIDDEN],
                [SHARED, HIDDEN],
                [HIDDEN, SHARED],
                [1, HIDDEN],
            ];
            for (index, name) in [
                "shared_expert.gate_proj.weight",
                "shared_expert.up_proj.weight",
                "shared_expert.down_proj.weight",
                "shared_expert_gate.weight",
            ]
            .into_iter()
            .enumerate()
            {
                let values = random(20 + index as u64, shapes[index].iter().product());
                put(name, array(&values, &shapes[index]));
                shared[index] = widen(&values);
            }
        }
        let mut experts = [const { Vec::new() }; 3];
        let mut dense = Vec::new();
        for (index, name) in ["gate_proj", "up_proj", "down_proj"]
            .into_iter()
            .enumerate()
        {
            let (n, k) = if index == 2 {
                (HIDDEN, INNER)
            } else {
                (INNER, HIDDEN)
            };
            let values = random(10 + index as u64, EXPERTS * n * k);
            let all = array(&values, &[EXPERTS, n, k]);
            experts[index] = widen(&values);
            let quantized = QuantizedWeight::quantize(&all, LAYOUT).unwrap();
            if matches!(form, Form::Quantized | Form::QuantizedOneByOne) {
                let unpacked = quantized.dequantize(None).unwrap();
                experts[index] = widen(&unpacked.to_vec::<f32>().unwrap());
            }
            let parts = [
                ("weight", &quantized.weight),
                ("scales", &quantized.scales),
                ("biases", quantized.biases.as_ref().unwrap()),
            ];
            match form {
                Form::Stacked => put(&format!("switch_mlp.{name}.weight"), all.clone()),
                Form::Quantized => {
                    for (part, array) in parts {
                        put(&format!("switch_mlp.{name}.{part}"), array.clone());
                    }
                }
                Form::OneByOne | Form::QuantizedOneByOne => {
                    for expert in 0..EXPERTS as i32 {
                        let path = format!("experts.{expert}.{name}");
                        if form == Form::OneByOne {
                            put(&format!("{path}.weight"), all.at(0, expert).unwrap());
                            continue;
                        }
                        for (part, array) in parts {
                            put(&format!("{path}.{part}"), array.at(0, expert).unwrap());
                        }
                    }
                }
                Form::Fused => dense.push(all),
            }
        }
        if form == Form::Fused {
            let both = Array::concatenate(&dense[..2], 1).unwrap();
            put("experts.gate_up_proj", both);
            put("experts.down_proj", dense[2].clone());
        }
        let weights = Weights::new(tensors, QuantizationConfig::uniform(LAYOUT));
        let layer = MoeMlp::load(&weights, &config).unwrap();
        weights.finish().unwrap();
        Self {
            layer,
            config,
            router: widen(&router),
            experts,
            shared,
        }
    }

    fn expected(&self, x: &[f64]) -> Vec<f64> {
        let matvec = |w: &[f64], x: &[f64]| -> Vec<f64> {
            w.chunks_exact(x.len())
                .map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum())
                .collect()
        };
        let mlp = |[gate, up, down]: [&[f64]; 3], x: &[f64]| {
            let (gate, up) = (matvec(gate, x), matvec(up, x));
            let inner = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u);
            matvec(down, &inner.collect::<Vec<_>>())
        };
        let mut out = Vec::new();
        for x in x.chunks_exact(HIDDEN) {
            let logits = matvec(&self.router, x);
            let exp: Vec<f64> = logits.iter().map(|logit| logit.exp()).collect();
            let mut order: Vec<usize> = (0..EXPERTS).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
            order.truncate(self.config.experts_per_token as usize);
            let total: f64 = if self.config.normalize {
                order.iter().map(|&expert| exp[expert]).sum()
            } else {
                exp.iter().sum()
            };
            let mut sum = vec![0.0; HIDDEN];
            let size = INNER * HIDDEN;
            for expert in order {
                let of = |all: &'_ [f64]| -> Vec<f64> { all[expert * size..][..size].to_vec() };
                let parts = self.experts.each_ref().map(|all| of(all));
                let y = mlp(parts.each_ref().map(Vec::as_slice), x);
                sum.iter_mut()
                    .zip(y)
                    .for_each(|(sum, y)| *sum += exp[expert] / total * y);
            }
            if self.config.shared_intermediate_size.is_some() {
                let [gate, up, down, weight] = &self.shared;
                let factor = 1.0 / (1.0 + (-matvec(weight, x)[0]).exp());
                let y = mlp([gate, up, down], x);
                sum.iter_mut()
                    .zip(y)
                    .for_each(|(sum, y)| *sum += factor * y);
            }
            out.extend(sum);
        }
        out
    }

    fn check(&self, what: &str, tokens: usize) {
        let x = random(tokens as u64, tokens * HIDDEN);
        let expected = self.expected(&widen(&x));
        let x = Array::from_slice(&x, &[1, tokens as i32, HIDDEN as i32]).unwrap();
        for kernels in [true, false] {
            dispatch::set_kernels(kernels);
            let y = self.layer.forward(&x).unwrap();
            y.eval().unwrap();
            dispatch::set_kernels(true);
            assert_eq!(y.shape(), x.shape());
            close(what, &y.to_vec().unwrap(), &expected, 2e-5);
        }
    }
}

fn close(what: &str, found: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(0.0f64, |max, x| max.max(x.abs()));
    for (found, expected) in found.iter().zip(expected) {
        let error = (f64::from(*found) - expected).abs();
        assert!(
            error <= tolerance * scale,
            "{what}: {found} != {expected} ({scale})"
        );
    }
}

const CONFIG: MoeConfig = MoeConfig {
    hidden_size: HIDDEN as i32,
    intermediate_size: INNER as i32,
    num_experts: EXPERTS as i32,
    experts_per_token: 2,
    normalize: true,
    shared_intermediate_size: None,
    gate: Some(Activation::Silu),
};

#[test]
fn every_form_of_the_experts() {
    for form in [
        Form::Stacked,
        Form::OneByOne,
        Form::Fused,
        Form::Quantized,
        Form::QuantizedOneByOne,
    ] {
        let layer = Layer::new(form, CONFIG);
        // Few products, and so many that they are sorted.
        for tokens in [1, 3, 70] {
            layer.check(&format!("{form:?}, {tokens} tokens"), tokens);
        }
    }
}

#[test]
fn weights_that_are_not_normalized_and_a_shared_expert() {
    for experts_per_token in [1, 3, EXPERTS as i32] {
        for normalize in [false, true] {
            let config = MoeConfig {
                experts_per_token,
                normalize,
                shared_intermediate_size: Some(SHARED as i32),
                ..CONFIG
            };
            let layer = Layer::new(Form::Quantized, config);
            layer.check(&format!("{config:?}"), 7);
        }
    }
}

#[test]
fn half_precision_is_near() {
    let layer = Layer::new(Form::Quantized, CONFIG);
    let x = random(3, 9 * HIDDEN);
    let x = Array::from_slice(&x, &[1, 9, HIDDEN as i32]).unwrap();
    for dtype in [Dtype::Bfloat16, Dtype::Float16] {
        let rounded = x.as_type(dtype).unwrap();
        let exact: Vec<f32> = rounded.as_type(Dtype::Float32).unwrap().to_vec().unwrap();
        let y = layer.layer.forward(&rounded).unwrap();
        let y: Vec<f32> = y.as_type(Dtype::Float32).unwrap().to_vec().unwrap();
        close(
            &format!("{dtype}"),
            &y,
            &layer.expected(&widen(&exact)),
            0.03,
        );
    }
}

#[test]
fn settings_out_of_range_are_named() {
    let weights = || Weights::new(BTreeMap::new(), QuantizationConfig::default());
    let load = |config| MoeMlp::load(&weights(), &config).unwrap_err().to_string();
    assert_eq!(
        load(MoeConfig {
            experts_per_token: 6,
            ..CONFIG
        }),
        "num_experts_per_tok: expected a number from 1 to the 5 experts, found 6"
    );
    assert_eq!(
        load(MoeConfig {
            num_experts: 0,
            ..CONFIG
        }),
        "num_experts: expected a positive number, found 0"
    );
    let weights = weights();
    MoeMlp::load(&weights, &CONFIG).unwrap();
    assert_eq!(
        weights.finish().unwrap_err().to_string(),
        "the tensors do not fit the model: 4 missing (gate.weight, switch_mlp.gate_proj.weight, \
         switch_mlp.up_proj.weight, switch_mlp.down_proj.weight)"
    );
}
