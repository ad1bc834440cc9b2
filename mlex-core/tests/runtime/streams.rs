//! Devices and streams.

use std::panic::{AssertUnwindSafe, catch_unwind};

use mlex_core::{Device, Stream};

use crate::{floats, ramp};

#[test]
fn operations_run_on_the_stream_in_scope() {
    let stream = Stream::new(Device::Cpu).unwrap();
    assert_eq!(stream.device(), Device::Cpu);
    let x = ramp(&[4]);
    let y = stream.scope(|| x.add(1.0).unwrap());
    // A result of one stream goes into another's.
    let z = y.multiply(&x).unwrap();
    assert_eq!(floats(&z), [0.0, 2.0, 6.0, 12.0]);
    stream.synchronize().unwrap();
}

#[test]
fn the_former_stream_comes_back() {
    let name = |stream: &Stream| format!("{stream:?}");
    let before = name(&Stream::current().unwrap());
    let inner = Stream::new(Device::Cpu).unwrap();
    let value = inner.scope(|| {
        let nested = Stream::new(Device::Cpu).unwrap();
        nested.scope(|| floats(&ramp(&[2]).add(1.0).unwrap()))
    });
    assert_eq!(value, [1.0, 2.0]);
    assert_eq!(name(&Stream::current().unwrap()), before);
    let panicked = catch_unwind(AssertUnwindSafe(|| inner.scope(|| panic!("on purpose"))));
    assert!(panicked.is_err());
    assert_eq!(name(&Stream::current().unwrap()), before);
    assert_eq!(floats(&ramp(&[2]).add(1.0).unwrap()), [1.0, 2.0]);
}

#[test]
fn a_thread_keeps_the_stream_it_sets() {
    std::thread::spawn(|| {
        let stream = Stream::new(Device::Cpu).unwrap();
        stream.set_current();
        drop(stream);
        assert_eq!(floats(&ramp(&[2]).exp().unwrap())[0], 1.0);
        assert_eq!(Stream::current().unwrap().device(), Device::Cpu);
    })
    .join()
    .unwrap();
}

#[test]
fn the_default_stream_is_there() {
    let stream = Stream::default_of(Device::Cpu).unwrap();
    assert_eq!(stream.scope(|| floats(&ramp(&[1]))), [0.0]);
    let preferred = Device::preferred().unwrap();
    assert!(preferred.is_available().unwrap());
}

#[test]
fn devices_that_are_not_there_are_refused() {
    let absent = Device::Gpu(63);
    assert!(!absent.is_available().unwrap());
    assert!(Stream::new(absent).is_err());
}

#[test]
fn devices_have_names() {
    for (text, device) in [
        ("cpu", Device::Cpu),
        ("gpu", Device::Gpu(0)),
        ("gpu:3", Device::Gpu(3)),
    ] {
        assert_eq!(text.parse::<Device>().unwrap(), device);
        assert_eq!(device.to_string(), text);
    }
    for text in [
        "",
        "CPU",
        "gpu:",
        "gpu:-1",
        "gpu:99999999999",
        "cpu:1",
        "tpu",
    ] {
        let error = text.parse::<Device>().unwrap_err().to_string();
        assert_eq!(
            error,
            format!("device: expected cpu, gpu or gpu:N, found {text:?}")
        );
    }
}
