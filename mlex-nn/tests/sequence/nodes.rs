//! Several steps in one node, their memory, and their failures.

use mlex_core::{Array, Dtype, ErrorKind, async_eval};
use mlex_nn::{Activation, Embedding, GatedMlp, Linear, RmsNorm, Sequence, Value};

use crate::{Tensors, assert_same, ends, normal, on_cpu, plain, recorded};

const WIDTH: i32 = 64;

fn norm() -> RmsNorm {
    let tensors = Tensors::new(Dtype::Float32, None).vector("weight", WIDTH);
    tensors.load(|w| RmsNorm::load(w, WIDTH, 1e-5))
}

fn linear(rows: i32, columns: i32) -> Linear {
    let tensors = Tensors::new(Dtype::Float32, None).matrix("", rows, columns, true);
    tensors.load(|w| Linear::load(w, columns, rows, true))
}

fn mlp() -> GatedMlp {
    let tensors = Tensors::new(Dtype::Float32, None)
        .matrix("gate_proj", 160, WIDTH, false)
        .matrix("up_proj", 160, WIDTH, false)
        .matrix("down_proj", WIDTH, 160, false);
    tensors.load(|w| GatedMlp::load(w, WIDTH, 160, false, Activation::Silu))
}

fn embedding() -> Embedding {
    let tensors = Tensors::new(Dtype::Float32, None).matrix("", 10, WIDTH, false);
    tensors.load(|w| Embedding::load(w, 10, WIDTH))
}

fn start(x: &Array) -> (Sequence, Value) {
    Sequence::start(x).unwrap().unwrap()
}

#[test]
fn many_layers_are_one_node() {
    on_cpu(|| {
        let (norm, mlp) = (norm(), mlp());
        for rows in [1, 9] {
            let x = normal(1, &[1, rows, WIDTH], Dtype::Float32);
            let (mut sequence, mut value) = start(&x);
            let mut residual = None;
            let (mut expected, mut expected_residual) = (x.clone(), None::<Array>);
            // Buffers are used again and again, by values of several sizes.
            for _ in 0..40 {
                let normed = match residual {
                    None => norm.record(&mut sequence, value).unwrap().unwrap(),
                    Some(residual) => {
                        let outputs = norm.record_sum(&mut sequence, value, residual, 0.5);
                        let (sum, normed) = outputs.unwrap().unwrap();
                        value = sum;
                        normed
                    }
                };
                residual = mlp.record(&mut sequence, normed).unwrap();

                let normed = match expected_residual {
                    None => norm.forward(&expected).unwrap(),
                    Some(residual) => {
                        let scaled = residual.multiply(0.5).unwrap();
                        let (sum, normed) = norm.forward_sum(&expected, &scaled).unwrap();
                        expected = sum;
                        normed
                    }
                };
                expected_residual = Some(mlp.forward(&normed).unwrap());
            }
            let outputs = sequence.finish(&[residual.unwrap(), value]).unwrap();
            assert_same(&outputs[0], &expected_residual.unwrap());
            assert_same(&outputs[1], &expected);
        }
    });
}

#[test]
fn an_output_of_the_node_is_an_input_of_later_steps() {
    on_cpu(|| {
        let (norm, mlp) = (norm(), mlp());
        let x = normal(1, &[3, WIDTH], Dtype::Float32);
        let (mut sequence, value) = start(&x);
        let normed = norm.record(&mut sequence, value).unwrap().unwrap();
        let inner = mlp.record(&mut sequence, normed).unwrap().unwrap();
        let outputs = norm.record_sum(&mut sequence, inner, normed, 1.0);
        let (sum, last) = outputs.unwrap().unwrap();
        // In an order of its own, and one of them made and not asked for.
        let outputs = sequence.finish(&[last, normed, inner]).unwrap();
        let _ = sum;
        let normed = norm.forward(&x).unwrap();
        let inner = mlp.forward(&normed).unwrap();
        let (_, last) = norm.forward_sum(&inner, &normed).unwrap();
        for (found, expected) in outputs.iter().zip([last, normed, inner]) {
            assert_same(found, &expected);
        }
    });
}

