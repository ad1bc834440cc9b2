//! Host operations: laziness, views, memory in place, failures, threads.

#![allow(clippy::unwrap_used)]

mod buffers;
mod constants;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use mlex_core::{
    Array, Compiled, Device, Dtype, Error, HostOp, HostOutput, HostView, HostViewMut, Result,
    Stream, async_eval, host_op,
};

/// Uses the CPU whatever the machine has.
fn on_cpu<T>(test: impl FnOnce() -> T) -> T {
    Stream::default_of(Device::Cpu).unwrap().scope(test)
}

/// Sum and product of two inputs, element by element.
struct SumAndProduct;

impl HostOp for SumAndProduct {
    fn name(&self) -> &'static str {
        "sum_and_product"
    }

    fn outputs(&self, inputs: &[&Array]) -> Result<Vec<HostOutput>> {
        let [a, b] = inputs else {
            return Err(Error::format("inputs", "2", inputs.len().to_string()));
        };
        assert_eq!(a.shape(), b.shape());
        let output = HostOutput::new(a.shape(), a.dtype());
        Ok(vec![output.clone(), output])
    }

    fn run(&self, inputs: &[HostView<'_>], outputs: &mut [HostViewMut<'_>]) -> Result<()> {
        let (a, b) = (inputs[0].as_slice::<f32>()?, inputs[1].as_slice::<f32>()?);
        let [sum, product] = outputs else {
            panic!("two outputs")
        };
        let pairs = a.iter().zip(b);
        for ((out, other), (a, b)) in sum
            .as_mut_slice::<f32>()?
            .iter_mut()
            .zip(product.as_mut_slice::<f32>()?)
            .zip(pairs)
        {
            (*out, *other) = (a + b, a * b);
        }
        Ok(())
    }
}

fn sum_and_product(a: &Array, b: &Array) -> Result<(Array, Array)> {
    let mut outputs = host_op(&Arc::new(SumAndProduct), &[a, b])?.into_iter();
    Ok((outputs.next().unwrap(), outputs.next().unwrap()))
}

fn array(values: &[f32], shape: &[i32]) -> Array {
    Array::from_slice(values, shape).unwrap()
}

#[test]
fn several_outputs_in_a_graph() {
    on_cpu(|| {
        let a = array(&[1.0, 2.0, 3.0], &[3]).add(1.0).unwrap();
        let (sum, product) = sum_and_product(&a, &array(&[4.0, 5.0, 6.0], &[3])).unwrap();
        let both = sum.multiply(&product).unwrap();
        assert_eq!(both.as_slice::<f32>().unwrap(), [48.0, 120.0, 240.0]);
        assert_eq!(sum.as_slice::<f32>().unwrap(), [6.0, 8.0, 10.0]);
    });
}

#[test]
fn inputs_that_are_not_contiguous_are_packed() {
    on_cpu(|| {
        let base = array(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3]);
        let transposed = base.t().unwrap();
        let broadcast = array(&[10.0, 20.0], &[2]).broadcast_to(&[3, 2]).unwrap();
        let (sum, _) = sum_and_product(&transposed, &broadcast).unwrap();
        assert_eq!(
            sum.as_slice::<f32>().unwrap(),
            [11.0, 24.0, 12.0, 25.0, 13.0, 26.0]
        );

        let reversed = base.slice(&[1, 2], &[-3, -4], Some(&[-1, -1])).unwrap();
        let (sum, _) = sum_and_product(&reversed, &base.zeros_like().unwrap()).unwrap();
        assert_eq!(
            sum.as_slice::<f32>().unwrap(),
            [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
        );

        // Three dimensions, the inner one in steps of two.
        let cube: Vec<f32> = (0..24).map(|x| x as f32).collect();
        let part = array(&cube, &[2, 3, 4])
            .slice(&[0, 1, 0], &[2, 3, 4], Some(&[1, 1, 2]))
            .unwrap()
            .transpose(&[1, 0, 2])
            .unwrap();
        let (sum, _) = sum_and_product(&part, &part.zeros_like().unwrap()).unwrap();
        let expected = [4.0, 6.0, 16.0, 18.0, 8.0, 10.0, 20.0, 22.0];
        assert_eq!(sum.as_slice::<f32>().unwrap(), expected);
    });
}

#[test]
fn empty_and_scalar_inputs() {
    on_cpu(|| {
        let empty = Array::zeros(&[0, 4], Dtype::Float32).unwrap();
        let (sum, _) = sum_and_product(&empty, &empty).unwrap();
        assert_eq!(sum.as_slice::<f32>().unwrap(), [0.0f32; 0]);
        let one = Array::scalar(2.0f32).unwrap();
        let (_, product) = sum_and_product(&one, &one).unwrap();
        assert_eq!(product.item::<f32>().unwrap(), 4.0);
    });
}

/// Reports the strides it sees, and the reach of its slice.
struct Strides;

