//! Each layer recorded alone.

use mlex_core::{Array, Dtype, QuantizationMode, Quantized};
use mlex_nn::{Activation, Embedding, GatedMlp, Linear, RmsNorm, Sequence};

use crate::{DTYPES, Tensors, assert_close, assert_same, floats, normal, on_cpu, plain, recorded};

const INPUT: i32 = 128;
const OUTPUT: i32 = 48;

fn affine(bits: i32, group_size: i32) -> Quantized {
    Quantized {
        bits,
        group_size,
        mode: QuantizationMode::Affine,
    }
}

/// Dense, and some of each kind of quantization.
fn layouts() -> Vec<Option<Quantized>> {
    vec![
        None,
        Some(affine(4, 64)),
        Some(affine(8, 32)),
        Some(affine(3, 32)),
        Some(affine(5, 128)),
        Some(QuantizationMode::Mxfp4.into()),
        Some(QuantizationMode::Mxfp8.into()),
        Some(QuantizationMode::Nvfp4.into()),
    ]
}

/// A few rows, and many.
fn inputs(dtype: Dtype) -> [Array; 3] {
    [&[1, 1, INPUT][..], &[3, INPUT], &[2, 7, INPUT]].map(|shape| normal(7, shape, dtype))
}

#[test]
fn linear_layers() {
    on_cpu(|| {
        for dtype in DTYPES {
            for layout in layouts() {
                for bias in [false, true] {
                    let tensors = Tensors::new(dtype, layout).matrix("", OUTPUT, INPUT, bias);
                    let layer = tensors.load(|w| Linear::load(w, INPUT, OUTPUT, bias));
                    for x in inputs(dtype) {
                        let found = recorded(&x, |sequence, x| layer.record(sequence, x));
                        assert_same(&found, &layer.forward(&x).unwrap());
                        assert_close(&found, &plain(|| layer.forward(&x)).unwrap());
                    }
                }
            }
        }
    });
}

#[test]
fn narrow_weights_of_wide_activations() {
    on_cpu(|| {
        for dtype in [Dtype::Float16, Dtype::Bfloat16] {
            let tensors = Tensors::new(dtype, None).matrix("", OUTPUT, INPUT, true);
            let layer = tensors.load(|w| Linear::load(w, INPUT, OUTPUT, true));
            for x in inputs(Dtype::Float32) {
                let found = recorded(&x, |sequence, x| layer.record(sequence, x));
                assert_eq!(found.dtype(), Dtype::Float32);
                assert_close(&found, &plain(|| layer.forward(&x)).unwrap());
            }
        }
    });
}

#[test]
fn what_widens_is_not_recorded() {
    on_cpu(|| {
        let wide = Tensors::new(Dtype::Float32, None).matrix("", OUTPUT, INPUT, false);
        let linear = wide.load(|w| Linear::load(w, INPUT, OUTPUT, false));
        let norm = Tensors::new(Dtype::Float32, None).vector("weight", INPUT);
        let norm = norm.load(|w| RmsNorm::load(w, INPUT, 1e-5));
        let x = normal(1, &[2, INPUT], Dtype::Bfloat16);
        let (mut sequence, value) = Sequence::start(&x).unwrap().unwrap();
        assert_eq!(linear.record(&mut sequence, value).unwrap(), None);
        assert_eq!(norm.record(&mut sequence, value).unwrap(), None);
        assert_eq!(linear.forward(&x).unwrap().dtype(), Dtype::Float32);
    });
}

#[test]
fn norms() {
    on_cpu(|| {
        for dtype in DTYPES {
            let tensors = Tensors::new(dtype, None).vector("weight", INPUT);
            let norm = tensors.load(|w| RmsNorm::load(w, INPUT, 1e-5));
            for x in inputs(dtype) {
                let found = recorded(&x, |sequence, x| norm.record(sequence, x));
                assert_same(&found, &norm.forward(&x).unwrap());
                assert_close(&found, &plain(|| norm.forward(&x)).unwrap());
            }
        }
    });
}

#[test]
fn residual_sums() {
    on_cpu(|| {
        for dtype in DTYPES {
            let tensors = Tensors::new(dtype, None).vector("weight", INPUT);
            let norm = tensors.load(|w| RmsNorm::load(w, INPUT, 1e-5));
            for (x, scale) in inputs(dtype).into_iter().zip([1.0, 0.22, -3.0]) {
                let residual = normal(8, x.shape(), dtype);
                let (mut sequence, value) = Sequence::start(&x).unwrap().unwrap();
                let other = sequence.input(&residual);
                let outputs = norm.record_sum(&mut sequence, value, other, scale);
                let (sum, normed) = outputs.unwrap().unwrap();
                let outputs = sequence.finish(&[normed, sum]).unwrap();

                // MLX's multiplication and addition round each.
                let scaled = residual.multiply(scale).unwrap();
                assert_same(&outputs[1], &x.add(&scaled).unwrap());
                assert_same(&outputs[0], &norm.forward(&outputs[1]).unwrap());
                let (sum, normed) = plain(|| norm.forward_sum(&x, &scaled)).unwrap();
                assert_same(&outputs[1], &sum);
                assert_close(&outputs[0], &normed);
            }
        }
    });
}

