//! Constants of host operations: what they hold, for how long, and where they may be dropped.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mlex_core::{
    Array, Dtype, ErrorKind, HostConstant, HostOp, HostOutput, HostView, HostViewMut, Result,
    host_op,
};

use crate::{Failing, Increment, array, on_cpu};

/// Long enough for anything that is not stuck.
const LONG: Duration = Duration::from_secs(60);

/// Runs a test on a thread of its own, and fails if it gets stuck.
fn ends(test: impl FnOnce() + Send + 'static) {
    let (done, result) = channel();
    let thread = std::thread::spawn(move || {
        on_cpu(test);
        // Nobody listens when it took too long.
        let _ = done.send(());
    });
    match result.recv_timeout(LONG) {
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("the test is stuck"),
        _ => thread.join().unwrap(),
    }
}

/// Adds a constant to its input.
struct AddConstant(Arc<HostConstant>);

impl HostOp for AddConstant {
    fn name(&self) -> &'static str {
        "add_constant"
    }

    fn outputs(&self, inputs: &[&Array]) -> Result<Vec<HostOutput>> {
        Ok(vec![HostOutput::new(inputs[0].shape(), inputs[0].dtype())])
    }

    fn run(&self, inputs: &[HostView<'_>], outputs: &mut [HostViewMut<'_>]) -> Result<()> {
        let pairs = inputs[0].as_slice::<f32>()?.iter();
        let pairs = pairs.zip(self.0.view().as_slice::<f32>()?);
        for (y, (x, c)) in outputs[0].as_mut_slice::<f32>()?.iter_mut().zip(pairs) {
            *y = x + c;
        }
        Ok(())
    }
}

#[track_caller]
fn assert_holds(array: &Array, shape: &[i32], strides: &[i64], values: &[f32]) {
    let constant = HostConstant::new(array).unwrap();
    let view = constant.view();
    assert_eq!(view.shape(), shape);
    assert_eq!(view.strides(), strides);
    assert_eq!(view.dtype(), Dtype::Float32);
    assert_eq!(view.as_slice::<f32>().unwrap(), values);
    assert_eq!(view.as_bytes().len(), 4 * values.len());
}

#[test]
fn elements_are_in_order_however_the_array_lies() {
    on_cpu(|| {
        let base = array(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3]);
        assert_holds(&base, &[2, 3], &[3, 1], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let transposed = base.t().unwrap();
        let columns = [1.0, 4.0, 2.0, 5.0, 3.0, 6.0];
        assert_holds(&transposed, &[3, 2], &[2, 1], &columns);
        // A part that lies without gaps, from the middle on.
        let row = base.slice(&[1, 0], &[2, 3], None).unwrap();
        assert_holds(&row, &[1, 3], &[3, 1], &[4.0, 5.0, 6.0]);
        let steps = base.slice(&[0, 0], &[2, 3], Some(&[1, 2])).unwrap();
        assert_holds(&steps, &[2, 2], &[2, 1], &[1.0, 3.0, 4.0, 6.0]);
        let backwards = base.slice(&[1, 2], &[-3, -4], Some(&[-1, -1])).unwrap();
        let reversed = [6.0, 5.0, 4.0, 3.0, 2.0, 1.0];
        assert_holds(&backwards, &[2, 3], &[3, 1], &reversed);
        let repeated = array(&[7.0, 8.0], &[2]).broadcast_to(&[2, 2]).unwrap();
        assert_holds(&repeated, &[2, 2], &[2, 1], &[7.0, 8.0, 7.0, 8.0]);
        assert_holds(&Array::scalar(9.0f32).unwrap(), &[], &[], &[9.0]);
        let nothing = Array::zeros(&[2, 0, 3], Dtype::Float32).unwrap();
        assert_holds(&nothing, &[2, 0, 3], &[0, 3, 1], &[]);
    });
}