#[test]
fn inputs_and_values_may_be_used_twice() {
    on_cpu(|| {
        let norm = norm();
        let x = normal(1, &[2, WIDTH], Dtype::Float32);
        let twice = x.add(&x).unwrap();

        let (mut sequence, value) = start(&x);
        let outputs = norm.record_sum(&mut sequence, value, value, 1.0);
        let (sum, _) = outputs.unwrap().unwrap();
        assert_same(&sequence.finish(&[sum]).unwrap()[0], &twice);

        let (mut sequence, value) = start(&x);
        let same = sequence.input(&x);
        let outputs = norm.record_sum(&mut sequence, value, same, 1.0);
        let (sum, normed) = outputs.unwrap().unwrap();
        let again = norm.record(&mut sequence, value).unwrap().unwrap();
        let outputs = sequence.finish(&[sum, normed, again]).unwrap();
        assert_same(&outputs[0], &twice);
        assert_same(&outputs[1], &norm.forward(&twice).unwrap());
        assert_same(&outputs[2], &norm.forward(&x).unwrap());
    });
}

#[test]
fn inputs_are_read_however_they_lie() {
    on_cpu(|| {
        let norm = norm();
        let x = normal(1, &[WIDTH, 6], Dtype::Float32).t().unwrap();
        let part = x.slice(&[0, 0], &[6, WIDTH], Some(&[2, 1])).unwrap();
        for x in [x, part] {
            let found = recorded(&x, |sequence, x| norm.record(sequence, x));
            assert_same(&found, &norm.forward(&x.contiguous().unwrap()).unwrap());
        }
    });
}

