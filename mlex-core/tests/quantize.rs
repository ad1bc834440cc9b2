//! Quantizing weights on the CPU against `mx.quantize`, bit for bit, in every mode, width and
//! group size (`tools/make_quantize_golden.py` has the weights).
#![allow(clippy::unwrap_used)]

use std::path::Path;

use mlex_core::io::SafetensorsFile;
use mlex_core::{Array, Device, Quantized, QuantizedWeight, Stream};

fn tensor(file: &SafetensorsFile, name: &str) -> Array {
    let info = file.info(name).unwrap();
    let shape: Vec<i32> = info.shape.iter().map(|&dim| dim as i32).collect();
    Array::from_bytes(file.bytes(name).unwrap(), &shape, info.dtype.dtype()).unwrap()
}

/// The layout in `TYPE.MODE.BITS.GROUP`.
fn layout(name: &str) -> Quantized {
    let parts: Vec<&str> = name.split('.').collect();
    Quantized {
        mode: parts[1].parse().unwrap(),
        bits: parts[2].parse().unwrap(),
        group_size: parts[3].parse().unwrap(),
    }
}

#[test]
fn packed_weights_equal_those_of_mlx_bit_for_bit() {
    Stream::default_of(Device::Cpu).unwrap().set_current();
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/quantize.safetensors");
    let file = SafetensorsFile::open(data).unwrap();
    let cases: Vec<&str> = file
        .names()
        .filter_map(|name| name.strip_suffix(".scales"))
        .collect();
    assert_eq!(cases.len(), 3 * 21, "types and layouts");
    for case in cases {
        let layout = layout(case);
        let weights = tensor(&file, case.split('.').next().unwrap());
        let packed = QuantizedWeight::quantize(&weights, layout).unwrap();
        assert_eq!(packed.biases.is_some(), layout.mode.has_biases(), "{case}");
        for (part, found) in [
            ("weight", Some(&packed.weight)),
            ("scales", Some(&packed.scales)),
            ("biases", packed.biases.as_ref()),
        ] {
            let Some(found) = found else { continue };
            let name = format!("{case}.{part}");
            let expected = tensor(&file, &name);
            assert_eq!(found.shape(), expected.shape(), "{name}");
            assert_eq!(found.dtype(), expected.dtype(), "{name}");
            let (found, expected) = (found.as_bytes().unwrap(), expected.as_bytes().unwrap());
            let differs = found.iter().zip(expected).position(|(a, b)| a != b);
            assert_eq!(differs, None, "{name}: the first byte that differs");
        }
    }
}