#[test]
fn any_dtype_is_held() {
    on_cpu(|| {
        let flags = Array::from_slice(&[true, false, true], &[3]).unwrap();
        let constant = HostConstant::new(&flags).unwrap();
        let view = constant.view();
        assert_eq!(view.as_slice::<bool>().unwrap(), [true, false, true]);
        let error = view.as_slice::<u8>().unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Dtype { .. }));
        assert_eq!(format!("{constant:?}"), "HostConstant([3], bool)");
        let wide = Array::from_slice(&[i64::MIN, 5], &[2]).unwrap();
        let constant = HostConstant::new(&wide).unwrap();
        assert_eq!(constant.view().as_slice::<i64>().unwrap(), [i64::MIN, 5]);
    });
}

#[test]
fn what_is_not_computed_yet_is_computed_then() {
    on_cpu(|| {
        let lazy = array(&[1.0, 2.0], &[2]).add(0.5).unwrap();
        assert_holds(&lazy, &[2], &[1], &[1.5, 2.5]);
        let failing = host_op(&Arc::new(Failing { panics: false }), &[&lazy]).unwrap();
        let error = HostConstant::new(&failing[0]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "anything: expected success, found failure"
        );
    });
}

#[test]
fn the_memory_stays_after_the_array_is_gone() {
    on_cpu(|| {
        let weight = array(&[1.0; 1000], &[1000]).add(1.0).unwrap();
        let constant = Arc::new(HostConstant::new(&weight).unwrap());
        let op = Arc::new(AddConstant(Arc::clone(&constant)));
        drop(weight);
        for round in 0..20 {
            // What is freed is taken for the next array of its size.
            let x = Array::full(&[1000], round as f32, Dtype::Float32).unwrap();
            let y = host_op(&op, &[&x]).unwrap().remove(0).add(0.0).unwrap();
            assert_eq!(y.to_vec::<f32>().unwrap(), vec![round as f32 + 2.0; 1000]);
        }
        assert_eq!(constant.view().as_slice::<f32>().unwrap(), [2.0; 1000]);
    });
}

#[test]
fn the_memory_is_never_given_away() {
    on_cpu(|| {
        let weight = array(&[1.0, 2.0], &[2]).add(0.0).unwrap();
        let constant = HostConstant::new(&weight).unwrap();
        // Both would work in place on an array that nothing else refers to.
        let next = host_op(&Arc::new(Increment), &[&weight]).unwrap().remove(0);
        let sum = weight.add(1.0).unwrap();
        drop(weight);
        assert_eq!(next.as_slice::<f32>().unwrap(), [2.0, 3.0]);
        assert_eq!(sum.as_slice::<f32>().unwrap(), [2.0, 3.0]);
        assert_eq!(constant.view().as_slice::<f32>().unwrap(), [1.0, 2.0]);
    });
}

#[test]
fn constants_are_read_on_other_threads() {
    on_cpu(|| {
        let constant = Arc::new(HostConstant::new(&array(&[3.0, 4.0], &[2])).unwrap());
        let threads = (0..4).map(|_| {
            let constant = Arc::clone(&constant);
            std::thread::spawn(move || constant.view().as_slice::<f32>().unwrap().to_vec())
        });
        let threads: Vec<_> = threads.collect();
        drop(constant);
        for thread in threads {
            assert_eq!(thread.join().unwrap(), [3.0, 4.0]);
        }
    });
}

/// Says that it runs, and goes on when it is told to.
struct Waiting {
    runs: Mutex<Sender<()>>,
    go_on: Mutex<Receiver<()>>,
}

impl HostOp for Waiting {
    fn name(&self) -> &'static str {
        "waiting"
    }

    fn outputs(&self, inputs: &[&Array]) -> Result<Vec<HostOutput>> {
        Ok(vec![HostOutput::new(inputs[0].shape(), inputs[0].dtype())])
    }

    fn run(&self, _inputs: &[HostView<'_>], outputs: &mut [HostViewMut<'_>]) -> Result<()> {
        self.runs.lock().unwrap().send(()).unwrap();
        self.go_on.lock().unwrap().recv_timeout(LONG).unwrap();
        outputs[0].as_mut_bytes().fill(0);
        Ok(())
    }
}