#[test]
fn sequences_of_other_threads_do_not_meet() {
    ends(|| {
        let threads: Vec<_> = (0..4)
            .map(|index| {
                std::thread::spawn(move || {
                    let cpu = mlex_core::Stream::default_of(mlex_core::Device::Cpu).unwrap();
                    cpu.scope(|| {
                        let (norm, mlp) = (norm(), mlp());
                        for round in 0..20 {
                            let x = normal(index * 100 + round, &[2, WIDTH], Dtype::Float32);
                            let (mut sequence, value) = start(&x);
                            let value = mlp.record(&mut sequence, value).unwrap().unwrap();
                            let value = norm.record(&mut sequence, value).unwrap().unwrap();
                            let found = sequence.finish(&[value]).unwrap().remove(0);
                            let expected = norm.forward(&mlp.forward(&x).unwrap()).unwrap();
                            assert_same(&found, &expected);
                        }
                    });
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
    });
}

#[test]
fn layers_may_be_dropped_before_the_evaluation() {
    ends(|| {
        let x = normal(1, &[1, WIDTH], Dtype::Float32);
        let expected = mlp().forward(&norm().forward(&x).unwrap()).unwrap();
        expected.eval().unwrap();
        for round in 0..20 {
            let (norm, mlp) = (norm(), mlp());
            let (mut sequence, value) = start(&x);
            let normed = norm.record(&mut sequence, value).unwrap().unwrap();
            let output = mlp.record(&mut sequence, normed).unwrap().unwrap();
            let output = sequence.finish(&[output]).unwrap().remove(0);
            drop((norm, mlp));
            match round % 4 {
                0 => assert_same(&output, &expected),
                // The node may be gone before its task is.
                1 => assert_same(&output.add(0.0).unwrap(), &expected.add(0.0).unwrap()),
                2 => async_eval([&output]).unwrap(),
                _ => drop(output),
            }
        }
    });
}

#[test]
fn a_sequence_may_be_dropped() {
    ends(|| {
        let x = normal(1, &[1, WIDTH], Dtype::Float32);
        for _ in 0..5 {
            let (norm, mlp) = (norm(), mlp());
            let (mut sequence, value) = start(&x);
            let normed = norm.record(&mut sequence, value).unwrap().unwrap();
            mlp.record(&mut sequence, normed).unwrap().unwrap();
            assert_eq!(
                format!("{sequence:?}"),
                "Sequence { steps: [\"rms_norm\", \"gated_linear\", \"linear\"] }"
            );
        }
        // The layers compute as before.
        assert_same(&norm().forward(&x).unwrap(), &norm().forward(&x).unwrap());
    });
}

#[test]
fn what_a_step_fails_with_reaches_the_evaluation() {
    on_cpu(|| {
        let (embedding, norm, linear) = (embedding(), norm(), linear(5, WIDTH));
        let run = |ids: &[i32]| {
            let ids = Array::from_slice(ids, &[1, ids.len() as i32]).unwrap();
            let (mut sequence, value) = Sequence::start_with_ids(&ids).unwrap().unwrap();
            let rows = embedding.record(&mut sequence, value).unwrap().unwrap();
            let normed = norm.record(&mut sequence, rows).unwrap().unwrap();
            let output = linear.record(&mut sequence, normed).unwrap().unwrap();
            sequence.finish(&[output, rows]).unwrap()
        };
        let good = run(&[3, 9]);
        good[0].eval().unwrap();
        for bad in [[3, 10], [-11, 0]] {
            let outputs = run(&bad);
            let error = outputs[0].eval().unwrap_err();
            let message = error.to_string();
            let expected = "host operation embedding: take_rows: ids: expected a row of the table";
            assert!(message.starts_with(expected), "{message}");
            assert!(matches!(error.kind(), ErrorKind::HostOp { .. }));

            let outputs = run(&bad);
            async_eval([&outputs[1]]).unwrap();
            assert!(outputs[1].as_slice::<f32>().is_err());
            // The next one is not disturbed.
            assert_same(&run(&[3, 9])[0], &good[0]);
        }
    });
}

fn refused(sequence: Sequence, outputs: &[Value]) {
    let message = sequence.finish(outputs).unwrap_err().to_string();
    let expected = "outputs of a sequence: expected values that its steps have made, each once, \
                    found Value(";
    assert!(message.starts_with(expected), "{message}");
}

#[test]
fn outputs_are_values_that_steps_made() {
    on_cpu(|| {
        let norm = norm();
        let x = normal(1, &[2, WIDTH], Dtype::Float32);
        let record = || {
            let (mut sequence, value) = start(&x);
            let normed = norm.record(&mut sequence, value).unwrap().unwrap();
            (sequence, value, normed)
        };
        let (sequence, value, _) = record();
        refused(sequence, &[value]);
        let (sequence, _, normed) = record();
        refused(sequence, &[normed, normed]);
        let (mut longer, _, normed) = record();
        let last = norm.record(&mut longer, normed).unwrap().unwrap();
        refused(record().0, &[last]);
        assert!(longer.finish(&[]).unwrap().is_empty());
        let (sequence, _, normed) = record();
        assert_same(
            &sequence.finish(&[normed]).unwrap()[0],
            &norm.forward(&x).unwrap(),
        );
    });
}

#[test]
fn nothing_is_recorded_without_kernels() {
    on_cpu(|| {
        let x = normal(1, &[2, WIDTH], Dtype::Float32);
        let ids = Array::from_slice(&[1i32], &[1, 1]).unwrap();
        plain(|| {
            assert!(Sequence::start(&x).unwrap().is_none());
            assert!(Sequence::start_with_ids(&ids).unwrap().is_none());
        });
        assert!(Sequence::start(&x).unwrap().is_some());
        assert!(Sequence::start_with_ids(&ids).unwrap().is_some());
        for dtype in [Dtype::Int32, Dtype::Float64, Dtype::Bool] {
            let x = Array::zeros(&[2, WIDTH], dtype).unwrap();
            assert!(Sequence::start(&x).unwrap().is_none());
        }
        // Ids of a type that are none.
        let x = Array::zeros(&[1, 2], Dtype::Float32).unwrap();
        let (mut sequence, value) = Sequence::start_with_ids(&x).unwrap().unwrap();
        assert_eq!(embedding().record(&mut sequence, value).unwrap(), None);
    });
}