impl HostOp for Strides {
    fn name(&self) -> &'static str {
        "strides"
    }

    fn outputs(&self, _inputs: &[&Array]) -> Result<Vec<HostOutput>> {
        Ok(vec![HostOutput::new([3], Dtype::Int64)])
    }

    fn contiguous(&self, _index: usize) -> bool {
        false
    }

    fn run(&self, inputs: &[HostView<'_>], outputs: &mut [HostViewMut<'_>]) -> Result<()> {
        let view = inputs[0];
        let out = outputs[0].as_mut_slice::<i64>()?;
        out[..2].copy_from_slice(view.strides());
        out[2] = view.as_slice::<f32>()?.len() as i64;
        Ok(())
    }
}

#[test]
fn strided_inputs_are_seen_as_they_are() {
    on_cpu(|| {
        let base = Array::zeros(&[4, 6], Dtype::Float32).unwrap();
        base.eval().unwrap();
        let part = base
            .slice(&[1, 0], &[3, 6], Some(&[1, 2]))
            .unwrap()
            .t()
            .unwrap();
        let out = host_op(&Arc::new(Strides), &[&part]).unwrap().remove(0);
        // [3, 2] of a [4, 6]: steps of 2 and 6; the last element is 2 * 2 + 6 on.
        assert_eq!(out.as_slice::<i64>().unwrap(), [2, 6, 11]);
    });
}

/// Adds 1 to its input in place.
struct Increment;

impl HostOp for Increment {
    fn name(&self) -> &'static str {
        "increment"
    }

    fn outputs(&self, inputs: &[&Array]) -> Result<Vec<HostOutput>> {
        Ok(vec![HostOutput::in_place(0, inputs[0])])
    }

    fn run(&self, inputs: &[HostView<'_>], outputs: &mut [HostViewMut<'_>]) -> Result<()> {
        assert!(inputs[0].as_bytes().is_empty());
        outputs[0]
            .as_mut_slice::<f32>()?
            .iter_mut()
            .for_each(|x| *x += 1.0);
        Ok(())
    }
}

#[test]
fn memory_is_reused_only_when_nothing_else_refers_to_it() {
    on_cpu(|| {
        let op = Arc::new(Increment);
        let kept = array(&[1.0, 2.0], &[2]);
        let next = host_op(&op, &[&kept]).unwrap().remove(0);
        assert_eq!(next.as_slice::<f32>().unwrap(), [2.0, 3.0]);
        assert_eq!(kept.as_slice::<f32>().unwrap(), [1.0, 2.0]);

        let pointer = next.as_slice::<f32>().unwrap().as_ptr();
        let after = host_op(&op, &[&next]).unwrap().remove(0);
        drop(next);
        assert_eq!(after.as_slice::<f32>().unwrap(), [3.0, 4.0]);
        assert_eq!(after.as_slice::<f32>().unwrap().as_ptr(), pointer);
    });
}

/// Adds 1 to one input and 2 to the other, both in place, and gives their sum too.
struct Both;

impl HostOp for Both {
    fn name(&self) -> &'static str {
        "both"
    }

    fn outputs(&self, inputs: &[&Array]) -> Result<Vec<HostOutput>> {
        Ok(vec![
            HostOutput::new(inputs[0].shape(), inputs[0].dtype()),
            HostOutput::in_place(0, inputs[0]),
            HostOutput::in_place(1, inputs[1]),
        ])
    }

    fn run(&self, _inputs: &[HostView<'_>], outputs: &mut [HostViewMut<'_>]) -> Result<()> {
        let [sum, a, b] = outputs else {
            panic!("three outputs")
        };
        let (a, b) = (a.as_mut_slice::<f32>()?, b.as_mut_slice::<f32>()?);
        for ((sum, a), b) in sum.as_mut_slice::<f32>()?.iter_mut().zip(a).zip(b) {
            *a += 1.0;
            *b += 2.0;
            *sum = *a + *b;
        }
        Ok(())
    }
}

#[test]
fn memory_is_reused_by_one_of_several_outputs() {
    on_cpu(|| {
        let op = Arc::new(Both);
        let mut state = vec![array(&[1.0], &[1]), array(&[10.0], &[1])];
        let mut pointers = Vec::new();
        for round in 1..=3 {
            let mut outputs = host_op(&op, &[&state[0], &state[1]]).unwrap();
            let sum = outputs.remove(0);
            state = outputs;
            let round = round as f32;
            assert_eq!(sum.item::<f32>().unwrap(), 11.0 + 3.0 * round);
            let pointer = |array: &Array| array.as_slice::<f32>().unwrap().as_ptr();
            pointers.push([pointer(&state[0]), pointer(&state[1])]);
        }
        assert_eq!(pointers[1], pointers[2]);
    });
}

/// Panics or fails, as told.
struct Failing {
    panics: bool,
}