#[test]
fn gated_layers() {
    on_cpu(|| {
        let inner = 96;
        for dtype in DTYPES {
            for layout in [
                None,
                Some(affine(4, 32)),
                Some(QuantizationMode::Mxfp8.into()),
            ] {
                for (bias, activation) in [
                    (false, Activation::Silu),
                    (true, Activation::Gelu),
                    (false, Activation::GeluTanh),
                ] {
                    let tensors = Tensors::new(dtype, layout)
                        .matrix("gate_proj", inner, INPUT, bias)
                        .matrix("up_proj", inner, INPUT, bias)
                        .matrix("down_proj", INPUT, inner, bias);
                    let layer = tensors.load(|w| GatedMlp::load(w, INPUT, inner, bias, activation));
                    for x in inputs(dtype) {
                        let found = recorded(&x, |sequence, x| layer.record(sequence, x));
                        assert_same(&found, &layer.forward(&x).unwrap());
                        assert_close(&found, &plain(|| layer.forward(&x)).unwrap());
                    }
                }
            }
        }
    });
}

#[test]
fn embeddings() {
    on_cpu(|| {
        let vocabulary = 40;
        for dtype in DTYPES {
            for layout in layouts() {
                let tensors = Tensors::new(dtype, layout).matrix("", vocabulary, INPUT, false);
                let layer = tensors.load(|w| Embedding::load(w, vocabulary, INPUT));
                for ids in [
                    Array::from_slice(&[0i32, 39, 7, 7, -1, -40], &[2, 3]).unwrap(),
                    Array::from_slice(&[38u32], &[1, 1]).unwrap(),
                    Array::zeros(&[2, 0], Dtype::Int32).unwrap(),
                ] {
                    if layout.is_some() && ids.size() == 0 {
                        // MLX does not unpack nothing.
                        continue;
                    }
                    let (mut sequence, value) = Sequence::start_with_ids(&ids).unwrap().unwrap();
                    let rows = layer.record(&mut sequence, value).unwrap().unwrap();
                    let found = sequence.finish(&[rows]).unwrap().remove(0);
                    let expected = layer.forward(&ids).unwrap();
                    assert_eq!(found.shape(), expected.shape());
                    assert_eq!(found.dtype(), expected.dtype());
                    match layout.map(|layout| layout.mode) {
                        // MLX rounds the product of scale and code before it adds the bias.
                        Some(QuantizationMode::Affine) => assert_close(&found, &expected),
                        _ => assert_eq!(floats(&found), floats(&expected)),
                    }
                }
            }
        }
    });
}

#[test]
fn shapes_that_do_not_fit_are_refused_at_once() {
    on_cpu(|| {
        for layout in [None, Some(affine(4, 64))] {
            let tensors = Tensors::new(Dtype::Float32, layout)
                .matrix("gate_proj", 64, INPUT, false)
                .matrix("up_proj", 64, INPUT, false)
                .matrix("down_proj", INPUT, 64, false);
            let mlp = tensors.load(|w| GatedMlp::load(w, INPUT, 64, false, Activation::Silu));
            let tensors = Tensors::new(Dtype::Float32, layout).matrix("", OUTPUT, INPUT, false);
            let linear = tensors.load(|w| Linear::load(w, INPUT, OUTPUT, false));
            let tensors = Tensors::new(Dtype::Float32, None).vector("weight", INPUT);
            let norm = tensors.load(|w| RmsNorm::load(w, INPUT, 1e-5));
            // Two rows of 192 are three of 128.
            for shape in [&[2, 192][..], &[1, INPUT - 1], &[]] {
                let x = normal(1, shape, Dtype::Float32);
                let (mut sequence, value) = Sequence::start(&x).unwrap().unwrap();
                assert_eq!(linear.record(&mut sequence, value).unwrap(), None);
                assert_eq!(norm.record(&mut sequence, value).unwrap(), None);
                assert_eq!(mlp.record(&mut sequence, value).unwrap(), None);
                assert!(linear.forward(&x).is_err());
                assert!(norm.forward(&x).is_err());
                assert!(mlp.forward(&x).is_err());
            }
            let (x, other) = (
                normal(1, &[2, INPUT], Dtype::Float32),
                normal(2, &[1, INPUT], Dtype::Float32),
            );
            let (mut sequence, value) = Sequence::start(&x).unwrap().unwrap();
            let other = sequence.input(&other);
            let sum = norm.record_sum(&mut sequence, value, other, 1.0);
            assert_eq!(sum.unwrap(), None);
        }
    });
}
