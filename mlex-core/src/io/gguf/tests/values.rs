//! The values of real files.

use super::super::*;
use super::data;
use crate::Dtype;
use crate::io::SafetensorsFile;

const BLOCK_TYPES: [(&str, GgmlType); 14] = [
    ("Q4_0", GgmlType::Q4_0),
    ("Q4_1", GgmlType::Q4_1),
    ("Q5_0", GgmlType::Q5_0),
    ("Q5_1", GgmlType::Q5_1),
    ("Q8_0", GgmlType::Q8_0),
    ("Q2_K", GgmlType::Q2_K),
    ("Q3_K", GgmlType::Q3_K),
    ("Q4_K", GgmlType::Q4_K),
    ("Q5_K", GgmlType::Q5_K),
    ("Q6_K", GgmlType::Q6_K),
    ("Q8_K", GgmlType::Q8_K),
    ("IQ4_NL", GgmlType::IQ4_NL),
    ("IQ4_XS", GgmlType::IQ4_XS),
    ("MXFP4", GgmlType::MXFP4),
];

fn golden() -> (GgufFile, SafetensorsFile) {
    let values = SafetensorsFile::open(data("values.safetensors")).unwrap();
    (GgufFile::open(data("all_types.gguf")).unwrap(), values)
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|&bytes| f32::from_le_bytes(bytes))
        .collect()
}

fn u32s(bytes: &[u8]) -> Vec<u32> {
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|&bytes| u32::from_le_bytes(bytes))
        .collect()
}

/// The elements of packed words, as MLX reads them: a little-endian stream of bits.
fn unpack(words: &[u32], bits: usize) -> Vec<u32> {
    let count = words.len() * 32 / bits;
    let bit = |i: usize| words[i / 32] >> (i % 32) & 1;
    (0..count)
        .map(|q| (0..bits).map(|b| bit(q * bits + b) << b).sum())
        .collect()
}

/// What MLX computes from a decoded tensor, in f32.
fn values_of(decoded: &Decoded<'_>) -> Vec<f32> {
    match decoded {
        Decoded::Plain {
            dtype: Dtype::Float32,
            bytes,
            ..
        } => f32s(bytes),
        Decoded::Plain {
            dtype: Dtype::Float16,
            bytes,
            ..
        } => {
            let halves = bytes.as_chunks().0.iter();
            halves
                .map(|&bytes| half::f16::from_le_bytes(bytes).to_f32())
                .collect()
        }
        Decoded::Plain {
            dtype: Dtype::Bfloat16,
            bytes,
            ..
        } => {
            let halves = bytes.as_chunks().0.iter();
            halves
                .map(|&bytes| half::bf16::from_le_bytes(bytes).to_f32())
                .collect()
        }
        Decoded::Plain { dtype, .. } => panic!("{dtype}"),
        Decoded::Affine(affine) => {
            let q = unpack(&affine.weight, affine.bits as usize);
            let value = |(i, q): (usize, u32)| {
                affine.scales[i / affine.group_size] * q as f32
                    + affine.biases[i / affine.group_size]
            };
            q.into_iter().enumerate().map(value).collect()
        }
        Decoded::Mxfp4(mxfp4) => {
            const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
            let value = |(i, q): (usize, u32)| {
                let scale = 2f32.powi(i32::from(mxfp4.scales[i / 32]) - 127);
                let sign = if q < 8 { 1.0 } else { -1.0 };
                sign * MAGNITUDES[q as usize % 8] * scale
            };
            unpack(&mxfp4.weight, 4)
                .into_iter()
                .enumerate()
                .map(value)
                .collect()
        }
    }
}

#[test]
fn every_block_type_has_the_values_of_the_reference() {
    let (file, values) = golden();
    for (name, ggml_type) in BLOCK_TYPES {
        let tensor = file.tensor(name).unwrap();
        assert_eq!(tensor.ggml_type(), ggml_type);
        assert_eq!(ggml_type.to_string(), name);
        assert_eq!(tensor.shape(), values.info(name).unwrap().shape);
        let expected = f32s(values.bytes(name).unwrap());
        // Exactly equal: nothing is rounded otherwise than in the reference.
        assert_eq!(values_of(&tensor.decode().unwrap()), expected, "{name}");

        let mut all = vec![f32::NAN; expected.len()];
        tensor.dequantize_rows(0..tensor.rows(), &mut all).unwrap();
        assert_eq!(all, expected, "{name}");
        let mut row = vec![f32::NAN; tensor.columns()];
        tensor.dequantize_rows(1..2, &mut row).unwrap();
        assert_eq!(
            row,
            expected[tensor.columns()..][..tensor.columns()],
            "{name}"
        );
    }
}