impl HostOp for Failing {
    fn name(&self) -> &'static str {
        "failing"
    }

    fn outputs(&self, inputs: &[&Array]) -> Result<Vec<HostOutput>> {
        Ok(vec![HostOutput::new(inputs[0].shape(), Dtype::Float32)])
    }

    fn run(&self, _inputs: &[HostView<'_>], _outputs: &mut [HostViewMut<'_>]) -> Result<()> {
        assert!(!self.panics, "on\npurpose");
        Err(Error::format("anything", "success", "failure"))
    }
}

#[test]
fn panics_and_errors_come_out_of_the_evaluation() {
    on_cpu(|| {
        let x = array(&[1.0], &[1]);
        for (panics, message) in [
            (true, "host operation failing: panicked: on purpose"),
            (false, "anything: expected success, found failure"),
        ] {
            let out = host_op(&Arc::new(Failing { panics }), &[&x])
                .unwrap()
                .remove(0);
            let sum = out.add(&x).unwrap();
            assert_eq!(sum.eval().unwrap_err().to_string(), message);
            // The stream goes on.
            assert_eq!(x.add(1.0).unwrap().item::<f32>().unwrap(), 2.0);

            let out = host_op(&Arc::new(Failing { panics }), &[&x])
                .unwrap()
                .remove(0);
            async_eval([&out]).unwrap();
            assert_eq!(out.as_slice::<f32>().unwrap_err().to_string(), message);
        }
    });
}

#[test]
fn the_thread_that_evaluates_is_told() {
    let failing = std::thread::spawn(|| {
        on_cpu(|| {
            let x = array(&[1.0], &[1]);
            (0..50)
                .filter(|_| {
                    let op = Arc::new(Failing { panics: false });
                    host_op(&op, &[&x]).unwrap()[0].eval().is_err()
                })
                .count()
        })
    });
    on_cpu(|| {
        let (a, b) = (array(&[1.0], &[1]), array(&[2.0], &[1]));
        for _ in 0..50 {
            sum_and_product(&a, &b).unwrap().0.eval().unwrap();
        }
    });
    assert_eq!(failing.join().unwrap(), 50);
}

/// Counts how many of it are alive.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl HostOp for Counted {
    fn name(&self) -> &'static str {
        "counted"
    }

    fn outputs(&self, inputs: &[&Array]) -> Result<Vec<HostOutput>> {
        Ok(vec![HostOutput::new(inputs[0].shape(), Dtype::Float32)])
    }

    fn run(&self, inputs: &[HostView<'_>], outputs: &mut [HostViewMut<'_>]) -> Result<()> {
        outputs[0]
            .as_mut_bytes()
            .copy_from_slice(inputs[0].as_bytes());
        Ok(())
    }
}

#[test]
fn nothing_leaks() {
    on_cpu(|| {
        let alive = Arc::new(AtomicUsize::new(0));
        let x = array(&[1.0], &[1]);
        for evaluated in [true, false] {
            for _ in 0..10 {
                alive.fetch_add(1, Ordering::SeqCst);
                let op = Arc::new(Counted(Arc::clone(&alive)));
                let out = host_op(&op, &[&x]).unwrap().remove(0);
                if evaluated {
                    out.eval().unwrap();
                }
            }
        }
        Stream::current().unwrap().synchronize().unwrap();
        // A task is taken apart on the stream's thread, after its result is there.
        for _ in 0..100 {
            if alive.load(Ordering::SeqCst) == 0 {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert_eq!(alive.load(Ordering::SeqCst), 0);
    });
}

#[test]
fn inside_a_compiled_function() {
    on_cpu(|| {
        let compiled = |shapeless| {
            Compiled::new(
                |inputs: &[Array]| {
                    let (sum, _) = sum_and_product(&inputs[0], &inputs[1])?;
                    Ok(vec![sum.multiply(2.0)?])
                },
                shapeless,
            )
            .unwrap()
        };
        let fixed = compiled(false);
        for length in [2, 3] {
            let x = Array::ones(&[length], Dtype::Float32).unwrap();
            let out = fixed.call([&x, &x]).unwrap().remove(0);
            assert_eq!(out.to_vec::<f32>().unwrap(), vec![4.0; length as usize]);
        }
        let shapeless = compiled(true);
        let x = Array::ones(&[2], Dtype::Float32).unwrap();
        let longer = Array::ones(&[3], Dtype::Float32).unwrap();
        let first = shapeless.call([&x, &x]);
        let second = shapeless.call([&longer, &longer]);
        assert!(
            first.is_err() || second.is_err(),
            "shapes of another call must not be used"
        );
    });
}

#[test]
fn wrong_inputs_are_refused_when_the_node_is_made() {
    on_cpu(|| {
        let x = array(&[1.0], &[1]);
        let error = host_op(&Arc::new(SumAndProduct), &[&x]).unwrap_err();
        assert_eq!(error.to_string(), "inputs: expected 2, found 1");
    });
}
