//! Arrays, a matrix product, lazy evaluation and what they cost in memory:
//! `cargo run -p mlex-core --example arrays`.
#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::time::Instant;

use mlex_core::{Array, Device, Dtype, Result, async_eval, memory, mlx_version, random};

const MEGABYTE: usize = 1 << 20;

fn main() -> Result<()> {
    println!("MLX {} on {}", mlx_version()?, Device::preferred()?);

    // Data in, an operation or two, data out.
    let x = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
    let y = x.matmul(&x.t()?)?.add(1.0)?;
    println!("x x^T + 1 = {:?}", y.as_slice::<f32>()?);

    // Operations build a graph; nothing is computed until somebody asks.
    let key = random::key(7)?;
    let a = random::normal(0.0, 1.0, &[1024, 1024], Dtype::Float32, &key)?;
    let start = Instant::now();
    let product = a.matmul(&a)?.tanh()?.mean(&[0, 1], false)?;
    println!(
        "the graph of a 1024 x 1024 product took {:?}, {} MB are in use",
        start.elapsed(),
        memory::active()? / MEGABYTE
    );
    let mean = product.item::<f32>()?;
    println!("its result {mean:.6} took {:?}", start.elapsed());

    // Other work goes on while an array is computed.
    let other = a.add(1.0)?;
    async_eval([&other])?;
    println!("started {other:?}");
    println!(
        "its first row adds up to {}",
        other.at(0, 0)?.sum_all()?.item::<f32>()?
    );

    // A clone is a reference; the memory is free when the last one is gone.
    let clone = a.clone();
    println!("in use: {} MB", memory::active()? / MEGABYTE);
    drop((a, other));
    println!(
        "with one reference left: {} MB",
        memory::active()? / MEGABYTE
    );
    drop((clone, product));
    println!(
        "with none: {} MB, and at most it was {} MB",
        memory::active()? / MEGABYTE,
        memory::peak()? / MEGABYTE
    );

    // What cannot be is an error that says where it was asked for.
    if let Err(error) = x.matmul(&Array::zeros(&[3, 3], Dtype::Float32)?) {
        println!("{error}");
    }
    Ok(())
}