#[test]
fn affine_and_mxfp4_tensors_have_the_shapes_of_mlx() {
    let (file, values) = golden();
    for (name, bits, columns) in [
        ("Q4_1", 4, 64),
        ("Q5_0", 5, 64),
        ("Q8_0", 8, 64),
        ("Q4_K", 4, 256),
        ("Q5_K", 5, 256),
    ] {
        let Decoded::Affine(affine) = file.tensor(name).unwrap().decode().unwrap() else {
            panic!("{name}");
        };
        assert_eq!((affine.bits, affine.group_size), (bits, 32));
        assert_eq!(affine.shape, [3, columns]);
        assert_eq!(affine.weight_shape(), [3, columns * bits as usize / 32]);
        assert_eq!(affine.scales_shape(), [3, columns / 32]);
        assert_eq!(
            affine.weight.len(),
            affine.weight_shape().iter().product::<usize>()
        );
        assert_eq!(
            affine.scales.len(),
            affine.scales_shape().iter().product::<usize>()
        );
        assert_eq!(affine.biases.len(), affine.scales.len());
        // The scales of Q4_K and Q5_K are products of a half and six bits.
        assert_eq!(affine.fits_f16(), !name.ends_with("_K"), "{name}");
    }
    let experts = file.tensor("experts").unwrap();
    let Decoded::Affine(affine) = experts.decode().unwrap() else {
        panic!("experts")
    };
    assert_eq!(affine.weight_shape(), [2, 3, 8]);
    assert_eq!(affine.scales_shape(), [2, 3, 1]);
    assert_eq!((experts.rows(), experts.columns()), (6, 32));
    assert_eq!(
        values_of(&Decoded::Affine(affine)),
        f32s(values.bytes("experts").unwrap())
    );

    let Decoded::Mxfp4(mxfp4) = file.tensor("MXFP4").unwrap().decode().unwrap() else {
        panic!("MXFP4");
    };
    assert_eq!(
        (mxfp4.weight_shape(), mxfp4.scales_shape()),
        (vec![3, 8], vec![3, 2])
    );
    assert_eq!((mxfp4.weight.len(), mxfp4.scales.len()), (24, 6));
}

#[test]
fn plain_types_keep_their_bytes() {
    let (file, values) = golden();
    for name in ["F32", "F16", "BF16"] {
        let tensor = file.tensor(name).unwrap();
        let expected = f32s(values.bytes(name).unwrap());
        assert_eq!(values_of(&tensor.decode().unwrap()), expected, "{name}");
        let mut all = vec![f32::NAN; expected.len()];
        tensor.dequantize_rows(0..3, &mut all).unwrap();
        assert_eq!(all, expected, "{name}");
    }
    for (name, expected) in [
        ("F64", Dtype::Float64),
        ("I8", Dtype::Int8),
        ("I16", Dtype::Int16),
        ("I32", Dtype::Int32),
        ("I64", Dtype::Int64),
    ] {
        let Decoded::Plain {
            dtype,
            shape,
            bytes,
        } = file.tensor(name).unwrap().decode().unwrap()
        else {
            panic!("{name}");
        };
        assert_eq!(dtype, expected);
        assert_eq!(shape, values.info(name).unwrap().shape);
        assert!(
            matches!(bytes, std::borrow::Cow::Borrowed(_)),
            "{name} was copied"
        );
        assert_eq!(bytes, values.bytes(name).unwrap());
    }
}

/// The words and what MLX's own dequantize reads from them: blocks of those elements must become
/// those words.
#[test]
fn packed_words_are_those_of_mlx() {
    let golden = SafetensorsFile::open(data("mlx_packing.safetensors")).unwrap();
    type BlockOf = fn(&[u8]) -> Vec<u8>;
    let blocks_of: [(u32, GgmlType, BlockOf); 3] = [
        (4, GgmlType::Q4_0, |q| {
            let halves = (0..16).map(|i| q[i] | q[i + 16] << 4);
            [0, 0x3c].into_iter().chain(halves).collect()
        }),
        (5, GgmlType::Q5_0, |q| {
            let high: u32 = (0..32).map(|i| u32::from(q[i] >> 4) << i).sum();
            let halves = (0..16).map(|i| q[i] & 15 | (q[i + 16] & 15) << 4);
            [0, 0x3c]
                .into_iter()
                .chain(high.to_le_bytes())
                .chain(halves)
                .collect()
        }),
        (8, GgmlType::Q8_0, |q| {
            let signed = q.iter().map(|q| q.wrapping_sub(128));
            [0, 0x3c].into_iter().chain(signed).collect()
        }),
    ];
    for (bits, ggml_type, block_of) in blocks_of {
        let elements = golden.bytes(&format!("{bits}.elements")).unwrap();
        let bytes: Vec<u8> = elements.chunks_exact(32).flat_map(block_of).collect();
        let info = GgufTensorInfo {
            ggml_type,
            shape: vec![2, 64],
            range: 0..bytes.len(),
        };
        let tensor = GgufTensor {
            name: "w",
            info: &info,
            bytes: &bytes,
            path: Path::new(""),
        };
        let Decoded::Affine(affine) = tensor.decode().unwrap() else {
            panic!("{ggml_type}")
        };
        assert_eq!(affine.bits, bits);
        assert_eq!(
            affine.weight,
            u32s(golden.bytes(&format!("{bits}.words")).unwrap())
        );
        // The scale is 1.0, and elements are counted from the middle.
        assert_eq!(affine.scales, [1.0; 4]);
        assert_eq!(affine.biases, [-(2f32.powi(bits as i32 - 1)); 4]);
    }
}

