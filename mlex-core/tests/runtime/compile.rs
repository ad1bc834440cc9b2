//! Compiled functions.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use mlex_core::{Array, Compiled, Error, ErrorKind};

use crate::{floats, ramp};

/// `2 x + c`, and how often it was traced.
fn counted(shapeless: bool) -> (Compiled, Rc<Cell<u32>>) {
    let traced = Rc::new(Cell::new(0));
    let count = Rc::clone(&traced);
    let captured = Array::from_slice(&[10f32], &[1]).unwrap();
    let function = move |inputs: &[Array]| {
        count.set(count.get() + 1);
        Ok(vec![inputs[0].multiply(2.0)?.add(&captured)?])
    };
    (Compiled::new(function, shapeless).unwrap(), traced)
}

fn call(compiled: &Compiled, input: &Array) -> Vec<f32> {
    floats(&compiled.call([input]).unwrap()[0])
}

#[test]
fn it_is_traced_once_for_a_shape() {
    let (compiled, traced) = counted(false);
    assert_eq!(call(&compiled, &ramp(&[3])), [10.0, 12.0, 14.0]);
    let other = Array::from_slice(&[5f32, 6.0, 7.0], &[3]).unwrap();
    assert_eq!(call(&compiled, &other), [20.0, 22.0, 24.0]);
    assert_eq!(traced.get(), 1);
    assert_eq!(call(&compiled, &ramp(&[1])), [10.0]);
    assert_eq!(traced.get(), 2);
    assert_eq!(call(&compiled, &ramp(&[3])), [10.0, 12.0, 14.0]);
    assert_eq!(traced.get(), 2);
}

#[test]
fn a_shapeless_one_is_traced_once_for_all() {
    let (compiled, traced) = counted(true);
    assert_eq!(call(&compiled, &ramp(&[2])), [10.0, 12.0]);
    assert_eq!(call(&compiled, &ramp(&[4])), [10.0, 12.0, 14.0, 16.0]);
    assert_eq!(traced.get(), 1);
}

#[test]
fn several_inputs_and_outputs_and_many_operations() {
    let compiled = Compiled::new(
        |inputs| {
            let [a, b] = inputs else {
                unreachable!("two inputs are given");
            };
            let product = a.matmul(&b.t()?)?;
            let weights = product.softmax(&[-1], true)?;
            let mixed = weights.matmul(b)?.rms_norm(None, 1e-5)?;
            Ok(vec![mixed, product.sum_all()?, a.clone()])
        },
        false,
    )
    .unwrap();
    let (a, b) = (ramp(&[2, 3]), ramp(&[4, 3]).multiply(0.1).unwrap());
    for _ in 0..3 {
        let outputs = compiled.call([&a, &b]).unwrap();
        let product = a.matmul(&b.t().unwrap()).unwrap();
        let mixed = product.softmax(&[-1], true).unwrap().matmul(&b).unwrap();
        let mixed = mixed.rms_norm(None, 1e-5).unwrap();
        assert_eq!(outputs.len(), 3);
        assert!(outputs[0].all_close(&mixed, 1e-6, 1e-6).unwrap());
        assert_eq!(floats(&outputs[1]), floats(&product.sum_all().unwrap()));
        assert_eq!(floats(&outputs[2]), floats(&a));
    }
}

#[test]
fn what_is_captured_lives_as_long_as_the_function() {
    let (compiled, traced) = counted(false);
    assert_eq!(call(&compiled, &ramp(&[1])), [10.0]);
    assert_eq!(Rc::strong_count(&traced), 2);
    drop(compiled);
    assert_eq!(Rc::strong_count(&traced), 1);
}

#[test]
fn an_error_inside_comes_out_and_harms_nothing() {
    let compiled = Compiled::new(
        |inputs| {
            let doubled = inputs[0].add(&inputs[0])?;
            Ok(vec![doubled.matmul(&inputs[0])?])
        },
        false,
    )
    .unwrap();
    let error = compiled.call([&ramp(&[2, 3])]).unwrap_err();
    let ErrorKind::Mlx { op, location, .. } = error.kind() else {
        panic!("{error}");
    };
    assert_eq!((*op, location.file()), ("matmul", file!()));
    // It still works for a shape that fits, and so does everything else.
    assert_eq!(call(&compiled, &ramp(&[2, 2])), [4.0, 6.0, 12.0, 22.0]);
    assert_eq!(floats(&ramp(&[2]).add(1.0).unwrap()), [1.0, 2.0]);
    assert!(compiled.call([&ramp(&[2, 3])]).is_err());

    let own = || {
        Error::new(ErrorKind::Argument {
            argument: "x",
            expected: "another",
            found: "100 %n".to_owned(),
        })
    };
    let compiled = Compiled::new(move |_| Err(own()), false).unwrap();
    let error = compiled.call([&ramp(&[1])]).unwrap_err();
    assert_eq!(error.to_string(), "x: expected another, found 100 %n");
}

#[test]
fn a_panic_inside_comes_out_as_that_panic() {
    let compiled = Compiled::new(
        |inputs| {
            let _half_done = inputs[0].add(1.0)?;
            assert!(inputs[0].size() != 3, "three of them");
            Ok(vec![inputs[0].add(2.0)?])
        },
        false,
    )
    .unwrap();
    for _ in 0..2 {
        let call = || compiled.call([&ramp(&[3])]).map(|_| ());
        let payload = catch_unwind(AssertUnwindSafe(call)).unwrap_err();
        let message = payload.downcast_ref::<&str>().copied();
        assert_eq!(message, Some("three of them"));
        assert_eq!(floats(&ramp(&[2]).add(1.0).unwrap()), [1.0, 2.0]);
    }
    assert_eq!(call(&compiled, &ramp(&[2])), [2.0, 3.0]);
    // The lock was given back: other threads are not shut out.
    let other = std::thread::spawn(|| floats(&ramp(&[2]).add(1.0).unwrap()));
    assert_eq!(other.join().unwrap(), [1.0, 2.0]);
}

#[test]
fn compiled_functions_nest() {
    let (inner, traced) = counted(false);
    let outer = Compiled::new(
        move |inputs| {
            let first = inner.call(inputs)?;
            inner.call(&first)
        },
        false,
    )
    .unwrap();
    // 2 (2 x + 10) + 10
    assert_eq!(call(&outer, &ramp(&[2])), [30.0, 34.0]);
    // Within the outer trace the inner function is run for each call, afterwards not at all.
    assert_eq!(traced.get(), 2);
    assert_eq!(call(&outer, &ramp(&[2])), [30.0, 34.0]);
    assert_eq!(traced.get(), 2);
}

#[test]
fn data_cannot_be_read_while_a_function_is_traced() {
    let compiled = Compiled::new(
        |inputs| {
            let first = inputs[0].to_vec::<f32>()?[0];
            Ok(vec![inputs[0].add(first)?])
        },
        false,
    )
    .unwrap();
    let error = compiled.call([&ramp(&[2])]).unwrap_err().to_string();
    assert!(!error.contains('\n'), "{error}");
    assert_eq!(floats(&ramp(&[2])), [0.0, 1.0]);
}

#[test]
fn functions_without_inputs_or_outputs() {
    let constant = Compiled::new(|_| Ok(vec![ramp(&[2])]), false).unwrap();
    assert_eq!(floats(&constant.call([]).unwrap()[0]), [0.0, 1.0]);
    let nothing = Compiled::new(|_| Ok(vec![]), false).unwrap();
    assert!(nothing.call([&ramp(&[2])]).unwrap().is_empty());
}
