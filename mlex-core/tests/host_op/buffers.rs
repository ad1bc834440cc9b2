//! Buffers of host operations, and views of what is being written.

use std::sync::Arc;

use half::bf16;
use mlex_core::{
    Array, Complex64, Dtype, ErrorKind, HostBuffer, HostOp, HostOutput, HostView, HostViewMut,
    Result, host_op,
};

use crate::{array, on_cpu};

#[test]
fn a_new_buffer_is_empty() {
    let mut buffer = HostBuffer::default();
    assert!(buffer.view().as_bytes().is_empty());
    assert!(buffer.view().shape().is_empty());
    assert!(buffer.view_mut().as_mut_bytes().is_empty());
}

#[test]
fn a_buffer_takes_any_shape_and_dtype_after_another() {
    let mut buffer = HostBuffer::default();
    let sizes: [(&[i32], Dtype, usize, &[i64]); 7] = [
        (&[2, 3], Dtype::Float32, 6, &[3, 1]),
        (&[5, 1, 2], Dtype::Bfloat16, 10, &[2, 2, 1]),
        (&[], Dtype::Float32, 1, &[]),
        (&[7], Dtype::Complex64, 7, &[1]),
        (&[3], Dtype::Uint8, 3, &[1]),
        (&[2, 0, 4], Dtype::Int64, 0, &[0, 4, 1]),
        (&[40, 50], Dtype::Int64, 2000, &[50, 1]),
    ];
    for (shape, dtype, count, strides) in sizes {
        buffer.resize(shape, dtype).unwrap();
        let view = buffer.view();
        assert_eq!((view.shape(), view.dtype()), (shape, dtype));
        assert_eq!(view.strides(), strides);
        assert_eq!(view.as_bytes().len(), count * dtype.size_in_bytes());
        let mut view = buffer.view_mut();
        assert_eq!((view.shape(), view.dtype()), (shape, dtype));
        view.as_mut_bytes().fill(0xff);
    }
}

#[test]
fn elements_are_those_that_were_written() {
    let mut buffer = HostBuffer::default();
    buffer.resize(&[3], Dtype::Complex64).unwrap();
    let values = [1.0, 2.0, 3.0].map(|re| Complex64 { re, im: -re });
    let mut view = buffer.view_mut();
    view.as_mut_slice::<Complex64>()
        .unwrap()
        .copy_from_slice(&values);
    assert_eq!(buffer.view().as_slice::<Complex64>().unwrap(), values);
    assert_eq!(
        buffer.view_mut().as_mut_slice::<Complex64>().unwrap(),
        values
    );

    buffer.resize(&[2, 2], Dtype::Bfloat16).unwrap();
    let values = [0.5, 1.5, -2.0, 3.0].map(bf16::from_f32);
    let mut view = buffer.view_mut();
    view.as_mut_slice::<bf16>()
        .unwrap()
        .copy_from_slice(&values);
    assert_eq!(buffer.view().as_slice::<bf16>().unwrap(), values);
    let error = buffer.view().as_slice::<f32>().unwrap_err();
    assert_eq!(error.to_string(), "expected dtype float32, found bfloat16");
    assert!(buffer.view_mut().as_mut_slice::<u16>().is_err());
}

#[test]
fn flags_are_false_until_they_are_written() {
    let mut buffer = HostBuffer::default();
    for (words, flags) in [(8, 16), (2, 5), (3, 0), (1, 1000)] {
        buffer.resize(&[words], Dtype::Uint32).unwrap();
        buffer.view_mut().as_mut_bytes().fill(0x55);
        // Such bytes are no flags.
        buffer.resize(&[flags], Dtype::Bool).unwrap();
        let found = buffer.view().as_slice::<bool>().unwrap().to_vec();
        assert_eq!(found, vec![false; flags as usize]);
        let mut view = buffer.view_mut();
        view.as_mut_slice::<bool>().unwrap().fill(true);
        let view = view.as_view();
        assert!(view.as_slice::<bool>().unwrap().iter().all(|&flag| flag));
    }
}

#[test]
fn memory_is_kept_for_what_is_smaller() {
    let mut buffer = HostBuffer::default();
    buffer.resize(&[100], Dtype::Float32).unwrap();
    let start = buffer.view().as_bytes().as_ptr();
    for (shape, dtype) in [([3], Dtype::Int64), ([400], Dtype::Bool)] {
        buffer.resize(&shape, dtype).unwrap();
        assert_eq!(buffer.view().as_bytes().as_ptr(), start);
    }
    // Aligned for the largest element.
    assert_eq!(start.align_offset(16), 0);
}

#[test]
fn what_cannot_be_counted_is_refused_and_changes_nothing() {
    let mut buffer = HostBuffer::default();
    buffer.resize(&[2], Dtype::Float32).unwrap();
    let mut view = buffer.view_mut();
    view.as_mut_slice::<f32>().unwrap().fill(1.5);
    let most = i32::MAX;
    for shape in [&[-1][..], &[2, -3], &[0, -1], &[most, most, 8], &[most; 9]] {
        let error = buffer.resize(shape, Dtype::Float32).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Argument { .. }));
        let expected =
            format!("shape: expected dimensions whose product can be counted, found {shape:?}");
        assert_eq!(error.to_string(), expected);
    }
    assert_eq!(buffer.view().shape(), [2]);
    assert_eq!(buffer.view().as_slice::<f32>().unwrap(), [1.5, 1.5]);
    // Nothing, however long its rows would be.
    buffer
        .resize(&[0, most, most, most], Dtype::Float32)
        .unwrap();
    assert!(buffer.view().as_bytes().is_empty());
}

/// Twice its input, by way of a function that writes halves, and of what was written.
struct Twice;

fn write(mut to: HostViewMut<'_>, from: &[f32], first: usize) -> Result<()> {
    to.as_mut_slice::<f32>()?[first..first + from.len()].copy_from_slice(from);
    Ok(())
}

impl HostOp for Twice {
    fn name(&self) -> &'static str {
        "twice"
    }

    fn outputs(&self, inputs: &[&Array]) -> Result<Vec<HostOutput>> {
        let output = HostOutput::new(inputs[0].shape(), Dtype::Float32);
        Ok(vec![output.clone(), output])
    }

    fn run(&self, inputs: &[HostView<'_>], outputs: &mut [HostViewMut<'_>]) -> Result<()> {
        let x = inputs[0].as_slice::<f32>()?;
        let (first, second) = x.split_at(x.len() / 2);
        let [copy, twice] = outputs else {
            panic!("two outputs")
        };
        write(copy.reborrow(), first, 0)?;
        write(copy.reborrow(), second, first.len())?;
        let written = copy.as_view();
        assert_eq!(written.shape(), inputs[0].shape());
        assert_eq!(written.strides(), inputs[0].strides());
        assert_eq!(written.dtype(), Dtype::Float32);
        let pairs = written.as_slice::<f32>()?.iter().zip(x);
        for (y, (a, b)) in twice.as_mut_slice::<f32>()?.iter_mut().zip(pairs) {
            *y = a + b;
        }
        Ok(())
    }
}

#[test]
fn what_was_written_is_read() {
    on_cpu(|| {
        let x = array(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[3, 2]);
        let outputs = host_op(&Arc::new(Twice), &[&x]).unwrap();
        assert_eq!(
            outputs[1].as_slice::<f32>().unwrap(),
            [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
        );
        assert_eq!(
            outputs[0].as_slice::<f32>().unwrap(),
            x.as_slice::<f32>().unwrap()
        );
    });
}
