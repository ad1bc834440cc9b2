//! Errors: one line that names the operation and its caller.

use mlex_core::{Array, Dtype, Error, ErrorKind};

use crate::ramp;

/// Checks an error of MLX that was met in this file, on `line`.
#[track_caller]
fn check(error: &Error, op: &str, line: u32) {
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    assert!(text.starts_with(&format!("{op}: ")), "{text}");
    let ErrorKind::Mlx {
        op: name, location, ..
    } = error.kind()
    else {
        panic!("{error:?}");
    };
    assert_eq!(*name, op);
    assert_eq!(
        (location.file(), location.line()),
        (file!(), line),
        "{text}"
    );
    assert!(text.ends_with(&format!("(called at {location})")), "{text}");
}

#[test]
fn they_name_the_operation_and_its_caller() {
    let (a, b) = (ramp(&[2, 3]), ramp(&[2, 3]));
    let error = a.matmul(&b).unwrap_err();
    check(&error, "matmul", line!() - 1);
    assert!(error.to_string().contains("(2,3)"), "{error}");
    let error = a.add(&ramp(&[4])).unwrap_err();
    check(&error, "add", line!() - 1);
    let error = a.reshape(&[5]).unwrap_err();
    check(&error, "reshape", line!() - 1);
    let error = a.sum(&[2], false).unwrap_err();
    check(&error, "sum_axes", line!() - 1);
    let error = Array::concatenate([&a, &ramp(&[3])], 0).unwrap_err();
    check(&error, "concatenate_axis", line!() - 1);
    let error = a.split(5, 0).unwrap_err();
    check(&error, "split", line!() - 1);
}

#[test]
fn a_failed_call_leaves_no_trace() {
    let a = ramp(&[2, 3]);
    assert!(a.matmul(&a).is_err());
    let sum = a.add(&a).unwrap();
    assert_eq!(sum.sum_all().unwrap().item::<f32>().unwrap(), 30.0);
}

#[test]
fn messages_are_not_formats() {
    // mlx-c hands messages on as a printf format.
    for equation in ["%s%s%s%n->%d", "a%1000000000d", "%%", "i%nj,jk->ik"] {
        let error = Array::einsum(equation, [&ramp(&[2, 2])]).unwrap_err();
        assert!(!error.to_string().contains('\n'), "{error}");
    }
    let error = Array::einsum("i\0j->i", [&ramp(&[2, 2])]);
    assert!(error.is_ok_and(|array| array.shape() == [2]));
}

#[test]
fn messages_may_be_long() {
    let many = vec![1; 3000];
    let error = ramp(&[2]).reshape(&many).unwrap_err();
    assert!(!error.to_string().contains('\n'));
}

#[test]
fn an_error_stays_on_its_thread() {
    let threads: Vec<_> = (0..8)
        .map(|thread| {
            std::thread::spawn(move || {
                for _ in 0..50 {
                    let error = ramp(&[1, thread + 2]).matmul(&ramp(&[1, 1])).unwrap_err();
                    let shape = format!("(1,{})", thread + 2);
                    assert!(error.to_string().contains(&shape), "{error}");
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn unknown_names_say_what_is_known() {
    let error = "float8".parse::<Dtype>().unwrap_err().to_string();
    assert!(
        error.contains("float8") && error.contains("bfloat16"),
        "{error}"
    );
}