#[test]
fn metadata_of_every_type_are_read() {
    let (file, _) = golden();
    assert_eq!(file.version(), 3);
    assert_eq!(
        file.require::<&str>("general.architecture").unwrap(),
        "llama"
    );
    assert_eq!(file.require::<u64>("test.u8").unwrap(), 200);
    assert_eq!(file.require::<i64>("test.i8").unwrap(), -100);
    assert_eq!(file.require::<u32>("test.u16").unwrap(), 60000);
    assert_eq!(file.require::<i32>("test.i16").unwrap(), -30000);
    assert_eq!(file.require::<usize>("test.u32").unwrap(), 4_000_000_000);
    assert_eq!(file.require::<i32>("test.i32").unwrap(), -2_000_000_000);
    assert_eq!(file.require::<f32>("test.f32").unwrap(), 1.5);
    assert_eq!(file.require::<f64>("test.f32").unwrap(), 1.5);
    assert!(file.require::<bool>("test.bool").unwrap());
    assert_eq!(file.require::<&str>("test.string").unwrap(), "grüße 🦙");
    assert_eq!(file.require::<u64>("test.u64").unwrap(), (1 << 63) + 1);
    assert_eq!(file.require::<i64>("test.i64").unwrap(), -(1 << 62));
    assert_eq!(file.require::<f64>("test.f64").unwrap(), 0.1);
    assert_eq!(
        file.require::<&[String]>("test.strings").unwrap(),
        ["<s>", "", "Ġthe"]
    );
    assert_eq!(
        file.require::<&[f32]>("test.floats").unwrap(),
        [0.0, -1.5, 2.25]
    );
    assert_eq!(file.require::<Vec<i64>>("test.ints").unwrap(), [1, -2, 3]);
    assert_eq!(
        file.require::<&GgufArray>("test.bools").unwrap(),
        &GgufArray::Bool(vec![true, false])
    );
    assert_eq!(file.get::<u32>("test.none").unwrap(), None);
    assert_eq!(file.metadata().iter().len(), 17);
}

#[test]
fn metadata_of_another_type_are_named() {
    let (file, _) = golden();
    let message = |error: Error| {
        assert_eq!(error.path(), Some(file.path()));
        error
            .to_string()
            .split_once("all_types.gguf: ")
            .unwrap()
            .1
            .to_owned()
    };
    for (error, expected) in [
        (
            file.require::<u32>("test.none").unwrap_err(),
            "metadata \"test.none\": expected u32, found nothing",
        ),
        (
            file.get::<&str>("test.u32").unwrap_err(),
            "metadata \"test.u32\": expected string, found u32 4000000000",
        ),
        (
            file.get::<i32>("test.u32").unwrap_err(),
            "metadata \"test.u32\": expected i32, found u32 4000000000",
        ),
        (
            file.get::<u64>("test.i8").unwrap_err(),
            "metadata \"test.i8\": expected u64, found i8 -100",
        ),
        (
            file.get::<f32>("test.u8").unwrap_err(),
            "metadata \"test.u8\": expected f32, found u8 200",
        ),
        (
            file.get::<&[String]>("test.ints").unwrap_err(),
            "metadata \"test.ints\": expected array of string, found array of i32",
        ),
        (
            file.get::<Vec<u32>>("test.ints").unwrap_err(),
            "metadata \"test.ints\": expected array of u32, found array of i32",
        ),
        (
            file.get::<bool>("test.string").unwrap_err(),
            "metadata \"test.string\": expected bool, found string",
        ),
    ] {
        assert_eq!(message(error), expected);
    }
}

#[test]
fn tensors_and_rows_that_are_not_there_are_named() {
    let (file, _) = golden();
    let error = file.tensor("none").unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::MissingTensor));
    assert_eq!(
        (error.path(), error.tensor()),
        (Some(file.path()), Some("none"))
    );

    let tensor = file.tensor("Q8_0").unwrap();
    #[allow(clippy::reversed_empty_ranges)]
    for rows in [0..4, 3..4, 2..1, 4..4] {
        let error = tensor.dequantize_rows(rows, &mut [0.0; 64]).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Argument { .. }),
            "{error}"
        );
        assert_eq!(
            (error.path(), error.tensor()),
            (Some(file.path()), Some("Q8_0"))
        );
    }
    let error = tensor.dequantize_rows(0..2, &mut [0.0; 64]).unwrap_err();
    assert!(matches!(
        error.kind(),
        ErrorKind::Length {
            expected: 128,
            found: 64,
            ..
        }
    ));
    let error = file
        .tensor("I32")
        .unwrap()
        .dequantize_rows(0..1, &mut [0.0; 7])
        .unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("expected a type that can be read, found I32")
    );
}

#[test]
fn released_tensors_can_be_read_again() {
    let (file, _) = golden();
    let before = file.tensor("Q6_K").unwrap().bytes().to_vec();
    file.release("Q6_K");
    assert_eq!(file.tensor("Q6_K").unwrap().bytes(), before);
}
