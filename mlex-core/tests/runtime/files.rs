//! Tensors of files as arrays, and back.

use std::collections::BTreeMap;
use std::io::Write;

use mlex_core::io::{SafetensorsFile, StoredDtype, TensorSpec, write_safetensors};
use mlex_core::{Array, Dtype, random};

fn array_of(file: &SafetensorsFile, name: &str) -> mlex_core::Result<Array> {
    let info = file.info(name).unwrap();
    let shape: Vec<i32> = info.shape.iter().map(|&dim| dim as i32).collect();
    Array::from_bytes(file.bytes(name)?, &shape, info.dtype.dtype())
}

#[test]
fn arrays_survive_a_file() {
    let key = random::key(1).unwrap();
    let noise = random::normal(0.0, 10.0, &[3, 5], Dtype::Float32, &key).unwrap();
    let dtypes = [
        (Dtype::Bool, StoredDtype::Bool),
        (Dtype::Uint8, StoredDtype::U8),
        (Dtype::Int16, StoredDtype::I16),
        (Dtype::Uint32, StoredDtype::U32),
        (Dtype::Int64, StoredDtype::I64),
        (Dtype::Float16, StoredDtype::F16),
        (Dtype::Bfloat16, StoredDtype::BF16),
        (Dtype::Float32, StoredDtype::F32),
        (Dtype::Float64, StoredDtype::F64),
    ];
    let arrays: BTreeMap<String, Array> = dtypes
        .iter()
        .map(|(dtype, stored)| (stored.name().to_owned(), noise.as_type(*dtype).unwrap()))
        .collect();
    let specs = dtypes.iter().map(|(_, dtype)| TensorSpec {
        name: dtype.name().to_owned(),
        dtype: *dtype,
        shape: vec![3, 5],
    });
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("arrays.safetensors");
    write_safetensors(&path, specs, &BTreeMap::new(), |spec, sink| {
        Ok(sink.write_all(arrays[&spec.name].as_bytes()?)?)
    })
    .unwrap();

    let file = SafetensorsFile::open(&path).unwrap();
    assert_eq!(file.names().count(), dtypes.len());
    for (name, array) in &arrays {
        let read = array_of(&file, name).unwrap();
        assert_eq!((read.dtype(), read.shape()), (array.dtype(), array.shape()));
        assert_eq!(read.as_bytes().unwrap(), array.as_bytes().unwrap());
        file.release(name);
    }
}

fn raw_file(header: &str, data: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes())
        .unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.write_all(data).unwrap();
    file
}

#[test]
fn tensors_lie_at_odd_places() {
    // One bool, then a float right behind it; no metadata as MLX writes it.
    let header = r#"{"__metadata__":null,"b":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]},
        "x":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}"#;
    let mut data = vec![1];
    data.extend([1.5f32, -2.0].iter().flat_map(|x| x.to_le_bytes()));
    let file = raw_file(header, &data);
    let file = SafetensorsFile::open(file.path()).unwrap();
    assert!(file.metadata().is_empty());
    assert!(array_of(&file, "b").unwrap().item::<bool>().unwrap());
    let x = array_of(&file, "x").unwrap();
    assert_eq!(x.as_slice::<f32>().unwrap(), [1.5, -2.0]);
}

#[test]
fn bools_of_a_file_are_checked() {
    let header = r#"{"b":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}}"#;
    let file = raw_file(header, &[1, 255]);
    let file = SafetensorsFile::open(file.path()).unwrap();
    assert!(array_of(&file, "b").is_err());
}
