//! MLX's memory figures. They count for the whole process, so this is one test in a process of
//! its own.
#![allow(clippy::unwrap_used, reason = "a helper fails as its test would")]

use mlex_core::{Array, Dtype, memory};

const MEGABYTE: usize = 1 << 20;

fn megabytes(count: i32) -> Array {
    let array = Array::full(&[count, 1 << 18], 1.5, Dtype::Float32).unwrap();
    array.eval().unwrap();
    array
}

#[test]
fn figures_follow_the_arrays() {
    memory::clear_cache().unwrap();
    let start = memory::active().unwrap();

    // A graph takes no memory before it is computed.
    let lazy = Array::zeros(&[64, 1 << 18], Dtype::Float32).unwrap();
    assert!(memory::active().unwrap() < start + MEGABYTE);
    drop(lazy);

    let eight = megabytes(8);
    let held = memory::active().unwrap();
    assert!(
        (8 * MEGABYTE..9 * MEGABYTE).contains(&(held - start)),
        "{start} {held}"
    );
    let clone = eight.clone();
    drop(eight);
    assert_eq!(memory::active().unwrap(), held);
    drop(clone);
    assert!(memory::active().unwrap() < start + MEGABYTE);

    // The peak stays until it is reset.
    assert!(memory::peak().unwrap() >= start + 8 * MEGABYTE);
    memory::reset_peak().unwrap();
    assert!(memory::peak().unwrap() < start + MEGABYTE);
    drop(megabytes(2));
    let peak = memory::peak().unwrap() - start;
    assert!((2 * MEGABYTE..4 * MEGABYTE).contains(&peak), "{peak}");

    // Limits give the former one back.
    let former = memory::set_cache_limit(0).unwrap();
    assert_eq!(memory::set_cache_limit(former).unwrap(), 0);
    let former = memory::set_limit(1 << 40).unwrap();
    assert_eq!(memory::set_limit(former).unwrap(), 1 << 40);

    memory::set_cache_limit(0).unwrap();
    drop(megabytes(4));
    assert_eq!(memory::cached().unwrap(), 0);
    memory::clear_cache().unwrap();
    assert!(memory::active().unwrap() < start + MEGABYTE);
}
