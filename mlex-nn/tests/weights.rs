//! Building layers from a checkpoint's tensors: what is missing, left over or of another shape
//! is told all at once.
#![allow(clippy::unwrap_used, reason = "a helper fails as its test would")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use mlex_core::{Array, Dtype, QuantizationMode, Quantized, QuantizedWeight};
use mlex_nn::{
    Embedding, ErrorKind, LazyTensor, Linear, Misshapen, QuantizationConfig, RmsNorm, Weights,
};

fn zeros(shape: &[i32]) -> LazyTensor {
    LazyTensor::ready(Array::zeros(shape, Dtype::Float32).unwrap())
}

fn checkpoint<const N: usize>(tensors: [(&str, LazyTensor); N]) -> BTreeMap<String, LazyTensor> {
    tensors
        .into_iter()
        .map(|(name, tensor)| (name.to_owned(), tensor))
        .collect()
}

fn dense<const N: usize>(tensors: [(&str, LazyTensor); N]) -> Weights {
    Weights::new(checkpoint(tensors), QuantizationConfig::default())
}

#[test]
fn one_error_lists_all_that_does_not_fit() {
    let weights = dense([
        ("model.q_proj.weight", zeros(&[4, 6])),
        ("model.q_proj.bias", zeros(&[5])),
        ("model.extra.weight", zeros(&[1])),
        ("rotary.inv_freq", zeros(&[1])),
    ]);
    let model = weights.pp("model");
    Linear::load(&model.pp("q_proj"), 6, 4, true).unwrap();
    RmsNorm::load(&model.pp("norm"), 6, 1e-5).unwrap();
    let error = weights.finish().unwrap_err();
    let ErrorKind::Weights(errors) = error.kind() else {
        panic!("{error}");
    };
    assert_eq!(errors.missing, ["model.norm.weight"]);
    assert_eq!(errors.unexpected, ["model.extra.weight", "rotary.inv_freq"]);
    let misshapen = Misshapen {
        name: "model.q_proj.bias".to_owned(),
        expected: vec![4],
        found: vec![5],
    };
    assert_eq!(errors.misshapen, [misshapen]);
    assert_eq!(
        error.to_string(),
        "the tensors do not fit the model: 1 missing (model.norm.weight); 2 unexpected \
         (model.extra.weight, rotary.inv_freq); 1 of another shape (model.q_proj.bias: \
         expected shape [4], found [5])"
    );
}

#[test]
fn what_is_of_no_use_can_be_discarded() {
    let weights = dense([("a.weight", zeros(&[2])), ("b.inv_freq", zeros(&[1]))]);
    weights.discard(|path| path.ends_with("inv_freq"));
    RmsNorm::load(&weights.pp("a"), 2, 1e-5).unwrap();
    weights.finish().unwrap();
}

#[test]
fn places_know_their_paths() {
    let weights = dense([("model.layers.3.norm.weight", zeros(&[2]))]);
    let norm = weights.pp("model").pp("layers").pp(3).pp("norm");
    assert_eq!(norm.prefix(), "model.layers.3.norm");
    assert_eq!(norm.path("weight"), "model.layers.3.norm.weight");
    assert!(norm.contains("weight") && !norm.contains("bias"));
    assert_eq!(norm.shape("weight"), Some(vec![2]));
    assert!(norm.get_optional("bias", &[2]).unwrap().is_none());
    // A tensor is taken once.
    assert!(norm.get_optional("weight", &[2]).unwrap().is_some());
    assert!(!norm.contains("weight"));
}

#[test]
fn a_tensor_is_read_when_it_is_asked_for() {
    let read = Rc::new(RefCell::new(Vec::new()));
    let lazy = |name: &'static str| {
        let read = Rc::clone(&read);
        LazyTensor {
            shape: vec![3],
            dtype: Dtype::Float32,
            load: Box::new(move || {
                read.borrow_mut().push(name);
                Array::ones(&[3], Dtype::Float32)
            }),
        }
    };
    let bytes = Rc::new(RefCell::new(Vec::new()));
    let counted = Rc::clone(&bytes);
    let weights = dense([("a", lazy("a")), ("b", lazy("b")), ("c", lazy("c"))])
        .with_dtype(Some(Dtype::Float16))
        .with_progress(Box::new(move |count| counted.borrow_mut().push(count)));
    assert_eq!(weights.get("b", &[3]).unwrap().dtype(), Dtype::Float16);
    assert_eq!(*read.borrow(), ["b"]);
    // A misshapen one is not read at all.
    weights.get("c", &[4]).unwrap();
    assert_eq!(*read.borrow(), ["b"]);
    assert_eq!(*bytes.borrow(), [6]);
}

#[test]
fn integers_keep_their_dtype() {
    let packed = Array::zeros(&[2], Dtype::Uint32).unwrap();
    let weights = dense([("packed", LazyTensor::ready(packed))]).with_dtype(Some(Dtype::Float16));
    assert_eq!(weights.get("packed", &[2]).unwrap().dtype(), Dtype::Uint32);
}

