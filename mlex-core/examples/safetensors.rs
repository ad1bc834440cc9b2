//! Writes arrays to a safetensors file and reads them back:
//! `cargo run -p mlex-core --example safetensors [FILE]`.
#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;

use mlex_core::io::{SafetensorsFile, StoredDtype, TensorSpec, write_safetensors};
use mlex_core::{Array, Dtype, Result};

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = match std::env::args_os().nth(1) {
        Some(path) => PathBuf::from(path),
        None => folder.path().join("example.safetensors"),
    };
    let weight = Array::arange(0.0, 6.0, 1.0, Dtype::Float32)?.reshape(&[2, 3])?;
    let arrays = [
        (
            "norm.weight",
            weight.as_type(Dtype::Bfloat16)?,
            StoredDtype::BF16,
        ),
        ("proj.weight", weight, StoredDtype::F32),
    ];

    // One tensor at a time is asked for, so that a model need not be in memory as a whole.
    let specs = arrays.iter().map(|(name, array, dtype)| TensorSpec {
        name: (*name).to_owned(),
        dtype: *dtype,
        shape: array.shape().iter().map(|&dim| dim as usize).collect(),
    });
    let metadata = BTreeMap::from([("format".to_owned(), "mlx".to_owned())]);
    write_safetensors(&path, specs, &metadata, |spec, sink| {
        for (name, array, _) in &arrays {
            if *name == spec.name {
                sink.write_all(array.as_bytes()?)?;
            }
        }
        Ok(())
    })?;

    // The file is mapped: its header is read and checked, its data stay where they are.
    let file = SafetensorsFile::open(&path)?;
    println!("{}: {:?}", file.path().display(), file.metadata());
    for name in file.names() {
        let Some(info) = file.info(name) else {
            continue;
        };
        let shape: Vec<i32> = info.shape.iter().map(|&dim| dim as i32).collect();
        let array = Array::from_bytes(file.bytes(name)?, &shape, info.dtype.dtype())?;
        // The array has a copy; the file's pages are not needed any more.
        file.release(name);
        println!("{name}: {array:?}\n{array}");
    }
    if let Err(error) = file.bytes("missing.weight") {
        println!("{error}");
    }
    Ok(())
}