#[test]
fn dropped_on_another_thread_while_an_evaluation_runs() {
    ends(|| {
        let x = array(&[1.0], &[1]);
        let constant = HostConstant::new(&array(&[5.0; 64], &[64])).unwrap();
        let ((runs, is_running), (go_on, told)) = (channel(), channel());
        let op = Arc::new(Waiting {
            runs: Mutex::new(runs),
            go_on: Mutex::new(told),
        });
        let other = std::thread::spawn(move || {
            is_running.recv_timeout(LONG).unwrap();
            // The evaluating thread holds MLX, and waits for the operation.
            drop(constant);
            go_on.send(()).unwrap();
        });
        let y = host_op(&op, &[&x]).unwrap().remove(0);
        y.eval().unwrap();
        other.join().unwrap();
        assert_eq!(x.add(&y).unwrap().item::<f32>().unwrap(), 1.0);
    });
}

/// Drops its constant while it runs.
struct Dropping(Mutex<Option<HostConstant>>);

impl HostOp for Dropping {
    fn name(&self) -> &'static str {
        "dropping"
    }

    fn outputs(&self, inputs: &[&Array]) -> Result<Vec<HostOutput>> {
        Ok(vec![HostOutput::new(inputs[0].shape(), inputs[0].dtype())])
    }

    fn run(&self, inputs: &[HostView<'_>], outputs: &mut [HostViewMut<'_>]) -> Result<()> {
        let constant = self.0.lock().unwrap().take();
        let first = match &constant {
            Some(constant) => constant.view().as_slice::<f32>()?[0],
            None => 0.0,
        };
        drop(constant);
        outputs[0].as_mut_slice::<f32>()?[0] = inputs[0].as_slice::<f32>()?[0] + first;
        Ok(())
    }
}

#[test]
fn dropped_by_the_operation_itself() {
    ends(|| {
        let x = array(&[1.0], &[1]);
        for round in 0..20 {
            let constant = HostConstant::new(&array(&[5.0], &[1])).unwrap();
            let op = Arc::new(Dropping(Mutex::new(Some(constant))));
            let mut y = host_op(&op, &[&x]).unwrap().remove(0);
            // The operation may go with the node that is made of it, on the stream's thread.
            drop(op);
            if round % 2 == 0 {
                y = y.add(0.0).unwrap();
            }
            assert_eq!(y.item::<f32>().unwrap(), 6.0);
        }
    });
}

#[test]
fn dropped_with_a_node_that_was_computed_or_never() {
    ends(|| {
        let x = array(&[1.0, 2.0], &[2]);
        for evaluated in [true, false] {
            for _ in 0..20 {
                let constant = HostConstant::new(&array(&[5.0, 6.0], &[2])).unwrap();
                let op = Arc::new(AddConstant(Arc::new(constant)));
                let y = host_op(&op, &[&x]).unwrap().remove(0).add(1.0).unwrap();
                drop(op);
                if evaluated {
                    assert_eq!(y.as_slice::<f32>().unwrap(), [7.0, 9.0]);
                }
            }
        }
    });
}

#[test]
fn dropped_while_many_threads_evaluate() {
    ends(|| {
        let threads: Vec<_> = (0..4)
            .map(|index| {
                std::thread::spawn(move || {
                    on_cpu(|| {
                        for round in 0..50 {
                            let value = (index * 100 + round) as f32;
                            let constant = HostConstant::new(&array(&[value], &[1])).unwrap();
                            let op = Arc::new(AddConstant(Arc::new(constant)));
                            let x = array(&[0.5], &[1]);
                            let y = host_op(&op, &[&x]).unwrap().remove(0);
                            drop(op);
                            let y = y.add(0.0).unwrap();
                            assert_eq!(y.item::<f32>().unwrap(), value + 0.5);
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