#[test]
fn rows_with_scales_of_bytes_have_the_dtype_that_is_asked_for() {
    let layout = Quantized::from(QuantizationMode::Nvfp4);
    // A scale of 1 and the largest FP4 number.
    let table = Array::full(&[3, 32], 6.0, Dtype::Float32).unwrap();
    let packed = QuantizedWeight::quantize(&table, layout).unwrap();
    let ids = Array::from_slice(&[2i32, 0], &[1, 2]).unwrap();
    for (asked, expected) in [
        (None, Dtype::Bfloat16),
        (Some(Dtype::Float32), Dtype::Float32),
        (Some(Dtype::Float16), Dtype::Float16),
    ] {
        let tensors = checkpoint([
            ("weight", LazyTensor::ready(packed.weight.clone())),
            ("scales", LazyTensor::ready(packed.scales.clone())),
        ]);
        let quantization = QuantizationConfig {
            default: Some(layout),
            layers: BTreeMap::new(),
        };
        let weights = Weights::new(tensors, quantization).with_dtype(asked);
        let rows = Embedding::load(&weights, 3, 32).unwrap();
        let rows = rows.forward(&ids).unwrap();
        assert_eq!((rows.shape(), rows.dtype()), (&[1, 2, 32][..], expected));
        let rows = rows.as_type(Dtype::Float32).unwrap();
        assert_eq!(rows.to_vec::<f32>().unwrap(), [6.0; 64]);
    }
}

#[test]
fn a_tensor_that_cannot_be_read_is_named() {
    let broken = LazyTensor {
        shape: vec![2],
        dtype: Dtype::Float32,
        load: Box::new(|| Array::from_bytes(&[0], &[2], Dtype::Float32)),
    };
    let weights = dense([("model.norm.weight", broken)]);
    let error = RmsNorm::load(&weights.pp("model.norm"), 2, 1e-5).unwrap_err();
    assert_eq!(
        error.to_string(),
        "tensor \"model.norm.weight\": bytes: expected 8, found 1"
    );
}

const LAYOUT: Quantized = Quantized {
    bits: 4,
    group_size: 32,
    mode: QuantizationMode::Affine,
};

/// The tensors of a packed `[8, 64]` weight below `head`.
fn packed() -> BTreeMap<String, LazyTensor> {
    let ramp = Array::arange(0.0, 512.0, 1.0, Dtype::Float32).unwrap();
    let packed = QuantizedWeight::quantize(&ramp.reshape(&[8, 64]).unwrap(), LAYOUT).unwrap();
    checkpoint([
        ("head.weight", LazyTensor::ready(packed.weight)),
        ("head.scales", LazyTensor::ready(packed.scales)),
        ("head.biases", LazyTensor::ready(packed.biases.unwrap())),
    ])
}

#[test]
fn scales_need_a_layout() {
    let weights = Weights::new(packed(), QuantizationConfig::default());
    let error = Linear::load(&weights.pp("head"), 64, 8, false).unwrap_err();
    assert_eq!(
        error.to_string(),
        "head: quantization: expected a layout for the layer's scales, found none"
    );
}

#[test]
fn layouts_go_by_layer() {
    // The default is wrong for this layer, its own entry is right.
    let wrong = Quantized { bits: 8, ..LAYOUT };
    let mut config = QuantizationConfig::uniform(wrong);
    config.layers.insert("head".to_owned(), Some(LAYOUT));
    let weights = Weights::new(packed(), config);
    Linear::load(&weights.pp("head"), 64, 8, false).unwrap();
    weights.finish().unwrap();

    let weights = Weights::new(packed(), QuantizationConfig::uniform(wrong));
    Embedding::load(&weights.pp("head"), 8, 64).unwrap();
    let error = weights.finish().unwrap_err().to_string();
    assert!(
        error.contains("head.weight: expected shape [8, 16], found [8, 8]"),
        "{error}"
    );
}

#[test]
fn layouts_that_do_not_divide_are_refused_by_layer() {
    let refused = |layout: Quantized, columns: i32| {
        let weights = Weights::new(packed(), QuantizationConfig::uniform(layout));
        let error = Linear::load(&weights.pp("head"), columns, 8, false).unwrap_err();
        assert_eq!(error.layer(), Some("head"));
        error.to_string()
    };
    assert_eq!(
        refused(LAYOUT, 80),
        "head: group_size: expected a divisor of the 80 columns, found 32"
    );
    assert_eq!(
        refused(Quantized { bits: 7, ..LAYOUT }, 64),
        "head: bits: expected 2, 3, 4, 5, 6 or 8 for affine, found 7"
    );
    let zero = Quantized {
        group_size: 0,
        ..LAYOUT
    };
    assert_eq!(
        refused(zero, 64),
        "head: group_size: expected 32, 64 or 128 for affine, found 0"
    );
}
